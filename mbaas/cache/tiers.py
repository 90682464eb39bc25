"""The bandwidth model: how long a sample takes from each place, how far to read ahead.

Dryden et al., "Clairvoyant Prefetching for Distributed Machine Learning I/O" (NoPFS), SC 2021, section 4, with
its symbols in parentheses. Pure functions of rates that were measured (`measure`) or given; bytes and seconds.

A rate is a total of all threads that use a thing at once, and each thread gets its even share. So times here are
those of one thread, and `threads` of them work side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError

Amount = TypeVar("Amount", float, NDArray[np.float64])
"""A number of bytes, or one for each of many."""


@dataclass(frozen=True)
class Rate:
    """Bytes per second against the number of threads: straight lines between points.

    Below the first point the rate is proportional to the threads, above the last one it stays.

    Attributes:
        threads: ascending, each at least 1.
        bytes_per_s: total of so many threads, each above 0.

    Raises:
        ConfigError: no points, unequal numbers of them, or numbers out of range.
    """

    threads: tuple[int, ...]
    bytes_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.threads or len(self.threads) != len(self.bytes_per_s):
            raise ConfigError(
                f"a rate needs as many threads as bytes_per_s, at least one, got {self.threads} and {self.bytes_per_s}"
            )
        if self.threads[0] < 1 or any(a >= b for a, b in pairwise(self.threads)):
            raise ConfigError(f"a rate's threads must be ascending from at least 1, got {self.threads}")
        if not all(rate > 0 for rate in self.bytes_per_s):
            raise ConfigError(f"each of a rate's bytes_per_s must be above 0, got {self.bytes_per_s}")

    @classmethod
    def constant(cls, bytes_per_s: float) -> Rate:
        """The same total for any number of threads."""
        return cls((1,), (bytes_per_s,))

    def at(self, threads: int) -> float:
        """Bytes per second of so many threads together."""
        return float(np.interp(threads, (0, *self.threads), (0.0, *self.bytes_per_s)))

    def share(self, threads: int) -> float:
        """Bytes per second of each of so many threads."""
        return self.at(threads) / threads


@dataclass(frozen=True)
class StorageClass:
    """One level of a node's storage (class j).

    Attributes:
        name: for messages.
        capacity_bytes: it holds at most so much (d_j).
        read: (r_j).
        write: (w_j).
        threads: that use it at once, at least 1 (p_j).
    """

    name: str
    capacity_bytes: int
    read: Rate
    write: Rate
    threads: int

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0:
            raise ConfigError(f"{self.name}: capacity_bytes must be at least 0, got {self.capacity_bytes}")
        if self.threads < 1:
            raise ConfigError(f"{self.name}: threads must be at least 1, got {self.threads}")


class Source(Enum):
    """Whom a sample is fetched from."""

    OWN = "own"
    REMOTE = "remote"
    STORAGE = "storage"


@dataclass(frozen=True)
class Place:
    """Where a sample lies: `level` is the index of the storage class there; of no meaning for storage."""

    source: Source
    level: int = 0


STORAGE = Place(Source.STORAGE)


@dataclass(frozen=True)
class Bandwidths:
    """What a node can move.

    Attributes:
        staging: the buffer that consumers take from (class 0); its threads do the reading (p_0).
        classes: where samples are cached, on this node and, alike, on every other (classes 1 and up); level 0
            is the first of them.
        network_bytes_per_s: between two nodes (b_c).
        storage: what the shared storage gives to all its readers together (t).
        readers: threads of all nodes that read the shared storage at once, at least 1 (gamma).
        prep_bytes_per_s: raw bytes that one thread prepares on their way into staging (beta); infinite where
            preparing is somebody else's work.
    """

    staging: StorageClass
    classes: tuple[StorageClass, ...]
    network_bytes_per_s: float
    storage: Rate
    readers: int
    prep_bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        for name in ("network_bytes_per_s", "prep_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.readers < 1:
            raise ConfigError(f"readers must be at least 1, got {self.readers}")

    def fetch_bytes_per_s(self, place: Place) -> float:
        """What one thread gets from a place.

        Own class j: r_j(p_j)/p_j. Another node's: min(b_c, r_j(p_j)/p_j). Shared storage: t(gamma)/gamma.
        """
        if place.source is Source.STORAGE:
            return self.storage.share(self.readers)
        level = self.classes[place.level]
        own = level.read.share(level.threads)
        return own if place.source is Source.OWN else min(self.network_bytes_per_s, own)

    def fetch_s(self, place: Place, nbytes: Amount) -> Amount:
        """Seconds until one thread has so many bytes from a place (fetch)."""
        return nbytes / self.fetch_bytes_per_s(place)

    def write_s(self, nbytes: Amount) -> Amount:
        """Seconds in which one thread prepares so many bytes and writes them to staging (write).

        Both go on side by side, so the slower one counts: max(s/beta, s/(w_0(p_0)/p_0)).
        """
        return nbytes / min(self.prep_bytes_per_s, self.staging.write.share(self.staging.threads))

    def read_s(self, parts: Mapping[Place, Amount]) -> Amount:
        """Seconds of one thread for bytes from several places, fetched and written one after the other (read).

        Args:
            parts: bytes by place, of a sample or a block, or float64[n] of n blocks; at least one place.
        """
        times = [self.fetch_s(place, nbytes) + self.write_s(nbytes) for place, nbytes in parts.items()]
        total = times[0]
        for more in times[1:]:
            total = total + more
        return total

    def fastest(self, places: Collection[Place]) -> Place:
        """Where to fetch a sample that lies at these places; it lies in shared storage always.

        Whatever its size: every time is proportional to it. Of equally fast places own comes before remote,
        remote before storage, and the lower level before the higher.
        """
        rank = {Source.OWN: 0, Source.REMOTE: 1, Source.STORAGE: 2}
        found = {*places, STORAGE}
        return min(found, key=lambda place: (-self.fetch_bytes_per_s(place), rank[place.source], place.level))


def worthwhile(bandwidths: Bandwidths) -> list[int]:
    """The classes of this node that are faster than shared storage, by index, the fastest first."""
    rates = [bandwidths.fetch_bytes_per_s(Place(Source.OWN, level)) for level in range(len(bandwidths.classes))]
    storage = bandwidths.fetch_bytes_per_s(STORAGE)
    useful = [level for level, rate in enumerate(rates) if rate > storage]
    return sorted(useful, key=lambda level: -rates[level])


@dataclass(frozen=True)
class Depth:
    """How far to read ahead.

    Attributes:
        blocks: that are read, or being read, and not consumed yet; at least 1.
        nbytes: the most that so many consecutive blocks hold.
        keeps_up: reading all blocks takes no longer than consuming them. If it does not, `blocks` carries the
            consumer over the blocks that were given, and no depth would carry it on for ever.
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
    """The fewest blocks of read-ahead with which the consumer, once they are there, never waits.

    Blocks are read in order by all threads together, so block k takes read_s[k] / threads, and it begins when
    the one before it is read and block k - depth is consumed (NoPFS: avail(f) = sum of read_s / p_0, with a
    buffer that ends). The consumer takes nbytes[k] / consume_bytes_per_s for block k. It never waits exactly if
    no run i..k of blocks takes longer to read than lies between the end of block i - depth and the start of
    block k. O(n log n).

    Args:
        read_s: float64[n], seconds of one thread for each block, in the order in which they are consumed.
        nbytes: int64[n], bytes of each block, at least one.
        consume_bytes_per_s: of the same bytes, above 0.
        threads: that read, at least 1.

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
    """Sums of the first 0, 1, ... n amounts: float64[n + 1]."""
    return np.concatenate([[0.0], np.cumsum(amounts, dtype=np.float64)])


def _never_waits(read_before: NDArray[np.float64], consumed_before: NDArray[np.float64], depth: int) -> bool:
    """Whether every block k >= depth is read when the consumer, which never waited, comes to it.

    Block i may begin at consumed_before[i - depth + 1], and i..k take read_before[k + 1] - read_before[i].
    """
    first = np.arange(depth, len(read_before) - 1)
    slack = np.minimum.accumulate(read_before[first] - consumed_before[first - depth + 1])
    late = read_before[first + 1] - consumed_before[first] - slack
    tolerance = 1e-9 * (consumed_before[-1] + read_before[-1])  # of sums of floats, in seconds
    return not (late > tolerance).any()
