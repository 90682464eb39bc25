"""Measures how to divide a node's threads between reading and preparing, for a data-parallel trial with two ranks.

Photographs come from memory, and each read takes a fixed time longer. So more threads read more, as with an object
store, unless a link limits all reads together. Nothing is cached: each epoch reads every sample again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from rich.table import Table

import mbaas
from benchmarks.local_cluster import answers
from mbaas.base.units import count, percent, seconds
from mbaas.dataset.base import SampleReader, WrappedDataset
from mbaas.ray_cluster import connection
from mbaas.tools.analysis.measuring.storage import Throttle, WatchedReader
from mbaas.tools.bench.render import figure_table
from mbaas.tools.bench.tasks.images import Images, make_photos

FEED, BATCH, RANKS = "threads", 32, 2

FEEDS = {
    "storage slow": (0.04, None),
    "narrow link": (0.005, 20e6),
    "both": (0.015, None),
    "prep heavy": (0.0, None),
    "quick storage": (0.001, None),
}
"""Feeds -> seconds that each read takes, and the bytes/s of all reads together."""

DIVISIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (2, {}),
    "8 threads read": (2, {"fetch": 8}),
    "one worker with two threads": (1, {"prep": 2}),
    "the same and 8 threads read": (1, {"prep": 2, "fetch": 8}),
}
"""Divisions -> prep workers, and their `mbaas.Threads`."""

STAGING_BYTES = 64 << 20

START_S = 6.0
"""Time before the first half: the ranks join, and the first blocks are prepared."""

LIMIT_S = 120.0


@dataclass(frozen=True)
class ThreadFigures:
    """Results of one division.

    Attributes:
        feed, division: keys of `FEEDS` and `DIVISIONS`.
        early_per_s, late_per_s: samples/s of all ranks together, in the first and in the second half.
        stall: fraction of the ranks' time spent waiting for data.
        uneven: fraction of steps in which the ranks' waits differed by more than 10 % of the step.
        fetch_threads: threads that read storage at the end.
        cpu_s: CPU-seconds of the feed's processes per 1,000 delivered samples.
    """

    feed: str
    division: str
    early_per_s: float
    late_per_s: float
    stall: float
    uneven: float
    fetch_threads: int
    cpu_s: float


@dataclass(frozen=True, eq=False, repr=False)
class LateDataset(WrappedDataset):
    """A dataset whose reads take ``late_s`` longer, over a link that carries ``bytes_per_s`` (None: no limit)."""

    late_s: float
    bytes_per_s: float | None

    def reader(self) -> SampleReader:
        link = None if self.bytes_per_s is None else Throttle(self.bytes_per_s)

        def wait(_: int, nbytes: int) -> None:
            time.sleep(self.late_s)
            if link is not None:
                link.carry(nbytes)

        return WatchedReader(self.inner.reader(), before=wait)


class _Rank:
    def __init__(self, rank: int) -> None:
        self._loader = mbaas.join(FEED, consumer="trial", rank=rank, world_size=RANKS, format="numpy")

    def train(self, ends_s: Sequence[float]) -> list[int]:
        """Train until the last of these times of the monotonic clock; return the samples received before each time."""
        received, seen = 0, [0] * len(ends_s)
        while True:
            for batch in self._loader:
                now = time.monotonic()
                if now >= ends_s[-1]:
                    self._loader.flush()
                    return seen
                received += len(batch["sample_id"])
                del batch
                seen = [received if now < end_s else before for end_s, before in zip(ends_s, seen, strict=True)]


_RankActor: Any = ray.remote(num_cpus=0)(_Rank)


def measure(
    *,
    feeds: Sequence[str],
    divisions: Sequence[str],
    images: int,
    half_s: float,
    rounds: int,
    cache_dir: Path,
    tell: Callable[[str], None],
) -> list[ThreadFigures]:
    """Measure each division with each feed, ``rounds`` times in turn, for two halves of ``half_s`` seconds."""
    data = mbaas.read_images(make_photos(cache_dir, images, report=tell))
    results = []
    with connection.separate_ray():
        for feed, division in [(feed, division) for _ in range(rounds) for feed in feeds for division in divisions]:
            results.append(_run(data, feed, division, half_s))
            tell(f"{feed}, {division}: {count(results[-1].late_per_s)} samples/s")
    return results


def _run(data: mbaas.Dataset, kind: str, division: str, half_s: float) -> ThreadFigures:
    workers, options = DIVISIONS[division]
    late_s, bytes_per_s = FEEDS[kind]
    late = LateDataset.around(data, late_s=late_s, bytes_per_s=bytes_per_s)
    fixed: Any = {"prep_workers": workers, "threads": mbaas.Threads(**options), "cache_bytes": 0, "engine": "cpu"}
    with mbaas.serve(FEED, late, Images().pipeline(), batch_size=BATCH, staging_bytes=STAGING_BYTES, **fixed) as feed:
        ranks = [_RankActor.remote(rank) for rank in range(RANKS)]
        try:
            now = time.monotonic() + START_S
            calls = [rank.train.remote([now, now + half_s, now + 2 * half_s]) for rank in ranks]
            seen = np.sum(answers(calls, LIMIT_S + 2 * half_s, "the ranks of a trial"), axis=0)
            status = feed.status()
        finally:
            for rank in ranks:
                ray.kill(rank)
    early, later = (np.diff(seen) / half_s).tolist()
    (steps,), (node,) = status.rank_steps, status.nodes
    reports = [each.report for each in status.consumers]
    return ThreadFigures(
        feed=kind,
        division=division,
        early_per_s=early,
        late_per_s=later,
        stall=sum(each.stall_share for each in reports) / len(reports),
        uneven=steps.uneven / max(1, steps.steps),
        fetch_threads=node.fetch_threads,
        cpu_s=1000 * status.costs.cpu_s / status.delivered_samples,
    )


def table(found: Sequence[ThreadFigures]) -> Table:
    """Return a table of the medians of all rounds: samples/s in both halves, and CPU-seconds per 1,000 samples."""
    title = f"{RANKS} ranks, minibatches of {BATCH}, no cache"
    headings = ("feed", "read", "division", "early/s", "late/s", "stall", "uneven", "threads", "CPU-s")
    shown = figure_table(title, headings, words=("feed", "division"))
    for feed, division in dict.fromkeys((each.feed, each.division) for each in found):
        runs = [each for each in found if (each.feed, each.division) == (feed, division)]

        def of(name: str, runs: Sequence[ThreadFigures] = runs) -> float:
            return float(np.median([getattr(each, name) for each in runs]))

        shown.add_row(
            feed,
            seconds(FEEDS[feed][0]),
            division,
            count(of("early_per_s")),
            count(of("late_per_s")),
            percent(of("stall")),
            percent(of("uneven")),
            count(of("fetch_threads")),
            f"{of('cpu_s'):.2f}",
        )
    return shown
