"""An analysis reports its progress, and keeps its results when it is stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stated_rates import decodable_rates, round_rates
from typer.testing import CliRunner

from mbaas import transforms as T
from mbaas.analysis import Setup, Workload, analyze
from mbaas.cli import app
from mbaas.dataset import synthetic
from mbaas.model.quantity import Quantity, stated
from mbaas.settings import FeedOptions
from mbaas.tools.analysis import whole
from mbaas.tools.analysis.measuring import system
from mbaas.tools.analysis.measuring import verify as verifying
from mbaas.tools.analysis.measuring.effort import MOST_AGE_S, QUICK, Effort, Progress, SavedStages
from mbaas.tools.analysis.measuring.prep import MachineSpeed
from mbaas.tools.analysis.measuring.service import EpochRun, PacedStep, ServiceRun
from mbaas.tools.analysis.measuring.system import NO_COSTS, QUICK_COSTS, Survey
from mbaas.tools.analysis.measuring.verify import points, verify

WORKLOAD = Workload(
    dataset=synthetic(100),
    pipeline=T.Pipeline([T.DecodeImage()]),
    step=PacedStep(100.0),
    options=FeedOptions(batch_size=10),
)


@pytest.mark.parametrize("pace", [0.1, 1.0, 5.0])
def test_what_is_left_follows_from_the_plan_and_never_rises(pace: float) -> None:
    """The machine takes 0.1, 1 and 5 times the expected time."""
    now, lines = [0.0], list[str]()
    progress = Progress({"reads": 30.0, "left out": 0.0, "runs": 60.0}, lines.append, clock=lambda: now[0])
    progress.begin("reads", "reading")
    now[0] = 30.0 * pace
    progress.found("100 samples/s")
    progress.begin("runs", "running")
    progress.begin("runs", "still running", done=0.5)
    progress.begin("runs", "again", done=0.0)
    assert [line.rpartition("gone, about ")[2] for line in lines] == [
        "1 min 30 s to go)",
        "  100 samples/s",
        "1 min 00 s to go)",
        "30 s to go)",
        "30 s to go)",
    ]


def test_a_quick_analysis_is_planned_for_half_a_minute() -> None:
    planned = Survey(workload=WORKLOAD, effort=QUICK, cores=2).expected_s()
    assert sum(planned.values()) < 25
    assert planned["costs"] == planned["gpu"] == 0.0
    assert Survey(workload=WORKLOAD, effort=QUICK, cores=8).worker_counts == [1, 8]


def test_every_phase_is_expected_to_take_as_long_as_there_is_to_measure() -> None:
    def phases(cores: int, *, rate_per_s: float | None = None, gpus: int = 0) -> dict[str, float]:
        return Survey(workload=WORKLOAD, cores=cores, rate_per_s=rate_per_s, gpus=gpus).expected_s()

    assert phases(2)["step"] > phases(2, rate_per_s=100.0)["step"] == 0.0
    assert phases(2, gpus=1)["gpu"] > phases(2)["gpu"] == phases(2, rate_per_s=100.0, gpus=1)["gpu"] == 0.0
    assert phases(64)["prep"] > phases(2)["prep"] > 0.0
    assert phases(2)["disk"] == 0.0


@pytest.mark.parametrize(
    ("options", "cores", "gpus", "workers"),
    [
        ({}, 16, 0, 16),
        ({}, 16, 1, 2),
        ({}, 4, 4, 4),
        ({"engine": "cpu"}, 16, 1, 16),
        ({"gpus_per_worker": 0.0}, 16, 1, 16),
        ({"gpus_per_worker": 0.25}, 16, 3, 3),
    ],
)
def test_as_many_workers_are_measured_as_share_the_gpus(
    options: dict[str, Any], cores: int, gpus: int, workers: int
) -> None:
    workload = replace(WORKLOAD, options=FeedOptions(batch_size=10, **options))
    survey = Survey(workload=workload, cores=cores, gpus=gpus)
    assert survey.workers == workers
    assert survey.worker_counts[-1] == 2 * workers


STEADY: Any = SimpleNamespace(relative=lambda: 1.0)
"""Stands in for the `MachineSpeed` of a machine with constant speed."""


def test_what_is_checked_is_said_with_its_unit() -> None:
    """The point without a cache is skipped; the next has half of 100 MB. The line precedes any feed."""
    rates, lines = round_rates(), list[str]()

    def stop(line: str) -> None:
        lines.append(line.partition(" (")[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(WORKLOAD, rates, points(rates, Setup())[1:], speed=STEADY, progress=Progress({"check": 1.0}, stop))
    assert lines == ["checking cache_bytes = 50 MB, round 1 of 3"]


def test_the_pace_of_the_machine_is_told_from_how_fast_it_prepares() -> None:
    """Each look prepares a block of 64 samples, at first in 1.28 s: 50/s. Then the machine is half as fast."""
    # Two looks when it is created, each with two parts: one warms up, one counts.
    took_s = [1.28] * 4 + [2.56] * 6
    # clock readings: start of a part, before the block, after the block, end of the part
    clock = chain.from_iterable([at, at, at + took, at + took] for at, took in enumerate(took_s)).__next__
    with closing(MachineSpeed(synthetic(64), WORKLOAD.pipeline, 2, clock)) as found:
        assert found.usual_per_s == pytest.approx(50)
        assert found.relative() == pytest.approx(0.5)
        assert found.measure() == pytest.approx(25)
        found.usual_per_s = 20.0
        assert found.relative() == pytest.approx(1.25)


def test_predictions_that_are_checked_are_for_the_pace_at_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prep sets the pace at 800/s. The machine runs at half speed, at full speed, and at half speed again."""
    paces = iter([0.5, 1.0, 0.5])
    monkeypatch.setattr(verifying, "ROUNDS", 1)
    speed: Any = SimpleNamespace(relative=lambda: next(paces))
    run = ServiceRun(((EpochRun(600, 1.0, 0.0, 0.0, 0.0),),))
    epochs = []

    def run_service(*_: Any, **options: Any) -> ServiceRun:
        epochs.append(options["epochs"])
        return run

    monkeypatch.setattr(verifying, "run_service", run_service)
    rates, told = round_rates(), Progress({"check": 1.0}, lambda _: None)
    chosen = [
        ("trials", Setup(cache_bytes=1e8, prep_workers=4)),
        ("prep_workers", Setup(cache_bytes=1e8, prep_workers=2)),
    ]
    found = verify(WORKLOAD, rates, chosen, speed=speed, progress=told)
    assert [check.pace for check in found.checks] == [0.75, 0.75]
    assert [check.predicted.value for check in found.checks] == pytest.approx([600, 300])
    assert [check.error for check in found.checks] == pytest.approx([0.0, -0.5])
    assert [check.simulated for check in found.checks] == pytest.approx([600, 300], rel=0.1)
    assert found.paces == (0.75, 0.75)
    assert epochs == [32, 16], "of 100 samples, as many as take 4 s at the usual pace"
    monkeypatch.setattr(verifying, "RUN_S", 0.1)
    paces = iter([1.0, 1.0])
    verify(WORKLOAD, rates, chosen[:1], speed=speed, progress=told)
    assert epochs[2:] == [4]


def test_rates_of_a_machine_that_is_half_as_fast() -> None:
    """A step takes 1 ms a sample. Its 0.4 ms of CPU take twice as long; storage is as fast as before."""
    costs = {"step_cpu_s": stated(0.0004, unit="CPU-s"), "serving_s": stated(0.001, unit="s")}
    rates = decodable_rates(step=stated(1000, unit="samples/s"), **costs)
    half = rates.at_pace(0.5)
    assert half.step.value == pytest.approx(1 / 0.0014)
    assert half.step_cpu_s.value == pytest.approx(0.0008)
    assert half.serving_s.value == pytest.approx(0.002)
    assert half.decoded_prep is not None
    assert (half.prep.rate(4), half.decoded_prep.rate(4), half.cache.value) == pytest.approx((400, 4000, 5e8))
    assert half.storage == rates.storage
    same = rates.at_pace(1.0)
    assert same.step.value == pytest.approx(rates.step.value)
    assert replace(same, step=rates.step) == rates


@pytest.mark.slow
def test_an_analysis_that_is_stopped_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, lines = round_rates(), list[str]()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    measured = SimpleNamespace(rates=rates, notes=("P is doubtful",), prep_threads=None, was_stopped=False)
    monkeypatch.setattr(Survey, "measure", lambda *_: measured)
    monkeypatch.setattr(verifying, "split_epoch", stop)
    found = analyze(WORKLOAD, setup=Setup(), step="paced", check=True, tell=lines.append)
    assert found.was_stopped
    assert found.rates == rates
    assert found.sentence.startswith("Loading is")
    assert (found.split, found.verification) == (None, None)
    assert found.notes[:2] == ("P is doubtful", whole.STOPPED)
    assert lines[0].startswith("how fast the machine prepares, to compare with later (0 s gone, about ")
    assert lines[1].startswith("splitting an epoch into compute, prep stall and fetch stall (")


SHORT = Effort(least=3, most=3, window_s=0.02)


def interrupt_at(line: str) -> Callable[[str], None]:
    """Press Ctrl-C when a progress line starts with ``line``."""

    def tell(said: str) -> None:
        if said.startswith(line):
            signal.raise_signal(signal.SIGINT)

    return tell


def test_an_interrupted_analysis_continues_after_its_last_stage(
    ray_clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives before prep; the second run does not read storage or copy memory again."""
    path = tmp_path / "cache" / "a.json"
    first = SavedStages(path, about="this")
    with pytest.raises(KeyboardInterrupt):
        analyze(WORKLOAD, setup=Setup(), step="paced", effort=SHORT, tell=interrupt_at("P: prep"), saved=first)
    assert first.stages == ("storage", "memory")

    def measured_again(*_: Any, **__: Any) -> None:
        raise AssertionError("a saved stage is measured again")

    monkeypatch.setattr(system, "storage_rate", measured_again)
    monkeypatch.setattr(system, "memory_rate", measured_again)
    second = SavedStages(path, about="this")
    assert second.earlier == ("storage", "memory")
    lines = list[str]()
    found = analyze(
        WORKLOAD, setup=Setup(), step="paced", rate_per_s=50.0, effort=QUICK, tell=lines.append, saved=second
    )
    assert not found.was_stopped
    assert [count for count, _ in found.rates.storage.points] == [1, 2, 4, 8, 16], "of the first run"
    assert lines[0].startswith("S: random reads from cold storage with 1 to 16 readers (0 s gone")
    assert not path.exists(), "a complete analysis leaves nothing behind"


def test_only_results_about_the_same_and_of_today_are_used_again(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    saved, rate = SavedStages(path, about="this"), stated(7.0, unit="bytes/s")
    assert saved.result("memory", Quantity, lambda: rate) == rate
    assert saved.result("memory", Quantity, lambda: stated(8.0, unit="bytes/s")) == rate
    assert SavedStages(path, about="this").earlier == ("memory",)
    assert SavedStages(path, about="another").earlier == ()
    old = time.time() - MOST_AGE_S - 1
    os.utime(path, (old, old))
    assert SavedStages(path, about="this").earlier == ()
    path.write_text("{")
    assert SavedStages(path, about="this").earlier == ()


def test_results_that_cannot_be_saved_are_used_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    saved = SavedStages(tmp_path / "file" / "a.json")
    assert saved.result("speed", float, lambda: 2.0) == 2.0
    assert (saved.path, saved.stages) == (None, ("speed",))


def test_ctrl_c_says_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object, saving: Callable[[SavedStages], None]) -> None:
        saved = SavedStages(tmp_path / "a.json")
        saving(saved)
        saved.result("storage", float, lambda: 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("mbaas.cli.analyze._of_file", interrupted)
    done = CliRunner().invoke(app, ["analyze", "f.yaml", "--rate", "50", "--save", str(tmp_path / "found.json")])
    assert done.exit_code == 130
    said = "".join(done.stderr.split())
    assert f"the same command continues after storage: results so far are in {tmp_path}/a.json".replace(" ", "") in said
    assert (tmp_path / "a.json").exists()
    assert not (tmp_path / "found.json").exists()


def test_an_analysis_that_is_stopped_while_costs_are_measured_predicts_without_them(ray_clean: None) -> None:
    """Rates are measured for real; Ctrl-C arrives when the first feed that measures costs starts."""
    tell, saved = interrupt_at("costs of a feed and of a trial"), SavedStages()
    found = analyze(
        WORKLOAD, setup=Setup(), step="paced", rate_per_s=50.0, effort=SHORT, tell=tell, check=True, saved=saved
    )
    assert saved.stages == ("storage", "memory", "prep", "decoded", "speed")
    assert found.was_stopped
    assert NO_COSTS in found.notes
    assert (found.split, found.verification) == (None, None)
    assert found.rates.serving_s.value == 0.0
    assert found.prediction.steady.trial_per_s.value > 0


def test_a_quick_analysis_predicts_from_rates_alone(ray_clean: None) -> None:
    """No feed runs, even with ``check=True``."""
    found = analyze(WORKLOAD, setup=Setup(), step="paced", rate_per_s=50.0, effort=QUICK, check=True)
    assert QUICK_COSTS in found.notes
    assert (found.split, found.verification, found.was_stopped) == (None, None, False)
    assert [count for count, _ in found.rates.storage.points] == [1, 4, 16]
    assert found.rates.prep.points[0][0] == 1
    assert found.prediction.steady.trial_per_s.value > 0
