"""The cache node: the actor that reads a dataset's bytes once for all prep workers of its machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import ray
from msgspec import structs
from numpy.typing import NDArray
from ray.exceptions import RayError

from mbaas import bugs, runtime, units
from mbaas.allocation.forms import FormPlan, plan_forms, room_for_decoded
from mbaas.cache.decoded_tier import HandIn
from mbaas.cache.disk.tier import DISK_THREADS, DiskTier
from mbaas.cache.planner import Planner
from mbaas.cache.read_pool import ReadPool
from mbaas.cache.reader import LOCAL_S, NO_ROWS, FetchReply, KnownSlabs
from mbaas.cache.relay import Relays
from mbaas.cache.row_server import RowPool, check_pick
from mbaas.cache.slab import (
    Load,
    Origin,
    OtherForm,
    RowLocations,
    Slab,
    away,
    joined,
    pack,
    squeeze,
    views,
)
from mbaas.cache.stats import CacheStats, EpochCounts, Flow, Meter
from mbaas.cache.tuner import ReadaheadTuner
from mbaas.errors import ConfigError
from mbaas.fields import Arrays
from mbaas.messages import Amount, DecodedSamples
from mbaas.order import Ids, SampleOrder
from mbaas.placement import Holdings, MovedIn, PartRequest, PlacementHistory, PlacementUpdate
from mbaas.settings import FIRST_FETCH_THREADS, Disk, Timeouts
from mbaas.units import counted

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

VALIDATE = os.environ.get("MBAAS_VALIDATE") == "1"
"""Check every invariant after every event; tests do, at a cost that grows with the dataset."""

PEER_TIMEOUT_S = 10.0
"""How long another node may take to hand samples over; after that they are read from storage."""

MOVED_TOGETHER = 256
"""How many samples move at a time when a node is to go: their bytes are on the heap of both nodes meanwhile."""

LOOK_S = 1.0
"""Period at which a fetch looks whether storage hangs."""

ADOPT_S = 30.0
"""Longest time in which a prepared part comes from another node."""

ROW_THREADS = 4
"""Threads that copy rows of prepared parts for ranks on other nodes."""

SlabRef: TypeAlias = "ray.ObjectRef[Slab]"


class Given(NamedTuple):
    """What another node gets of the n samples that it asked for.

    Attributes:
        kept: bool[n], those whose bytes it gets.
        packed: these, end to end.
        other: int64[n], those that are here in another form than was asked for: see `Planner.in_form`.
    """

    kept: NDArray[np.bool_]
    packed: Slab
    other: NDArray[np.int64]


class CacheNode:
    """The cache of one machine, a thin shell around `Planner`: its own threads fill slabs, and it hands out references.

    In the object store it takes at most `cache_bytes`, plus `readahead_bytes`, plus a block for each of `max_fetches`
    fetches in progress, plus what fetchers have not released yet. On its heap it holds slabs only while they are being
    filled and copied into the store, one copy at a time.

    A fetch may be repeated at any time, with the same bytes as answer. When the actor dies, its slabs die with it;
    started with `max_restarts=-1` it comes back empty, with another incarnation number, and fills anew.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: SampleOrder,
        *,
        cache_bytes: int,
        readahead_bytes: int,
        threads: int = FIRST_FETCH_THREADS,
        max_fetches: int = 16,
        node: str = "",
        feed: str = "",
        coordinator: str = "",
        disk: Disk | None = None,
        storage_s: float = Timeouts().storage_s,
        decoded: DecodedSamples | None = None,
    ) -> None:
        """
        Args:
            dataset: whose bytes to read.
            order: of the samples; parts of its blocks are what is fetched.
            cache_bytes: the most that permanent slabs may hold; 0 caches nothing.
            readahead_bytes: the most that may be held for blocks nobody has asked for; 0 reads nothing ahead.
            threads: that read storage at first; see `set_threads`.
            max_fetches: fetches in progress at a time; further ones wait.
            node: id of its Ray node, by which placements know it.
            disk: a local disk for what memory has no room for; None: there is none.
            feed: the feed that it belongs to; "" for one that stands alone.
            coordinator: actor id of the feed's coordinator, with which it ends; "" for one that stands alone.
            storage_s: how long storage is asked again for a sample that it does not give, before that counts as bad.
            decoded: what decoded samples are and cost, from which follows how many are kept; None: none are.

        Raises:
            ConfigError: a budget is negative, or the order is not that of the dataset.
        """
        # Ray calls the shutdown hook also after a constructor that raised: what it must close is said as it is made.
        self._to_close = contextlib.ExitStack()
        if order.num_samples != len(dataset):
            raise ConfigError(f"the order must be of {len(dataset)} samples, got one of {order.num_samples}")
        # Drawn, not counted: nothing of an earlier incarnation is left here that could tell its number. Never 0, which
        # is that of a reader that has heard of none.
        self._incarnation = int.from_bytes(os.urandom(7), "big") + 1
        self._order = order
        self._placements = PlacementHistory(order, node, dataset.stored_ids)
        self._peers: dict[str, Any] = {}
        self._relays = Relays()
        self._whole, self._dataset, self._feed = dataset, dataset.stored, feed
        if coordinator:
            runtime.end_with(coordinator)
        self._meter = Meter()
        self._disk: DiskTier | None = None
        if disk is not None:
            prefix = "" if decoded is None else decoded.prefix
            self._disk = DiskTier(disk.path, disk.max_bytes, self._dataset, self._placements, self._meter, prefix)
            self._to_close.callback(self._disk.close)
        self._planner = Planner(
            order,
            self._dataset.lengths,
            cache_bytes=cache_bytes,
            readahead_bytes=readahead_bytes,
            placements=self._placements,
            num_samples=len(self._dataset),
            decoded_on_disk=None if self._disk is None else self._disk.decoded_lengths,
            undecoded_share=0.0 if decoded is None else decoded.undecoded_share,
        )
        self._tuner = ReadaheadTuner(self._planner, self._meter, self._disk, block_samples=order.block_samples)
        self._pool = ReadPool(self._dataset.reader(), threads=threads, meter=self._meter, storage_s=storage_s)
        self._to_close.callback(self._pool.close)
        self._row_server = RowPool(threads=ROW_THREADS)
        self._to_close.callback(self._row_server.close)
        # One thread, so that no more than one slab at a time is on the heap and in the object store.
        self._putter = ThreadPoolExecutor(1, thread_name_prefix="mbaas-put")
        self._to_close.callback(self._putter.shutdown)
        self._slots = asyncio.Semaphore(max_fetches)
        self._filling: dict[int, asyncio.Task[int]] = {}  # by slab; exactly those that the planner awaits
        self._refs: dict[int, SlabRef] = {}  # by slab; full ones, transient ones until released
        self._drops_slabs = False  # whether permanent slabs were ever let go
        self._peak_transient_bytes = 0
        self._decoded = decoded
        self._aimed: FormPlan | None = None  # what was planned last
        self._knows_disk = False  # whether it was planned with the disk's speed
        self._aim()

    # ---- what readers ask for ----

    async def fetch(self, request: PartRequest, known: KnownSlabs | None = None) -> FetchReply:
        """Fetch the samples of a part of a block, each in a slab.

        Args:
            request: the part.
            known: the slabs that the caller has, of which it needs no references; see `SlabViews.known`.

        Raises:
            ConfigError: a negative block.
            StateError: the placement by which the part was cut is not known here.
            Exception: what kept a slab from being filled. Samples that cannot be read are in `errors` instead.

        If one of these is a `PassingReason`, the caller is to come again: the sample is not bad.
        """
        async with self._fetched(request) as rows:
            asked, nbytes = self._planner.to_hand_in(request) if rows.slab_ids else (NO_ROWS, 0)
            return structs.replace(self._reply(rows, known), hand_in=asked, hand_in_bytes=nbytes)

    async def keep_decoded(
        self,
        request: PartRequest,
        sample_ids: Ids,
        lengths: NDArray[np.int64],
        packed: Slab,
        unfit: list[int],
        is_last: bool,
    ) -> None:
        """Keep decoded samples that a worker of this node hands in; see `CacheReader.hand_in`."""
        hand_in = self._planner.begin_keeping(request, sample_ids, lengths, unfit)
        if is_last:
            self._planner.not_handed_in(request)
        self._check()
        if len(hand_in.sample_ids):
            await self._put_decoded(hand_in, _of(packed, lengths, hand_in.chosen))
        if self._disk is not None and hand_in.to_disk.any():
            chosen = hand_in.to_disk
            await self._disk.write_decoded(sample_ids[chosen], lengths[chosen], _of(packed, lengths, chosen))

    async def _put_decoded(self, hand_in: HandIn, slab: Slab) -> None:
        try:
            self._refs[hand_in.slab] = await self._put(slab)
        except Exception as error:
            bugs.log_bug(error, "while decoded samples were kept")
            self._planner.keeping_failed(hand_in)
        else:
            self._planner.kept(hand_in)
        self._check()

    async def fetch_packed(self, request: PartRequest) -> tuple[FetchReply, Slab]:
        """Fetch for a caller on another node: all samples end to end in one array, which alone travels."""
        async with self._fetched(request) as rows:
            reply = self._reply(rows, None)
            # One array instead of many slabs: Ray would fetch each slab whole, with the samples that nobody asked for.
            slabs = await asyncio.gather(*(ref for ref in reply.slab_refs if ref is not None))
            self._planner.not_handed_in(request)  # by a worker elsewhere
            # In the same thread as puts: it makes a copy on the heap, too.
            packed = await asyncio.get_running_loop().run_in_executor(self._putter, _pack, rows, slabs)
            return structs.replace(reply, slab_refs=[]), packed

    async def pick(
        self, rank: str, part_refs: list[ray.ObjectRef[Arrays]], rows: Ids, bad_rows: Ids, left_s: float
    ) -> list[Arrays]:
        """Copy rows out of prepared parts of a block that lie on this node, for a rank elsewhere; see `RowPool.pick`.

        Raises:
            ConfigError: a value cannot be; says which, what it is and what it must be.
            asyncio.TimeoutError: Ray does not find a part within `LOCAL_S`; it is better read whole.
        """
        check_pick(rank, part_refs, rows, bad_rows, left_s, most=self._order.block_samples)
        parts = await asyncio.wait_for(asyncio.gather(*part_refs), LOCAL_S)
        return await self._row_server.pick(rank, parts, rows, bad_rows, left_s=left_s)

    @ray.method(num_returns=2)
    async def adopt(self, part_refs: list[ray.ObjectRef[Arrays]]) -> tuple[int, Arrays]:
        """Copy a prepared part of a block to this node, as two returns like those of a prep worker: bytes, and arrays.

        The caller owns the copy, which outlives the node where the part lies now.

        Raises:
            asyncio.TimeoutError: it does not come within `ADOPT_S`.
        """
        (arrays,) = await asyncio.wait_for(asyncio.gather(*part_refs), ADOPT_S)
        return sum(array.nbytes for array in arrays.values()), arrays

    @contextlib.asynccontextmanager
    async def _fetched(self, request: PartRequest) -> AsyncIterator[RowLocations]:
        """Fetch a part and tell where its rows lie; the slabs stay as long as the context, or a reference."""
        if request.block < 0:
            raise ConfigError(f"a block's number must be at least 0, got {request.block}")
        if not self._placements.knows(request.block_part):
            await self._learn_placement()
        if (rows := await self._still_away(request)) is not None:
            yield rows
            return
        # A bound, because each fetch may hold a block's bytes in the object store beyond what the cache may take.
        async with self._slots:
            if self._knows_disk and self._disk is not None:
                self._planner.tier.disk_free_bytes = self._disk.free_for_decoded_bytes
            self._start(self._planner.begin_fetch(request), urgent=True)
            try:
                # Before the wait: threads that this part leaves idle read the next ones meanwhile.
                self._look_ahead()
                rows = await self._complete(request)
                if rows is None:
                    rows = self._planner.locate(request)
                    epoch = self._order.chance_epoch(request.block, request.shuffle)
                    self._meter.count(epoch, EpochCounts(fetched=rows.counts))
                yield rows
            finally:
                self._let_go(self._planner.end_fetch(request))
                self._check()

    async def relay(self, coordinator_id: str, coordinator: Any) -> tuple[str, str] | None:
        """Take calls for blocks from consumers of this machine; see `Relays.find`."""
        return await self._relays.find(coordinator_id, coordinator)

    # ---- placement ----

    async def update_placement(self, update: PlacementUpdate) -> None:
        """Take in a new placement; samples that moved here are fetched from the nodes that kept them."""
        self._placements.add_older(update.older)
        self._placements.add(update.placement, update.holders)
        self._peers = update.caches
        if self._disk is not None:
            self._disk.update_nodes(len(update.placement.node_weights))
        self._planner.placement_changed()
        self._aim()

    async def _learn_placement(self) -> None:
        """Ask the coordinator for the placement, which this node has forgotten if it was restarted."""
        coordinator = runtime.find_coordinator(self._feed) if self._feed else None
        update = await coordinator.placement_update.remote() if coordinator is not None else None
        if update is not None:
            await self.update_placement(update)

    async def holdings(self) -> Holdings:
        """Tell what this node keeps."""
        newest, directory = self._placements.newest, self._planner.directory
        ids, decoded = directory.cached_ids(), None
        if directory.decoded.samples:
            kept = directory.lookup(ids)
            decoded = np.where(kept["decoded"], kept["length"], 0)
        return Holdings(newest.version if newest is not None else 0, ids, decoded)

    async def dataset(self) -> Dataset:
        """Return the dataset, for a coordinator that was restarted."""
        return self._whole

    async def move_in(self, within_s: float) -> MovedIn:
        """Fetch samples that other nodes keep and that have their home here now: one of these nodes is to go.

        Args:
            within_s: after this long no more are begun.
        """
        end, samples = asyncio.get_running_loop().time() + within_s, 0
        ids = self._placements.held_elsewhere()
        for first in range(0, len(ids), MOVED_TOGETHER):
            if asyncio.get_running_loop().time() >= end:
                return MovedIn(samples, len(ids) - first)
            loads = self._planner.move_in(ids[first : first + MOVED_TOGETHER])
            self._start(loads, urgent=False)
            # Shielded: what was begun is kept, even if the caller gives up.
            samples += sum(await asyncio.gather(*(asyncio.shield(self._filling[load.slab]) for load in loads)))
        return MovedIn(samples)

    async def hand_over(
        self, sample_ids: Ids, lacking: NDArray[np.bool_], lengths: NDArray[np.int64], *, decoded: bool
    ) -> Given:
        """Give samples to the node that is their home now, and keep them no more, unless it asks for another form.

        Args:
            sample_ids: int64[n].
            lacking: bool[n], whose bytes that node lacks; of the others it has them.
            lengths: int64[n], bytes for which it has room.
            decoded: whether it believes that they are kept decoded here.
        """
        present: NDArray[np.bool_] = self._planner.directory.slabs(sample_ids) > 0
        given = await self._give(sample_ids, lacking, lengths, decoded=decoded)
        # While slabs were awaited, another call may have handed over some of the samples.
        still = present & (given.other < 0) & (self._planner.directory.slabs(sample_ids) > 0)
        emptied = self._planner.hand_over(sample_ids[still])
        self._drops_slabs = self._drops_slabs or bool(emptied)
        self._let_go(emptied)
        self._check()
        return given

    async def lend(
        self, sample_ids: Ids, lacking: NDArray[np.bool_], lengths: NDArray[np.int64], *, decoded: bool
    ) -> Given:
        """Give copies of samples that live here now to the node where they were, for a part that was cut before.

        Arguments are those of `hand_over`. Samples that are still on their way are waited for.
        """
        to_come = [self._filling[slab] for slab in self._planner.slabs_to_come(sample_ids) if slab in self._filling]
        if to_come:
            await asyncio.wait(to_come)
        return await self._give(sample_ids, lacking, lengths, decoded=decoded)

    async def _give(
        self, sample_ids: Ids, wanted: NDArray[np.bool_], lengths: NDArray[np.int64], *, decoded: bool
    ) -> Given:
        """Give those of the wanted samples that are kept in this form and with these lengths."""
        kept, other = self._planner.in_form(sample_ids, wanted, lengths, decoded=decoded)
        locations = self._planner.directory.lookup(sample_ids[kept])
        numbers = np.unique(locations["slab"]).tolist()
        slabs = dict(zip(numbers, await asyncio.gather(*(self._refs[slab] for slab in numbers)), strict=True))
        packed = joined(views(slabs, locations["slab"], locations["offset"], locations["length"]))
        return Given(kept, packed, other)

    # ---- how it is doing ----

    async def stats(self) -> CacheStats:
        """Tell how the cache is doing."""
        planner, meter, read = self._planner, self._meter, self._meter.storage.sums()
        return CacheStats(
            incarnation=self._incarnation,
            epochs=dict(meter.epochs),
            total=meter.total,
            budget_bytes=planner.minio.budget_bytes,
            cached_bytes=planner.directory.nbytes,
            cached_samples=planner.directory.samples,
            cached_slabs=len(planner.directory.slab_bytes),
            decoded=planner.directory.decoded,
            decoded_on_disk=Amount() if self._disk is None else self._disk.decoded,
            decoded_target_bytes=planner.tier.target_bytes,
            readahead_budget_bytes=planner.ahead.budget_bytes,
            readahead_bytes=planner.ahead.used_bytes,
            readahead_blocks=planner.ahead_blocks,
            fetching_bytes=planner.transient_bytes - planner.ahead.used_bytes,
            peak_transient_bytes=self._peak_transient_bytes,
            read_s=read.thread_s,
            storage_s=read.busy_s,
            threads=self._pool.threads,
            readahead_depth_bytes=planner.ahead.depth_bytes,
            speeds=self._tuner.speeds,
            cpu_s=time.process_time(),
        )

    async def flow(self, pace_per_s: float) -> Flow:
        """Tell running sums and what was decided, and decide anew how far to read ahead.

        Args:
            pace_per_s: samples/s that prep on this node could take; 0: not known.
        """
        self._tuner.look(threads=self._pool.threads, pace_per_s=pace_per_s)
        now = time.monotonic()
        hanging = self._pool.replace_hanging()
        self._tuner.watch(self._pool.oldest(), hanging, self._dataset.uri, now)
        for sentence in self._pool.troubles.log(self._dataset.uri, now):
            self._tuner.tell(sentence)
        if self._disk is not None and not self._knows_disk and self._tuner.speeds.disk is not None:
            self._aim()
        for sentence in self._disk.log() if self._disk is not None else ():
            self._tuner.tell(sentence)
        self._look_ahead()
        meter, tuner = self._meter, self._tuner
        return Flow(
            incarnation=self._incarnation,
            threads=self._pool.threads,
            storage=meter.storage.sums(),
            disk=meter.disk.sums(),
            remote=meter.remote.sums(),
            speeds=tuner.speeds,
            told=tuner.told,
            log=tuple(tuner.log),
            cpu_s=time.process_time(),
            kept_bytes=self._planner.minio.used_bytes,
            budget_bytes=self._planner.minio.budget_bytes,
        )

    async def set_threads(self, threads: int) -> None:
        """Read storage with ``threads`` threads from now on."""
        self._pool.set_threads(threads)

    async def pid(self) -> int:
        """Tell the process id of the node's present incarnation, and that it is up."""
        return os.getpid()

    def __ray_shutdown__(self) -> None:
        """Close files and threads; Ray calls this before the process ends in good order."""
        self._to_close.close()

    # ---- filling slabs ----

    async def _still_away(self, request: PartRequest) -> RowLocations | None:
        """Look whether storage gives the samples of a part that it did not give before; if not, nothing else is read.

        No slot is taken: who waits for storage keeps nobody else from fetching.
        """
        ids, troubles = self._placements.stored(request), self._pool.troubles
        if not (troubled := troubles.among(ids.tolist())):
            return away(ids, self._pool.hung(ids.tolist(), time.monotonic()))
        kept = self._planner.directory.slabs(np.array([*troubled], np.int64)) > 0
        troubled = {i: troubled[i] for i, here in zip([*troubled], kept.tolist(), strict=True) if not here}
        if troubled and not troubles.pause_s(troubled, time.monotonic()):
            asked = np.array([*troubled], np.int64)
            await self._pool.ask_again(asked, self._dataset.lengths(asked))
            troubled = troubles.among(troubled)
        return away(ids, troubled)

    async def _complete(self, request: PartRequest) -> RowLocations | None:
        """Wait until every slab that a part needs is full; or until storage hangs, and tell over which samples."""
        # Again and again: what another part was to read may have failed there, and is read for this one then.
        while True:
            self._start(self._planner.retry_awaited(request), urgent=True)
            awaited = self._planner.awaited(request)
            if not awaited:
                return None
            self._pool.hurry(awaited)
            filling = [self._filling[slab] for slab in awaited]
            # Other fetches may wait for the same slabs when this one is cancelled, and `wait` leaves them alone.
            while (await asyncio.wait(filling, timeout=LOOK_S))[1]:
                self._pool.replace_hanging()
                ids = self._placements.stored(request)
                if (rows := away(ids, self._pool.hung(ids.tolist(), time.monotonic()))) is not None:
                    return rows

    def _look_ahead(self) -> None:
        change = self._planner.look_ahead()
        self._let_go(change.dropped)
        self._start(change.loads, urgent=False)
        self._check()

    def _start(self, loads: Iterable[Load], *, urgent: bool) -> None:
        for load in loads:
            self._filling[load.slab] = asyncio.create_task(self._fill(load, urgent=urgent))

    async def _fill(self, load: Load, *, urgent: bool) -> int:
        """Fill one slab, put it into the object store and tell the planner.

        Returns how many samples came from something nearer than storage.
        """
        try:
            # On the heap, and put into the object store when it is full: what is in there cannot be changed any more.
            slab = np.empty(load.nbytes, dtype=np.uint8)
            origins = np.full(len(load.rows), Origin.STORAGE, np.int8)  # unless something nearer has it
            failures = await self._fill_from_nearer(load, slab, origins)
            rows = np.flatnonzero(origins == Origin.STORAGE)
            if load.decoded:  # which storage has not: those are read anew as it has them
                failures.update(dict.fromkeys(rows.tolist(), OtherForm(0)))
            else:
                failures.update(await self._pool.fill(load, slab, urgent=urgent, rows=rows))
            if self._disk is not None and self._tuner.uses_disk:
                await self._tuner.until_probed()  # until then the disk's room is taken by the file that is measured
                await self._disk.write(load, slab, origins, failures)
            if len(failures) < len(load.rows):
                self._refs[load.slab] = await self._put(squeeze(slab, load, failures))
        except Exception as error:
            # Whatever it is, those that wait for the slab are told: nobody, if it was read ahead. One that was let go
            # is cancelled, and ends in silence.
            bugs.log_bug(error, "while a slab was filled")
            self._filling.pop(load.slab)
            self._let_go(self._planner.failed(load, error))
            self._check()
            return 0
        self._filling.pop(load.slab)
        self._planner.filled(load, failures, origins)
        self._look_ahead()  # bytes of the budget may be free now
        return int((origins != Origin.STORAGE).sum())

    async def _fill_from_nearer(self, load: Load, slab: Slab, origins: NDArray[np.int8]) -> dict[int, str]:
        """Fill what of a slab is nearer than storage, from the fastest tier first. Returns what has another form."""
        disk = self._disk if self._tuner.uses_disk else None
        if disk is not None and self._tuner.prefers_disk:
            await disk.read(load, slab, origins)
        # A node that gives samples away must hear of it, so it is asked also for what the disk had.
        other = await self._fill_from_peer(load, slab, origins)
        if disk is not None:
            await disk.read(load, slab, origins)
        return other

    async def _fill_from_peer(self, load: Load, slab: Slab, origins: NDArray[np.int8]) -> dict[int, str]:
        """Fill what of a slab another node keeps in memory, and have it given up there unless it is only lent.

        Returns what it keeps in another form, which neither the disk nor storage is asked for.
        """
        peer = self._peers.get(load.peer) if load.peer is not None else None
        if peer is None:
            return {}
        lacking = origins == Origin.STORAGE
        try:
            with self._meter.remote.using():
                give = peer.lend if load.lends else peer.hand_over
                asked = give.remote(load.sample_ids, lacking, load.lengths, decoded=load.decoded)
                given: Given = await asyncio.wait_for(_result(asked), PEER_TIMEOUT_S)
                self._meter.remote.moved(len(given.packed))
        except asyncio.TimeoutError:
            return {}  # it is as good as gone: storage has everything
        except RayError as error:
            bugs.log_bug(error, "in the cache of another node")
            return {}
        kept = given.kept
        starts = pack(load.lengths[kept]).tolist()
        spans = zip(load.offsets[kept].tolist(), load.lengths[kept].tolist(), starts, strict=True)
        for offset, length, start in spans:
            slab[offset : offset + length] = given.packed[start : start + length]
        origins[kept | (given.other >= 0)] = Origin.REMOTE
        return {row: OtherForm(int(given.other[row])) for row in np.flatnonzero(given.other >= 0).tolist()}

    async def _put(self, slab: Slab) -> SlabRef:
        return await asyncio.get_running_loop().run_in_executor(self._putter, ray.put, slab)

    def _let_go(self, slabs: Iterable[int]) -> None:
        for slab in slabs:
            self._refs.pop(slab, None)
            if task := self._filling.pop(slab, None):
                task.cancel()

    def _reply(self, rows: RowLocations, known: KnownSlabs | None) -> FetchReply:
        if known is not None and known.incarnation != self._incarnation:
            known = None  # slabs of a node that died: the same numbers mean other slabs now
        refs = [None if known is not None and known.has(slab) else self._refs[slab] for slab in rows.slab_ids]
        # Told from what the caller has: a list of all that ever went would grow with every move.
        dropped = known.without(self._refs) if known is not None and self._drops_slabs else ()
        return FetchReply(**structs.asdict(rows), incarnation=self._incarnation, slab_refs=refs, dropped_slabs=dropped)

    def _aim(self) -> None:
        """Decide how much of the memory and the disk is for decoded samples: anew where samples have come or gone."""
        if self._decoded is None:
            return
        costs, memory_bytes, disk_bytes = self._decoded.costs, self._planner.minio.budget_bytes, 0
        speed = self._tuner.speeds.disk
        if self._disk is not None and self._tuner.uses_disk and speed is not None:
            costs, disk_bytes = (
                replace(costs, disk_bytes_per_s=speed * DISK_THREADS),
                self._disk.for_decoded_bytes,
            )
            if self._disk.holds_all:  # and so none is read from storage again
                costs = replace(costs, storage_s=min(costs.storage_s, costs.encoded_bytes * costs.disk_s_per_byte))
            self._knows_disk = True
        samples = self._placements.home_share(len(self._dataset)) * len(self._dataset)
        plan = plan_forms(
            costs,
            samples=samples,
            threads=self._decoded.threads,
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
        )
        memory_bytes, disk_bytes = room_for_decoded(
            plan, costs, samples=samples, memory_bytes=memory_bytes, disk_bytes=disk_bytes
        )
        self._planner.aim(memory_bytes, costs.decoded_bytes)
        if self._knows_disk and self._disk is not None:
            self._disk.divide(disk_bytes)
        if plan == self._aimed:
            return
        self._aimed = plan
        for share, nbytes, place in (
            (plan.memory_decoded, memory_bytes, "in memory"),
            (plan.disk_decoded, disk_bytes, "on disk"),
        ):
            if share:
                of_all = f"{units.percent(share)} of {counted(round(samples), 'sample')}"
                self._tuner.tell(f"{of_all} are to be kept decoded {place}, in up to {units.size(nbytes)}")
        for clause in plan.told:
            self._tuner.tell(clause)

    def _check(self) -> None:
        if dropped := self._planner.take_dropped():
            self._drops_slabs = True
            self._let_go(dropped)
        self._peak_transient_bytes = max(self._peak_transient_bytes, self._planner.transient_bytes)
        if VALIDATE:
            self._planner.validate()


# It reserves no CPU: it must start even when prep workers have taken them all.
CacheNodeActor: Any = ray.remote(num_cpus=0)(CacheNode)


def _pack(rows: RowLocations, slabs: list[Slab]) -> Slab:
    """Copy the rows end to end; those that could not be read take no bytes."""
    return joined(views(slabs, rows.slab, rows.offset, rows.length))


def _of(packed: Slab, lengths: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Slab:
    """Return the chosen ones, bool[n], of samples of these lengths that lie end to end, end to end."""
    if chosen.all():
        return packed
    return joined(views([packed], np.where(chosen, 0, -1), pack(lengths), lengths))


async def _result(ref: Any) -> Any:
    return await ref
