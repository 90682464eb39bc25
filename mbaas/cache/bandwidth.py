"""Decides from measured speeds whether a cache node uses its disk tier, and how far it reads ahead. Pure.

The model is `mbaas.model.tiers`. Storage never replaces another node's memory, even if it is faster: mbaas
guarantees that cached samples are read from storage only once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas import units
from mbaas.messages import FetchSpeeds
from mbaas.model.curves import ThroughputCurve
from mbaas.model.tiers import (
    STORAGE,
    Bandwidths,
    Locality,
    StagingClass,
    StorageClass,
    Tier,
    readahead_depth,
)

MEMORY, DISK = 0, 1
"""Levels of a node's storage classes."""

AGAIN = 1.25
"""An unused disk is used again when it is this many times as fast as storage; near 1 the decision would oscillate."""

MEMORY_GUESS = 5e9
"""Speed of memory in bytes/s until it is measured; far above storage in any case."""

READS_IN_FLIGHT = 2
"""Minimum number of samples read ahead per storage thread; with fewer, threads would be idle."""

STEADY_LOOKS = 10
"""The depth is reduced only after this many consecutive updates that needed less."""

LOGGED_CHANGE = 2.0
"""Changes of the depth by this factor are logged."""


class UpcomingBytes(Struct, frozen=True, eq=False):
    """Missing bytes of the next blocks, float64[n] by location, and the number of all samples in these blocks."""

    samples: int
    from_storage: NDArray[np.float64]
    from_disk: NDArray[np.float64]

    @property
    def lacking(self) -> NDArray[np.float64]:
        """float64[n], missing bytes of each block."""
        return self.from_storage + self.from_disk


def bandwidths_of(speeds: FetchSpeeds, *, threads: int) -> Bandwidths:
    """Return this node's model from single-thread speeds; unmeasured tiers get the speed of memory."""
    memory = speeds.local or MEMORY_GUESS

    # Only rates are used; capacities belong to the planner.
    def kept_in(name: str, bytes_per_s: float) -> StorageClass:
        return StorageClass(name=name, capacity_bytes=0, read=ThroughputCurve.flat(bytes_per_s))

    return Bandwidths(
        staging=StagingClass(capacity_bytes=0, write=ThroughputCurve.flat(memory)),
        classes=(kept_in("memory", memory), kept_in("disk", speeds.disk or memory)),
        network_bytes_per_s=speeds.remote or memory,
        storage=ThroughputCurve.through({threads: (speeds.storage or memory) * threads}),
    )


class Advisor:
    """The model's advice. It changes only when speeds change.

    Attributes:
        uses_disk: the disk tier is read and written.
        prefers_disk: samples on disk and in another node's memory are read from disk.
        depth_bytes: bytes to read ahead.
    """

    def __init__(self, *, has_disk: bool, readahead_bytes: int) -> None:
        self._has_disk, self._most_bytes = has_disk, readahead_bytes
        self._told_bytes = readahead_bytes
        self._enough_bytes: deque[int] = deque([readahead_bytes], maxlen=STEADY_LOOKS)  # at the last updates
        self.uses_disk = has_disk
        self.prefers_disk = False
        self.depth_bytes = readahead_bytes

    def weigh(self, speeds: FetchSpeeds, *, threads: int) -> list[str]:
        """Decide whether to use the disk, once both speeds of a comparison are measured. Return log lines."""
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
        """Set the depth for prep that could consume ``pace_per_s`` samples/s; 0 if unknown. Return log lines.

        The model's depth is the least at which prep never waits. It takes rates as given, without the concurrent reads
        that they require, so `READS_IN_FLIGHT` sets a lower bound.
        """
        lacking_bytes = float(upcoming.lacking.sum())
        if speeds.storage is None or not pace_per_s or not lacking_bytes:
            # No data yet, so use the whole budget, as at the start.
            self._enough_bytes.append(self._most_bytes)
            self.depth_bytes = self._most_bytes
            return []
        parts = {STORAGE: upcoming.from_storage, Tier(Locality.OWN, DISK): upcoming.from_disk}
        # Per sample of the order rather than per missing sample: prep consumes cached samples at the same rate.
        consumed_bytes_per_s = pace_per_s * lacking_bytes / upcoming.samples
        depth = readahead_depth(
            bandwidths_of(speeds, threads=threads).read_s(parts, readers=threads),
            np.ceil(upcoming.lacking).astype(np.int64),
            consume_bytes_per_s=consumed_bytes_per_s,
            threads=threads,
        )
        in_flight = int(READS_IN_FLIGHT * threads * lacking_bytes / upcoming.samples)
        # If prep waits in any case, every byte read ahead saves time.
        self._enough_bytes.append(max(depth.nbytes, in_flight) if depth.keeps_up else self._most_bytes)
        # The maximum of the last updates: increased at once, reduced only when all of them agree.
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
    """Return the measured speeds as a log line."""
    known: Sequence[tuple[str, float | None]] = (
        ("memory", speeds.local),
        ("the disk tier", speeds.disk),
        ("other nodes' memory", speeds.remote),
        ("storage", speeds.storage),
    )
    parts = [f"{name} {units.rate(rate)}" for name, rate in known if rate is not None]
    return f"a thread gets from {', '.join(parts)}"
