"""Measuring what a cache node can move, and doing what the bandwidth model (`mbaas.cache.bandwidth`) makes of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from mbaas import units
from mbaas.cache.bandwidth import Advisor, UpcomingBytes, speeds_told
from mbaas.cache.disk.tier import DISK_THREADS, DiskTier
from mbaas.cache.planner import Planner
from mbaas.cache.read_pool import LATE_S, Hanging, Read
from mbaas.cache.readahead import DEPTH_BLOCKS
from mbaas.cache.speeds import Speedometer, try_out
from mbaas.cache.stats import Meter
from mbaas.errors import ConfigError
from mbaas.messages import FetchSpeeds

LOOKED_AHEAD = 20_000
"""Samples of upcoming blocks from which the depth of read-ahead is computed: a few milliseconds of work a second."""

KEPT_LOG = 20
"""Sentences that are kept until a coordinator has read them; it comes about once a second."""


class ReadaheadTuner:
    """The tuner of one cache node: its speeds, and because of them how far it reads ahead and whether it uses its disk.

    Args:
        planner: whose read-ahead it bounds.
        meter: of the node.
        disk: the disk tier, if there is one.
        block_samples: samples in a block of the order.

    Attributes:
        told: how many sentences were logged.
        log: the last of them.
    """

    def __init__(self, planner: Planner, meter: Meter, disk: DiskTier | None, *, block_samples: int) -> None:
        self._planner, self._meter, self._disk = planner, meter, disk
        self._blocks = min(DEPTH_BLOCKS, max(2, LOOKED_AHEAD // block_samples))
        self._speedometer = Speedometer()
        self._advisor = Advisor(has_disk=disk is not None, readahead_bytes=planner.ahead.budget_bytes)
        self._is_storage_told = False
        self._late: tuple[Read, float] | None = None  # the read that was logged last, and when it will be again
        self._all_replaced = True  # whether each read that hangs has another thread in its place, as the log says
        self.told, self.log = 0, deque[str](maxlen=KEPT_LOG)
        path, free_bytes = (None, 0) if disk is None else (disk.path, disk.free_bytes)
        # In a thread of its own: a node answers at once, and what is measured takes half a second or more.
        prober = ThreadPoolExecutor(1, thread_name_prefix="mbaas-measure")
        self._probe: Future[tuple[float, float | None]] = prober.submit(
            try_out, disk_path=path, disk_bytes=free_bytes, threads=DISK_THREADS
        )
        self._probe.add_done_callback(self._probed)
        prober.shutdown(wait=False)  # the thread ends with its only task

    def _probed(self, probe: Future[tuple[float, float | None]]) -> None:
        try:
            memory, disk = probe.result()
        except ConfigError as error:
            self.tell(str(error))
        else:
            self._speedometer.probed(local=memory, disk=disk)

    @property
    def speeds(self) -> FetchSpeeds:
        """What was measured so far."""
        return self._speedometer.speeds

    @property
    def uses_disk(self) -> bool:
        """Whether the disk tier is there and worth using."""
        return self._advisor.uses_disk

    @property
    def prefers_disk(self) -> bool:
        """Whether the disk tier is faster than the memory of other nodes."""
        return self._advisor.prefers_disk

    async def until_probed(self) -> None:
        """Wait until the disk was tried out: until then the file that this needs takes the room of samples."""
        if not self._probe.done():
            await asyncio.wait([asyncio.wrap_future(self._probe)])

    def look(self, *, threads: int, pace_per_s: float) -> None:
        """Take in what was measured, and do what the model says.

        Args:
            threads: how many read storage.
            pace_per_s: samples/s that prep on this node could take; 0: not known.
        """
        self._speedometer.look("storage", self._meter.storage.sums())
        self._speedometer.look("disk", self._meter.disk.sums())
        self._speedometer.look("remote", self._meter.remote.sums())
        # Once, when everything is known that can be: from then on only what changes is told.
        if self.speeds.storage is not None and self._probe.done() and not self._is_storage_told:
            self._is_storage_told = True
            self.tell(f"{speeds_told(self.speeds)}; {threads} threads read storage")
        told = self._advisor.weigh(self.speeds, threads=threads)
        if self._planner.ahead.budget_bytes:
            # The blocks ahead are worth a look only if a depth can follow from them.
            matters = pace_per_s and self.speeds.storage is not None and not self._planner.keeps_all
            blocks = self._blocks if matters else 0
            upcoming = self._upcoming(blocks)
            told += self._advisor.look_ahead(upcoming, self.speeds, threads=threads, pace_per_s=pace_per_s)
            self._planner.ahead.set_depth(self._advisor.depth_bytes)
        for sentence in told:
            self.tell(sentence)

    def watch(self, oldest: Read | None, hanging: Hanging, uri: Callable[[int], str], now: float) -> None:
        """Log a read from storage that hangs, again whenever its time has doubled; and when too many hang.

        Args:
            oldest: the read that has been in progress for the longest time, if there is any.
            hanging: how many hang.
            uri: tells where a sample lies.
            now: on the monotonic clock.
        """
        if oldest is not None:
            waited_s = now - oldest.since
            due_s = self._late[1] if self._late is not None and self._late[0] == oldest else LATE_S
            if waited_s >= due_s:
                self._late = oldest, 2 * waited_s
                others = f", and {hanging.reads - 1} more hang" if hanging.reads > 1 else ""
                self.tell(f"storage has not given {uri(oldest.sample_id)} for {units.seconds(waited_s)}{others}")
        all_replaced = hanging.reads == hanging.replaced
        if self._all_replaced and not all_replaced:
            self.tell(
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

    def tell(self, sentence: str) -> None:
        """Write a sentence into the log, which the coordinator notes."""
        self.told += 1
        self.log.append(sentence)
