"""Storage tiers of a node: their speeds, the use of its disks, and the distance to read ahead.

Rates are those of the performance model of Dryden et al., "Clairvoyant Prefetching for Distributed Machine Learning
I/O" (NoPFS), SC 2021, section 4; its symbols are given in parentheses. A rate is the total of all threads that use a
tier at the same time, divided evenly between them. A time is one thread's, and several threads work in parallel.

A cache node measures the speeds (`FetchSpeeds`) and follows the `Advisor` and the `DiskOrder`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.base import units

Floats = NDArray[np.float64]


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
    depths = range(1, len(sizes))
    depth = 1 + bisect_left(depths, True, key=partial(_never_waits, read_before, consumed_before))
    held = _before(sizes)
    return Depth(depth, int((held[depth:] - held[:-depth]).max()), bool(read_before[-1] <= consumed_before[-1]))


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

COPIES = 1.25
"""Copies for other pipelines get room for the spread of positions times this factor, because it varies."""

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


@dataclass
class DiskState:
    """The measured speed of a disk, and whether it is used."""

    name: str
    speed: float | None = None  # bytes/s of one thread
    is_used: bool = True  # False while it is no faster than storage
    failure: str = ""  # why it is dropped


class DiskOrder:
    """Decides from measured speeds which disks of a cache node are used, the fastest first.

    Storage never replaces another node's memory, even if it is faster: mbaas guarantees that cached samples are read
    from storage only once. A disk as slow as storage is not used, and a disk that failed is never used again.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._disks = [DiskState(name) for name in names]

    def __getitem__(self, disk: int) -> DiskState:
        return self._disks[disk]

    @property
    def used(self) -> list[int]:
        """Indices of the disks in use, the fastest first. Those without a measurement come last."""
        used = [index for index, disk in enumerate(self._disks) if disk.is_used and not disk.failure]
        return sorted(used, key=lambda index: -(self._disks[index].speed or 0.0))

    def at_least(self, bytes_per_s: float) -> list[int]:
        """Return the used disks that are known to be this fast, the fastest first."""
        return [index for index in self.used if (self._disks[index].speed or 0.0) >= bytes_per_s]

    def ahead_of_peers(self, speeds: FetchSpeeds) -> list[int]:
        """Return the used disks that are read before another node's memory, the fastest first."""
        if speeds.remote is None:
            return []
        # Another node's bytes cross the network and leave its memory; the slower of the two counts.
        return self.at_least(min(speeds.remote, speeds.local or MEMORY_GUESS))

    @property
    def speed(self) -> float | None:
        """Bytes/s of one thread from the slowest disk in use; None unless all are measured."""
        speeds = [self._disks[index].speed for index in self.used]
        known = [speed for speed in speeds if speed is not None]
        return min(known) if known and len(known) == len(speeds) else None

    def measured(self, disk: int, bytes_per_s: float) -> None:
        self._disks[disk].speed = bytes_per_s

    def failed(self, disk: int, reason: str) -> list[str]:
        """Drop a disk for good. Return log lines; none if it was dropped before."""
        state = self._disks[disk]
        if state.failure:
            return []
        state.failure = reason
        others = ", and other disks stay in use" if self.used else ""
        return [f"the disk {state.name} is dropped: {reason}; its samples are read from storage{others}"]

    def has_failed(self, disk: int) -> bool:
        return bool(self._disks[disk].failure)

    def weigh(self, storage: float | None) -> list[str]:
        """Compare the disks with storage, bytes/s of one thread, once it is measured. Return log lines."""
        log = []
        for disk in self._disks:
            if storage is None or disk.speed is None or disk.failure:
                continue
            again = 1.0 if disk.is_used else AGAIN
            is_worthwhile = disk.speed > storage and disk.speed >= again * storage
            if is_worthwhile != disk.is_used:
                disk.is_used = is_worthwhile
                log.append(
                    f"the disk {disk.name} is {'used again' if is_worthwhile else 'not used'}: a thread gets "
                    f"{units.rate(disk.speed)} from it, and {units.rate(storage)} from storage"
                )
        return log

    def __str__(self) -> str:
        speeds = [(self._disks[index].name, self._disks[index].speed) for index in self.used]
        return ", ".join(name if speed is None else f"{name} {units.rate(speed)}" for name, speed in speeds)


class DiskRoom(NamedTuple):
    """Bytes that a disk may hold, and whether all nodes share it."""

    max_bytes: float
    is_shared: bool


class Admission(Enum):
    """Which samples that were read from storage a disk stores."""

    EVERY = "all samples that it lacks"
    MISSING = "samples that no disk has"
    OF_CLASS = "samples of its class that no disk has"
    NONE = "none"


def admissions(
    disks: Sequence[DiskRoom], *, needed_bytes: float, dataset_bytes: float, has_classes: bool, in_memory: bool
) -> list[Admission]:
    """Return for each disk which samples it stores.

    Disks that can hold all samples of this node also store the ones in memory, so that they survive a restart.

    Args:
        needed_bytes, dataset_bytes: all samples with their home on this node, and all of the dataset.
        has_classes: True if samples are drawn by weight, so that each has a class.
        in_memory: True if memory caches the samples.
    """
    hold_all = sum(disk.max_bytes for disk in disks if not disk.is_shared) >= needed_bytes

    def admission(disk: DiskRoom) -> Admission:
        if disk.is_shared and disk.max_bytes >= dataset_bytes:
            return Admission.EVERY
        if hold_all and not disk.is_shared:
            return Admission.MISSING
        if has_classes:
            return Admission.OF_CLASS
        return Admission.NONE if in_memory else Admission.MISSING

    return [admission(disk) for disk in disks]


class Advisor:
    """Decides from measured speeds how far a cache node reads ahead."""

    def __init__(self, *, readahead_bytes: int) -> None:
        self._most_bytes = readahead_bytes
        self._logged_bytes = readahead_bytes
        self._enough_bytes: deque[int] = deque([readahead_bytes], maxlen=STEADY_LOOKS)  # at the last updates
        self.depth_bytes = readahead_bytes

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
