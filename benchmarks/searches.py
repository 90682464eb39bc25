"""Measures what Ray Tune's schedulers leave of sharing: searches by each, over a feed to train and one to validate.

A trial trains for an epoch, evaluates with a loader that it opens anew, saves its state and reports. A step is a pause,
so several trials fit a small machine. Scores follow from the trials' configurations alone.

Trials that come in the middle of an epoch wait for the next one, or begin at once, or each has a DataLoader of its own:
all ways take turns. Trials themselves measure what they wait for, in the same way whoever gives them minibatches.
"""

# ruff: noqa: ARG002 - the signatures of callbacks are Tune's

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import ray
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler, PopulationBasedTraining
from rich.table import Table

import mbaas
from benchmarks import ID_BYTES
from mbaas import runtime
from mbaas import transforms as T
from mbaas.bench.render import figure_table
from mbaas.dataset import Dataset, synthetic
from tune_integration import FeedCallback, get_loader

SAMPLES, HELD_OUT, BATCH = 1728, 288, 32
TRAIN, VALIDATE = "train", "validation"

EPOCHS = 9
"""Of a trial that is not stopped before."""

STAGED = 16
"""Minibatches of the training feed that may be staged: less than an epoch, as with a large dataset."""

EVALUATION_STEP = 0.1
"""A step of an evaluation takes this share of a training step."""

SCHEDULERS: dict[str, Callable[[], Any]] = {
    "FIFO": FIFOScheduler,
    "ASHA": lambda: ASHAScheduler(time_attr="epoch", max_t=EPOCHS, grace_period=1, reduction_factor=3),
    "HyperBand": lambda: HyperBandScheduler(time_attr="training_iteration", max_t=EPOCHS, reduction_factor=3),
    "PBT": lambda: PopulationBasedTraining(
        time_attr="epoch", perturbation_interval=2, hyperparam_mutations={"rate": [0.1, 0.01]}, quantile_fraction=0.25
    ),
}

PAUSING = ("HyperBand", "PBT")
"""Schedulers that pause trials, and let them go on later."""

Way = Literal["epoch", "now", "dataloader"]
"""How a trial gets its minibatches: of the feed, from the next epoch on (as by default) or at once; or by itself."""


@dataclass(frozen=True)
class SearchData:
    """What a search trains on, and what it evaluates with after each epoch; picklable.

    Attributes:
        train, held_out: images.
        augmented, plain: what is done to them.
        side: height and width of what is made.
        batch: samples in a minibatch.
        workers: worker processes of each DataLoader, where trials have their own.
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
    """How a search goes.

    Attributes:
        scheduler: one of `SCHEDULERS`, which decides which trials go on.
        trials: how many there are.
        slots: how many of them run at once.
        step_s: how long a trial works on a minibatch.
    """

    scheduler: str
    trials: int
    slots: int
    step_s: float


@dataclass(frozen=True)
class Search:
    """What came of a search; medians over rounds.

    Attributes:
        scheduler: who decided which trials go on.
        way: how they got their minibatches.
        epochs: epochs of training that trials finished.
        seconds: how long it took.
        delivered: samples that trials got, to train and to evaluate.
        prepared: samples that were prepared for that.
        train_prepared: training samples that were prepared for each that was delivered; 1 with a DataLoader.
        train_least: the least that is possible, had those that ran at the same time shared everything.
        validation_prepared: as ``train_prepared``. A feed that keeps all of it prepares each sample once.
        waited_s: seconds for which trials waited for minibatches of either kind, summed over trials.
        waited: the same as a share of the time that they ran.
        first_batch_s: from opening a loader to the first minibatch of training, mean over trials.
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
    """A time on the machine's monotonic clock, in seconds."""

    began: float
    ended: float


@dataclass(frozen=True)
class Run:
    """What a trial did from opening its loader until it ended or paused.

    Attributes:
        span: all of it.
        epochs: those of training in it.
        waited_s: seconds in which it waited for minibatches.
        first_batch_s: until its first minibatch.
    """

    span: Span
    epochs: tuple[Span, ...]
    waited_s: float
    first_batch_s: float


def least_prepared(runs: Sequence[Run]) -> float:
    """Return how many epochs had to be prepared if all trials that ran at the same time had shared everything.

    An epoch is taken to be delivered evenly over its time, and to be shared by as many trials as run at that moment.
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
    """Writes down when each trial runs and trains, as it reports it itself."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, float], Run] = {}

    @property
    def runs(self) -> list[Run]:
        """Return all that have ended an epoch; a trial that was resumed has several."""
        return list(self._runs.values())

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        # It reports when it has evaluated; unless it is let go on, nothing comes after that.
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
    """Run each search ``rounds`` times, with so many trials, ``slots`` of them at once, on images of ``side``."""
    rows = [(name, way) for name in schedulers for way in ways]
    data = made_up(side)
    runtime.start_ray(slots + 2)
    try:
        found = [
            search(Plan(scheduler, trials, slots, step_s), way, data) for _ in range(rounds) for scheduler, way in rows
        ]
    finally:
        ray.shutdown()
    return [median_of([each for each in found if (each.scheduler, each.way) == row]) for row in rows]


def median_of(rounds: Sequence[Search]) -> Search:
    """Return the median of each figure."""
    names = [field.name for field in fields(Search) if field.name not in ("scheduler", "way")]
    figures: dict[str, Any] = {name: median(getattr(each, name) for each in rounds) for name in names}
    return replace(
        rounds[0], **{**figures, **{name: round(figures[name]) for name in ("epochs", "delivered", "prepared")}}
    )


def search(plan: Plan, way: Way, data: SearchData, **options: Any) -> Search:
    """Run a search; ``options`` are of the feeds."""
    scheduler = plan.scheduler
    with contextlib.ExitStack() as stack:
        feeds = [] if way == "dataloader" else [stack.enter_context(feed) for feed in _served(data, options)]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        quality = list(range(plan.trials))
        # Were each trial better than those before it, a scheduler that asks how it compares with these would stop none.
        random.Random(0).shuffle(quality)
        # HyperBand stops all trials. If one ends by itself, Tune (2.60) may leave others paused for ever: once a
        # bracket was halved, no trial's end has Tune look at it again.
        epochs = sys.maxsize if scheduler == "HyperBand" else EPOCHS
        space = {
            "way": way,
            "data": data,
            "step_s": plan.step_s,
            "epochs": epochs,
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
                # To start a process takes longer here than a short trial. But Tune (2.60) may wait for ever at the end
                # of a search if trials that were paused shared processes.
                reuse_actors=scheduler not in PAUSING,
            ),
            run_config=tune.RunConfig(storage_path=folder, callbacks=callbacks, verbose=0),
        )
        with contextlib.redirect_stdout(sys.stderr):  # what Tune says of itself is not what was asked for
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
    """Make images of noise, of ``side`` pixels."""
    train, held_out = (synthetic(samples, height=side, width=side) for samples in (SAMPLES, HELD_OUT))
    augmented = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
    return SearchData(train, held_out, augmented, T.Pipeline([T.DecodeImage()]), side, BATCH)


def _served(data: SearchData, options: dict[str, Any]) -> Iterator[mbaas.Feed]:
    """Serve what to train on, and then what to validate with."""
    staging_bytes = STAGED * data.batch * (data.side * data.side * 3 + ID_BYTES)
    each = {"batch_size": data.batch, **options}
    workers = options.get("prep_workers", 1)
    yield mbaas.serve(
        TRAIN, data.train, data.augmented, **{"prep_workers": workers, **each}, staging_bytes=staging_bytes
    )
    yield mbaas.serve(VALIDATE, data.held_out, data.plain, **{**each, "prep_workers": 1}, shuffle=False)


def _train(config: dict[str, Any]) -> None:
    """Train, evaluate, save and report; go on where a checkpoint was taken."""
    data, step_s, state = config["data"], config["step_s"], _restored()
    opened = time.monotonic()
    loader: Any
    evaluation: contextlib.AbstractContextManager[Any]
    if config["way"] == "dataloader":
        from benchmarks.own_loader import OwnLoader  # imports torch, which trials that share a feed do without

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
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state.json").write_text(json.dumps(loader.state_dict()))
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
            tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))


def _go_through(minibatches: Iterable[Any], step_s: float) -> tuple[float, float]:
    """Take each step of an epoch; return when the first minibatch came, and the seconds of waiting."""
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


def _restored() -> dict[str, Any] | None:
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        state: dict[str, Any] = json.loads((Path(folder) / "state.json").read_text())
        return state


def table(results: list[Search]) -> Table:
    """Show what was measured."""
    headings = ("scheduler", "start", "epochs", "s", "s/epoch", "prepared", "least", "waited s", "first s")
    shown = figure_table("Prepared per delivered, to train; waits", headings, words=("scheduler", "start"))
    for each in results:
        shown.add_row(
            each.scheduler,
            each.way,
            str(each.epochs),
            f"{each.seconds:.0f}",
            f"{each.seconds / each.epochs:.2f}",
            f"{each.train_prepared:.2f}",
            f"{each.train_least:.2f}",
            f"{each.waited_s:.0f}",
            f"{each.first_batch_s:.2f}",
        )
    return shown
