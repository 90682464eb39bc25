"""The cache node: the actor that reads a dataset's bytes once for all prep workers of its machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import ray

from mbaas.cache.planner import Planner
from mbaas.cache.reading import ReadPool
from mbaas.cache.slab import Load, Rows, squeeze
from mbaas.cache.stats import CacheStats, Meter
from mbaas.cache.views import Fetched, Held, Slab
from mbaas.errors import ConfigError
from mbaas.order import Sweep

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

VALIDATE = os.environ.get("MBAAS_VALIDATE") == "1"
"""Check every invariant after every event; tests do, at a cost that grows with the dataset."""

SlabRef: TypeAlias = "ray.ObjectRef[Slab]"


@ray.remote(num_cpus=0)
class CacheNode:
    """A thin shell around `Planner`: it fills slabs with its own threads and hands out references to them.

    In the object store it takes at most `cache_bytes`, plus `readahead_bytes`, plus a block for each of
    `max_fetches` fetches in progress, plus what fetchers have not released yet. On its heap it holds slabs
    only while they are being filled and copied into the store, one copy at a time.

    A fetch may be repeated at any time, with the same bytes as answer. When the actor dies, its slabs die
    with it; started with `max_restarts=-1` it comes back empty, with another incarnation number, and fills
    anew.
    """

    def __init__(
        self,
        dataset: Dataset,
        sweep: Sweep,
        *,
        cache_bytes: int,
        readahead_bytes: int,
        threads: int = 8,
        max_fetches: int = 16,
    ) -> None:
        """
        Args:
            dataset: whose bytes to read.
            sweep: the order; its blocks are what is fetched.
            cache_bytes: the most that permanent slabs may hold; 0 caches nothing.
            readahead_bytes: the most that may be held for blocks nobody has asked for; 0 reads nothing ahead.
            threads: that read storage.
            max_fetches: fetches in progress at a time; further ones wait.

        Raises:
            ConfigError: a budget is negative, or the sweep is not over the dataset.
        """
        if sweep.num_samples != len(dataset):
            raise ConfigError(f"the sweep must be over {len(dataset)} samples, got {sweep.num_samples}")
        self._incarnation = int.from_bytes(os.urandom(7), "big") + 1
        self._sweep = sweep
        self._planner = Planner(sweep, dataset.lengths, cache_bytes=cache_bytes, readahead_bytes=readahead_bytes)
        self._meter = Meter()
        self._pool = ReadPool(dataset.reader(), threads=threads, meter=self._meter)
        self._putter = ThreadPoolExecutor(1, thread_name_prefix="mbaas-put")
        self._slots = asyncio.Semaphore(max_fetches)
        self._filling: dict[int, asyncio.Task[None]] = {}  # by slab; exactly those that the planner awaits
        self._refs: dict[int, SlabRef] = {}  # by slab; full ones, transient ones until released
        self._peak_transient_bytes = 0

    async def fetch(self, block: int, held: Held | None = None) -> Fetched:
        """The samples of a block, each in a slab.

        Args:
            block: global number, from 0.
            held: the slabs that the caller has and wants no references to; see `SlabViews.held`.

        Raises:
            ConfigError: a negative block.
            Exception: what kept a slab from filling. Samples that cannot be read are in `errors` instead.
        """
        if block < 0:
            raise ConfigError(f"a block's number must be at least 0, got {block}")
        async with self._slots:
            self._start(self._planner.demand(block), urgent=True)
            try:
                self._look_ahead()
                await self._complete(block)
                return self._answer(block, self._planner.deliver(block), held)
            finally:
                self._let_go(self._planner.release(block))
                self._check()

    async def stats(self) -> CacheStats:
        """How the cache is doing."""
        planner, meter = self._planner, self._meter
        return CacheStats(
            incarnation=self._incarnation,
            epochs=dict(meter.epochs),
            total=meter.total,
            budget_bytes=planner.minio.budget_bytes,
            cached_bytes=planner.directory.nbytes,
            cached_samples=planner.directory.samples,
            cached_slabs=len(planner.directory.slab_bytes),
            readahead_budget_bytes=planner.ahead.budget_bytes,
            readahead_bytes=planner.ahead.used_bytes,
            readahead_blocks=planner.ahead_blocks,
            fetching_bytes=planner.transient_bytes - planner.ahead.used_bytes,
            peak_transient_bytes=self._peak_transient_bytes,
            read_s=meter.read_s,
            storage_s=meter.storage_s,
        )

    async def pid(self) -> int:
        """Process id of the node's present incarnation."""
        return os.getpid()

    async def directory_version(self) -> int:
        """Grows whenever samples become cached; starts at 0 in each incarnation."""
        return self._planner.directory.version

    def __ray_shutdown__(self) -> None:
        """Ray calls this before the process ends in good order."""
        self._pool.close()
        self._putter.shutdown()

    async def _complete(self, block: int) -> None:
        """Waits until every slab that `block` needs is full."""
        while True:
            self._start(self._planner.settle(block), urgent=True)
            awaited = self._planner.awaited(block)
            if not awaited:
                return
            self._pool.hurry(awaited)
            await asyncio.gather(*(asyncio.shield(self._filling[slab]) for slab in awaited))

    def _look_ahead(self) -> None:
        ahead = self._planner.look_ahead()
        self._let_go(ahead.dropped)
        self._start(ahead.loads, urgent=False)
        self._check()

    def _start(self, loads: Iterable[Load], *, urgent: bool) -> None:
        for load in loads:
            self._filling[load.slab] = asyncio.create_task(self._fill(load, urgent=urgent))

    async def _fill(self, load: Load, *, urgent: bool) -> None:
        """Reads one slab, puts it into the object store and tells the planner."""
        try:
            slab = np.empty(load.nbytes, dtype=np.uint8)
            failures = await self._pool.fill(load, slab, urgent=urgent)
            if len(failures) < len(load.rows):
                self._refs[load.slab] = await self._put(squeeze(slab, load, failures))
        except Exception as error:
            self._filling.pop(load.slab)
            self._let_go(self._planner.aborted(load, error))
            self._check()
        else:
            self._filling.pop(load.slab)
            self._planner.landed(load, failures)
            self._look_ahead()

    async def _put(self, slab: Slab) -> SlabRef:
        return await asyncio.get_running_loop().run_in_executor(self._putter, ray.put, slab)

    def _let_go(self, slabs: Iterable[int]) -> None:
        for slab in slabs:
            self._refs.pop(slab, None)
            if task := self._filling.pop(slab, None):
                task.cancel()

    def _answer(self, block: int, rows: Rows, held: Held | None) -> Fetched:
        self._meter.count(self._sweep.epoch_of(block), hits=rows.hits, misses=rows.misses, hit_bytes=rows.hit_bytes)
        known = held if held is not None and held.incarnation == self._incarnation else None
        refs = [None if known and known.holds(slab) else self._refs[slab] for slab in rows.slab_ids]
        return Fetched(**vars(rows), incarnation=self._incarnation, slab_refs=refs)

    def _check(self) -> None:
        self._peak_transient_bytes = max(self._peak_transient_bytes, self._planner.transient_bytes)
        if VALIDATE:
            self._planner.validate()
