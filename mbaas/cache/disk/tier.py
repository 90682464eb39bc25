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
from mbaas.cache.reader import Slab
from mbaas.cache.slab import Failures, Load, Origin, squeeze
from mbaas.cache.stats import Meter
from mbaas.order import Ids
from mbaas.placement import PlacementHistory

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

DISK_THREADS = 4

DISK_SLACK = 1.1
"""A node's share of the dataset may be so much larger than the mean."""


class DiskTier:
    """The disk tier of one cache node.

    Args:
        path: a folder on a local disk.
        disk_bytes: that may be kept there.
        dataset: whose samples they are.
        atlas: which of them are at home here.
        meter: counts what is read.
    """

    def __init__(
        self, path: str, disk_bytes: int, dataset: Dataset, placements: PlacementHistory, meter: Meter
    ) -> None:
        self.path = path
        self._tier = DiskStore(path, disk_bytes, dataset.fingerprint, num_samples=len(dataset))
        self._disk_bytes, self._dataset_bytes = disk_bytes, dataset.total_bytes
        self._holds_all = disk_bytes >= dataset.total_bytes
        self._placements, self._meter = placements, meter
        self._threads = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="mbaas-disk")

    @property
    def free_bytes(self) -> int:
        """What is left of the budget."""
        stats = self._tier.stats()
        return max(0, stats.budget_bytes - stats.used_bytes - stats.stale_bytes)

    def update_nodes(self, nodes: int) -> None:
        """The dataset has homes on so many nodes."""
        self._holds_all = self._disk_bytes >= DISK_SLACK * self._dataset_bytes / nodes

    def has(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """bool[n], which samples are here."""
        return self._tier.has(sample_ids)

    async def read(self, load: Load, slab: Slab, origins: NDArray[np.int8]) -> None:
        """Fill what of a slab is here, where ``origins`` still say storage, and mark it."""
        rows = np.flatnonzero(origins == Origin.STORAGE)
        rows = rows[self.has(load.sample_ids[rows])]
        if not len(rows):
            return
        get = functools.partial(self._get, buffer=slab, offsets=load.offsets[rows])
        found = await self._apart(get, load.sample_ids[rows], load.lengths[rows])
        origins[rows[found]] = Origin.DISK

    def _get(self, sample_ids: Ids, lengths: NDArray[np.int64], **places: Any) -> NDArray[np.bool_]:
        with self._meter.disk.using():
            found = self._tier.get(sample_ids, lengths, **places)
            self._meter.disk.moved(int(lengths[found].sum()))
        return found

    async def write(self, load: Load, slab: Slab, origins: NDArray[np.int8], failures: Failures) -> None:
        """Keep what was read from storage and is at home here: what memory has no room for, and all of it if the disk
        holds this node's whole share, so that a restart finds it.
        """
        if load.permanent and not self._holds_all:
            return
        at_home = self._placements.is_home(load.sample_ids)
        request = at_home & (origins == Origin.STORAGE) & load.kept(failures)
        if request.any():
            left_out = dict.fromkeys(np.flatnonzero(~request).tolist(), "")
            packed = squeeze(slab, load, left_out)
            await self._apart(self._tier.put, load.sample_ids[request], load.lengths[request], packed)

    async def _apart(self, work: Callable[..., NDArray[np.bool_]], *arguments: Any) -> NDArray[np.bool_]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def close(self) -> None:
        """Waits for what is being read and written."""
        self._threads.shutdown()
        self._tier.close()
