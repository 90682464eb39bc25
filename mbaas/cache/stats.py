"""What the cache counts and how its state looks from outside."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from msgspec import Struct

from mbaas.cache.speeds import TierMeter, TransferSums
from mbaas.messages import Amount, FetchCounts, FetchSpeeds

KEPT_EPOCHS = 64
"""Newest epochs whose counts are kept one by one; older ones are in the totals only."""


class EpochCounts(Struct, frozen=True):
    """The counts of what one epoch asked of the cache and of storage; epochs add up.

    Attributes:
        fetched: samples of delivered blocks, by where they came from, so a block that is made again counts again. From
            the second epoch on, the local ones are exactly the cached samples if no block was fetched twice.
        reads: samples that storage was asked for, and the bytes that it gave. Reads count when they happen, for the
            epoch that wants them: ahead of time, and for dropped or repeated blocks, too.
        failures: reads that gave nothing.
    """

    fetched: FetchCounts = FetchCounts()
    reads: Amount = Amount()
    failures: int = 0

    def __add__(self, other: EpochCounts) -> EpochCounts:
        return EpochCounts(self.fetched + other.fetched, self.reads + other.reads, self.failures + other.failures)


class CacheStats(Struct, frozen=True):
    """One look at a cache node.

    Attributes:
        incarnation: changes when the node was restarted and its cache is filled anew.
        epochs: epoch -> its counts, the newest KEPT_EPOCHS that anything happened in.
        total: the counts of all epochs.
        budget_bytes: the most that the cache may keep.
        cached_bytes: bytes of the samples it keeps; those that are being read to be kept come on top, within
            the budget. Near the budget, or near the dataset's size: the cache is filled.
        cached_samples: samples it keeps.
        cached_slabs: slabs that they lie in.
        decoded: those of the samples that it keeps decoded, and their bytes, which are part of the above.
        decoded_on_disk: the samples that its disk has decoded, and the bytes of their files.
        decoded_target_bytes: what the plan gives to decoded samples.
        readahead_budget_bytes: the most that may be held for blocks nobody has asked for.
        readahead_bytes: what is held for them; zero while samples stall means that storage is too slow.
        readahead_blocks: blocks that are read ahead, wholly kept ones included.
        fetching_bytes: bytes held for fetches in progress, beside the cache and read-ahead.
        peak_transient_bytes: the most that read-ahead and fetches in progress held together at any time.
        read_s: thread-seconds spent in reads; near threads x storage_s means that more threads may help.
        storage_s: seconds in which at least one read was in progress.
        threads: that may read storage at once.
        readahead_depth_bytes: how much of the budget is worth using, by the bandwidth model.
        speeds: what one thread gets from each tier, as far as it was measured.
        cpu_s: CPU-seconds that the process took, of all of its threads.
    """

    incarnation: int
    epochs: dict[int, EpochCounts]
    total: EpochCounts
    budget_bytes: int
    cached_bytes: int
    cached_samples: int
    cached_slabs: int
    decoded: Amount
    decoded_on_disk: Amount
    decoded_target_bytes: int
    readahead_budget_bytes: int
    readahead_bytes: int
    readahead_blocks: int
    fetching_bytes: int
    peak_transient_bytes: int
    read_s: float
    storage_s: float
    threads: int
    readahead_depth_bytes: int
    speeds: FetchSpeeds
    cpu_s: float = 0.0


class Flow(Struct, frozen=True):
    """The little that a coordinator wants to know of a cache node again and again, so that many nodes can be asked.

    Attributes:
        incarnation: changes when the node was restarted and all sums begin anew.
        threads: that may read storage at once.
        storage, disk, remote: running sums of what came from there.
        speeds: what one thread gets from each tier, as far as it was measured.
        told: how many sentences the node has written into its log, about what it decided.
        log: the last of them.
        cpu_s: as in `CacheStats`.
        kept_bytes, budget_bytes: what the cache keeps or is about to keep, and the most that it may.
    """

    incarnation: int
    threads: int
    storage: TransferSums
    disk: TransferSums
    remote: TransferSums
    speeds: FetchSpeeds
    told: int
    log: tuple[str, ...]
    cpu_s: float = 0.0
    kept_bytes: int = 0
    budget_bytes: int = 0


@dataclass
class Meter:
    """The running counts of a cache node; every method may be called from any thread.

    Attributes:
        epochs: the newest KEPT_EPOCHS.
        total: all epochs together, and what no epoch asked for.
        storage, disk, remote: what came from storage, from the disk tier, and from the memory of other nodes.
    """

    epochs: dict[int, EpochCounts] = field(default_factory=dict)
    total: EpochCounts = field(default_factory=EpochCounts)
    storage: TierMeter = field(default_factory=TierMeter)
    disk: TierMeter = field(default_factory=TierMeter)
    remote: TierMeter = field(default_factory=TierMeter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, epoch: int | None, more: EpochCounts) -> None:
        """Add to the counts of one epoch, or of none: what moves between nodes no epoch asked for."""
        # New values each time: who looks from another thread sees counts that fit together.
        with self._lock:
            self.total += more
            if epoch is None:
                return
            self.epochs[epoch] = self.epochs.get(epoch, EpochCounts()) + more
            if len(self.epochs) > KEPT_EPOCHS:  # a feed may run for months
                del self.epochs[min(self.epochs)]
