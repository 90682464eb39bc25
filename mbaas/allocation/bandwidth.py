"""The bandwidth model: how long a sample takes from each tier, and how far to read ahead.

It is that of Dryden et al., "Clairvoyant Prefetching for Distributed Machine Learning I/O" (NoPFS), SC 2021, section 4,
whose symbols stand in parentheses. These are pure functions of rates that were measured or given, in bytes and seconds.
A cache node decides by them what to read and how far ahead; the simulator predicts with them.

A rate is the total of all threads that use a thing at once, and each thread gets its even share. So times here are
those of one thread, and a number of threads work side by side.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mbaas.allocation.throughput import ThroughputCurve
from mbaas.errors import ConfigError

BytesT = TypeVar("BytesT", float, NDArray[np.float64])
"""A number of bytes, or one for each of many."""

RESERVED = ("compute", "staging", "remote", "pfs")
"""Names that a storage class may not have, because results call something else so."""


@dataclass(frozen=True, kw_only=True)
class StorageClass:
    """A kind of memory or disk on a node, where samples are kept (class j, from 1): its memory, its disk.

    Attributes:
        name: how messages and results call it.
        capacity_bytes: the most that it holds (d_j).
        threads: how many read it at once, at least 1 (p_j).
        read: bytes/s of a number of threads together (r_j).

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
        """What one of its threads reads: r_j(p_j) / p_j."""
        return self.read.rate_of_each(self.threads)


@dataclass(frozen=True, kw_only=True)
class StagingClass:
    """The staging buffer (class 0): minibatches that are ready or being made.

    Attributes:
        capacity_bytes: the most that it holds (d_0).
        threads: how many there are, each of which fetches a sample, prepares it and writes it here (p_0).
        write: bytes/s of a number of threads together (w_0); None where writing is part of the measured prep rate.

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
        """What one of its threads writes: w_0(p_0) / p_0."""
        return math.inf if self.write is None else self.write.rate_of_each(self.threads)


class Locality(Enum):
    """How far bytes are: on the node itself, on another one, or in shared storage."""

    OWN = "own"
    REMOTE = "remote"
    STORAGE = "storage"


@dataclass(frozen=True)
class Tier:
    """Where a sample can be fetched; ``level`` is the index of the storage class there, without meaning for storage."""

    locality: Locality
    level: int = 0


STORAGE = Tier(Locality.STORAGE)
"""Shared storage, where every sample lies."""


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """What a node can move; all nodes are alike.

    Attributes:
        network_bytes_per_s: the rate between two nodes (b_c).
        storage: what shared storage gives to all its readers, the threads of all nodes, together (t).
        staging: the buffer that consumers take from.
        classes: where samples are kept, on this node and, alike, on every other; level 0 is the first of them.
        prep_bytes_per_s: raw bytes that one thread prepares on their way into staging (beta); infinite where preparing
            is somebody else's work.

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
        """Return what one thread gets from a tier.

        Own class j: r_j(p_j)/p_j. Another node's: min(b_c, r_j(p_j)/p_j). Shared storage: t(gamma)/gamma.

        Args:
            readers: threads of all nodes that read shared storage at once, at least 1 (gamma).
        """
        if tier.locality is Locality.STORAGE:
            _check_least("readers", readers, 1)
            return self.storage.rate_of_each(readers)
        own = self.classes[tier.level].thread_bytes_per_s
        return own if tier.locality is Locality.OWN else min(self.network_bytes_per_s, own)

    @property
    def write_bytes_per_s(self) -> float:
        """What one thread prepares and writes to staging: both go on side by side, so the slower one counts."""
        return min(self.prep_bytes_per_s, self.staging.thread_bytes_per_s)

    def read_s(self, parts: Mapping[Tier, BytesT], *, readers: int) -> BytesT:
        """Return the seconds of one thread for bytes from several tiers, fetched and written in turn (read).

        Args:
            parts: bytes by tier, of a sample or a block, or float64[n] of n blocks; at least one tier.
            readers: as in `fetch_bytes_per_s`.
        """
        # One thread does one thing at a time, so parts add up. That several work side by side is the caller's affair.
        times = [
            nbytes / self.fetch_bytes_per_s(tier, readers=readers) + nbytes / self.write_bytes_per_s
            for tier, nbytes in parts.items()
        ]
        return sum(times[1:], times[0])

    def fastest(self, tiers: Collection[Tier], *, readers: int) -> Tier:
        """Return the tier to fetch a sample from that lies in these tiers; it always lies in shared storage, too.

        It does not depend on the sample's size: every time is proportional to it. Of equally fast tiers own comes
        before remote, remote before storage, and the lower level before the higher.
        """
        rank = {Locality.OWN: 0, Locality.REMOTE: 1, Locality.STORAGE: 2}
        rates = {tier: self.fetch_bytes_per_s(tier, readers=readers) for tier in {*tiers, STORAGE}}
        return min(rates, key=lambda tier: (-rates[tier], rank[tier.locality], tier.level))

    def worthwhile(self, *, readers: int) -> list[int]:
        """Return the classes of this node that are faster than shared storage, by index, the fastest first."""
        rates = [each.thread_bytes_per_s for each in self.classes]
        storage = self.fetch_bytes_per_s(STORAGE, readers=readers)
        useful = [level for level, rate in enumerate(rates) if rate > storage]
        return sorted(useful, key=lambda level: -rates[level])


@dataclass(frozen=True)
class Depth:
    """How far to read ahead.

    Attributes:
        blocks: how many are read, or being read, and not consumed yet; at least 1.
        nbytes: the most that ``blocks`` consecutive blocks hold.
        keeps_up: whether reading all blocks takes no longer than consuming them. If it takes longer, ``blocks`` carries
            the consumer over the blocks that were given, and no depth would carry it on for ever.
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
    """Find the fewest blocks of read-ahead with which the consumer, once they are there, never waits.

    Blocks are read in order by all threads together, so block k takes read_s[k] / threads, and it begins when the one
    before it is read and block k - depth is consumed (NoPFS: avail(f) = sum of read_s / p_0, with a buffer that ends).
    The consumer takes nbytes[k] / consume_bytes_per_s for block k. It never waits exactly if no run i..k of blocks
    takes longer to read than lies between the end of block i - depth and the start of block k. This search takes time
    in O(n log n).

    Args:
        read_s: float64[n], seconds of one thread for each block, in the order in which they are consumed.
        nbytes: int64[n], bytes of each block, at least one.
        consume_bytes_per_s: how fast the same bytes are consumed, above 0.
        threads: how many read, at least 1.

    Raises:
        ConfigError: no blocks, unequal numbers of them, no threads, or no consumption.
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
    # A consumer that never waits with one depth never waits with a greater one: bisect.
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
    """Return the sums of the first 0, 1, ... n amounts: float64[n + 1]."""
    return np.concatenate([[0.0], np.cumsum(amounts, dtype=np.float64)])


def _never_waits(read_before: NDArray[np.float64], consumed_before: NDArray[np.float64], depth: int) -> bool:
    """Return whether every block k >= depth is read when the consumer, which never waited, comes to it.

    Block i may begin at consumed_before[i - depth + 1], and i..k take read_before[k + 1] - read_before[i].
    """
    first = np.arange(depth, len(read_before) - 1)
    # the worst beginning i of each run up to k, kept as k grows: so all runs are checked in one pass
    slack = np.minimum.accumulate(read_before[first] - consumed_before[first - depth + 1])
    late = read_before[first + 1] - consumed_before[first] - slack
    tolerance = 1e-9 * (consumed_before[-1] + read_before[-1])  # of sums of floats, in seconds
    return not (late > tolerance).any()


def _check_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
