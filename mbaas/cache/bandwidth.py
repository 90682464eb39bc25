"""What the bandwidth model says a cache node should do, from the speeds that were measured on it.

The model is `mbaas.allocation.bandwidth`; all here is pure. Three questions are answered: is the disk tier worth using,
is it faster than another node's memory, and how far should be read ahead? Whether to read storage instead of the memory
of another node is not asked, though the model could answer: that storage is read once for what the caches hold is a
promise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas import units
from mbaas.allocation.bandwidth import (
    STORAGE,
    Bandwidths,
    Locality,
    StagingClass,
    StorageClass,
    Tier,
    readahead_depth,
)
from mbaas.allocation.throughput import ThroughputCurve
from mbaas.messages import FetchSpeeds

MEMORY, DISK = 0, 1
"""Levels of a node's storage classes."""

AGAIN = 1.25
"""A disk that was not worth using is used again when it is this many times as fast as storage. With a value near 1 it
would be used and not used in turns.
"""

MEMORY_GUESS = 5e9
"""Speed of memory in bytes/s, until it is measured; beside storage any memory is fast."""

READS_IN_FLIGHT = 2
"""Samples that are read ahead at least, for each thread that reads storage: with fewer, threads would be idle."""

STEADY_LOOKS = 10
"""Read-ahead is made shallower only when less was enough at this many looks in a row."""

LOGGED_CHANGE = 2.0
"""A change of the depth by this factor is logged."""


class UpcomingBytes(Struct, frozen=True, eq=False):
    """The bytes that the next blocks of the order need and that nobody reads yet.

    Attributes:
        samples: in all of these blocks, whether they are lacking or not.
        from_storage, from_disk: float64[n], bytes of each block that this node lacks, by where they are.
    """

    samples: int
    from_storage: NDArray[np.float64]
    from_disk: NDArray[np.float64]

    @property
    def lacking(self) -> NDArray[np.float64]:
        """float64[n], bytes of each block that have to be read, wherever they are."""
        return self.from_storage + self.from_disk


def bandwidths_of(speeds: FetchSpeeds, *, threads: int) -> Bandwidths:
    """Make the model of this node; what is not known yet is as fast as memory.

    Args:
        speeds: of one thread each.
        threads: that read storage.
    """
    memory = speeds.local or MEMORY_GUESS

    # Only rates are asked of this model: capacities are the planner's business.
    def kept_in(name: str, bytes_per_s: float) -> StorageClass:
        return StorageClass(name=name, capacity_bytes=0, read=ThroughputCurve.flat(bytes_per_s))

    return Bandwidths(
        staging=StagingClass(capacity_bytes=0, write=ThroughputCurve.flat(memory)),
        classes=(kept_in("memory", memory), kept_in("disk", speeds.disk or memory)),
        network_bytes_per_s=speeds.remote or memory,
        storage=ThroughputCurve.through({threads: (speeds.storage or memory) * threads}),
    )


class Advisor:
    """What the model advises, which changes only when speeds do.

    Args:
        has_disk: whether there is a disk tier.
        readahead_bytes: the most that may be read ahead.

    Attributes:
        uses_disk: whether the disk tier is read and written.
        prefers_disk: whether what lies on the disk and in another node's memory is read from the disk.
        depth_bytes: how much to read ahead.
    """

    def __init__(self, *, has_disk: bool, readahead_bytes: int) -> None:
        self._has_disk, self._most_bytes = has_disk, readahead_bytes
        self._told_bytes = readahead_bytes
        self._enough_bytes: deque[int] = deque([readahead_bytes], maxlen=STEADY_LOOKS)  # at the last looks
        self.uses_disk = has_disk
        self.prefers_disk = False
        self.depth_bytes = readahead_bytes

    def weigh(self, speeds: FetchSpeeds, *, threads: int) -> list[str]:
        """Decide whether the disk is worth using; nothing changes before both sides of a comparison are known.

        Returns:
            What changed and why, in sentences.
        """
        if not self._has_disk or speeds.disk is None:
            return []
        model, told = bandwidths_of(speeds, threads=threads), []
        if speeds.storage is not None:
            again = 1.0 if self.uses_disk else AGAIN
            is_worthwhile = DISK in model.worthwhile(readers=threads) and speeds.disk >= again * speeds.storage
            if is_worthwhile != self.uses_disk:
                self.uses_disk = is_worthwhile
                told.append(
                    f"the disk tier is {'used again' if is_worthwhile else 'not used'}: a thread gets "
                    f"{units.rate(speeds.disk)} from it, and {units.rate(speeds.storage)} from storage"
                )
        if speeds.remote is not None:
            own, remote = Tier(Locality.OWN, DISK), Tier(Locality.REMOTE, MEMORY)
            self.prefers_disk = self.uses_disk and model.fastest([own, remote], readers=threads) == own
        return told

    def look_ahead(self, upcoming: UpcomingBytes, speeds: FetchSpeeds, *, threads: int, pace_per_s: float) -> list[str]:
        """Decide how far to read ahead for prep that could take ``pace_per_s`` samples/s; 0: that is not known.

        The model's depth is the least with which prep never waits. It knows rates, but not that a rate needs many reads
        in flight; so that is the least.

        Returns:
            What changed much and why, in sentences.
        """
        lacking_bytes = float(upcoming.lacking.sum())
        if speeds.storage is None or not pace_per_s or not lacking_bytes:
            # Nothing to compute with: all of the budget, as in the beginning.
            self._enough_bytes.append(self._most_bytes)
            self.depth_bytes = self._most_bytes
            return []
        parts = {STORAGE: upcoming.from_storage, Tier(Locality.OWN, DISK): upcoming.from_disk}
        # Per sample of the order, not per sample that lacks: prep is as fast with those that are here already.
        consumed_bytes_per_s = pace_per_s * lacking_bytes / upcoming.samples
        depth = readahead_depth(
            bandwidths_of(speeds, threads=threads).read_s(parts, readers=threads),
            np.ceil(upcoming.lacking).astype(np.int64),
            consume_bytes_per_s=consumed_bytes_per_s,
            threads=threads,
        )
        in_flight = int(READS_IN_FLIGHT * threads * lacking_bytes / upcoming.samples)
        # If prep waits in any case, every byte that is read ahead is time saved.
        self._enough_bytes.append(max(depth.nbytes, in_flight) if depth.keeps_up else self._most_bytes)
        # The most of the last looks: deeper at once, shallower only when all of them agree.
        self.depth_bytes = min(max(self._enough_bytes), self._most_bytes)
        if self._told_bytes / LOGGED_CHANGE < self.depth_bytes < self._told_bytes * LOGGED_CHANGE:
            return []
        self._told_bytes = self.depth_bytes
        why = "storage keeps up with prep" if depth.keeps_up else "storage is slower than prep"
        return [
            f"{units.size(self.depth_bytes)} of at most {units.size(self._most_bytes)} are read ahead: {why}, which "
            f"could take {units.rate(consumed_bytes_per_s)}"
        ]


def speeds_told(speeds: FetchSpeeds) -> str:
    """Write what is known as a sentence."""
    known: Sequence[tuple[str, float | None]] = (
        ("memory", speeds.local),
        ("the disk tier", speeds.disk),
        ("other nodes' memory", speeds.remote),
        ("storage", speeds.storage),
    )
    parts = [f"{name} {units.rate(rate)}" for name, rate in known if rate is not None]
    return f"a thread gets from {', '.join(parts)}"
