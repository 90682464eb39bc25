"""A report gives the waits after each kind of fault, the slopes, and whether the run was sound."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from mbaas.tools.chaos.checker import Delivery, Flaw
from mbaas.tools.chaos.injector import FaultOutcome
from mbaas.tools.chaos.plan import Fault
from mbaas.tools.chaos.records import Incarnation, Step
from mbaas.tools.chaos.report import Checked, KindReport, Report, check_records, kinds_of, longest_waits
from mbaas.tools.chaos.usage import Usage, growth

SOUND = Report(seed=1, seconds=60.0, kinds={"kill-cache": KindReport(2, 1, (0.5,))}, checked=Checked(trials=1))


def waits(pid: int, *spans: tuple[float, float], **options: object) -> Incarnation:
    steps = [Step(Delivery(0, ((at, "x"),)), *span, {}) for at, span in enumerate(spans)]
    return Incarnation("t", pid, 0, tuple(steps), **options)


def test_a_wait_is_due_to_the_last_fault_before_it_or_just_after_it_began() -> None:
    """Faults at 10 and 20; waits before both, around the first, around both, and after both."""
    log = [FaultOutcome(10.0, "a"), FaultOutcome(20.0, "b")]
    assert longest_waits(log, {"t": [waits(1, (5, 6))]}) == {}
    assert longest_waits(log, {"t": [waits(1, (9, 12))]}) == {}
    assert longest_waits(log, {"t": [waits(1, (9.9, 11))]}) == {0: pytest.approx(1.1)}
    assert longest_waits(log, {"t": [waits(1, (9.9, 9.95))]}) == {}
    assert longest_waits(log, {"t": [waits(1, (11, 23))]}) == {0: 12}
    assert longest_waits(log, {"t": [waits(1, (12, 15), (19.9, 23), (24, 25))]}) == {0: 3, 1: pytest.approx(3.1)}


def test_a_trial_that_was_struck_itself_does_not_count_for_that_fault() -> None:
    log = [FaultOutcome(10.0, "a", pids={1}), FaultOutcome(20.0, "b")]
    assert longest_waits(log, {"t": [waits(1, (10, 15), (21, 22)), waits(2, (11, 13))]}) == {0: 2, 1: 1}


def test_only_faults_that_met_somebody_count() -> None:
    plan = [Fault(0.0, "a", ()), Fault(1.0, "a", ()), Fault(2.0, "b", ()), Fault(3.0, "a", ())]
    log = [FaultOutcome(0.0, "a"), FaultOutcome(1.0, "a", happened=False), FaultOutcome(3.0, "a")]
    trials = {"t": [waits(1, (0.5, 0.9), (1.5, 2.5))]}
    assert kinds_of(plan, log, trials) == {"a": KindReport(3, 2, (pytest.approx(0.4), 0.0)), "b": KindReport(1, 0)}
    assert kinds_of(plan, log, {}) == {"a": KindReport(3, 2), "b": KindReport(1, 0)}, "waits are not known"


def test_what_trials_wrote_is_checked_against_the_reference() -> None:
    """Two trials. One lacks the second sample of its epoch; the first process of the other was killed before it."""
    reference = {0: [(5, "p"), (6, "q")]}
    steps = [Step(Delivery(0, (row,)), 0.0, 0.0, {}) for row in reference[0]]
    found = {
        "a": [Incarnation("a", 1, 0, (steps[0],)), Incarnation("a", 2, 1, (steps[1],), is_closed=True)],
        "b": [Incarnation("b", 3, 0, (steps[0],), errors=((1.0, "E", "no"),), is_closed=True)],
    }
    result = check_records(found, {0: reference}, samples=2)
    assert result.flaws == (Flaw("missing", "b", 0, (6,)),)
    assert (result.trials, result.minibatches, result.samples, result.epochs, result.incarnations) == (2, 3, 3, 2, 3)
    assert (result.errors, result.told, result.is_independent) == ({"E": 1}, ("E: no",), True)
    assert result.count("missing") == 1
    assert json.loads(json.dumps(asdict(result)))["errors"] == {"E": 1}
    assert check_records(found, None, samples=2).flaws == result.flaws


@pytest.mark.parametrize(
    "change",
    [
        {"checked": Checked(flaws=(Flaw("missing", "t", 0, (1,)),))},
        {"feeds_ended": ("chaos: no",)},
        {"hung": ("trial-0",)},
        {"inexact_epochs": 1},
        {"command_code": 3},
    ],
)
def test_a_run_is_sound_only_if_nothing_went_wrong(change: dict) -> None:
    assert SOUND.is_sound
    assert replace(SOUND, command_code=0, bugs=("b",), left_behind=("p",)).is_sound
    assert not replace(SOUND, **change).is_sound


def test_growth_is_told_by_a_slope_that_peaks_do_not_move() -> None:
    """One more descriptor per second, one more process in every fourth measurement, and falling memory."""
    looks = [Usage(at, 10 + (at % 4 == 0), 5, at, 10**9 - 60 * at, 0) for at in range(100)]
    found = {each.thing: each for each in growth(looks)}
    assert found["descriptors"].per_min == pytest.approx(60)
    assert found["memory_bytes"].per_min == pytest.approx(-3600)
    assert (found["processes"].per_min, found["processes"].first, found["processes"].last) == (0, 10, 10)
    assert found["descriptors"].last > found["descriptors"].first
    assert growth(looks[:9]) == []
