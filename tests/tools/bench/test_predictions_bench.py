"""The benchmark that runs predicted setups: its setups and table, and a run of some of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.predictions import runs
from benchmarks.predictions.points import BATCH, Point, PredictionsReport, figures, points, table
from mbaas.model.curves import MeasuredCurve
from mbaas.model.pace import predict
from mbaas.model.quantity import stated
from mbaas.model.rates import Rates
from mbaas.tools.bench.report import Machine


def per_s(rate: float) -> Any:
    return stated(rate, unit="samples/s")


RATES = Rates(
    samples=1000,
    sample_bytes=96_000,
    pixel_bytes=150_536,
    cores=2,
    batch_size=BATCH,
    step=per_s(600),
    step_overhead_s=stated(0.02, unit="s"),
    prep=MeasuredCurve(((1, per_s(1000)), (2, per_s(2000)))),
    storage=MeasuredCurve(((1, per_s(3300)),)),
    cache=stated(1e10, unit="bytes/s"),
)


def test_points_vary_what_no_analysis_of_one_machine_can_vary_and_have_different_limits() -> None:
    chosen = list(points(RATES))
    assert len(chosen) >= 12
    limits: dict[str, set[str]] = {varied: set() for varied, _ in chosen}
    for varied, setup in chosen:
        limits[varied].add(predict(RATES, setup).steady.limit)
    assert limits["batch size"] == {"step"}
    assert limits["page cache"] == {"storage"}
    assert limits["nodes"] == {"storage"}
    assert limits["network rate"] == {"network", "step"}
    assert limits["storage rate"] == limits["pipelines"] == {"storage", "prep"}


def test_the_table_has_each_error() -> None:
    (varied, slow), (_, fast), *_ = points(RATES)
    found = (
        Point(varied, slow, per_s(210), "storage", per_s(200), 1.0),
        Point(varied, fast, per_s(380), "storage", per_s(400), 1.0),
    )
    report, out = PredictionsReport(Machine(), RATES, found), io.StringIO()
    Console(file=out, width=80).print(table(report))
    assert "+5.0 %" in out.getvalue()
    assert "-5.0 %" in out.getvalue()
    assert "storage 10 MB/s" in out.getvalue()
    plain = figures(report)
    assert (plain["median_error"], plain["worst_error"]) == pytest.approx((0.05, 0.05))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_measurement_predicts_slow_storage_and_two_nodes(
    no_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "points", lambda rates: [list(points(rates))[number] for number in (0, 11)])
    report = runs.run(images=200, rounds=1, seed=0, cache_dir=tmp_path, report=lambda _: None)
    assert [point.setup.nodes for point in report.points] == [1, 2]
    assert max(report.errors) < 0.3
