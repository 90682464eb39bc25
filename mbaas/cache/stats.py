"""Counters, meters and statistics of a cache node."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from msgspec import Struct

from mbaas.model.tiers import FetchSpeeds
from mbaas.status import DiskStatus
from mbaas.wire.samples import Amount, FetchCounts, Sum

RECENT_EPOCHS = 64
"""Newest epochs with separate counts; older ones are only in the totals."""


class TransferSums(Sum, Struct, frozen=True):
    """Running totals of transfers from one tier."""

    nbytes: int = 0  # bytes received
    thread_s: float = 0.0  # seconds of waiting, summed over threads, including unfinished reads
    busy_s: float = 0.0  # seconds with at least one waiting thread


ENOUGH_S = 0.05
"""Thread-seconds of reading before a rate counts; shorter measurements are mostly noise."""

FRESH = 0.5
"""Weight of a new rate against older ones: a change shows after a few updates, an outlier has little effect."""


class Speedometer:
    """The speed of one tier: bytes/s of one thread, with all others active; None until enough was read."""

    def __init__(self) -> None:
        self.speed: float | None = None
        self._counted: TransferSums | None = None  # totals at the last update

    def probed(self, bytes_per_s: float) -> None:
        """Record a probed speed. Regular reads take precedence."""
        if self.speed is None:
            self.speed = bytes_per_s

    def update(self, sums: TransferSums) -> None:
        """Update the speed from running totals of regular reads."""
        new = sums - (self._counted or TransferSums())
        if new.thread_s < ENOUGH_S or not new.nbytes:
            return
        rate = new.nbytes / new.thread_s
        if self._counted is not None and self.speed is not None:
            rate = self.speed + FRESH * (rate - self.speed)
        self._counted, self.speed = sums, rate


class TierMeter:
    """The meter of one tier; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = 0
        self._thread_s = self._busy_s = 0.0  # up to _at
        self._using = 0  # threads, since _at
        self._at = 0.0

    def moved(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes

    @contextmanager
    def using(self) -> Iterator[None]:
        """Count the time inside the context as one thread waiting for this tier."""
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    def sums(self) -> TransferSums:
        self._change(0)  # includes reads in progress, so a hanging read shows in the rate
        with self._lock:
            return TransferSums(self._nbytes, self._thread_s, self._busy_s)

    def _change(self, users: int) -> None:
        # Both times are updated at every change, so no list of reads is needed.
        with self._lock:
            now = perf_counter()
            self._thread_s += self._using * (now - self._at)
            self._busy_s += (now - self._at) if self._using else 0.0
            self._using += users
            self._at = now


class EpochCounts(Sum, Struct, frozen=True):
    """Cache and storage counts of one epoch; they can be added."""

    # samples of delivered blocks, by source; a block that is prepared twice counts twice
    fetched: FetchCounts = FetchCounts()
    # samples requested from storage, and bytes received, for the epoch that needs the sample; includes read-ahead, and
    # dropped or repeated blocks
    reads: Amount = Amount()
    failures: int = 0  # failed reads


class Flow(Struct, frozen=True):
    """Statistics that the coordinator polls regularly; small, so that many nodes can be polled."""

    incarnation: int  # changes when the node restarts with an empty cache, and its totals start at 0
    speeds: FetchSpeeds  # measured speed of one thread for each tier
    # logged, log: number of lines logged so far, and the last lines
    logged: int
    log: tuple[str, ...]
    noted: int = 0  # lines that a coordinator has noted; one that starts later continues there
    cpu_s: float = 0.0  # CPU seconds used by the process, all threads
    # used_bytes, budget_bytes: bytes cached or being read into the cache, and the capacity
    used_bytes: int = 0
    budget_bytes: int = 0


class CacheStats(Flow, frozen=True, kw_only=True):
    """All statistics of a cache node."""

    threads: int  # threads that read storage
    storage: TransferSums  # running totals of transfers from storage
    # epochs, total: counts of the newest RECENT_EPOCHS active epochs, and of all epochs
    epochs: dict[int, EpochCounts]
    total: EpochCounts
    # cached_bytes, cached_samples, cached_slabs: the cached samples, without those being read, and their slabs
    cached_bytes: int
    cached_samples: int
    cached_slabs: int
    decoded: Amount  # the subset that is cached decoded
    decoded_on_disk: Amount  # samples cached decoded on disk, and the bytes of their files
    readahead_bytes: int  # bytes read ahead of requests; 0 during a stall means that storage is too slow
    readahead_blocks: int  # blocks read ahead, including blocks that were already cached
    fetching_bytes: int  # bytes held for running fetches, outside the cache and read-ahead
    peak_transient_bytes: int  # peak of read-ahead and running fetches together
    disks: tuple[DiskStatus, ...]
    readahead_depth_bytes: int  # part of the read-ahead budget that is useful according to the bandwidth model


@dataclass
class Meter:
    """Running counts of a cache node; thread-safe.

    `epochs` has the newest RECENT_EPOCHS; `total` also includes older ones, and transfers outside any epoch.
    """

    epochs: dict[int, EpochCounts] = field(default_factory=dict)
    total: EpochCounts = field(default_factory=EpochCounts)
    storage: TierMeter = field(default_factory=TierMeter)
    disk: TierMeter = field(default_factory=TierMeter)
    remote: TierMeter = field(default_factory=TierMeter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, epoch: int | None, more: EpochCounts) -> None:
        """Add to the counts of one epoch; None for moves between nodes, which belong to no epoch."""
        # New objects each time, so that other threads see consistent counts.
        with self._lock:
            self.total += more
            if epoch is None:
                return
            self.epochs[epoch] = self.epochs.get(epoch, EpochCounts()) + more
            if len(self.epochs) > RECENT_EPOCHS:  # a feed may run for months
                del self.epochs[min(self.epochs)]
