"""An analysis reports its progress, and keeps its results when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from stated_rates import decodable_rates, round_rates
from typer.testing import CliRunner

from mbaas import transforms as T
from mbaas.analysis import Setup, Workload, analyze, whole
from mbaas.analysis.measuring import verify as verifying
from mbaas.analysis.measuring.effort import QUICK, Effort
from mbaas.analysis.measuring.pace import Pace
from mbaas.analysis.measuring.progress import Progress
from mbaas.analysis.measuring.service import EpochRun, ServiceRun
from mbaas.analysis.measuring.steps import PacedStep
from mbaas.analysis.measuring.system import NO_COSTS, QUICK_COSTS, begun, expected_s, workers_here
from mbaas.analysis.measuring.verify import points, verify
from mbaas.analysis.whole import AnalysisStoppedError
from mbaas.cli import app
from mbaas.dataset import synthetic
from mbaas.dataset.base import SampleReader, WrappedDataset
from mbaas.model.curves import MeasuredCurve
from mbaas.model.quantity import stated
from mbaas.settings import Disk, FeedOptions

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
    planned = expected_s(WORKLOAD, QUICK, cores=2, rate_per_s=None, gpus=0)
    assert sum(planned.values()) < 25
    assert planned["costs"] == planned["gpu"] == 0.0
    assert begun(WORKLOAD, QUICK, rate_per_s=None, cores=8).workers == (1, 8)


def test_every_phase_is_expected_to_take_as_long_as_there_is_to_measure() -> None:
    def phases(cores: int, *, rate_per_s: float | None = None, gpus: int = 0) -> dict[str, float]:
        return expected_s(WORKLOAD, Effort(), cores=cores, rate_per_s=rate_per_s, gpus=gpus)

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
    assert workers_here(workload, cores=cores, gpus=gpus) == workers
    assert begun(workload, rate_per_s=None, cores=cores, gpus=gpus).workers[-1] == 2 * workers


STEADY: Any = SimpleNamespace(now=lambda: 1.0)
"""Stands in for the `Pace` of a machine with constant speed."""


def test_what_is_checked_is_said_with_its_unit() -> None:
    """The point without a cache is skipped; the next has half of 100 MB. The line precedes any feed."""
    rates, lines = round_rates(), list[str]()

    def stop(line: str) -> None:
        lines.append(line.partition(" (")[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(WORKLOAD, rates, points(rates, Setup())[1:], pace=STEADY, progress=Progress({"check": 1.0}, stop))
    assert lines == ["checking cache_bytes = 50 MB, round 1 of 3"]


def test_the_pace_of_the_machine_is_told_from_how_fast_it_prepares() -> None:
    """Each look prepares a block of 64 samples, at first in 1.28 s: 50/s. Then the machine is half as fast."""
    # Two looks when it is created, each with two parts: one warms up, one counts.
    took_s = [1.28] * 4 + [2.56] * 6
    # clock readings: start of a part, before the block, after the block, end of the part
    clock = chain.from_iterable([at, at, at + took, at + took] for at, took in enumerate(took_s)).__next__
    with Pace(replace(WORKLOAD, dataset=synthetic(64)), 2, clock) as found:
        assert found.usual_per_s == pytest.approx(50)
        assert found.now() == pytest.approx(0.5)
        assert found.look() == pytest.approx(25)
        found.usual_per_s = 20.0
        assert found.now() == pytest.approx(1.25)


def test_predictions_that_are_checked_are_for_the_pace_at_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prep sets the pace at 800/s. The machine runs at half speed, at full speed, and at half speed again."""
    paces = iter([0.5, 1.0, 0.5])
    monkeypatch.setattr(verifying, "ROUNDS", 1)
    pace: Any = SimpleNamespace(now=lambda: next(paces))
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
    found = verify(WORKLOAD, rates, chosen, pace=pace, progress=told)
    assert [check.pace for check in found.checks] == [0.75, 0.75]
    assert [check.predicted.value for check in found.checks] == pytest.approx([600, 300])
    assert [check.error for check in found.checks] == pytest.approx([0.0, -0.5])
    assert [check.simulated for check in found.checks] == pytest.approx([600, 300], rel=0.1)
    assert found.paces == (0.75, 0.75)
    assert epochs == [32, 16], "of 100 samples, as many as take 4 s at the usual pace"
    monkeypatch.setattr(verifying, "RUN_S", 0.1)
    paces = iter([1.0, 1.0])
    verify(WORKLOAD, rates, chosen[:1], pace=pace, progress=told)
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


def test_an_analysis_that_is_stopped_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, lines = round_rates(), list[str]()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    measured = SimpleNamespace(
        rates=rates, notes=("P is doubtful",), prep=SimpleNamespace(threads=None), was_stopped=False
    )
    monkeypatch.setattr(whole, "measure", lambda *_, **__: measured)
    monkeypatch.setattr(whole, "split_epoch", stop)
    found = analyze(WORKLOAD, setup=Setup(), step="paced", check=True, tell=lines.append)
    assert found.was_stopped
    assert found.rates == rates
    assert found.sentence.startswith("Loading is")
    assert (found.split, found.verification) == (None, None)
    assert found.notes[:2] == ("P is doubtful", whole.STOPPED)
    assert lines[0].startswith("how fast the machine prepares, to compare with later (0 s gone, about ")
    assert lines[1].startswith("splitting an epoch into compute, prep stall and fetch stall (")


@dataclass(frozen=True, eq=False, repr=False)
class InterruptingDataset(WrappedDataset):
    """Sends SIGINT, like Ctrl-C, as soon as two readers run at the same time."""

    def reader(self) -> SampleReader:
        return InterruptingReader(self.inner.reader())


class InterruptingReader(SampleReader):
    def __init__(self, inner: SampleReader) -> None:
        self._inner, self._is_over = inner, threading.Event()

    def read_into(self, sample_id: int, buffer: memoryview | np.ndarray) -> None:
        time.sleep(0.005)  # like real storage, it leaves time for a second reader
        self._inner.read_into(sample_id, buffer)
        if threading.current_thread().name == "mbaas-measure_1" and not self._is_over.is_set():
            self._is_over.set()
            os.kill(os.getpid(), signal.SIGINT)


SHORT = Effort(least=3, most=3, window_s=0.02)


def stopped_when(line: str, workload: Workload = WORKLOAD, **options: Any) -> AnalysisStoppedError:
    """Run a real analysis, and press Ctrl-C when a progress line starts with ``line``; "" means never."""

    def tell(said: str) -> None:
        if line and said.strip().startswith(line):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as stopped:  # any kind: one that escapes would end all tests
        analyze(workload, setup=Setup(), step="paced", effort=SHORT, tell=tell, **options)
    assert isinstance(stopped.value, AnalysisStoppedError)
    return stopped.value


def test_ctrl_c_after_the_first_number_of_readers_keeps_its_rate() -> None:
    found = stopped_when("", replace(WORKLOAD, dataset=InterruptingDataset.around(synthetic(100)))).found
    ((readers, rate),) = found.rates.storage
    assert (readers, rate.samples, rate.unit) == (1, 3, "samples/s")
    assert found.rates.missing == (
        "S (storage) with more than 1 reader",
        "C (memory)",
        "P (prep)",
        "G (the training step)",
    )
    assert found.was_stopped
    assert found.sentence == (
        "The analysis was stopped before all rates were measured: without S (storage) with more than 1 reader, "
        "C (memory), P (prep) and G (the training step) nothing can be predicted, and there is no verdict and no "
        "advice."
    )


def test_a_stopped_analysis_is_saved_reported_and_shown_with_all_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S (5 numbers of readers) and C were measured, G is stated as 50, P is missing. `mbaas what-if` reports that."""
    stopped = stopped_when("reading a part", rate_per_s=50.0)
    assert stopped.found.rates.missing == ("P (prep)",)
    assert {name: len(points) for name, points in vars(stopped.found.rates).items() if name in ("storage", "prep")} == {
        "storage": 5,
        "prep": 0,
    }

    def measured(*_: object) -> None:
        raise stopped

    monkeypatch.setattr("mbaas.cli.analyze._of_file", measured)
    saved, report, plots = tmp_path / "a.json", tmp_path / "r.html", tmp_path / "plots"
    outputs = ["--save", saved, "--report", report, "--plots", plots]
    done = CliRunner().invoke(app, list(map(str, ["analyze", "f.yaml", "--rate", "50", *outputs])))
    words = " ".join(done.stdout.split())
    assert done.exit_code == 130
    assert stopped.found.sentence in words
    for shown in ("G 50/s", "16 readers, from cold storage, at random", "C ", "memory, "):
        assert shown in words
    assert "no plots were written" in done.stderr
    assert not plots.exists()
    plain = json.loads(saved.read_text())
    assert plain["missing"] == ["P (prep)"]
    assert plain["verdict"] == stopped.found.sentence
    rates = plain["rates"]
    assert set(rates) == {"samples", "sample_bytes", "cores", "batch_size", "step", "storage", "cache"}
    assert MeasuredCurve.from_json(rates["storage"]).points == tuple(stopped.found.rates.storage)
    page = " ".join("".join(ElementTree.fromstring(report.read_text()).itertext()).replace("\u00a0", " ").split())
    assert stopped.found.sentence in page
    assert "P (prep). " in page
    assert page.count("from cold storage, at random") == 5
    asked = CliRunner().invoke(app, ["what-if", str(saved)])
    assert asked.exit_code == 2
    assert "the analysis was stopped before it had measured P (prep)" in " ".join(asked.stderr.split())


def test_ctrl_c_before_anything_was_measured_is_ctrl_c() -> None:
    def tell(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        analyze(WORKLOAD, setup=Setup(), step="paced", tell=tell)
    assert not isinstance(stopped.value, AnalysisStoppedError)


def test_what_is_missing_follows_from_what_is_there() -> None:
    so_far = begun(
        replace(WORKLOAD, options=FeedOptions(batch_size=10, disk=Disk(path="/x", max_bytes=1))),
        rate_per_s=5.0,
        cores=2,
    )
    rate = stated(7.0, unit="samples/s")
    assert so_far.is_empty
    assert so_far.missing == ("S (storage)", "C (memory)", "P (prep)", "the rate of the disk tier's disk")
    so_far.storage += [(float(count), rate) for count in so_far.readers]
    so_far.prep += [(1.0, rate), (2.0, rate)]
    so_far.cache = so_far.disk = stated(1e9, unit="bytes/s")
    assert so_far.missing == ("P (prep) with more than 2 workers",)
    so_far.prep.append((4.0, rate))
    assert so_far.missing == ("P (prep) with several threads",)
    so_far.pixel_bytes = 12.0
    so_far.decoded_prep.append((1.0, rate))
    assert so_far.missing == ("P of decoded samples with more than 1 worker",)
    so_far.has_decoded = False
    assert so_far.missing == ()


def test_an_analysis_that_is_stopped_while_costs_are_measured_predicts_without_them(ray_clean: None) -> None:
    """Rates are measured for real; Ctrl-C arrives when the first feed that measures costs starts."""

    def tell(said: str) -> None:
        if said.startswith("costs of a feed and of a trial"):
            signal.raise_signal(signal.SIGINT)

    found = analyze(WORKLOAD, setup=Setup(), step="paced", rate_per_s=50.0, effort=SHORT, tell=tell, check=True)
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
