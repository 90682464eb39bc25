"""The disk tier as a cache node uses it: what goes to it, what comes from it, in threads of its own."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mbaas.cache.disk.store import DiskStats, DiskStore
from mbaas.cache.slab import Failures, Load, Origin, Slab, squeeze
from mbaas.cache.stats import Meter
from mbaas.messages import Amount
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
        prefix: what decoded samples are, told from all that others of the dataset may be; "": there are none.
    """

    def __init__(
        self,
        path: str,
        disk_bytes: int,
        dataset: Dataset,
        placements: PlacementHistory,
        meter: Meter,
        prefix: str = "",
    ) -> None:
        self.path = path
        self._store = DiskStore(path, disk_bytes, dataset.fingerprint, num_samples=len(dataset))
        self._decoded: DiskStore | None = None
        if prefix:
            named = hashlib.blake2b(f"{dataset.fingerprint} {prefix}".encode(), digest_size=16).hexdigest()
            left = max(0, disk_bytes - self._store.stats().used_bytes)
            try:
                self._decoded = DiskStore(path, left, f"{named}-decoded", num_samples=len(dataset))
            except BaseException:  # whatever it is, an interrupt too: the lock of the first would stay
                self._store.close()
                raise
        self._disk_bytes, self._dataset_bytes = disk_bytes, dataset.total_bytes
        self._needed_bytes = float(dataset.total_bytes)  # for all samples that have their home here
        self._placements, self._meter = placements, meter
        self._told = [store.stats() for store in self._stores]  # as it was when `log` was last asked
        self._threads = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="mbaas-disk")

    @property
    def _stores(self) -> list[DiskStore]:
        return [self._store] if self._decoded is None else [self._store, self._decoded]

    @property
    def holds_all(self) -> bool:
        """Whether the disk has room for all samples that have their home here, as storage has them."""
        return self._disk_bytes >= self._needed_bytes

    @property
    def for_decoded_bytes(self) -> int:
        """What of the budget may be for decoded samples.

        A disk that holds all samples as storage has them goes on to do so: then a restart finds them.
        """
        return (
            max(0, self._disk_bytes - math.ceil(DISK_SLACK * self._needed_bytes))
            if self.holds_all
            else self._disk_bytes
        )

    @property
    def free_bytes(self) -> int:
        """What is left of the budget for samples as storage has them."""
        return _free_bytes(self._store)

    @property
    def free_for_decoded_bytes(self) -> int:
        """What is left of the budget for decoded samples."""
        return 0 if self._decoded is None else _free_bytes(self._decoded)

    @property
    def decoded(self) -> Amount:
        """The decoded samples that are here, and the bytes of their files."""
        stats = None if self._decoded is None else self._decoded.stats()
        return Amount() if stats is None else Amount(stats.samples, stats.used_bytes)

    def divide(self, decoded_bytes: int) -> None:
        """Set how much of the budget is for decoded samples, as far as others leave it."""
        if self._decoded is None:
            return
        others = self._store.stats().used_bytes
        decoded_bytes = max(0, min(decoded_bytes, self.for_decoded_bytes, self._disk_bytes - others))
        self._decoded.set_budget(decoded_bytes)
        self._store.set_budget(self._disk_bytes - max(decoded_bytes, self._decoded.stats().used_bytes))

    def log(self) -> list[str]:
        """Write sentences about what went wrong since the last call."""
        before, self._told = self._told, [store.stats() for store in self._stores]
        return [sentence for pair in zip(before, self._told, strict=True) for sentence in self._changes(*pair)]

    def _changes(self, before: DiskStats, now: DiskStats) -> list[str]:
        told = []
        if now.write_failure and not before.write_failure:
            told.append(f"the disk cache keeps nothing more: {now.write_failure}")
        if now.removal_failure and not before.removal_failure:
            told.append(f"the disk cache has less room: {now.removal_failure}")
        if damaged := now.damaged_samples - before.damaged_samples:
            told.append(
                f"{counted(damaged, 'sample')} in the disk cache {self.path} could not be read, or had other "
                f"bytes than were written ({now.damaged_samples} since it was opened): read from storage"
            )
        return told

    def update_nodes(self, nodes: int) -> None:
        """Note on how many nodes the dataset's homes are from now on."""
        self._needed_bytes = DISK_SLACK * self._dataset_bytes / nodes

    def has(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Tell which samples are here, in whatever form: bool[n]."""
        return self._store.has(sample_ids) | (self.decoded_lengths(sample_ids) > 0)

    def decoded_lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the bytes of the samples that are here decoded, 0 for others: int64[n]."""
        return np.zeros(len(sample_ids), np.int64) if self._decoded is None else self._decoded.lengths(sample_ids)

    async def read(self, load: Load, slab: Slab, origins: NDArray[np.int8]) -> None:
        """Fill what of a slab is here in its form, where ``origins`` still say storage, and mark it."""
        store = self._decoded if load.decoded else self._store
        rows = np.flatnonzero(origins == Origin.STORAGE)
        if store is None or not len(rows := rows[store.has(load.sample_ids[rows])]):
            return
        get = functools.partial(self._get, store, buffer=slab, offsets=load.offsets[rows])
        found = await self._in_thread(get, load.sample_ids[rows], load.lengths[rows])
        origins[rows[found]] = Origin.DISK

    def _get(self, store: DiskStore, sample_ids: Ids, lengths: NDArray[np.int64], **target: Any) -> NDArray[np.bool_]:
        with self._meter.disk.using():
            found = store.get(sample_ids, lengths, **target)
            self._meter.disk.moved(int(lengths[found].sum()))
        return found

    async def write(self, load: Load, slab: Slab, origins: NDArray[np.int8], failures: Failures) -> None:
        """Keep what was read from storage and has its home here: what memory has no room for, and all of it if the disk
        holds everything that has its home here, so that a restart finds it.
        """
        if load.decoded or ((load.permanent or load.passing) and not self.holds_all):
            return  # memory keeps it: here it would take the room of what memory has no room for
        keep = self._placements.is_home(load.sample_ids) & (origins == Origin.STORAGE) & load.readable(failures)
        if keep.any():
            # To leave out is what `squeeze` does with failures.
            left_out = dict.fromkeys(np.flatnonzero(~keep).tolist(), "")
            packed = squeeze(slab, load, left_out)
            await self._in_thread(self._store.put, load.sample_ids[keep], load.lengths[keep], packed)

    async def write_decoded(self, sample_ids: Ids, lengths: NDArray[np.int64], packed: Slab) -> None:
        """Keep decoded samples that are not here yet, as far as there is room; ``packed`` has them end to end."""
        if self._decoded is not None and len(sample_ids):
            await self._in_thread(self._decoded.put, sample_ids, lengths, packed)

    async def _in_thread(self, work: Callable[..., NDArray[np.bool_]], *arguments: Any) -> NDArray[np.bool_]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def close(self) -> None:
        """End the threads, after what is being read and written, and let the folder go."""
        self._threads.shutdown()
        for store in self._stores:
            store.close()


def _free_bytes(store: DiskStore) -> int:
    stats = store.stats()
    return max(0, stats.budget_bytes - stats.used_bytes - stats.stale_bytes)
