"""Cost of joining late: trials wait for the next epoch, or begin in mid-epoch.

Trials start one after another, run for a few epochs and leave, as in a search of short trials. A step is a pause, so
all trials fit a small machine. Rounds alternate between `start="epoch"` and `start="now"`.
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
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.ray_cluster import connection
from mbaas.tools.bench.render import figure_table
from mbaas.wire.consumers import JoinStart

SAMPLES, SIDE, BATCH = 4096, 64, 32
START_S = 60.0
"""Timeout in seconds for the start of the trials' processes."""

STAGED = 16
"""Staging capacity in minibatches: an eighth of an epoch, as with a large dataset."""


@dataclass(frozen=True)
class Round:
    """Results of one search.

    Attributes:
        start: "epoch" or "now".
        first_batch_s: seconds from the join to the first minibatch, for each trial.
        seconds: seconds from the join to the end of the last epoch, for each trial.
        prepared, delivered: numbers of samples.
    """

    start: JoinStart
    first_batch_s: tuple[float, ...]
    seconds: tuple[float, ...]
    prepared: int
    delivered: int


@dataclass(frozen=True)
class Lateness:
    """Results for one way to start: medians over rounds.

    Attributes:
        start: "epoch" or "now".
        first_batch_s: from the join to the first minibatch, median over all trials but the first.
        longest_first_batch_s: the longest of these times.
        trial_s: from the join to the end of the last epoch, mean over trials.
        ideal_s: the same if every minibatch were always ready.
        prepared_per_delivered: samples prepared for each one delivered.
    """

    start: JoinStart
    first_batch_s: float
    longest_first_batch_s: float
    trial_s: float
    ideal_s: float
    prepared_per_delivered: float


def measure(*, trials: int, epochs: int, step_s: float, rounds: int) -> list[Lateness]:
    """Run the search ``rounds`` times in each way; a trial joins 0.4 epochs after the one before."""
    connection.start_ray(2)
    try:
        # Alternating, so that a slow phase of the machine affects both ways.
        found = [_search(start, trials, epochs, step_s) for _ in range(rounds) for start in get_args(JoinStart)]
    finally:
        ray.shutdown()
    ideal_s = epochs * SAMPLES / BATCH * step_s
    return [_summary(start, [each for each in found if each.start == start], ideal_s) for start in get_args(JoinStart)]


def _summary(start: JoinStart, rounds: list[Round], ideal_s: float) -> Lateness:
    late = [each.first_batch_s[1:] for each in rounds]  # the first trial finds an empty feed in both ways
    return Lateness(
        start,
        first_batch_s=median(median(each) for each in late),
        longest_first_batch_s=median(max(each) for each in late),
        trial_s=median(sum(each.seconds) / len(each.seconds) for each in rounds),
        ideal_s=ideal_s,
        prepared_per_delivered=median(each.prepared / each.delivered for each in rounds),
    )


@ray.remote(num_cpus=0)  # steps are pauses, which need no core
class _Trial:
    """A trial in its own process."""

    def ready(self) -> None:
        """Return once the process is running."""

    def run(
        self, feed: str, name: str, start: JoinStart, pause_s: float, epochs: int, step_s: float
    ) -> tuple[float, float]:
        """Join after a pause, and train; return the seconds to the first minibatch and to the end."""
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
    # Not a divisor of an epoch, so that trials join at different positions.
    apart_s = 0.4 * SAMPLES / BATCH * step_s
    with mbaas.serve("late", data, pipeline, batch_size=BATCH, prep_workers=1, staging_bytes=staging_bytes) as feed:
        processes = [_Trial.remote() for _ in range(trials)]  # type: ignore[attr-defined]
        # Otherwise the start of a process would count as waiting for its first minibatch.
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
    """Return a table with a row for each way to start."""
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
