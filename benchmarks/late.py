"""Measures what it costs trials to come late: they wait for the next epoch, or begin in the middle of one.

Trials start one after the other, some while an epoch is under way, go through a few epochs and leave, as in a search of
short trials. A step is a pause, so all of them fit a small machine. Rounds with `start="epoch"` and `start="now"` take
turns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import get_args

import ray
from rich.table import Table

import mbaas
from benchmarks import ID_BYTES
from mbaas import runtime
from mbaas import transforms as T
from mbaas.bench.render import figure_table
from mbaas.dataset import synthetic
from mbaas.messages import JoinStart

SAMPLES, SIDE, BATCH = 4096, 64, 32
START_S = 60.0
"""How long the trials' processes may take to start."""

STAGED = 16
"""Minibatches that may be staged: an eighth of an epoch, as with a large dataset."""


@dataclass(frozen=True)
class Round:
    """What one search showed.

    Attributes:
        start: where its trials began: "epoch" or "now".
        first_batch_s: seconds from a trial's join to its first minibatch, for each trial.
        seconds: of each trial, from its join to the end of its last epoch.
        prepared, delivered: samples.
    """

    start: JoinStart
    first_batch_s: tuple[float, ...]
    seconds: tuple[float, ...]
    prepared: int
    delivered: int


@dataclass(frozen=True)
class Lateness:
    """What trials that come late cost in one way to begin: medians over rounds.

    Attributes:
        start: "epoch" or "now".
        first_batch_s: from a trial's join to its first minibatch, median over the trials that did not come first.
        longest_first_batch_s: the longest of these.
        trial_s: from a trial's join to the end of its last epoch, mean over trials.
        ideal_s: the same if every minibatch were there at once.
        prepared_per_delivered: samples that were prepared for each that was delivered.
    """

    start: JoinStart
    first_batch_s: float
    longest_first_batch_s: float
    trial_s: float
    ideal_s: float
    prepared_per_delivered: float


def measure(*, trials: int, epochs: int, step_s: float, rounds: int) -> list[Lateness]:
    """Run the search ``rounds`` times in each way; a trial comes whenever the one before is 0.4 epochs further."""
    runtime.start_ray(2)
    try:
        # In turns: a machine that is slower for a while is so for both.
        found = [_search(start, trials, epochs, step_s) for _ in range(rounds) for start in get_args(JoinStart)]
    finally:
        ray.shutdown()
    ideal_s = epochs * SAMPLES / BATCH * step_s
    return [_summary(start, [each for each in found if each.start == start], ideal_s) for start in get_args(JoinStart)]


def _summary(start: JoinStart, rounds: list[Round], ideal_s: float) -> Lateness:
    late = [each.first_batch_s[1:] for each in rounds]  # the first trial finds an empty feed, in either way
    return Lateness(
        start,
        first_batch_s=median(median(each) for each in late),
        longest_first_batch_s=median(max(each) for each in late),
        trial_s=median(sum(each.seconds) / len(each.seconds) for each in rounds),
        ideal_s=ideal_s,
        prepared_per_delivered=median(each.prepared / each.delivered for each in rounds),
    )


@ray.remote(num_cpus=0)  # its steps are pauses: it needs no core for itself
class _Trial:
    """A trial in a process of its own."""

    def ready(self) -> None:
        """Answer as soon as the process is there."""

    def run(
        self, feed: str, name: str, start: JoinStart, pause_s: float, epochs: int, step_s: float
    ) -> tuple[float, float]:
        """Join after a pause, and train; return the seconds to the first minibatch, and to the end."""
        time.sleep(pause_s)
        began, first_s = time.perf_counter(), 0.0
        with mbaas.join(feed, name, format="numpy", start=start) as loader:
            for _ in range(epochs):
                for batch in loader:
                    del batch
                    first_s = first_s or time.perf_counter() - began
                    time.sleep(step_s)
        return first_s, time.perf_counter() - began


def _search(start: JoinStart, trials: int, epochs: int, step_s: float) -> Round:
    data = synthetic(SAMPLES, height=SIDE, width=SIDE)
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
    staging_bytes = STAGED * BATCH * (SIDE * SIDE * 3 + ID_BYTES)
    # No divisor of an epoch, so that trials come at different places of it.
    apart_s = 0.4 * SAMPLES / BATCH * step_s
    with mbaas.serve("late", data, pipeline, batch_size=BATCH, prep_workers=1, staging_bytes=staging_bytes) as feed:
        processes = [_Trial.remote() for _ in range(trials)]  # type: ignore[attr-defined]
        # Else the start of a process would count as waiting for its first minibatch.
        ray.get([process.ready.remote() for process in processes], timeout=START_S)
        results = ray.get(
            [
                process.run.remote(feed.name, f"trial-{number}", start, number * apart_s, epochs, step_s)
                for number, process in enumerate(processes)
            ]
        )
        return Round(
            start,
            first_batch_s=tuple(first_s for first_s, _ in results),
            seconds=tuple(seconds for _, seconds in results),
            prepared=feed.status().prepared_samples,
            delivered=trials * epochs * SAMPLES,
        )


def table(results: list[Lateness]) -> Table:
    """Show a line for each way to begin."""
    headings = ("start", "first minibatch s", "longest s", "trial s", "of ideal", "prepared/delivered")
    shown = figure_table("Trials that come late", headings, words=("start",))
    for result in results:
        shown.add_row(
            result.start,
            f"{result.first_batch_s:.2f}",
            f"{result.longest_first_batch_s:.2f}",
            f"{result.trial_s:.1f}",
            f"{result.trial_s / result.ideal_s:.2f}",
            f"{result.prepared_per_delivered:.2f}",
        )
    return shown
