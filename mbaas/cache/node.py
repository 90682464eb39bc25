"""The cache node: one actor per machine that reads a dataset's bytes once for all its prep workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import ray
from msgspec import structs
from numpy.typing import NDArray
from ray.exceptions import RayError

from mbaas.base import units
from mbaas.base.units import counted
from mbaas.cache.decoded_tier import HandIn
from mbaas.cache.directory import Locations
from mbaas.cache.disk.tier import DISK_THREADS, DiskTier
from mbaas.cache.planner import Planner
from mbaas.cache.read_pool import ReadPool
from mbaas.cache.reader import LOCAL_S, NO_ROWS, FetchReply, KnownSlabs
from mbaas.cache.row_server import RowPool, check_pick
from mbaas.cache.slab import (
    Load,
    Origin,
    OtherForm,
    RowLocations,
    Slab,
    extract,
    joined,
    pack,
    unreadable_part,
    views,
)
from mbaas.cache.stats import CacheStats, EpochCounts, Flow, Meter
from mbaas.cache.tuner import ReadAheadTuner
from mbaas.calls.relay import Relays
from mbaas.errors import ConfigError
from mbaas.model.forms import FormPlan, plan_forms, room_for_decoded
from mbaas.ray_cluster import actor_names, bugs, leftovers
from mbaas.samples.fields import Arrays
from mbaas.samples.order import Ids, SampleOrder
from mbaas.samples.placement import (
    ENCODED,
    DecodedSizes,
    Holdings,
    MovedIn,
    PartRequest,
    PlacementHistory,
    PlacementUpdate,
)
from mbaas.settings import FETCH_THREADS, Disk, Timeouts
from mbaas.wire.samples import Amount, DecodedSamples

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

VALIDATE = os.environ.get("MBAAS_VALIDATE") == "1"
"""Check every invariant after every event. For tests: the cost grows with the dataset."""

PEER_TIMEOUT_S = 10.0
"""Timeout of a hand-over from another node; after that the samples are read from storage."""

MOVE_BATCH = 256
"""Samples moved per call when a node is draining. Their bytes are on the heap of both nodes meanwhile."""

HANG_CHECK_S = 1.0
"""Interval at which a waiting fetch checks for hung storage reads."""

ADOPT_S = 30.0
"""Timeout for copying a prepared part from another node."""

COMPACTION_PAUSE_S = 1.0
"""Pause between a hand-over and the compaction of slabs, because hand-overs come in series."""

ROW_THREADS = 4
"""Threads that copy rows of prepared parts for ranks on other nodes."""

SlabRef: TypeAlias = "ray.ObjectRef[Slab]"


class HandOver(NamedTuple):
    """Samples handed to another node, out of the n it requested."""

    included: NDArray[np.bool_]  # bool[n], samples whose bytes are in `packed`
    packed: Slab  # their bytes, end to end
    other: dict[int, OtherForm]  # row -> form of a sample that is cached here in another form


class CacheNode:
    """The cache of one machine: runs the threads and I/O for a `Planner`, and hands out references to slabs.

    Object store use is bounded by `cache_bytes`, plus `readahead_bytes`, plus a block for each of `max_fetches` running
    fetches, plus slabs that fetchers still reference. The heap only contains slabs that are being filled or copied to
    the store, one copy at a time.

    A fetch may be repeated at any time and returns the same bytes. With `max_restarts=-1`, a dead actor restarts empty
    under a new incarnation number and refills.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: SampleOrder,
        *,
        cache_bytes: int,
        readahead_bytes: int,
        threads: int = FETCH_THREADS,
        max_fetches: int = 16,
        node: str = "",
        feed: str = "",
        coordinator: str = "",
        disk: Sequence[Disk] = (),
        storage_s: float = Timeouts().storage_s,
        decoded: DecodedSamples | None = None,
    ) -> None:
        """
        Args:
            dataset, order: the dataset to read, and its sample order.
            cache_bytes: capacity of permanent slabs; 0 disables caching.
            readahead_bytes: capacity for blocks read ahead of requests; 0 disables read-ahead.
            threads: number of storage threads.
            max_fetches: concurrent fetches; further ones wait.
            node: id of its Ray node, as used in placements.
            feed, coordinator: the feed's name, and its coordinator's actor id; this actor ends with that one. "" for a
                standalone node.
            disk: disks for samples that do not fit in memory.
            storage_s: seconds of retries before an unreadable sample counts as bad.
            decoded: sizes and costs of decoded samples, which determine how many are cached; None for none.

        Raises:
            ConfigError: a disk's path cannot be used.
        """
        # Ray calls the shutdown hook even if the constructor raised, so resources are registered as they are created.
        self._to_close = contextlib.ExitStack()
        # Random rather than counted, because no state survives a restart. Never 0, which is a reader's initial value.
        self._incarnation = int.from_bytes(os.urandom(7), "big") + 1
        self._noted = 0  # log lines that a coordinator has noted
        self._order = order
        self._placements = PlacementHistory(order, node, dataset.stored_ids)
        self._peers: dict[str, Any] = {}
        self._relays = Relays()
        self._whole, self._dataset, self._feed = dataset, dataset.stored, feed
        if coordinator:
            leftovers.end_with(coordinator)
        self._meter = Meter()
        self._decoded = decoded
        # The disk keeps decoded samples in the form of the feed's own pipeline, whatever forms memory has.
        self._form_on_disk = ENCODED if decoded is None else decoded.form
        self._disk: DiskTier | None = None
        if disk:
            identity = "" if decoded is None else decoded.identity
            parts = (disk, self._dataset, self._placements, self._meter, identity)
            self._disk = DiskTier(*parts, classes=lambda ids, sizes: self._planner.disk_classes(ids, sizes))
            self._to_close.callback(self._disk.close)
        self._planner = Planner(
            order,
            self._dataset.lengths,
            cache_bytes=cache_bytes,
            readahead_bytes=readahead_bytes,
            placements=self._placements,
            num_samples=len(self._dataset),
            decoded_on_disk=None if self._disk is None else self._disk.decoded_lengths,
            form_on_disk=self._form_on_disk,
            undecoded_share=0.0 if decoded is None else decoded.undecoded_share,
            draws=dataset.stored_draws,
        )
        self._tuner = ReadAheadTuner(self._planner, self._meter, self._disk, block_samples=order.block_samples)
        self._pool = ReadPool(self._dataset.reader(), threads=threads, meter=self._meter, storage_s=storage_s)
        self._to_close.callback(self._pool.close)
        self._row_server = RowPool(threads=ROW_THREADS)
        self._to_close.callback(self._row_server.close)
        # One thread, so that at most one slab at a time is both on the heap and in the object store.
        self._putter = ThreadPoolExecutor(1, thread_name_prefix="mbaas-put")
        self._to_close.callback(self._putter.shutdown)
        self._slots = asyncio.Semaphore(max_fetches)
        self._filling: dict[int, asyncio.Task[int]] = {}  # by slab; the same slabs as in the planner's _loading
        self._refs: dict[int, SlabRef] = {}  # by slab; full ones, transient ones until released
        self._drops_slabs = False  # permanent slabs were dropped at least once
        self._compacting: asyncio.Task[None] | None = None
        self._peak_transient_bytes = 0
        self._form_plan: FormPlan | None = None  # the newest plan
        self._knows_disk = False  # the newest plan includes the disk's speed
        self._plan_forms()

    # ---- requests from readers ----

    async def fetch(self, request: PartRequest, known: KnownSlabs | None = None, pipeline: str = "") -> FetchReply:
        """Fetch the samples of a block part, as references to their slabs. Slabs in ``known`` are omitted.

        ``pipeline`` is the name of the pipeline that they are for; "" for the feed's own.

        Raises:
            ConfigError: the block number is negative.
            StateError: this node does not have the placement version that the part was cut by.
            Exception: a slab could not be filled. Samples that cannot be read are listed in `errors` instead. A
                `TemporaryReason` there means that the sample is not bad and the caller should retry.
        """
        async with self._fetched(request, pipeline) as rows:
            asked, nbytes = self._planner.to_hand_in(request) if rows.slab_ids else (NO_ROWS, 0)
            form = self._planner.tier.form
            return structs.replace(self._reply(rows, known), hand_in=asked, hand_in_form=form, hand_in_bytes=nbytes)

    async def cache_decoded(
        self,
        request: PartRequest,
        form: int,
        sample_ids: Ids,
        lengths: NDArray[np.int64],
        packed: Slab,
        unfit: list[int],
        is_last: bool,
    ) -> None:
        """Cache decoded samples that a prep worker of this node hands in; see `CacheReader.hand_in`."""
        hand_in = self._planner.begin_hand_in(request, form, sample_ids, lengths, unfit)
        if is_last and form == self._planner.tier.form:
            self._planner.tier.release(request)
        self._check()
        if len(hand_in.sample_ids):
            await self._put_decoded(hand_in, extract(packed, lengths, hand_in.chosen))
        if self._disk is not None and hand_in.to_disk.any():
            chosen = hand_in.to_disk
            await self._disk.write_decoded(sample_ids[chosen], lengths[chosen], extract(packed, lengths, chosen))

    async def _put_decoded(self, hand_in: HandIn, slab: Slab) -> None:
        try:
            self._refs[hand_in.slab] = await self._put(slab)
        except Exception as error:
            bugs.log_bug(error, "while decoded samples were kept")
            self._planner.tier.failed(hand_in)
        else:
            self._planner.hand_in_cached(hand_in)
        self._check()

    async def fetch_packed(self, request: PartRequest, pipeline: str = "") -> tuple[FetchReply, Slab]:
        """Fetch for a caller on another node: all samples are copied end to end into one array."""
        async with self._fetched(request, pipeline) as rows:
            reply = self._reply(rows, None)
            # One array instead of many slabs: Ray would transfer whole slabs, including samples that were not
            # requested.
            slabs = await asyncio.gather(*(ref for ref in reply.slab_refs if ref is not None))
            self._planner.tier.release(request)  # workers on other nodes hand in nothing
            # In the thread of the puts, because this also makes a copy on the heap.
            copy = functools.partial(views, slabs, rows.slab, rows.offset, rows.length)
            packed = await asyncio.get_running_loop().run_in_executor(self._putter, lambda: joined(copy()))
            return structs.replace(reply, slab_refs=[]), packed

    async def pick(self, part_refs: list[ray.ObjectRef[Arrays]], rows: Ids, bad_rows: Ids) -> list[Arrays]:
        """Copy rows out of prepared parts on this node, for a rank on another node; see `RowPool.pick`.

        Raises:
            ConfigError: an invalid argument.
            asyncio.TimeoutError: Ray did not find a part within `LOCAL_S`; the caller should read the part whole.
        """
        check_pick(part_refs, rows, bad_rows, most=self._order.block_samples)
        parts = await asyncio.wait_for(asyncio.gather(*part_refs), LOCAL_S)
        return await self._row_server.pick(parts, rows, bad_rows)

    @ray.method(num_returns=2)
    async def adopt(self, part_refs: list[ray.ObjectRef[Arrays]]) -> tuple[int, Arrays]:
        """Copy a prepared part to this node. Return its size in bytes and its arrays, as two objects.

        The caller owns the copy, which survives the original's node. Raises asyncio.TimeoutError after `ADOPT_S`.
        """
        (arrays,) = await asyncio.wait_for(asyncio.gather(*part_refs), ADOPT_S)
        return sum(array.nbytes for array in arrays.values()), arrays

    @contextlib.asynccontextmanager
    async def _fetched(self, request: PartRequest, pipeline: str) -> AsyncIterator[RowLocations]:
        if request.block < 0:
            raise ConfigError(f"a block's number must be at least 0, got {request.block}")
        if not self._placements.knows(request.block_part):
            await self._learn_placement()
        if (rows := await self._retry_failing(request)) is not None:
            yield rows
            return
        # Bounded, because each fetch may hold a block's bytes in the object store on top of the cache.
        async with self._slots:
            if self._knows_disk and self._disk is not None:
                is_same = self._planner.tier.form == self._form_on_disk
                self._planner.tier.disk_free_bytes = self._disk.free_for_decoded_bytes if is_same else 0
            self._start(self._planner.begin_fetch(request, pipeline), urgent=True)
            try:
                # Before the wait, so that threads this part leaves idle read the next parts.
                self._look_ahead()
                rows = await self._complete(request)
                if rows is None:
                    rows = self._planner.locate(request)
                    epoch = self._placements.chance_epoch(request)
                    self._meter.count(epoch, EpochCounts(fetched=rows.counts))
                yield rows
            finally:
                self._planner.end_fetch(request)
                self._check()

    async def relay(self, coordinator_id: str, coordinator: Any) -> tuple[str, str] | None:
        """Return the relay that takes block calls from this machine's consumers; see `Relays.find`."""
        return await self._relays.find(coordinator_id, coordinator)

    # ---- placement ----

    async def update_placement(self, update: PlacementUpdate) -> None:
        """Apply a new placement. Samples that moved here are fetched from the nodes that cached them."""
        self._placements.add_older(update.older)
        self._placements.add(update.placement, update.holders)
        self._peers = update.caches
        if self._disk is not None:
            self._disk.update_nodes(len(update.placement.node_weights))
        self._planner.placement_changed()
        if update.decoded is not None:
            self._decoded = update.decoded
        self._plan_forms()

    async def keep_decoded(self, decoded: DecodedSamples) -> None:
        """Keep decoded samples in another form, or by other costs, from now on."""
        self._decoded = decoded
        self._plan_forms()
        self._check()

    async def _learn_placement(self) -> None:
        coordinator = actor_names.find_coordinator(self._feed) if self._feed else None
        update = await coordinator.placement_update.remote() if coordinator is not None else None
        if update is not None:
            await self.update_placement(update)

    async def holdings(self) -> Holdings:
        """Return the samples cached on this node."""
        newest, directory = self._placements.newest, self._planner.directory
        ids, decoded = directory.cached_ids(), None
        if directory.decoded.samples:
            kept = directory.lookup(ids)
            decoded = DecodedSizes(kept["form"], np.where(kept["form"] == ENCODED, 0, kept["length"]))
        return Holdings(newest.version if newest is not None else 0, ids, decoded)

    async def dataset(self) -> Dataset:
        """Return the dataset, for a restarted coordinator."""
        return self._whole

    async def move_in(self, within_s: float) -> MovedIn:
        """Fetch samples with their home here from other nodes' caches, because one of these nodes is draining.

        No new batch starts after ``within_s``.
        """
        end, samples = asyncio.get_running_loop().time() + within_s, 0
        ids = self._placements.held_elsewhere()
        for first in range(0, len(ids), MOVE_BATCH):
            if asyncio.get_running_loop().time() >= end:
                return MovedIn(samples, len(ids) - first)
            loads = self._planner.move_in(ids[first : first + MOVE_BATCH])
            self._start(loads, urgent=False)
            # Shielded, so that batches in progress are cached even if the caller gives up.
            samples += sum(await asyncio.gather(*(asyncio.shield(self._filling[load.slab]) for load in loads)))
        return MovedIn(samples)

    async def hand_over(
        self, sample_ids: Ids, lacking: NDArray[np.bool_], lengths: NDArray[np.int64], *, form: int, lends: bool
    ) -> HandOver:
        """Give samples to their new home node, and drop the local copies unless it requested another form.

        Args:
            sample_ids: int64[n].
            lacking: bool[n], samples whose bytes the other node needs; it already has the rest.
            lengths: int64[n], bytes per sample reserved by the other node.
            form: the form that the other node expects.
            lends: the local copies stay: the other node is the former home, and reads a part that was cut by an older
                placement. Samples that are still being read are waited for.
        """
        if lends:
            to_come = [self._filling[slab] for slab in self._planner.slabs_to_come(sample_ids) if slab in self._filling]
            if to_come:
                await asyncio.wait(to_come)
        planner, directory = self._planner, self._planner.directory
        present: NDArray[np.bool_] = directory.slabs(sample_ids) > 0
        included, other = planner.in_form(sample_ids, lacking, lengths, form)
        packed = joined(await self._views(directory.lookup(sample_ids[included])))
        if not lends:
            # Another call may have handed over some of the samples while this one awaited slabs.
            present[[*other]] = False
            planner.withdraw(sample_ids[present & (directory.slabs(sample_ids) > 0)])
            self._check()
            if self._compacting is None or self._compacting.done():
                self._compacting = asyncio.create_task(self._compact())
        return HandOver(included, packed, other)

    async def _views(self, locations: Locations) -> list[Slab]:
        numbers = np.unique(locations["slab"]).tolist()
        slabs = dict(zip(numbers, await asyncio.gather(*(self._refs[slab] for slab in numbers)), strict=True))
        return views(slabs, locations["slab"], locations["offset"], locations["length"])

    async def _compact(self) -> None:
        """Compact slabs until none is worth it."""
        await asyncio.sleep(COMPACTION_PAUSE_S)
        while True:
            async with self._slots:  # like a fetch, it holds a slab on top of the cache
                if (compaction := self._planner.begin_compaction()) is None:
                    return
                try:
                    samples = await self._views(compaction.locations)
                    self._refs[compaction.slab] = await self._put(joined(samples))
                except Exception as error:
                    bugs.log_bug(error, "while slabs were compacted")
                    return
                self._planner.end_compaction(compaction)
                self._check()

    # ---- monitoring ----

    async def stats(self) -> CacheStats:
        planner, meter = self._planner, self._meter
        return CacheStats(
            **structs.asdict(self._flow()),
            threads=self._pool.threads,
            storage=meter.storage.sums(),
            epochs=dict(meter.epochs),
            total=meter.total,
            cached_bytes=planner.directory.nbytes,
            cached_samples=planner.directory.samples,
            cached_slabs=len(planner.directory.slab_bytes),
            decoded=planner.directory.decoded,
            decoded_on_disk=Amount() if self._disk is None else self._disk.decoded,
            readahead_bytes=planner.ahead.used_bytes,
            readahead_blocks=planner.ahead_blocks,
            fetching_bytes=planner.transient_bytes - planner.ahead.used_bytes,
            peak_transient_bytes=self._peak_transient_bytes,
            readahead_depth_bytes=planner.ahead.depth_bytes,
            disks=() if self._disk is None else self._disk.status(),
        )

    async def flow(self, pace_per_s: float, noted: tuple[int, int] = (0, 0)) -> Flow:
        """Return measurements and log lines, and update the read-ahead depth; see `ReadAheadTuner.update`.

        ``noted`` is the incarnation that the caller knows, and how many of its log lines it has noted.
        """
        incarnation, lines = noted
        if incarnation == self._incarnation:
            self._noted = max(self._noted, lines)
        self._tuner.update(threads=self._pool.threads, pace_per_s=pace_per_s)
        now = time.monotonic()
        hanging = self._pool.replace_hanging()
        self._tuner.log_hanging(self._pool.oldest(), hanging, self._dataset.uri, now)
        if self._disk is not None and not self._knows_disk and self._tuner.speeds.disk is not None:
            self._plan_forms()
        for line in (*self._pool.retries.log(self._dataset.uri, now), *(self._disk.log() if self._disk else ())):
            self._tuner.log(line)
        self._look_ahead()
        return self._flow()

    def _flow(self) -> Flow:
        tuner, minio = self._tuner, self._planner.minio
        return Flow(
            incarnation=self._incarnation,
            speeds=tuner.speeds,
            logged=tuner.logged,
            log=tuple(tuner.lines),
            noted=self._noted,
            cpu_s=time.process_time(),
            used_bytes=minio.used_bytes,
            budget_bytes=minio.budget_bytes,
        )

    async def pid(self) -> int:
        """Return the process id of the current incarnation; also serves as a readiness check."""
        return os.getpid()

    def __ray_shutdown__(self) -> None:
        """Close files and threads. Ray calls this on a graceful exit."""
        self._to_close.close()

    # ---- filling slabs ----

    async def _retry_failing(self, request: PartRequest) -> RowLocations | None:
        """Retry a part's failing samples; if this fails, return locations without data. Takes no fetch slot."""
        ids, retries = self._placements.stored(request), self._pool.retries
        if not (failing := retries.failing(ids.tolist())):
            return unreadable_part(ids, self._pool.hung(ids.tolist(), time.monotonic()))
        kept = self._planner.directory.slabs(np.array([*failing], np.int64)) > 0
        failing = {i: failing[i] for i, here in zip([*failing], kept.tolist(), strict=True) if not here}
        if failing and not retries.pause_s(failing, time.monotonic()):
            asked = np.array([*failing], np.int64)
            await self._pool.retry(asked, self._dataset.lengths(asked))
            failing = retries.failing(failing)
        return unreadable_part(ids, failing)

    async def _complete(self, request: PartRequest) -> RowLocations | None:
        """Wait until every slab of a part is full. If storage hangs, return locations without data instead."""
        # A loop, because a slab read for another part may have failed; its samples are then read for this part.
        while True:
            self._start(self._planner.retry_awaited(request), urgent=True)
            awaited = self._planner.awaited(request)
            if not awaited:
                return None
            self._pool.mark_urgent(awaited)
            filling = [self._filling[slab] for slab in awaited]
            # `wait` does not cancel the tasks if this fetch is cancelled; other fetches may need them.
            while (await asyncio.wait(filling, timeout=HANG_CHECK_S))[1]:
                self._pool.replace_hanging()
                ids = self._placements.stored(request)
                if (rows := unreadable_part(ids, self._pool.hung(ids.tolist(), time.monotonic()))) is not None:
                    return rows

    def _look_ahead(self) -> None:
        self._start(self._planner.look_ahead(), urgent=False)
        self._check()

    def _start(self, loads: Iterable[Load], *, urgent: bool) -> None:
        for load in loads:
            self._filling[load.slab] = asyncio.create_task(self._fill(load, urgent=urgent))

    async def _fill(self, load: Load, *, urgent: bool) -> int:
        """Fill one slab, store it and notify the planner. Return how many samples did not come from storage."""
        try:
            # Filled on the heap, because objects in the store are immutable.
            slab = np.empty(load.nbytes, dtype=np.uint8)
            origins = np.full(len(load.rows), Origin.STORAGE, np.int8)  # overwritten where a nearer tier has the sample
            slab, failures = await self._fill_from_nearer(load, slab, origins)
            rows = np.flatnonzero(origins == Origin.STORAGE)
            if load.form != ENCODED:  # storage has no decoded samples; these rows are read again, encoded
                failures.update(dict.fromkeys(rows.tolist(), OtherForm()))
            else:
                failures.update(await self._pool.fill(load, slab, urgent=urgent, rows=rows))
            if self._disk is not None and self._disk.is_used:
                await self._tuner.until_probed()  # until then the probe's file uses the disk's free space
                await self._disk.write(load, slab, origins, failures)
            if len(failures) < len(load.rows):
                self._refs[load.slab] = await self._put(extract(slab, load.lengths, load.readable(failures)))
        except Exception as error:
            # Every waiting fetch receives the error; a slab that was read ahead has none. A dropped slab's task is
            # cancelled, which is not an `Exception` and is not reported.
            bugs.log_bug(error, "while a slab was filled")
            self._filling.pop(load.slab)
            self._planner.failed(load, error)
            self._check()
            return 0
        self._filling.pop(load.slab)
        self._planner.filled(load, failures, origins)
        self._look_ahead()  # the budget may have free bytes now
        return int((origins != Origin.STORAGE).sum())

    async def _fill_from_nearer(self, load: Load, slab: Slab, origins: NDArray[np.int8]) -> tuple[Slab, dict[int, str]]:
        if self._disk is not None and load.peer is not None:
            slab = await self._disk.read(load, slab, origins, self._disk.order.ahead_of_peers(self._tuner.speeds))
        # Includes samples that the disks had, because the other node must drop its copies.
        other = await self._fill_from_peer(load, slab, origins)
        if self._disk is not None:
            slab = await self._disk.read(load, slab, origins)
        return slab, other

    async def _fill_from_peer(self, load: Load, slab: Slab, origins: NDArray[np.int8]) -> dict[int, str]:
        """Fill rows from another node's memory. Return rows that it has in the other form; these are not read here."""
        peer = self._peers.get(load.peer) if load.peer is not None else None
        if peer is None:
            return {}
        lacking = origins == Origin.STORAGE
        try:
            with self._meter.remote.using():
                asked = peer.hand_over.remote(load.sample_ids, lacking, load.lengths, form=load.form, lends=load.lends)
                handed: HandOver
                (handed,) = await asyncio.wait_for(asyncio.gather(asked), PEER_TIMEOUT_S)
                self._meter.remote.moved(len(handed.packed))
        except asyncio.TimeoutError:
            return {}  # treat the node as gone: storage has everything
        except RayError as error:
            bugs.log_bug(error, "in the cache of another node")
            return {}
        included = handed.included
        starts = pack(load.lengths[included]).tolist()
        spans = zip(load.offsets[included].tolist(), load.lengths[included].tolist(), starts, strict=True)
        for offset, length, start in spans:
            slab[offset : offset + length] = handed.packed[start : start + length]
        origins[included] = origins[[*handed.other]] = Origin.REMOTE
        return dict(handed.other)

    async def _put(self, slab: Slab) -> SlabRef:
        return await asyncio.get_running_loop().run_in_executor(self._putter, ray.put, slab)

    def _reply(self, rows: RowLocations, known: KnownSlabs | None) -> FetchReply:
        if known is not None and known.incarnation != self._incarnation:
            known = None  # slabs of an earlier incarnation: the numbers have other meanings now
        refs = [None if known is not None and known.has(slab) else self._refs[slab] for slab in rows.slab_ids]
        # Relative to the caller's slabs: a list of all slabs ever dropped would grow with every move.
        dropped = known.without(self._refs) if known is not None and self._drops_slabs else ()
        return FetchReply(**structs.asdict(rows), incarnation=self._incarnation, slab_refs=refs, dropped_slabs=dropped)

    def _plan_forms(self) -> None:
        if self._decoded is None:
            return
        costs, memory_bytes, disk_bytes = self._decoded.costs, self._planner.minio.budget_bytes, 0
        speed = self._tuner.speeds.disk
        if self._disk is not None and self._disk.is_used and speed is not None:
            costs, disk_bytes = replace(costs, disk_bytes_per_s=speed * DISK_THREADS), self._disk.for_decoded_bytes
            if self._disk.holds_all:  # so no sample is read from storage again
                costs = replace(costs, storage_s=min(costs.storage_s, costs.encoded_bytes * costs.disk_s_per_byte))
            self._knows_disk = True
        samples = self._placements.home_share(len(self._dataset)) * len(self._dataset)
        threads = self._decoded.threads
        plan = plan_forms(costs, samples=samples, threads=threads, memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        memory_bytes, disk_bytes = room_for_decoded(
            plan, costs, samples=samples, memory_bytes=memory_bytes, disk_bytes=disk_bytes
        )
        self._planner.set_decoded_target(self._decoded.form, memory_bytes, costs.decoded_bytes)
        if self._knows_disk and self._disk is not None:
            self._disk.divide(disk_bytes)
        if plan == self._form_plan:
            return
        self._form_plan = plan
        shares = (plan.memory_decoded, memory_bytes, "in memory"), (plan.disk_decoded, disk_bytes, "on disk")
        for share, nbytes, place in shares:
            if share:
                of_all = f"{units.percent(share)} of {counted(round(samples), 'sample')}"
                self._tuner.log(f"{of_all} are to be kept decoded {place}, in up to {units.size(nbytes)}")
        for clause in plan.told:
            self._tuner.log(clause)

    def _check(self) -> None:
        for slab in self._planner.take_dropped():
            self._drops_slabs |= slab > 0
            self._refs.pop(slab, None)
            if task := self._filling.pop(slab, None):
                task.cancel()
        self._peak_transient_bytes = max(self._peak_transient_bytes, self._planner.transient_bytes)
        if VALIDATE:
            self._planner.validate()


# No CPU reserved: the actor must start even if prep workers have taken all CPUs.
CacheNodeActor: Any = ray.remote(num_cpus=0)(CacheNode)
