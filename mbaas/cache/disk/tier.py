"""The disk tier as a cache node uses it: what goes to it, what comes from it, in threads of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mbaas.cache.disk.store import DiskStore
from mbaas.cache.slab import Failures, Load, Origin, Slab, squeeze
from mbaas.cache.stats import Meter
from mbaas.order import Ids
from mbaas.placement import PlacementHistory
from mbaas.units import counted

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

DISK_THREADS = 4
"""Threads that read and write the disk at once: enough for a solid-state disk to be busy, few beside prep."""

DISK_SLACK = 1.1
"""How much larger than the mean the part of the dataset may be that has its home on one node."""


class DiskTier:
    """The disk tier of one cache node.

    Args:
        path: a folder on a local disk.
        disk_bytes: the most that may be kept there.
        dataset: whose samples they are.
        placements: which of them have their home here.
        meter: counts what is read.
    """

    def __init__(
        self, path: str, disk_bytes: int, dataset: Dataset, placements: PlacementHistory, meter: Meter
    ) -> None:
        self.path = path
        self._store = DiskStore(path, disk_bytes, dataset.fingerprint, num_samples=len(dataset))
        self._disk_bytes, self._dataset_bytes = disk_bytes, dataset.total_bytes
        self._holds_all = disk_bytes >= dataset.total_bytes  # as long as this is the only node
        self._placements, self._meter = placements, meter
        self._told = self._store.stats()  # as it was when `log` was last asked
        self._threads = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="mbaas-disk")

    @property
    def free_bytes(self) -> int:
        """What is left of the budget."""
        stats = self._store.stats()
        return max(0, stats.budget_bytes - stats.used_bytes - stats.stale_bytes)

    def log(self) -> list[str]:
        """Write sentences about what went wrong since the last call."""
        before, self._told = self._told, self._store.stats()
        told = []
        if self._told.write_failure and not before.write_failure:
            told.append(f"the disk cache keeps nothing more: {self._told.write_failure}")
        if self._told.removal_failure and not before.removal_failure:
            told.append(f"the disk cache has less room: {self._told.removal_failure}")
        if damaged := self._told.damaged_samples - before.damaged_samples:
            told.append(
                f"{counted(damaged, 'sample')} in the disk cache {self.path} could not be read, or had other "
                f"bytes than were written ({self._told.damaged_samples} since it was opened): read from storage"
            )
        return told

    def update_nodes(self, nodes: int) -> None:
        """Note on how many nodes the dataset's homes are from now on."""
        self._holds_all = self._disk_bytes >= DISK_SLACK * self._dataset_bytes / nodes

    def has(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Tell which samples are here: bool[n]."""
        return self._store.has(sample_ids)

    async def read(self, load: Load, slab: Slab, origins: NDArray[np.int8]) -> None:
        """Fill what of a slab is here, where ``origins`` still say storage, and mark it."""
        rows = np.flatnonzero(origins == Origin.STORAGE)
        rows = rows[self.has(load.sample_ids[rows])]
        if not len(rows):
            return
        get = functools.partial(self._get, buffer=slab, offsets=load.offsets[rows])
        found = await self._in_thread(get, load.sample_ids[rows], load.lengths[rows])
        origins[rows[found]] = Origin.DISK

    def _get(self, sample_ids: Ids, lengths: NDArray[np.int64], **target: Any) -> NDArray[np.bool_]:
        with self._meter.disk.using():
            found = self._store.get(sample_ids, lengths, **target)
            self._meter.disk.moved(int(lengths[found].sum()))
        return found

    async def write(self, load: Load, slab: Slab, origins: NDArray[np.int8], failures: Failures) -> None:
        """Keep what was read from storage and has its home here: what memory has no room for, and all of it if the disk
        holds everything that has its home here, so that a restart finds it.
        """
        if load.permanent and not self._holds_all:
            return  # memory keeps it: here it would take the room of what memory has no room for
        keep = self._placements.is_home(load.sample_ids) & (origins == Origin.STORAGE) & load.readable(failures)
        if keep.any():
            # To leave out is what `squeeze` does with failures.
            left_out = dict.fromkeys(np.flatnonzero(~keep).tolist(), "")
            packed = squeeze(slab, load, left_out)
            await self._in_thread(self._store.put, load.sample_ids[keep], load.lengths[keep], packed)

    async def _in_thread(self, work: Callable[..., NDArray[np.bool_]], *arguments: Any) -> NDArray[np.bool_]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def close(self) -> None:
        """End the threads, after what is being read and written, and let the folder go."""
        self._threads.shutdown()
        self._store.close()
