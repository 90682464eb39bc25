"""Storage tiers of a node, and what follows from their speeds: the use of a disk, and how far to read ahead.

Rates are those of the performance model of Dryden et al., "Clairvoyant Prefetching for Distributed Machine Learning
I/O" (NoPFS), SC 2021, section 4; its symbols are given in parentheses. A rate is the total of all threads that use a
tier at the same time, divided evenly between them. A time is one thread's, and several threads work in parallel.

A cache node measures the speeds (`FetchSpeeds`) and follows the `Advisor`. The simulator has machines whose tiers are
`StorageClass` and `StagingClass`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.base import units
from mbaas.errors import ConfigError
from mbaas.model.curves import ThroughputCurve
from mbaas.model.quantity import check_numbers

Floats = NDArray[np.float64]

RESERVED = ("compute", "staging", "remote", "pfs")
"""Names reserved for other entries of results."""


@dataclass(frozen=True, kw_only=True)
class StorageClass:
    """Memory or disk of a node that caches samples (class j, from 1).

    ``capacity_bytes`` is d_j, ``threads`` p_j; ``read`` are total bytes/s against the number of threads (r_j).
    """

    name: str
    capacity_bytes: float
    threads: int = 1
    read: ThroughputCurve

    def __post_init__(self) -> None:
        if self.name in RESERVED:
            raise ConfigError(f"a storage class may not be called {', '.join(RESERVED)}, got {self.name!r}")
        check_numbers("0 or more", **{f"capacity_bytes of {self.name}": self.capacity_bytes})
        check_numbers("at least 1", **{f"threads of {self.name}": self.threads})

    @property
    def thread_bytes_per_s(self) -> float:
        return self.read.rate_of_each(self.threads)


@dataclass(frozen=True, kw_only=True)
class StagingClass:
    """The staging buffer (class 0): minibatches that are ready or in preparation.

    ``capacity_bytes`` is d_0. ``threads`` (p_0) each fetch a sample, prepare it and write it here; ``write`` are their
    total bytes/s (w_0), None if the measured prep rate includes writing.
    """

    capacity_bytes: float
    threads: int = 1
    write: ThroughputCurve | None = None

    def __post_init__(self) -> None:
        check_numbers("0 or more", **{"capacity_bytes of staging": self.capacity_bytes})
        check_numbers("at least 1", **{"threads of staging": self.threads})

    @property
    def thread_bytes_per_s(self) -> float:
        return math.inf if self.write is None else self.write.rate_of_each(self.threads)


@dataclass(frozen=True)
class Depth:
    """A read-ahead depth: at most ``blocks`` (1 or more), ``nbytes`` together, are read and not consumed yet.

    ``keeps_up`` is True if reading all blocks takes no longer than consuming them. Otherwise ``blocks`` covers only the
    given blocks, and no depth would suffice for an endless sequence.
    """

    blocks: int
    nbytes: int
    keeps_up: bool


def readahead_depth(
    read_s: Sequence[float] | Floats,
    nbytes: Sequence[int] | NDArray[np.int64],
    *,
    consume_bytes_per_s: float,
    threads: int,
) -> Depth:
    """Return the smallest read-ahead depth at which the consumer never waits after the initial fill, in O(n log n).

    All threads together read blocks in order, so block k takes read_s[k] / threads. It starts when block k - 1 is read
    and block k - depth is consumed (NoPFS: avail(f) = sum of read_s / p_0, with a finite buffer). The consumer never
    waits if and only if no run i..k of blocks takes longer to read than the time from the end of block i - depth to the
    start of block k.

    ``read_s`` are float64[n], seconds of one thread for each block, in the order of consumption; ``nbytes`` int64[n].
    """
    sizes, work = np.asarray(nbytes, np.int64), np.asarray(read_s, np.float64)
    read_before = _before(work / threads)
    consumed_before = _before(sizes / consume_bytes_per_s)
    # A consumer that never waits at one depth never waits at a greater one: bisect.
    low, high = 1, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if _never_waits(read_before, consumed_before, middle):
            high = middle
        else:
            low = middle + 1
    held = _before(sizes)
    return Depth(low, int((held[low:] - held[:-low]).max()), bool(read_before[-1] <= consumed_before[-1]))


def _before(amounts: Floats | NDArray[np.int64]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(amounts, dtype=np.float64)])


def _never_waits(read_before: Floats, consumed_before: Floats, depth: int) -> bool:
    first = np.arange(depth, len(read_before) - 1)
    # Block i may start at consumed_before[i - depth + 1], and i..k take read_before[k + 1] - read_before[i]. The
    # running minimum is the worst start i of each run up to k, so one pass checks all runs.
    slack = np.minimum.accumulate(read_before[first] - consumed_before[first - depth + 1])
    late = read_before[first + 1] - consumed_before[first] - slack
    tolerance = 1e-9 * (consumed_before[-1] + read_before[-1])  # rounding of sums of floats, in seconds
    return not (late > tolerance).any()


MEMORY_GUESS = 5e9
"""Speed of memory in bytes/s until it is measured; far above storage in any case."""

AGAIN = 1.25
"""An unused disk is used again when it is this many times as fast as storage; near 1 the decision would oscillate."""

READS_IN_FLIGHT = 2
"""Minimum number of samples read ahead per storage thread; with fewer, threads would be idle."""

STEADY_LOOKS = 10
"""The depth is reduced only after this many consecutive updates that needed less."""

LOGGED_CHANGE = 2.0
"""Changes of the depth by this factor are logged."""


@dataclass(frozen=True)
class FetchSpeeds:
    """Bytes/s that one thread of a node gets from each tier while all other threads read there, too.

    None means not measured yet. The names are the same as in `mbaas.wire.samples.FetchCounts`.
    """

    local: float | None = None
    remote: float | None = None
    disk: float | None = None
    storage: float | None = None

    def read_s(self, *, storage_bytes: Floats, disk_bytes: Floats) -> Floats:
        """Seconds of one thread to fetch blocks, float64[n], and write them to memory (read)."""
        memory = self.local or MEMORY_GUESS
        fetch_s = storage_bytes / (self.storage or memory) + disk_bytes / (self.disk or memory)
        return fetch_s + (storage_bytes + disk_bytes) / memory

    def __str__(self) -> str:
        known = (
            ("memory", self.local),
            ("the disk tier", self.disk),
            ("other nodes' memory", self.remote),
            ("storage", self.storage),
        )
        return ", ".join(f"{name} {units.rate(rate)}" for name, rate in known if rate is not None)


class UpcomingBytes(Struct, frozen=True, eq=False):
    """Missing bytes of the next blocks, float64[n] by location, and the number of all samples in these blocks."""

    samples: int
    from_storage: Floats
    from_disk: Floats

    @property
    def lacking(self) -> Floats:
        return self.from_storage + self.from_disk


class Advisor:
    """Decides from measured speeds whether a cache node uses its disk tier, and how far it reads ahead.

    Storage never replaces another node's memory, even if it is faster: mbaas guarantees that cached samples are read
    from storage only once. ``prefers_disk``: samples on disk and in another node's memory are read from disk.
    """

    def __init__(self, *, has_disk: bool, readahead_bytes: int) -> None:
        self._has_disk, self._most_bytes = has_disk, readahead_bytes
        self._logged_bytes = readahead_bytes
        self._enough_bytes: deque[int] = deque([readahead_bytes], maxlen=STEADY_LOOKS)  # at the last updates
        self.uses_disk = has_disk
        self.prefers_disk = False
        self.depth_bytes = readahead_bytes

    def weigh(self, speeds: FetchSpeeds) -> list[str]:
        """Decide whether to use the disk, once both speeds are measured. Return log lines."""
        if not self._has_disk or speeds.disk is None:
            return []
        log = []
        if speeds.storage is not None:
            again = 1.0 if self.uses_disk else AGAIN
            is_worthwhile = speeds.disk > speeds.storage and speeds.disk >= again * speeds.storage
            if is_worthwhile != self.uses_disk:
                self.uses_disk = is_worthwhile
                log.append(
                    f"the disk tier is {'used again' if is_worthwhile else 'not used'}: a thread gets "
                    f"{units.rate(speeds.disk)} from it, and {units.rate(speeds.storage)} from storage"
                )
        if speeds.remote is not None:
            # Another node's bytes cross the network and leave its memory; the slower of the two counts.
            memory = speeds.local or MEMORY_GUESS
            self.prefers_disk = self.uses_disk and speeds.disk >= min(speeds.remote, memory)
        return log

    def look_ahead(self, upcoming: UpcomingBytes, speeds: FetchSpeeds, *, threads: int, pace_per_s: float) -> list[str]:
        """Set the depth for prep that could consume ``pace_per_s`` samples/s; 0 if unknown. Return log lines.

        The model's depth takes rates as given, without the concurrent reads that they require, so `READS_IN_FLIGHT`
        sets a lower bound.
        """
        lacking_bytes = float(upcoming.lacking.sum())
        if speeds.storage is None or not pace_per_s or not lacking_bytes:
            # No data yet, so use the whole budget, as at the start.
            self._enough_bytes.append(self._most_bytes)
            self.depth_bytes = self._most_bytes
            return []
        # Per sample of the order rather than per missing sample: prep consumes cached samples at the same rate.
        consumed_bytes_per_s = pace_per_s * lacking_bytes / upcoming.samples
        depth = readahead_depth(
            speeds.read_s(storage_bytes=upcoming.from_storage, disk_bytes=upcoming.from_disk),
            np.ceil(upcoming.lacking).astype(np.int64),
            consume_bytes_per_s=consumed_bytes_per_s,
            threads=threads,
        )
        in_flight = int(READS_IN_FLIGHT * threads * lacking_bytes / upcoming.samples)
        # If prep waits in any case, every byte read ahead saves time.
        self._enough_bytes.append(max(depth.nbytes, in_flight) if depth.keeps_up else self._most_bytes)
        # The maximum of the last updates: increased at once, reduced only when all of them agree.
        self.depth_bytes = min(max(self._enough_bytes), self._most_bytes)
        if self._logged_bytes / LOGGED_CHANGE < self.depth_bytes < self._logged_bytes * LOGGED_CHANGE:
            return []
        self._logged_bytes = self.depth_bytes
        why = "storage keeps up with prep" if depth.keeps_up else "storage is slower than prep"
        return [
            f"{units.size(self.depth_bytes)} of at most {units.size(self._most_bytes)} are read ahead: {why}, which "
            f"could take {units.rate(consumed_bytes_per_s)}"
        ]
