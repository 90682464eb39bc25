"""Measures a cache node's speeds, and applies the bandwidth model's advice (`mbaas.model.tiers`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import numpy as np

from mbaas.base import units
from mbaas.cache.disk.tier import DISK_THREADS, DiskTier
from mbaas.cache.planner import Planner
from mbaas.cache.read_pool import LATE_S, Hanging, Read
from mbaas.cache.readahead import DEPTH_BLOCKS
from mbaas.cache.speed_probe import probe_speeds
from mbaas.cache.stats import Meter, TransferSums
from mbaas.errors import ConfigError
from mbaas.model.tiers import Advisor, FetchSpeeds, UpcomingBytes

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
            self.log(f"a thread gets from {self.speeds}; {threads} threads read storage")
        lines = self._advisor.weigh(self.speeds)
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
