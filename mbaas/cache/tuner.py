"""The read-ahead depth of a cache node and the use of its disk tier, decided from measured speeds.

The model is `mbaas.allocation.bandwidth`. Storage never replaces another node's memory, even if it is faster: mbaas
guarantees that cached samples are read from storage only once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

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
from mbaas.cache.disk.tier import DISK_THREADS, DiskTier
from mbaas.cache.planner import Planner
from mbaas.cache.read_pool import LATE_S, Hanging, Read
from mbaas.cache.readahead import DEPTH_BLOCKS
from mbaas.cache.speed_probe import probe_speeds
from mbaas.cache.stats import Meter, TransferSums
from mbaas.errors import ConfigError
from mbaas.messages import FetchSpeeds

MEMORY, DISK = 0, 1
"""Levels of a node's storage classes."""

REUSE_RATIO = 1.25
"""An unused disk is used again when it is this many times as fast as storage; near 1 the decision would oscillate."""

MEMORY_GUESS = 5e9
"""Speed of memory in bytes/s until it is measured; far above storage in any case."""

READS_IN_FLIGHT = 2
"""Minimum number of samples read ahead per storage thread; with fewer, threads would be idle."""

STEADY_UPDATES = 10
"""The depth is reduced only after this many consecutive updates that needed less."""

LOGGED_CHANGE = 2.0
"""Changes of the depth by this factor are logged."""

TierName = Literal["remote", "disk", "storage"]
"""Tiers that are measured during regular reads, named as in `FetchSpeeds`."""

ENOUGH_S = 0.05
"""Thread-seconds of reading before a rate counts; shorter measurements are mostly noise."""

FRESH = 0.5
"""Weight of a new rate against older ones: a change shows after a few updates, an outlier has little effect."""

LOOKAHEAD_SAMPLES = 20_000
"""Samples of upcoming blocks used to compute the read-ahead depth: a few milliseconds of work per second."""

LOG_LINES = 20
"""Log lines kept for the coordinator, which reads them about once a second."""


class Speedometer:
    """Current speeds, computed from running totals; None until enough was read."""

    def __init__(self) -> None:
        self.speeds = FetchSpeeds()
        self._counted: dict[TierName, TransferSums] = {}  # totals at the last rate update

    def probed(self, *, local: float, disk: float | None) -> None:
        """Record probed speeds. A disk speed from regular reads takes precedence."""
        known = self.speeds.disk if self.speeds.disk is not None else disk
        self.speeds = replace(self.speeds, local=local, disk=known)

    def update(self, tier: TierName, sums: TransferSums) -> None:
        """Update a tier's speed from its current totals."""
        new = sums.since(self._counted.get(tier, TransferSums()))
        if new.thread_s < ENOUGH_S or not new.nbytes:
            return
        rate = new.nbytes / new.thread_s  # for one thread, with all others active
        if tier in self._counted:
            old = getattr(self.speeds, tier)
            rate = old + FRESH * (rate - old)
        self._counted[tier] = sums
        self.speeds = replace(self.speeds, **{tier: rate})


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
        self._logged_bytes = readahead_bytes
        self._enough_bytes: deque[int] = deque([readahead_bytes], maxlen=STEADY_UPDATES)  # at the last updates
        self.uses_disk = has_disk
        self.prefers_disk = False
        self.depth_bytes = readahead_bytes

    def weigh(self, speeds: FetchSpeeds, *, threads: int) -> list[str]:
        """Decide whether to use the disk, once both speeds of a comparison are measured. Return log lines."""
        if not self._has_disk or speeds.disk is None:
            return []
        model, lines = bandwidths_of(speeds, threads=threads), []
        if speeds.storage is not None:
            again = 1.0 if self.uses_disk else REUSE_RATIO
            is_worthwhile = DISK in model.worthwhile(readers=threads) and speeds.disk >= again * speeds.storage
            if is_worthwhile != self.uses_disk:
                self.uses_disk = is_worthwhile
                lines.append(
                    f"the disk tier is {'used again' if is_worthwhile else 'not used'}: a thread gets "
                    f"{units.rate(speeds.disk)} from it, and {units.rate(speeds.storage)} from storage"
                )
        if speeds.remote is not None:
            own, remote = Tier(Locality.OWN, DISK), Tier(Locality.REMOTE, MEMORY)
            self.prefers_disk = self.uses_disk and model.fastest([own, remote], readers=threads) == own
        return lines

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
        if self._logged_bytes / LOGGED_CHANGE < self.depth_bytes < self._logged_bytes * LOGGED_CHANGE:
            return []
        self._logged_bytes = self.depth_bytes
        why = "storage keeps up with prep" if depth.keeps_up else "storage is slower than prep"
        return [
            f"{units.size(self.depth_bytes)} of at most {units.size(self._most_bytes)} are read ahead: {why}, which "
            f"could take {units.rate(consumed_bytes_per_s)}"
        ]


def speeds_line(speeds: FetchSpeeds) -> str:
    """Return the measured speeds as a log line."""
    known: Sequence[tuple[str, float | None]] = (
        ("memory", speeds.local),
        ("the disk tier", speeds.disk),
        ("other nodes' memory", speeds.remote),
        ("storage", speeds.storage),
    )
    parts = [f"{name} {units.rate(rate)}" for name, rate in known if rate is not None]
    return f"a thread gets from {', '.join(parts)}"


class ReadaheadTuner:
    """Sets a cache node's read-ahead depth, and whether it uses its disk tier, from measured speeds.

    Attributes:
        logged, lines: number of lines logged so far, and the last lines.
    """

    def __init__(self, planner: Planner, meter: Meter, disk: DiskTier | None, *, block_samples: int) -> None:
        self._planner, self._meter, self._disk = planner, meter, disk
        self._blocks = min(DEPTH_BLOCKS, max(2, LOOKAHEAD_SAMPLES // block_samples))
        self._speedometer = Speedometer()
        self._advisor = Advisor(has_disk=disk is not None, readahead_bytes=planner.ahead.budget_bytes)
        self._storage_is_logged = False
        self._late: tuple[Read, float] | None = None  # last logged read, and its age at the next log line
        self._all_replaced = True  # as last logged: each hanging read has a replacement thread
        self.logged, self.lines = 0, deque[str](maxlen=LOG_LINES)
        path, free_bytes = (None, 0) if disk is None else (disk.path, disk.free_bytes)
        # In a separate thread, because the probe takes half a second or more and the node must respond at once.
        prober = ThreadPoolExecutor(1, thread_name_prefix="mbaas-measure")
        self._probe: Future[tuple[float, float | None]] = prober.submit(
            probe_speeds, disk_path=path, disk_bytes=free_bytes, threads=DISK_THREADS
        )
        self._probe.add_done_callback(self._probed)
        prober.shutdown(wait=False)  # the thread ends after its only task

    def _probed(self, probe: Future[tuple[float, float | None]]) -> None:
        try:
            memory, disk = probe.result()
        except ConfigError as error:
            self.log(str(error))
        else:
            self._speedometer.probed(local=memory, disk=disk)

    @property
    def speeds(self) -> FetchSpeeds:
        """Speeds measured so far."""
        return self._speedometer.speeds

    @property
    def uses_disk(self) -> bool:
        """True if there is a disk tier and it is worth using."""
        return self._advisor.uses_disk

    @property
    def prefers_disk(self) -> bool:
        """True if the disk tier is faster than other nodes' memory."""
        return self._advisor.prefers_disk

    async def until_probed(self) -> None:
        """Wait until the disk probe ends; until then its file takes space meant for samples."""
        if not self._probe.done():
            await asyncio.wait([asyncio.wrap_future(self._probe)])

    def update(self, *, threads: int, pace_per_s: float) -> None:
        """Update the speeds and apply the model's advice.

        Args:
            threads: threads that read storage.
            pace_per_s: samples/s that prep on this node could consume; 0 if unknown.
        """
        self._speedometer.update("storage", self._meter.storage.sums())
        self._speedometer.update("disk", self._meter.disk.sums())
        self._speedometer.update("remote", self._meter.remote.sums())
        # Logged once, when all speeds are available; later only changes are logged.
        if self.speeds.storage is not None and self._probe.done() and not self._storage_is_logged:
            self._storage_is_logged = True
            self.log(f"{speeds_line(self.speeds)}; {threads} threads read storage")
        lines = self._advisor.weigh(self.speeds, threads=threads)
        if self._planner.ahead.budget_bytes:
            # Examine the blocks ahead only if a depth can be computed from them.
            matters = pace_per_s and self.speeds.storage is not None and not self._planner.keeps_all
            blocks = self._blocks if matters else 0
            upcoming = self._upcoming(blocks)
            lines += self._advisor.look_ahead(upcoming, self.speeds, threads=threads, pace_per_s=pace_per_s)
            self._planner.ahead.set_depth(self._advisor.depth_bytes)
        for line in lines:
            self.log(line)

    def log_hanging(self, oldest: Read | None, hanging: Hanging, uri: Callable[[int], str], now: float) -> None:
        """Log if the oldest read hangs, again each time its age has doubled. Also log if too many reads hang."""
        if oldest is not None:
            waited_s = now - oldest.since
            due_s = self._late[1] if self._late is not None and self._late[0] == oldest else LATE_S
            if waited_s >= due_s:
                self._late = oldest, 2 * waited_s
                others = f", and {hanging.reads - 1} more hang" if hanging.reads > 1 else ""
                self.log(f"storage has not given {uri(oldest.sample_id)} for {units.seconds(waited_s)}{others}")
        all_replaced = hanging.reads == hanging.replaced
        if self._all_replaced and not all_replaced:
            self.log(
                f"{hanging.reads} reads hang, more than the {hanging.replaced} in whose place others read: "
                "this node reads less, or nothing, until storage answers"
            )
        self._all_replaced = all_replaced

    def _upcoming(self, blocks: int) -> UpcomingBytes:
        parts = self._planner.upcoming(blocks)
        from_storage, from_disk = np.zeros((2, len(parts)))
        for row, part in enumerate(parts):
            on_disk = np.zeros(len(part.lacking), np.bool_)
            if self._disk is not None and self.uses_disk:
                on_disk = self._disk.has(part.lacking)
            from_disk[row], from_storage[row] = part.lengths[on_disk].sum(), part.lengths[~on_disk].sum()
        return UpcomingBytes(sum(part.samples for part in parts), from_storage, from_disk)

    def log(self, line: str) -> None:
        """Append a line to the log, which the coordinator copies into its own."""
        self.logged += 1
        self.lines.append(line)
