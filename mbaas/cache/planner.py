"""What the cache node decides: what is a hit, what is read, what is kept, what is read ahead. Pure.

No Ray, clock, thread or I/O: events come in as calls (`demand`, `landed`, `retry_awaited`, `release`, `look_ahead`),
what is to be done comes back as `Load`s to fill and numbers of slabs to let go.

Everything is decided when a share of a block is scheduled, from the known lengths. So two shares that are in flight at
the same time never read a sample twice if the cache keeps it: the later one counts it as a hit and waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.cache.directory import Directory, MinIO
from mbaas.cache.readahead import DEPTH_BLOCKS, ReadAhead
from mbaas.cache.slab import BlockPlan, Failures, Load, Rows, pack
from mbaas.order import Ids, SampleOrder
from mbaas.placement import PartRequest, PlacementHistory

Lengths = Callable[[Ids], NDArray[np.int64]]
"""Bytes of samples: int64[n] -> int64[n]."""


MOVING = PartRequest(-1)
"""Stands in loads that are made for no block."""


@dataclass(frozen=True)
class Ahead:
    """What read-ahead asks for: slabs to fill, and slabs to let go (their reads need not be finished)."""

    loads: list[Load]
    dropped: list[int]


@dataclass(frozen=True, eq=False)
class Coming:
    """This node's share of a block that will be wanted.

    Attributes:
        samples: in the share.
        lacking: int64[k], those that are neither kept nor on their way.
        lengths: int64[k], their bytes.
    """

    samples: int
    lacking: Ids
    lengths: NDArray[np.int64]


class Planner:
    """The state of one cache node.

    Attributes:
        directory: the samples of all permanent slabs that are full.
        minio: charged with exactly the samples in the directory and in permanent slabs that are being read.
        ahead: holds the slabs of blocks that nobody asked for, permanent ones until they are full.
        atlas: which share of a block is this node's own, and what else it has to know of other nodes.
    """

    def __init__(
        self,
        order: SampleOrder,
        lengths: Lengths,
        *,
        cache_bytes: int,
        readahead_bytes: int,
        placements: PlacementHistory | None = None,
    ) -> None:
        self.directory = Directory(order.num_samples)
        self.minio = MinIO(cache_bytes)
        self.ahead = ReadAhead(readahead_bytes)
        self.placements = placements if placements is not None else PlacementHistory(order)
        self._order = order
        self._lengths = lengths
        self._numbers = itertools.count(1)  # of slabs, of either kind
        self._plans: dict[PartRequest, BlockPlan] = {}  # each is fetched, or read ahead and likely to be
        self._loading: dict[int, Load] = {}  # by slab; every slab that is not full yet
        self._coming: dict[int, int] = {}  # sample -> slab: the samples of all permanent slabs in _loading

    def demand(self, request: PartRequest) -> list[Load]:
        """A fetch of a share begins, to end with `release`. Returns the slabs to fill."""
        loads = [] if request in self._plans else self._schedule(request)
        plan = self._plans[request]
        plan.fetches += 1
        for load in plan.loads:
            self.ahead.let_go(load.slab)
        if self.ahead.budget_bytes and request == self.placements.own(request.block):
            self.ahead.follow(request.block)
        return loads

    def awaited(self, request: PartRequest) -> set[int]:
        """The slabs, not full yet, that a scheduled share needs."""
        plan = self._plans[request]
        own = {load.slab for load in plan.loads if load.slab in self._loading}
        others = plan.sample_ids[plan.hit & (self.directory.slabs(plan.sample_ids) == 0)]
        return own | {self._coming[i] for i in others.tolist() if i in self._coming}

    def landed(self, load: Load, failures: Failures, origins: NDArray[np.int8] | None = None) -> None:
        """A slab is full, and squeezed: without the samples that could not be read, which are not kept.

        ``origins`` int8[rows] say from where the samples came (`Origin`); by default from storage.
        """
        self._stop_loading(load)
        if load.permanent:
            kept = load.kept(failures)
            ids, lengths = load.sample_ids[kept], load.lengths[kept]
            self.minio.give_back(load.nbytes - int(lengths.sum()))
            if len(ids):
                self.directory.publish(load.slab, ids, offsets=pack(lengths), lengths=lengths)
        if plan := self._plan_of(load):
            plan.landed(load, failures, np.zeros(len(load.rows), np.int8) if origins is None else origins)

    def aborted(self, load: Load, failure: Exception) -> list[int]:
        """A slab cannot be filled at all. Returns the block's other slabs to let go, if it was read ahead."""
        self._stop_loading(load)
        if load.permanent:
            self.minio.give_back(load.nbytes)
        plan = self._plan_of(load)
        if plan is None:
            return []
        plan.failure = failure
        if plan.fetches:
            return []
        self.ahead.retreat(plan.request.block)
        return [slab for slab in self._forget(plan) if slab != load.slab]

    def retry_awaited(self, request: PartRequest) -> list[Load]:
        """Schedules again what a share awaited from another one's slab and that slab could not read."""
        plan = self._plans[request]
        return self._place(plan, np.flatnonzero(plan.hit & self._absent(plan.sample_ids)))

    def deliver(self, request: PartRequest) -> Rows:
        """Where the rows of a share lie, once it awaits nothing.

        Raises:
            Exception: whatever kept one of its slabs from being filled.
        """
        plan = self._plans[request]
        if plan.failure is not None:
            raise plan.failure
        return plan.rows(self.directory.lookup(plan.sample_ids))

    def release(self, request: PartRequest) -> list[int]:
        """A fetch of a share ended, well or not. Returns the transient slabs to let go."""
        plan = self._plans[request]
        plan.fetches -= 1
        return [] if plan.fetches else self._forget(plan)

    def look_ahead(self) -> Ahead:
        """Drops what was read ahead and is wanted no more, and schedules blocks ahead within the budget."""
        stale = [p for p in self._plans.values() if not p.fetches and not self._expected(p.request)]
        dropped = [slab for plan in stale for slab in self._forget(plan)]
        loads: list[Load] = []
        for stream in self.ahead.streams:
            while stream.frontier <= stream.head + DEPTH_BLOCKS:
                request = self.placements.own(stream.frontier)
                nbytes = 0 if request in self._plans else self._missing_bytes(request)
                if nbytes and not self.ahead.fits(stream, nbytes):
                    break
                stream.frontier += 1
                loads += self._schedule(request, ahead=True) if nbytes else []
        return Ahead(loads, dropped)

    def upcoming(self, blocks: int) -> list[Coming]:
        """What the next blocks lack that were not scheduled yet, of the stream that was fetched from last."""
        if not self.ahead.streams:
            return []
        first = self.ahead.streams[0].frontier
        parts = [self.placements.ids(self.placements.own(block)) for block in range(first, first + blocks)]
        lacking = [ids[self._absent(ids)] for ids in parts]
        return [Coming(len(ids), lack, self._lengths(lack)) for ids, lack in zip(parts, lacking, strict=True)]

    def _expected(self, request: PartRequest) -> bool:
        """Whether a share that was read ahead will still be asked for."""
        return self.ahead.wants(request.block) and request == self.placements.own(request.block)

    def move_in(self, sample_ids: Ids) -> list[Load]:
        """Samples that other nodes keep are to be kept here, before anybody asks. Returns the slabs to fill."""
        plan = BlockPlan(MOVING, sample_ids, self._lengths(sample_ids))
        rows = np.flatnonzero(self._absent(sample_ids) & self.placements.admits(sample_ids))
        loads = self._place(plan, rows)
        for load in loads:
            if not load.permanent:  # there is no room
                self._stop_loading(load)
        return [load for load in loads if load.permanent]

    def hand_over(self, sample_ids: Ids) -> list[int]:
        """Samples moved to another node: keep them no more. Returns the slabs to let go, which hold nothing else."""
        emptied = self.directory.withdraw(sample_ids)
        self.minio.give_back(sum(emptied.values()))
        return [*emptied]

    @property
    def keeps_all(self) -> bool:
        """Whether the whole dataset is kept here: nothing will ever lack."""
        return self.directory.samples == self._order.num_samples

    @property
    def ahead_blocks(self) -> int:
        """Blocks that are read ahead and not asked for yet."""
        return sum(not plan.fetches for plan in self._plans.values())

    @property
    def transient_bytes(self) -> int:
        """Bytes held beside the cache: transient slabs, and permanent ones that are being filled."""
        own = (load for plan in self._plans.values() for load in plan.loads)
        transient = {load.slab: load for load in own if not load.permanent}
        return sum(load.nbytes for load in (transient | self._loading).values())

    def _schedule(self, request: PartRequest, *, ahead: bool = False) -> list[Load]:
        ids = self.placements.ids(request)
        plan = self._plans[request] = BlockPlan(request, ids, self._lengths(ids))
        loads = self._place(plan, np.arange(len(ids)))
        for load in loads if ahead else ():
            self.ahead.hold(load.slab, block=request.block, nbytes=load.nbytes)
        return loads

    def _place(self, plan: BlockPlan, rows: NDArray[np.int64]) -> list[Load]:
        """Decides for rows of a share: hit, fetched and kept, or fetched for this share alone; and from where."""
        missing = rows[self._absent(plan.sample_ids[rows])]
        ids, lengths = plan.sample_ids[missing], plan.lengths[missing]
        ours = self.placements.admits(ids)
        admitted = ours.copy()
        admitted[ours] = self.minio.admit(lengths[ours])
        sources = np.where(ours, self.placements.former_holders(ids), -1)
        loads = []
        for source in np.unique(sources).tolist():
            for keep, sign in ((True, 1), (False, -1)):
                part = missing[(sources == source) & (admitted == keep)]
                if len(part):
                    loads.append(self._load(plan, part, sign * next(self._numbers), source))
        return loads

    def _load(self, plan: BlockPlan, rows: NDArray[np.int64], slab: int, source: int) -> Load:
        ids, lengths = plan.sample_ids[rows], plan.lengths[rows]
        load = Load(
            slab=slab,
            request=plan.request,
            epoch=self._order.epoch_of(plan.request.block),
            source=self.placements.holder(source) if source >= 0 else None,
            rows=rows,
            sample_ids=ids,
            lengths=lengths,
            offsets=pack(lengths),
            nbytes=int(lengths.sum()),
        )
        plan.add(load)
        self._loading[slab] = load
        if load.permanent:
            self._coming.update(dict.fromkeys(ids.tolist(), slab))
        return load

    def _absent(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """bool[n], true where the sample is neither kept nor being read to be kept."""
        absent = self.directory.slabs(sample_ids) == 0
        if self._coming:
            absent[absent] = [i not in self._coming for i in sample_ids[absent].tolist()]
        return absent

    def _missing_bytes(self, request: PartRequest) -> int:
        ids = self.placements.ids(request)
        return int(self._lengths(ids[self._absent(ids)]).sum())

    def _stop_loading(self, load: Load) -> None:
        del self._loading[load.slab]
        if load.permanent:
            self.ahead.let_go(load.slab)
            for i in load.sample_ids.tolist():
                del self._coming[i]

    def _plan_of(self, load: Load) -> BlockPlan | None:
        """The plan that the slab was read for, unless it is gone; its share may have a newer one."""
        plan = self._plans.get(load.request)
        return plan if plan and any(load is own for own in plan.loads) else None

    def _forget(self, plan: BlockPlan) -> list[int]:
        """Ends a plan and returns its transient slabs; permanent ones that are being read go on."""
        del self._plans[plan.request]
        for slab in plan.transient_slabs():
            self.ahead.let_go(slab)
            self._loading.pop(slab, None)
        return plan.transient_slabs()

    def validate(self) -> None:
        """Re-checks every invariant against every other; costs O(dataset), for tests.

        Raises:
            AssertionError: one of them does not hold.
        """
        self.directory.validate()
        self.ahead.validate()
        permanent = [load for load in self._loading.values() if load.permanent]
        coming = {int(i): load.slab for load in permanent for i in load.sample_ids}
        assert self._coming == coming, "a sample is read for two permanent slabs, or forgotten"
        assert not self.directory.slabs(np.array([*coming], dtype=np.int64)).any(), "kept and read again"
        charged = self.directory.slab_total + sum(load.nbytes for load in permanent)
        assert self.minio.used_bytes == charged <= self.minio.budget_bytes, (charged, self.minio.used_bytes)
        for plan in self._plans.values():
            assert plan.fetches or self.ahead.budget_bytes, f"{plan.request} is nobody's"
            plan.validate()
        self._validate_slabs()

    def _validate_slabs(self) -> None:
        transient = [slab for plan in self._plans.values() for slab in plan.transient_slabs()]
        assert len(transient) == len(set(transient)), "a transient slab belongs to two blocks"
        loading = {slab for slab in self._loading if slab < 0}
        assert loading <= set(transient), "a transient slab is read for nobody"
        unasked = {slab for p in self._plans.values() if not p.fetches for slab in p.transient_slabs()}
        held = set(self.ahead.held_slabs())
        assert {slab for slab in held if slab < 0} == unasked, (held, unasked)
        assert {slab for slab in held if slab > 0} <= set(self._loading), (held, self._loading)
