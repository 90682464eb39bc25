"""A node with tunable thread counts: its true rates, measured with noise, in a closed loop with a tuner."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mbaas.model.curves import ThroughputCurve
from mbaas.model.threads import NodeLoad, ThreadTuner, Tuned
from mbaas.settings import Threads

BATCH = 100
PERIOD_S = 3.0
WINDOW_S = 4.0


@dataclass
class Node:
    """The true rates of a node, which a tuner must find.

    Attributes:
        storage: bytes/s by number of threads.
        prep: samples/s by number of threads.
        step_s: of the trials, for a minibatch of `BATCH` samples.
        sample_bytes: read from storage for each sample.
        filled: share of its threads that fetch keeps busy.
    """

    storage: ThroughputCurve
    step_s: float
    prep: ThroughputCurve = field(default_factory=lambda: ThroughputCurve.linear(2000))
    workers: int = 1
    threads: int = 1
    fetch: int = 8
    most_fetch: int = 32
    sample_bytes: float = 1e5
    noise: float = 0.03
    filled: float = 1.0

    def __post_init__(self) -> None:
        self.preparing = self.workers * self.threads
        self.changes: list[tuple[float, Tuned]] = []
        self._random = np.random.default_rng(0)

    @property
    def most(self) -> int:
        return self.workers * self.threads + self.most_fetch

    def fetch_s(self) -> float:
        nbytes = BATCH * self.sample_bytes
        return nbytes / self.storage.rate(self.fetch) if nbytes else 0.0

    def minibatch_s(self) -> float:
        """Time of a minibatch: fetch, prep and training overlap."""
        return max(self.step_s, self.fetch_s(), BATCH / self.prep.rate(self.preparing))

    def look(self) -> NodeLoad:
        """Load over the last `WINDOW_S`."""
        minibatches = WINDOW_S / self.minibatch_s()
        busy_s = min(WINDOW_S, minibatches * self.fetch_s())
        noise = np.exp(self.noise * self._random.standard_normal(2))
        return NodeLoad(
            workers=self.workers,
            prep_threads=self.preparing,
            fetch_threads=self.fetch,
            most_prep=self.workers * self.threads,
            most=self.most,
            demand_per_s=BATCH / self.step_s,
            batch_samples=BATCH,
            prep_per_s=self.prep.rate(self.preparing) * noise[0],
            sample_bytes=self.sample_bytes,
            storage_bytes=minibatches * BATCH * self.sample_bytes * noise[1],
            storage_s=busy_s,
            read_s=busy_s * max(1, self.fetch * self.filled),
        )

    def run(self, tuner: ThreadTuner, *, seconds: float, begin_s: float = 0.0) -> list[Tuned]:
        """Follow the tuner's decisions; each decision starts a new measurement."""
        changed_s, first = begin_s, len(self.changes)
        for tick in range(int(seconds / PERIOD_S)):
            now = begin_s + tick * PERIOD_S
            if now - changed_s < WINDOW_S:
                continue
            tuned = tuner.observe(self.look(), now)
            if tuned is not None:
                self.preparing, self.fetch, changed_s = tuned.prep_threads, tuned.fetch_threads, now
                self.changes.append((now, tuned))
                self.check()
        return [tuned for _, tuned in self.changes[first:]]

    def check(self) -> None:
        """Check the limits that hold after every decision."""
        assert self.workers <= self.preparing <= self.workers * self.threads
        assert 1 <= self.fetch <= self.most - self.preparing


def tuned(node: Node, *, seconds: float = 120.0) -> list[int]:
    """Fetch threads after each change of a node with a fresh tuner."""
    changes = node.run(ThreadTuner(Threads()), seconds=seconds)
    return [change.fetch_threads for change in changes]


def fast() -> ThroughputCurve:
    """Files in the page cache: two threads reach 2 GB/s, more contend."""
    return ThroughputCurve(((2, 2e9), (8, 1.8e9)), slope=-5e6)


def late(request_s: float = 0.05, nbytes: float = 1e5) -> ThroughputCurve:
    """Storage with a fixed latency under any load: each thread gets one sample per ``request_s``."""
    return ThroughputCurve.linear(nbytes / request_s)


def capped(bytes_per_s: float, threads: int) -> ThroughputCurve:
    """A link that ``threads`` threads fill."""
    return ThroughputCurve(((threads, bytes_per_s),), slope=0.0)
