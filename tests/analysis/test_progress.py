"""What an analysis says while it runs, and what it keeps when it is stopped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from stated_rates import round_rates

from mbaas import transforms as T
from mbaas.analysis import Setup, Workload, analyze, whole
from mbaas.analysis.measuring.effort import Effort
from mbaas.analysis.measuring.progress import Progress
from mbaas.analysis.measuring.steps import PacedStep
from mbaas.analysis.measuring.system import expected_s
from mbaas.analysis.measuring.verify import points, verify
from mbaas.dataset import synthetic
from mbaas.settings import FeedOptions

WORKLOAD = Workload(
    dataset=synthetic(100),
    pipeline=T.Pipeline([T.DecodeImage()]),
    step=PacedStep(100.0),
    options=FeedOptions(batch_size=10),
)


def test_what_is_left_follows_from_how_slow_the_machine_turned_out_to_be() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress({"reads": 30.0, "left out": 0.0, "runs": 60.0}, lines.append, clock=lambda: now[0])
    progress.begin("reads", "reading")
    now[0] = 60.0
    progress.found("100 samples/s")
    progress.begin("runs", "running")
    assert lines == [
        "reading (0 s gone, about 1 min 30 s to go)",
        "  100 samples/s",
        "running (1 min 00 s gone, about 2 min 00 s to go)",
    ]


def test_every_phase_is_expected_to_take_as_long_as_there_is_to_measure() -> None:
    def phases(cores: int, *, is_step_measured: bool = True) -> dict[str, float]:
        return expected_s(WORKLOAD, Effort(), cores=cores, is_step_measured=is_step_measured)

    assert phases(2)["step"] > phases(2, is_step_measured=False)["step"] == 0.0
    assert phases(64)["prep"] > phases(2)["prep"] > 0.0
    assert phases(2)["disk"] == 0.0


def test_what_is_checked_is_said_with_its_unit() -> None:
    """The first point is that without a cache, the second holds half of 100 MB; the line comes before any feed runs."""
    rates, lines = round_rates(), list[str]()

    def stop(line: str) -> None:
        lines.append(line.partition(" (")[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(WORKLOAD, rates, points(rates, Setup())[1:], progress=Progress({"check": 1.0}, stop))
    assert lines == ["checking cache_bytes = 50 MB, round 1 of 2"]


def test_an_analysis_that_is_stopped_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, lines = round_rates(), list[str]()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    measured = SimpleNamespace(rates=rates, notes=("P is doubtful",), prep=SimpleNamespace(threads=None))
    monkeypatch.setattr(whole, "measure", lambda *_, **__: measured)
    monkeypatch.setattr(whole, "split_epoch", stop)
    found = analyze(WORKLOAD, setup=Setup(), step="paced", check=True, tell=lines.append)
    assert found.was_stopped
    assert found.rates == rates
    assert found.sentence.startswith("Loading is")
    assert (found.split, found.verification) == (None, None)
    assert found.notes[:2] == ("P is doubtful", whole.STOPPED)
    assert lines[0].startswith("splitting an epoch into compute, prep stall and fetch stall (0 s gone, about ")
