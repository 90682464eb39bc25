"""The fault of Tune's HyperBand that `benchmarks.tune_trials.stop_at` avoids. Remove both when Ray has mended it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import HyperBandScheduler, TrialScheduler

from benchmarks.tune_trials import stop_at


@dataclass(eq=False)
class FakeTrial:
    """The part of a trial that the scheduler reads."""

    trial_id: str
    status: str = Trial.RUNNING
    is_saving: bool = False


@dataclass
class FakeController:
    stopped: list[Any] = field(default_factory=list)

    def stop_trial(self, trial: Any) -> None:
        self.stopped.append(trial)


def finalists() -> tuple[HyperBandScheduler, FakeController, list[FakeTrial]]:
    """A bracket of two trials that both train until max_t = 2."""
    scheduler, controller = (
        HyperBandScheduler(metric="score", mode="max", max_t=2, reduction_factor=2),
        FakeController(),
    )
    trials = [FakeTrial("a"), FakeTrial("b")]
    for trial in trials:
        scheduler.on_trial_add(controller, trial)
    return scheduler, controller, trials


def report(score: float) -> dict[str, float]:
    return {"score": score, "training_iteration": 2}


def test_a_finalist_that_is_paused_is_stopped_with_the_last_one() -> None:
    scheduler, controller, (first, last) = finalists()
    assert scheduler.on_trial_result(controller, first, report(1)) == TrialScheduler.PAUSE
    first.status = Trial.PAUSED
    assert scheduler.on_trial_result(controller, last, report(2)) == TrialScheduler.STOP
    assert controller.stopped == [first]


def test_a_finalist_that_is_still_saving_is_forgotten() -> None:
    """Nothing stops or resumes it after its save, so the search does not end."""
    scheduler, controller, (first, last) = finalists()
    assert scheduler.on_trial_result(controller, first, report(1)) == TrialScheduler.PAUSE
    first.is_saving = True
    assert scheduler.on_trial_result(controller, last, report(2)) == TrialScheduler.STOP
    scheduler.on_trial_complete(controller, last, report(2))
    first.is_saving, first.status = False, Trial.PAUSED
    assert controller.stopped == []
    assert scheduler.choose_trial_to_run(controller) is None


def test_with_the_criterion_no_finalist_is_paused() -> None:
    """Tune checks the criterion before it calls the scheduler (`TuneController._process_trial_result`)."""
    trial = Trial("trainable", stub=True, stopping_criterion=stop_at(2))
    assert not trial.should_stop({"training_iteration": 1})
    assert trial.should_stop({"training_iteration": 2})
