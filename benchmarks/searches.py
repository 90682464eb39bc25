"""Sharing in searches by each of Ray Tune's schedulers, with a training feed and a validation feed.

A trial trains for an epoch, evaluates with a new loader, saves its state and reports. A step is a pause, so several
trials fit a small machine. Scores depend only on the trials' configurations.

Rounds alternate between the ways to start a trial. Trials measure their waits themselves, in the same way for feeds and
DataLoaders.
"""

# ruff: noqa: ARG002 - the signatures of callbacks are Tune's

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, Literal

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler, PopulationBasedTraining
from rich.table import Table

import mbaas
from benchmarks import ID_BYTES, rows
from benchmarks.tune_trials import report_with_state, restored_state, stop_at
from mbaas import transforms as T
from mbaas.dataset import Dataset, synthetic
from mbaas.ray_cluster import connection
from tune_integration import FeedCallback, get_loader

SAMPLES, HELD_OUT, BATCH = 1728, 288, 32
TRAIN, VALIDATE = "train", "validation"

EPOCHS = 9
"""Epochs of a trial that is not stopped early."""

STAGED = 16
"""Staging capacity of the training feed in minibatches: less than an epoch, as with a large dataset."""

EVALUATION_STEP = 0.1
"""Time of an evaluation step as a fraction of a training step."""

SCHEDULERS: dict[str, Callable[[], Any]] = {
    "FIFO": FIFOScheduler,
    "ASHA": lambda: ASHAScheduler(time_attr="epoch", max_t=EPOCHS, grace_period=1, reduction_factor=3),
    "HyperBand": lambda: HyperBandScheduler(time_attr="training_iteration", max_t=EPOCHS, reduction_factor=3),
    "PBT": lambda: PopulationBasedTraining(
        time_attr="epoch", perturbation_interval=2, hyperparam_mutations={"rate": [0.1, 0.01]}, quantile_fraction=0.25
    ),
}

PAUSING = ("HyperBand", "PBT")
"""Schedulers that pause trials and resume them later."""

Way = Literal["epoch", "now", "dataloader"]
"""Source of minibatches: the feed from its next epoch, the feed at once, or a separate DataLoader."""


@dataclass(frozen=True)
class SearchData:
    """Data of a search, for training and for the evaluation after each epoch; picklable.

    Attributes:
        train, held_out: images.
        augmented, plain: the pipelines for training and for evaluation.
        side: height and width of prepared images.
        batch: samples in a minibatch.
        workers: worker processes of each trial's DataLoader.
    """

    train: Dataset
    held_out: Dataset
    augmented: T.Pipeline
    plain: T.Pipeline
    side: int
    batch: int
    workers: int = 1


@dataclass(frozen=True)
class Plan:
    """Settings of a search.

    Attributes:
        scheduler: one of `SCHEDULERS`.
        trials: number of trials.
        slots: number of concurrent trials.
        step_s: seconds of a training step.
    """

    scheduler: str
    trials: int
    slots: int
    step_s: float


@dataclass(frozen=True)
class Search:
    """Results of a search; medians over rounds.

    Attributes:
        scheduler: one of `SCHEDULERS`.
        way: source of minibatches.
        epochs: training epochs that trials finished.
        seconds: duration of the search.
        delivered: samples delivered for training and evaluation.
        prepared: samples prepared for these.
        train_prepared: training samples prepared for each one delivered; 1 with a DataLoader.
        train_least: the lower bound of ``train_prepared``, if all concurrent trials had shared everything.
        validation_prepared: as ``train_prepared``. A feed that keeps its whole epoch prepares each sample once.
        waited_s: seconds that trials waited for minibatches, summed over trials, training and evaluation.
        waited: ``waited_s`` as a fraction of the trials' run time.
        first_batch_s: from opening a loader to the first training minibatch, mean over trials.
    """

    scheduler: str
    way: Way
    epochs: int
    seconds: float
    delivered: int
    prepared: int
    train_prepared: float
    train_least: float
    validation_prepared: float
    waited_s: float
    waited: float
    first_batch_s: float


@dataclass(frozen=True)
class Span:
    """Start and end on the machine's monotonic clock, in seconds."""

    began: float
    ended: float


@dataclass(frozen=True)
class Run:
    """A trial from opening its loader until it ended or paused.

    Attributes:
        span: start and end of the run.
        epochs: its training epochs.
        waited_s: seconds of waiting for minibatches.
        first_batch_s: seconds to its first minibatch.
    """

    span: Span
    epochs: tuple[Span, ...]
    waited_s: float
    first_batch_s: float


def least_prepared(runs: Sequence[Run]) -> float:
    """Return the least number of epochs to prepare if all concurrent trials had shared everything.

    Assumes that an epoch is delivered evenly over its time, and shared by all trials that run at that moment.
    """
    moments = sorted(
        {moment for run in runs for span in (run.span, *run.epochs) for moment in (span.began, span.ended)}
    )
    least = 0.0
    for began, ended in itertools.pairwise(moments):
        there = [run for run in runs if run.span.began <= began and ended <= run.span.ended]
        under_way = [e for run in there for e in run.epochs if e.began <= began and ended <= e.ended]
        least += sum((ended - began) / (epoch.ended - epoch.began) for epoch in under_way) / max(1, len(there))
    return least


class RunRecorder(tune.Callback):
    """Records when each trial runs and trains, from its reports."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, float], Run] = {}

    @property
    def runs(self) -> list[Run]:
        """All runs that finished an epoch; a resumed trial has several."""
        return list(self._runs.values())

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        # The report follows the evaluation, so it ends the run unless Tune continues the trial.
        run = (trial.trial_id, result["opened"])
        before = self._runs.get(run, Run(Span(result["opened"], result["opened"]), (), 0.0, result["first_batch_s"]))
        self._runs[run] = replace(
            before,
            span=Span(before.span.began, result["evaluated"]),
            epochs=(*before.epochs, Span(result["began"], result["ended"])),
            waited_s=before.waited_s + result["waited_s"],
        )


def measure(
    *,
    schedulers: tuple[str, ...],
    ways: tuple[Way, ...],
    trials: int,
    slots: int,
    step_s: float,
    side: int,
    rounds: int,
) -> list[Search]:
    """Run each search ``rounds`` times on images of ``side`` pixels, with ``slots`` of ``trials`` at once."""
    rows = [(name, way) for name in schedulers for way in ways]
    data = made_up(side)
    with connection.separate_ray(slots + 2):
        found = [
            search(Plan(scheduler, trials, slots, step_s), way, data) for _ in range(rounds) for scheduler, way in rows
        ]
    return [median_of([each for each in found if (each.scheduler, each.way) == row]) for row in rows]


def median_of(rounds: Sequence[Search]) -> Search:
    """Return the median of each figure."""
    names = [field.name for field in fields(Search) if field.name not in ("scheduler", "way")]
    figures: dict[str, Any] = {name: median(getattr(each, name) for each in rounds) for name in names}
    return replace(
        rounds[0], **{**figures, **{name: round(figures[name]) for name in ("epochs", "delivered", "prepared")}}
    )


def search(plan: Plan, way: Way, data: SearchData, **options: Any) -> Search:
    """Run a search; ``options`` are passed to `mbaas.serve`."""
    scheduler = plan.scheduler
    with contextlib.ExitStack() as stack:
        feeds = [] if way == "dataloader" else [stack.enter_context(feed) for feed in _served(data, options)]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        quality = list(range(plan.trials))
        # If each trial were better than the ones before, a scheduler that compares with these would stop none.
        random.Random(0).shuffle(quality)
        space = {
            "way": way,
            "data": data,
            "step_s": plan.step_s,
            "epochs": EPOCHS,
            "quality": tune.grid_search(quality),
            "rate": 0.1,
        }
        recorder = RunRecorder()
        callbacks = [recorder, *([FeedCallback(TRAIN, VALIDATE)] if feeds else [])]
        began = time.perf_counter()
        tuner = tune.Tuner(
            tune.with_resources(_train, {"cpu": 1}),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="score",
                mode="max",
                scheduler=SCHEDULERS[scheduler](),
                max_concurrent_trials=plan.slots,
                # Starting a process takes longer here than a short trial. But Tune (2.60) may hang at the end of a
                # search if paused trials shared processes.
                reuse_actors=scheduler not in PAUSING,
            ),
            run_config=tune.RunConfig(
                storage_path=folder,
                callbacks=callbacks,
                stop=stop_at(EPOCHS) if scheduler == "HyperBand" else None,
                verbose=0,
            ),
        )
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results, not for Tune's messages
            results = tuner.fit()
        seconds = time.perf_counter() - began
        if results.num_errors:
            raise results.errors[0]
        counts = [(status.prepared_samples, status.delivered_samples) for status in map(mbaas.Feed.status, feeds)]
    runs = recorder.runs
    epochs, waited_s = sum(len(run.epochs) for run in runs), sum(run.waited_s for run in runs)
    if not counts:
        counts = [(epochs * samples,) * 2 for samples in (len(data.train), len(data.held_out))]
    train_prepared, validation_prepared = (prepared / delivered for prepared, delivered in counts)
    return Search(
        scheduler,
        way,
        epochs=epochs,
        seconds=seconds,
        delivered=sum(delivered for _, delivered in counts),
        prepared=sum(prepared for prepared, _ in counts),
        train_prepared=train_prepared,
        train_least=least_prepared(runs) / epochs,
        validation_prepared=validation_prepared,
        waited_s=waited_s,
        waited=waited_s / sum(run.span.ended - run.span.began for run in runs),
        first_batch_s=sum(run.first_batch_s for run in runs) / len(runs),
    )


def made_up(side: int) -> SearchData:
    """Make noise images of ``side`` x ``side`` pixels."""
    train, held_out = (synthetic(samples, height=side, width=side) for samples in (SAMPLES, HELD_OUT))
    augmented = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
    return SearchData(train, held_out, augmented, T.Pipeline([T.DecodeImage()]), side, BATCH)


def _served(data: SearchData, options: dict[str, Any]) -> Iterator[mbaas.Feed]:
    staging_bytes = STAGED * data.batch * (data.side * data.side * 3 + ID_BYTES)
    each = {"batch_size": data.batch, **options}
    workers = options.get("prep_workers", 1)
    yield mbaas.serve(
        TRAIN, data.train, data.augmented, **{"prep_workers": workers, **each}, staging_bytes=staging_bytes
    )
    yield mbaas.serve(VALIDATE, data.held_out, data.plain, **{**each, "prep_workers": 1}, shuffle=False)


def _train(config: dict[str, Any]) -> None:
    """Train, evaluate, save and report each epoch; resume from a checkpoint if there is one."""
    data, step_s, state = config["data"], config["step_s"], restored_state()
    opened = time.monotonic()
    loader: Any
    evaluation: contextlib.AbstractContextManager[Any]
    if config["way"] == "dataloader":
        from benchmarks.own_loader import OwnLoader  # imports torch, which trials with a feed do not need

        size: Any = {"side": data.side, "batch": data.batch, "workers": data.workers}
        loader = OwnLoader(data.train, data.augmented, **size, shuffle=True, state=state)
        own_evaluation = OwnLoader(data.held_out, data.plain, **size, shuffle=False)
    else:
        loader, own_evaluation = get_loader(TRAIN, format="numpy", start=config["way"], state=state), None
    first_batch_s = 0.0
    while loader.epoch < config["epochs"]:
        began = time.monotonic()
        first_at, waited_s = _go_through(loader, step_s)
        first_batch_s = first_batch_s or first_at - opened
        ended = time.monotonic()
        if own_evaluation is not None:
            evaluation = contextlib.nullcontext(own_evaluation)
        else:
            evaluation = get_loader(VALIDATE, format="numpy")
        with evaluation as minibatches:
            waited_s += _go_through(minibatches, EVALUATION_STEP * step_s)[1]
        # From the configuration alone, so that each round stops the same trials; it grows as a real score does.
        report = {
            "score": config["quality"] + loader.epoch / 100,
            "epoch": loader.epoch,
            "opened": opened,
            "began": began,
            "ended": ended,
            "evaluated": time.monotonic(),
            "waited_s": waited_s,
            "first_batch_s": first_batch_s,
        }
        report_with_state(report, loader.state_dict())


def _go_through(minibatches: Iterable[Any], step_s: float) -> tuple[float, float]:
    """Run an epoch; return the time of the first minibatch, and the seconds of waiting."""
    asked = first_at = time.monotonic()
    waited_s, is_first = 0.0, True
    for batch in minibatches:
        came = time.monotonic()
        waited_s += came - asked
        first_at, is_first = came if is_first else first_at, False
        del batch
        time.sleep(step_s)
        asked = time.monotonic()
    return first_at, waited_s + time.monotonic() - asked


def table(results: list[Search]) -> Table:
    """Return a table with a row for each search."""
    columns: dict[str, Callable[[Search], str]] = {
        "scheduler": lambda each: each.scheduler,
        "start": lambda each: each.way,
        "epochs": lambda each: str(each.epochs),
        "s": lambda each: f"{each.seconds:.0f}",
        "s/epoch": lambda each: f"{each.seconds / each.epochs:.2f}",
        "prepared": lambda each: f"{each.train_prepared:.2f}",
        "least": lambda each: f"{each.train_least:.2f}",
        "waited s": lambda each: f"{each.waited_s:.0f}",
        "first s": lambda each: f"{each.first_batch_s:.2f}",
    }
    return rows("Prepared per delivered, to train; waits", results, columns, words=("scheduler", "start"))
