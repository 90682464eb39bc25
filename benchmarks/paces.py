"""Cost of sharing for trials of different paces, with a training feed and a validation feed.

Each slot runs one trial after another, as a search does; a trial alternates between a training epoch and an evaluation.
A step is a pause, so all trials fit a small machine. Times are compared with data that is always ready.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import ray
from rich.table import Table

import mbaas
from benchmarks import ID_BYTES
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.ray_cluster import connection
from mbaas.tools.bench.render import figure_table

SAMPLES, HELD_OUT, SIDE, BATCH = 1728, 288, 64, 32
START_S = 60.0
"""Timeout in seconds for the start of the trials' processes."""

STAGED = 16
"""Staging capacity of each feed in minibatches: less than an epoch, as with a large dataset."""

EVALUATION_STEP = 0.1
"""Time of an evaluation step as a fraction of a training step."""


@dataclass(frozen=True)
class _Times:
    """Seconds of each epoch and each evaluation of a trial."""

    epochs: tuple[float, ...]
    evaluations: tuple[float, ...]


@dataclass(frozen=True)
class Pace:
    """Results for trials of one pace: medians over rounds.

    Attributes:
        step_s: seconds of a training step.
        epoch: time of an epoch relative to data that is always ready, mean over epochs.
        longest_epoch: the longest epoch, relative in the same way.
        evaluation_s: mean time of an evaluation.
        ideal_evaluation_s: the same with data that is always ready.
    """

    step_s: float
    epoch: float
    longest_epoch: float
    evaluation_s: float
    ideal_evaluation_s: float


@dataclass(frozen=True)
class Paces:
    """Results of a search: medians over rounds.

    Attributes:
        paces: one for each slot.
        seconds: of the whole search, without starting the processes.
        ideal_s: the same with data that is always ready.
        prepared_per_delivered: samples prepared for each one delivered, in both feeds.
    """

    paces: tuple[Pace, ...]
    seconds: float
    ideal_s: float
    prepared_per_delivered: float


@dataclass(frozen=True)
class _Round:
    times: tuple[_Times, ...]
    seconds: float
    prepared_per_delivered: float


def measure(*, steps_s: tuple[float, ...], trials: int, epochs: int, rounds: int) -> Paces:
    """Run the search ``rounds`` times: one slot for each of ``steps_s``, each with ``trials`` consecutive trials."""
    connection.start_ray(2)
    try:
        found = [_search(steps_s, trials, epochs) for _ in range(rounds)]
    finally:
        ray.shutdown()
    training, testing = SAMPLES / BATCH, HELD_OUT / BATCH * EVALUATION_STEP
    paces = []
    for slot, step_s in enumerate(steps_s):
        own = [each.times[slot] for each in found]
        paces.append(
            Pace(
                step_s,
                epoch=median(sum(each.epochs) / len(each.epochs) for each in own) / (training * step_s),
                longest_epoch=median(max(each.epochs) for each in own) / (training * step_s),
                evaluation_s=median(sum(each.evaluations) / len(each.evaluations) for each in own),
                ideal_evaluation_s=testing * step_s,
            )
        )
    return Paces(
        tuple(paces),
        seconds=median(each.seconds for each in found),
        ideal_s=trials * epochs * (training + testing) * max(steps_s),
        prepared_per_delivered=median(each.prepared_per_delivered for each in found),
    )


@ray.remote(num_cpus=0)  # steps are pauses, which need no core
class _Slot:
    """A process that runs trials one after another."""

    def ready(self) -> None:
        """Return once the process is running."""

    def run(self, slot: int, trials: int, epochs: int, step_s: float) -> _Times:
        trained: list[float] = []
        evaluated: list[float] = []
        for number in range(trials):
            name = f"trial-{slot}-{number}"
            with (
                mbaas.join("paces", name, format="numpy") as training,
                mbaas.join("paces-held-out", name, format="numpy") as held_out,
            ):
                for _ in range(epochs):
                    trained.append(_epoch(training, step_s))
                    evaluated.append(_epoch(held_out, step_s * EVALUATION_STEP))
        return _Times(tuple(trained), tuple(evaluated))


def _epoch(loader: mbaas.Loader, step_s: float) -> float:
    began = time.perf_counter()
    for batch in loader:
        del batch
        time.sleep(step_s)
    return time.perf_counter() - began


def _search(steps_s: tuple[float, ...], trials: int, epochs: int) -> _Round:
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
    data, held_out = (synthetic(samples, height=SIDE, width=SIDE) for samples in (SAMPLES, HELD_OUT))
    staging_bytes = STAGED * BATCH * (SIDE * SIDE * 3 + ID_BYTES)
    with (
        mbaas.serve("paces", data, pipeline, batch_size=BATCH, prep_workers=1, staging_bytes=staging_bytes) as feed,
        mbaas.serve(
            "paces-held-out",
            held_out,
            T.Pipeline([T.DecodeImage()]),
            batch_size=BATCH,
            prep_workers=1,
            shuffle=False,
            staging_bytes=staging_bytes,
        ) as other,
    ):
        slots = [_Slot.remote() for _ in steps_s]  # type: ignore[attr-defined]
        ray.get(
            [slot.ready.remote() for slot in slots], timeout=START_S
        )  # otherwise their start would count as waiting
        began = time.perf_counter()
        times = ray.get(
            [
                slot.run.remote(n, trials, epochs, step_s)
                for n, (slot, step_s) in enumerate(zip(slots, steps_s, strict=True))
            ]
        )
        seconds = time.perf_counter() - began
        prepared = feed.status().prepared_samples + other.status().prepared_samples
        delivered = len(steps_s) * trials * epochs * (SAMPLES + HELD_OUT)
        return _Round(tuple(times), seconds, prepared / delivered)


def table(result: Paces) -> Table:
    """Return a table with a row for each pace, and a caption for the search."""
    headings = ("step ms", "epoch, of ideal", "longest", "evaluation s", "of ideal")
    shown = figure_table("Trials of different paces", headings, words=())
    for pace in result.paces:
        shown.add_row(
            f"{1000 * pace.step_s:.0f}",
            f"{pace.epoch:.2f}",
            f"{pace.longest_epoch:.2f}",
            f"{pace.evaluation_s:.2f}",
            f"{pace.evaluation_s / pace.ideal_evaluation_s:.1f}",
        )
    shown.caption = (
        f"the search: {result.seconds:.1f} s, {result.seconds / result.ideal_s:.2f} of ideal; "
        f"{result.prepared_per_delivered:.2f} samples prepared for each that was delivered"
    )
    return shown
