"""Medians and shares match hand calculations, and the tables show them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from mbaas.errors import ConfigError
from mbaas.tools.bench.host import RowRun
from mbaas.tools.bench.render import render
from mbaas.tools.bench.report import BenchReport, Machine, Round, RowResult, summarize
from mbaas.tools.bench.rows import ROWS, BenchSettings


def run_of(row: str, rate: float, cores: float = 2.0, **more: object) -> RowRun:
    kinds = (("trial", cores / 4), ("PrepWorker", cores * 3 / 4))
    return RowRun(row, 4, 64, samples_per_s=rate, cores_by_kind=kinds, epochs=8, peak_bytes=10**9, **more)  # type: ignore[arg-type]


@pytest.fixture
def results() -> tuple[RowResult, ...]:
    """Three rounds of 4 trials. P is 1000, 500, 800; mbaas 3600, 1600, 2400, so 0.9, 0.8 and 0.75 of 4 x P."""
    rounds = [
        Round((run_of("prep", prep, cores), run_of("mbaas", rate), run_of("dali", 300.0, error=error)))
        for prep, rate, cores, error in [
            (1000.0, 3600.0, 2.0, ""),
            (500.0, 1600.0, 1.0, "took too long"),
            (800.0, 2400.0, 2.0, "took too long"),
        ]
    ]
    return summarize(rounds, 4)


def test_shares_are_taken_within_a_round(results: tuple[RowResult, ...]) -> None:
    prep, _, mbaas = results
    assert (prep.samples_per_s, prep.share) == (800.0, None)
    assert (mbaas.samples_per_s, mbaas.share) == (2400.0, pytest.approx(0.8))
    # CPU-s per 1,000: P 2.0, 2.0, 2.5; mbaas 0.556, 1.25, 0.833; so 0.9, 0.4 and 0.75 of 4 x P
    assert mbaas.cpu_share == pytest.approx(0.75)
    assert mbaas.cores_by_kind == (("PrepWorker", 1.5), ("trial", 0.5))
    assert mbaas.epochs == 24


def test_decoded_rows_have_shares_of_p_and_of_p_from_decoded_samples() -> None:
    """N = 4: 4,800 / (4 x 1,000) and / (4 x 3,000), then 3,200 / (4 x 500) and / (4 x 1,600)."""
    rounds = [
        Round(tuple(run_of(row, rate) for row, rate in [*zip(ROWS[:2], prep, strict=True), *rest]))
        for prep, rest in [
            ((1000.0, 3000.0), (("mbaas", 3600.0), ("mbaas-decoded", 4800.0))),
            ((500.0, 1600.0), (("mbaas", 1600.0), ("mbaas-decoded", 3200.0))),
        ]
    ]
    prep, decoded, mbaas, feed = summarize(rounds, 4)
    assert (prep.share, prep.decoded_share, decoded.share, decoded.decoded_share) == (None,) * 4
    assert (mbaas.share, mbaas.decoded_share) == (pytest.approx(0.85), None)
    assert (feed.share, feed.decoded_share) == (pytest.approx(1.4), pytest.approx(0.45))
    # all rows keep two cores busy, so the shares by CPU are the same
    assert (feed.cpu_share, feed.decoded_cpu_share) == (pytest.approx(1.4), pytest.approx(0.45))
    out = io.StringIO()
    settings = BenchSettings(trials=(4,), batch=(64,))
    Console(file=out, width=80).print(render(BenchReport(settings, Machine(), 1500, (prep, decoded, mbaas, feed))))
    assert "one feed, decoded, 4 trials, batches of 64: 45 % of N x P' (45 % by CPU); CPU-us" in " ".join(
        out.getvalue().split()
    )
    assert "one mbaas feed, 4 trials, batches of 64, CPU-us" in " ".join(out.getvalue().split())
    assert "N x P' is the limit" in " ".join(out.getvalue().split())


def test_at_best_each_sample_is_prepared_once_and_read_by_every_trial() -> None:
    """N = 4, and reading alone reaches 12,000/s.

    Encoded: 1 / (1 / (4 x 1,000) + 1 / 12,000) = 3,000, and 2,400 is 0.8 times that.
    Decoded: 1 / (1 / (4 x 3,000) + 1 / 12,000) = 6,000, and 4,500 is 0.75 times that.

    In CPU-s per 1,000: P 2.0, P' 2/3, reading alone 1/6, the feeds 2 / 2.4 and 2 / 4.5. The shares by CPU are
    (0.5 + 1/6) * 1.2 = 0.8 and (1/6 + 1/6) * 2.25 = 0.75.
    """
    rates = {"prep": 1000.0, "prep-decoded": 3000.0, "memory": 12_000.0, "mbaas": 2400.0, "mbaas-decoded": 4500.0}
    one = Round(tuple(run_of(row, rate) for row, rate in rates.items()))
    results = summarize([one], 4)
    assert [result.best_share for result in results] == [None] * 3 + [pytest.approx(0.8), pytest.approx(0.75)]
    assert [result.best_cpu_share for result in results] == [None] * 3 + [pytest.approx(0.8), pytest.approx(0.75)]
    assert (results[2].share, results[2].cpu_share) == (None, None)
    out = io.StringIO()
    settings = BenchSettings(trials=(4,), batch=(64,), read="all")
    Console(file=out, width=80).print(render(BenchReport(settings, Machine(), 1500, results)))
    said = " ".join(out.getvalue().split())
    assert "batches of 64: 80 % of what the machine could carry at best (80 % by CPU); CPU-us" in said
    assert "as trials do, every byte." in said
    without = summarize([Round(one.runs[:2] + one.runs[3:])], 4)
    assert [result.best_share for result in without] == [None] * 4


def test_rows_are_in_order_and_failures_are_kept(results: tuple[RowResult, ...]) -> None:
    assert [result.row for result in results] == ["prep", "dali", "mbaas"]
    dali = results[1]
    assert (dali.rounds, dali.samples_per_s, dali.errors) == (1, 300.0, ("took too long",) * 2)
    assert not dali.is_sound
    assert results[2].is_sound


@pytest.mark.parametrize("fault", ["missing", "repeated", "spilled_bytes"])
def test_a_single_fault_makes_a_result_unsound(fault: str) -> None:
    good = run_of("mbaas", 100.0)
    (result,) = summarize([Round((good,)), Round((run_of("mbaas", 100.0, **{fault: 1}),))], 4)
    assert not result.is_sound


def test_tables_show_the_figures(results: tuple[RowResult, ...]) -> None:
    settings = BenchSettings(trials=(4,), batch=(64,))
    report = BenchReport(settings, Machine(cpu="Abacus 3000"), 1500, results)
    out = io.StringIO()
    Console(file=out, width=160).print(render(report))
    text = out.getvalue()
    for shown in ("Abacus 3000", "1,500 images", "2,400", "80 %", "75 %", "one mbaas feed", "took too long"):
        assert shown in text


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("images", "1,500 images, random-resized-crop 224 and flip; medians of 3 rounds"),
        ("detection", "1,500 images with boxes, random-IoU-crop to 300, flip and colour; medians of 3 rounds"),
        ("audio", "1,500 recordings, resampled to 16 kHz, a random second, 64 log-mel bands, SpecAugment; medians"),
    ],
)
def test_the_heading_says_what_is_done(task: str, said: str, results: tuple[RowResult, ...]) -> None:
    out = io.StringIO()
    report = BenchReport(BenchSettings(task=task, trials=(4,), batch=(64,)), Machine(), 1500, results)
    Console(file=out, width=200).print(render(report))
    assert out.getvalue().startswith(said)


def test_the_table_is_whole_in_80_columns(results: tuple[RowResult, ...]) -> None:
    report = BenchReport(BenchSettings(trials=(4,), batch=(64,)), Machine(cpu="Abacus 3000"), 1500, results)
    out = io.StringIO()
    Console(file=out, width=80).print(render(report))
    assert "…" not in out.getvalue()
    (row,) = (
        re.split(r"  +", line.strip()) for line in out.getvalue().splitlines() if line.startswith(" one mbaas feed  ")
    )
    assert [*row[1:4], row[-1]] == ["2,400", "80 %", "75 %", "none"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"trials": ()}, "trials must be at least 1, got nothing"),
        ({"batch": (64, 0)}, "batch must be at least 1, got 64, 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"rows": ("prep", "dalli")}, "got dalli"),
        ({"gpu": True, "task": "audio"}, "task must be images on a GPU, got audio"),
        (
            {"gpu": True, "rows": ("prep", "memory")},
            "rows must be among prep, dataloader, dali, mbaas on a GPU, got memory",
        ),
        ({"read": "some"}, "read must be one of 'pages', 'all', got 'some'"),
        ({"timeout_s": 0.0}, "timeout_s"),
        (
            {"task": "audio", "rows": ("prep", "ray-data")},
            r"task must be images where peers are run \(ray-data\), got a",
        ),
        ({"peers_python": Path("/none")}, "peers_python must be a Python interpreter, got /none, which cannot be run"),
    ],
)
def test_settings_check_themselves(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BenchSettings(**wrong)  # type: ignore[arg-type]
