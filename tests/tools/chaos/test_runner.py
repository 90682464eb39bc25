"""Faults happen on schedule, but not while a trial still waits because of earlier ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mbaas.base.units import seconds
from mbaas.tools.chaos import runner
from mbaas.tools.chaos.injector import FaultOutcome
from mbaas.tools.chaos.plan import Fault


class NoWatch:
    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


class FakeInjector:
    """Records the times of faults; a trial resumes after a number of checks."""

    def __init__(self, record: Path, looks: int) -> None:
        self.record, self.looks = record, looks
        self.happened: list[str] = []

    def undo_what_is_due(self) -> None:
        self.looks -= 1
        if self.looks == 0:
            self.happened.append("the trial goes on")
            os.utime(self.record)

    def inject(self, fault: Fault) -> FaultOutcome:
        self.happened.append(fault.kind)
        return FaultOutcome(time.monotonic(), fault.kind)


@pytest.mark.parametrize(("waited_s", "hung"), [(runner.HOLD_S + 5, False), (runner.HUNG_S + 5, True)])
def test_nothing_more_happens_until_a_trial_that_waits_for_long_has_gone_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited_s: float, hung: bool
) -> None:
    monkeypatch.setattr(runner, "USAGE_S", 0.01)
    faults = [Fault(0.0, "first", ()), Fault(0.1, "second", ()), Fault(0.2, "third", ())]
    run = runner._Run(runner.ChaosSettings(), faults, tmp_path, "no process has this", lambda _: None)
    run._watch = NoWatch()  # type: ignore[assignment]
    record = tmp_path / "records" / "trial-0.0.jsonl"
    record.touch()
    os.utime(record, (time.time() - waited_s,) * 2)
    injector = FakeInjector(record, looks=10)
    run._strike(injector, lambda: not run.report.hung)  # type: ignore[arg-type]
    if hung:
        assert injector.happened == ["first"]
        assert run.report.hung == (f"trial-0 got nothing for {seconds(runner.HUNG_S)}",)
    else:
        assert injector.happened == ["first", "the trial goes on", "second", "third"]
        assert run.report.hung == ()
