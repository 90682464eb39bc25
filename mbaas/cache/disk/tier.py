"""The disk tier of a cache node: admission, reads and writes in its own threads."""

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

from mbaas.base.units import counted
from mbaas.cache.disk.store import DiskStats, DiskStore
from mbaas.cache.slab import Failures, Load, Origin, Slab, extract
from mbaas.cache.stats import Meter
from mbaas.samples.order import Ids
from mbaas.samples.placement import ENCODED, PlacementHistory
from mbaas.wire.samples import Amount

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

DISK_THREADS = 4
"""Threads that access the disk concurrently: enough to saturate a solid-state disk, few compared with prep."""

DISK_SLACK = 1.1
"""Tolerance for the size of the dataset part with its home on one node, relative to the mean."""


class DiskTier:
    """The disk tier of one cache node, in the folder ``path``, with up to ``disk_bytes``.

    It stores samples whose home node this is according to ``placements``. ``identity`` is that of decoded samples,
    as in `DecodedSamples`; "" if none are kept.
    """

    def __init__(
        self,
        path: str,
        disk_bytes: int,
        dataset: Dataset,
        placements: PlacementHistory,
        meter: Meter,
        identity: str = "",
    ) -> None:
        self.path = path
        self._store = DiskStore(path, disk_bytes, dataset.fingerprint, num_samples=len(dataset))
        self._decoded: DiskStore | None = None
        if identity:
            named = hashlib.blake2b(f"{dataset.fingerprint} {identity}".encode(), digest_size=16).hexdigest()
            left = max(0, disk_bytes - self._store.stats().used_bytes)
            try:
                self._decoded = DiskStore(path, left, f"{named}-decoded", num_samples=len(dataset))
            except BaseException:  # including interrupts: the first store's lock would otherwise stay
                self._store.close()
                raise
        self._disk_bytes, self._dataset_bytes = disk_bytes, dataset.total_bytes
        self._needed_bytes = float(dataset.total_bytes)  # for all samples with their home here
        self._placements, self._meter = placements, meter
        self._logged = [store.stats() for store in self._stores]  # at the last `log` call
        self._threads = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="mbaas-disk")

    @property
    def _stores(self) -> list[DiskStore]:
        return [self._store] if self._decoded is None else [self._store, self._decoded]

    @property
    def holds_all(self) -> bool:
        """True if the disk can store all samples with their home here in encoded form."""
        return self._disk_bytes >= self._needed_bytes

    @property
    def for_decoded_bytes(self) -> int:
        """Bytes of the disk budget available to decoded samples: the part beyond all encoded samples if these fit."""
        if not self.holds_all:
            return self._disk_bytes
        return max(0, self._disk_bytes - math.ceil(DISK_SLACK * self._needed_bytes))

    @property
    def free_bytes(self) -> int:
        """Free bytes for encoded samples."""
        return self._store.stats().free_bytes

    @property
    def free_for_decoded_bytes(self) -> int:
        return 0 if self._decoded is None else self._decoded.stats().free_bytes

    @property
    def decoded(self) -> Amount:
        """Number of decoded samples on disk, and the bytes of their files."""
        stats = None if self._decoded is None else self._decoded.stats()
        return Amount() if stats is None else Amount(stats.samples, stats.used_bytes)

    def divide(self, decoded_bytes: int) -> None:
        """Set the bytes for decoded samples, limited by the space that encoded samples leave."""
        if self._decoded is None:
            return
        others = self._store.stats().used_bytes
        decoded_bytes = max(0, min(decoded_bytes, self.for_decoded_bytes, self._disk_bytes - others))
        self._decoded.set_budget(decoded_bytes)
        self._store.set_budget(self._disk_bytes - max(decoded_bytes, self._decoded.stats().used_bytes))

    def log(self) -> list[str]:
        """Return log lines about new failures since the last call."""
        before, self._logged = self._logged, [store.stats() for store in self._stores]
        return [sentence for pair in zip(before, self._logged, strict=True) for sentence in self._changes(*pair)]

    def _changes(self, before: DiskStats, now: DiskStats) -> list[str]:
        lines = []
        if now.write_failure and not before.write_failure:
            lines.append(f"the disk cache keeps nothing more: {now.write_failure}")
        if now.removal_failure and not before.removal_failure:
            lines.append(f"the disk cache has less room: {now.removal_failure}")
        if damaged := now.damaged_samples - before.damaged_samples:
            lines.append(
                f"{counted(damaged, 'sample')} in the disk cache {self.path} could not be read, or had other "
                f"bytes than were written ({now.damaged_samples} since it was opened): read from storage"
            )
        return lines

    def update_nodes(self, nodes: int) -> None:
        self._needed_bytes = DISK_SLACK * self._dataset_bytes / nodes

    def has(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples are stored in any form: bool[n]."""
        return self._store.has(sample_ids) | (self.decoded_lengths(sample_ids) > 0)

    def decoded_lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the bytes of samples stored decoded, 0 for others: int64[n]."""
        return np.zeros(len(sample_ids), np.int64) if self._decoded is None else self._decoded.lengths(sample_ids)

    async def read(self, load: Load, slab: Slab, origins: NDArray[np.int8]) -> None:
        """Fill rows of a slab whose ``origins`` are still storage and that are stored in its form, and mark them."""
        store = self._store if load.form == ENCODED else self._decoded
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
        """Store samples that were read from storage and have their home here, unless memory caches them.

        If all of these fit on disk, cached ones are stored too, so that they survive a restart.
        """
        if load.form != ENCODED or ((load.permanent or load.interim) and not self.holds_all):
            return  # cached in memory; the space is for samples that do not fit there
        keep = self._placements.is_home(load.sample_ids) & (origins == Origin.STORAGE) & load.readable(failures)
        if keep.any():
            packed = extract(slab, load.lengths, keep)
            await self._in_thread(self._store.put, load.sample_ids[keep], load.lengths[keep], packed)

    async def write_decoded(self, sample_ids: Ids, lengths: NDArray[np.int64], packed: Slab) -> None:
        """Store decoded samples that are not stored yet, as many as fit. ``packed`` contains them end to end."""
        if self._decoded is not None and len(sample_ids):
            await self._in_thread(self._decoded.put, sample_ids, lengths, packed)

    async def _in_thread(self, work: Callable[..., NDArray[np.bool_]], *arguments: Any) -> NDArray[np.bool_]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def close(self) -> None:
        """Finish reads and writes in progress, end the threads, and unlock the folders."""
        self._threads.shutdown()
        for store in self._stores:
            store.close()
