"""Bandwidth model: read time of a sample from each tier, and read-ahead depth.

The model comes from Dryden et al., "Clairvoyant Prefetching for Distributed Machine Learning I/O" (NoPFS), SC 2021,
section 4; its symbols are given in parentheses. All functions are pure, in bytes and seconds. Cache nodes choose with
them what to read ahead, and the simulator predicts with them.

A rate is the total of all threads that use a resource at the same time, divided evenly between them. A time is one
thread's, and several threads work in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.model.curves import ThroughputCurve

BytesT = TypeVar("BytesT", float, NDArray[np.float64])
"""One or many numbers of bytes."""

RESERVED = ("compute", "staging", "remote", "pfs")
"""Names reserved for other entries of results."""


@dataclass(frozen=True, kw_only=True)
class StorageClass:
    """Memory or disk of a node that caches samples (class j, from 1).

    Attributes:
        capacity_bytes: capacity (d_j).
        threads: concurrent readers, at least 1 (p_j).
        read: total bytes/s against the number of threads (r_j).

    Raises:
        ConfigError: a reserved name, or a number out of range.
    """

    name: str
    capacity_bytes: float
    threads: int = 1
    read: ThroughputCurve

    def __post_init__(self) -> None:
        if self.name in RESERVED:
            raise ConfigError(f"a storage class may not be called {', '.join(RESERVED)}, got {self.name!r}")
        _check_least(f"capacity_bytes of {self.name}", self.capacity_bytes, 0)
        _check_least(f"threads of {self.name}", self.threads, 1)

    @property
    def thread_bytes_per_s(self) -> float:
        """Bytes/s that one of its threads reads: r_j(p_j) / p_j."""
        return self.read.rate_of_each(self.threads)


@dataclass(frozen=True, kw_only=True)
class StagingClass:
    """The staging buffer (class 0): minibatches that are ready or in preparation.

    Attributes:
        capacity_bytes: capacity (d_0).
        threads: number of threads; each fetches a sample, prepares it and writes it here (p_0).
        write: total bytes/s against the number of threads (w_0); None if the measured prep rate includes writing.

    Raises:
        ConfigError: a number out of range.
    """

    capacity_bytes: float
    threads: int = 1
    write: ThroughputCurve | None = None

    def __post_init__(self) -> None:
        _check_least("capacity_bytes of staging", self.capacity_bytes, 0)
        _check_least("threads of staging", self.threads, 1)

    @property
    def thread_bytes_per_s(self) -> float:
        """Bytes/s that one of its threads writes: w_0(p_0) / p_0."""
        return math.inf if self.write is None else self.write.rate_of_each(self.threads)


class Locality(Enum):
    """Location of bytes: on the node itself, on another node, or in shared storage."""

    OWN = "own"
    REMOTE = "remote"
    STORAGE = "storage"


@dataclass(frozen=True)
class Tier:
    """A source of samples. ``level`` is the index of the storage class, and has no meaning for shared storage."""

    locality: Locality
    level: int = 0


STORAGE = Tier(Locality.STORAGE)
"""Shared storage, which contains every sample."""


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """Transfer rates of a node; all nodes are the same.

    Attributes:
        network_bytes_per_s: rate between two nodes (b_c).
        storage: total rate of shared storage against the number of reading threads of all nodes (t).
        staging: the buffer that consumers read.
        classes: storage classes of every node, from level 0.
        prep_bytes_per_s: raw bytes/s that one thread prepares on the way into staging (beta); infinite if prep runs
            elsewhere.

    Raises:
        ConfigError: a rate is not above 0.
    """

    network_bytes_per_s: float
    storage: ThroughputCurve
    staging: StagingClass
    classes: tuple[StorageClass, ...] = ()
    prep_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("network_bytes_per_s", "prep_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")

    def fetch_bytes_per_s(self, tier: Tier, *, readers: int) -> float:
        """Return the bytes/s that one thread reads from a tier.

        Local class j: r_j(p_j)/p_j. Another node: min(b_c, r_j(p_j)/p_j). Shared storage: t(gamma)/gamma, where gamma
        is ``readers``, the threads of all nodes that read it at the same time, at least 1.
        """
        if tier.locality is Locality.STORAGE:
            _check_least("readers", readers, 1)
            return self.storage.rate_of_each(readers)
        own = self.classes[tier.level].thread_bytes_per_s
        return own if tier.locality is Locality.OWN else min(self.network_bytes_per_s, own)

    @property
    def write_bytes_per_s(self) -> float:
        """Bytes/s that one thread prepares and writes to staging: the slower of the two, because they overlap."""
        return min(self.prep_bytes_per_s, self.staging.thread_bytes_per_s)

    def read_s(self, parts: Mapping[Tier, BytesT], *, readers: int) -> BytesT:
        """Return the seconds of one thread to fetch and write bytes from several tiers, one after the other (read).

        ``parts`` has the bytes by tier, of a sample or a block, or float64[n] of n blocks; at least one tier.
        """
        # One thread does one thing at a time, so times add up. Callers account for parallel threads.
        times = [
            nbytes / self.fetch_bytes_per_s(tier, readers=readers) + nbytes / self.write_bytes_per_s
            for tier, nbytes in parts.items()
        ]
        return sum(times[1:], times[0])

    def fastest(self, tiers: Collection[Tier], *, readers: int) -> Tier:
        """Return the fastest tier; shared storage is always a candidate, because it has every sample.

        The sample's size does not matter, because every time is proportional to it. Ties go to the local node, then to
        remote nodes, and to the lower level.
        """
        rank = {Locality.OWN: 0, Locality.REMOTE: 1, Locality.STORAGE: 2}
        rates = {tier: self.fetch_bytes_per_s(tier, readers=readers) for tier in {*tiers, STORAGE}}
        return min(rates, key=lambda tier: (-rates[tier], rank[tier.locality], tier.level))

    def worthwhile(self, *, readers: int) -> list[int]:
        """Return the indices of this node's classes that are faster than shared storage, fastest first."""
        rates = [each.thread_bytes_per_s for each in self.classes]
        storage = self.fetch_bytes_per_s(STORAGE, readers=readers)
        useful = [level for level, rate in enumerate(rates) if rate > storage]
        return sorted(useful, key=lambda level: -rates[level])


@dataclass(frozen=True)
class Depth:
    """A read-ahead depth: at most ``blocks`` (1 or more) are read, or being read, and not consumed yet.

    They have at most ``nbytes``. ``keeps_up`` is True if reading all blocks takes no longer than consuming them.
    Otherwise ``blocks`` covers only the given blocks, and no depth would suffice for an endless sequence.
    """

    blocks: int
    nbytes: int
    keeps_up: bool


def readahead_depth(
    read_s: Sequence[float] | NDArray[np.float64],
    nbytes: Sequence[int] | NDArray[np.int64],
    *,
    consume_bytes_per_s: float,
    threads: int,
) -> Depth:
    """Return the smallest read-ahead depth at which the consumer never waits after the initial fill, in O(n log n).

    All threads together read blocks in order, so block k takes read_s[k] / threads. It starts when block k - 1 is read
    and block k - depth is consumed (NoPFS: avail(f) = sum of read_s / p_0, with a finite buffer). The consumer takes
    nbytes[k] / consume_bytes_per_s for block k. It never waits if and only if no run i..k of blocks takes longer to
    read than the time from the end of block i - depth to the start of block k.

    Args:
        read_s: float64[n], seconds of one thread for each block, in the order of consumption.
        nbytes: int64[n], bytes of each block, at least one block.
        consume_bytes_per_s: rate at which the same bytes are consumed, above 0.
        threads: number of reading threads, at least 1.

    Raises:
        ConfigError: no blocks, different numbers of sizes and times, no threads, or no consumption.
    """
    sizes, work = np.asarray(nbytes, np.int64), np.asarray(read_s, np.float64)
    if not len(sizes) or len(sizes) != len(work):
        raise ConfigError(f"read_s and nbytes must be of the same blocks, at least one, got {len(work)}, {len(sizes)}")
    if consume_bytes_per_s <= 0:
        raise ConfigError(f"consume_bytes_per_s must be above 0, got {consume_bytes_per_s}")
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")
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


def _before(amounts: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sums of the first 0, 1, ... n amounts."""
    return np.concatenate([[0.0], np.cumsum(amounts, dtype=np.float64)])


def _never_waits(read_before: NDArray[np.float64], consumed_before: NDArray[np.float64], depth: int) -> bool:
    """Return whether every block k >= depth is read before the consumer, which never waited, reaches it."""
    first = np.arange(depth, len(read_before) - 1)
    # Block i may start at consumed_before[i - depth + 1], and i..k take read_before[k + 1] - read_before[i]. The
    # running minimum is the worst start i of each run up to k, so one pass checks all runs.
    slack = np.minimum.accumulate(read_before[first] - consumed_before[first - depth + 1])
    late = read_before[first + 1] - consumed_before[first] - slack
    tolerance = 1e-9 * (consumed_before[-1] + read_before[-1])  # rounding of sums of floats, in seconds
    return not (late > tolerance).any()


def _check_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
