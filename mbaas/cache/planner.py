"""What the cache node decides: what is a hit, what is read, what is kept, what is read ahead. Pure.

No Ray, clock, thread or I/O: events come in as calls (`begin_fetch`, `filled`, `failed`, `retry_awaited`, `end_fetch`,
`look_ahead`), what is to be done comes back as `Load`s to fill and numbers of slabs to let go.

Everything is decided when a part of a block is scheduled, from the known lengths. So two parts that are in flight at
the same time never read a sample twice if the cache keeps it: the later one counts it as a hit and waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.cache.directory import Directory, MinIO
from mbaas.cache.readahead import DEPTH_BLOCKS, FetchSequence, ReadAhead
from mbaas.cache.slab import Failures, Load, PartPlan, RowLocations, pack
from mbaas.order import Ids, SampleOrder
from mbaas.placement import PartRequest, PlacementHistory

Lengths = Callable[[Ids], NDArray[np.int64]]
"""Bytes of samples: int64[n] -> int64[n]."""


@dataclass(frozen=True)
class ReadAheadChange:
    """What read-ahead asks for: slabs to fill, and slabs to let go, which need not be full yet."""

    loads: list[Load]
    dropped: list[int]


@dataclass(frozen=True, eq=False)
class UpcomingPart:
    """A part of a block of which this node is the home, and that will be asked for.

    Attributes:
        samples: of the part.
        lacking: int64[k], those that are neither kept nor being read to be kept.
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
        placements: which part of a block is this node's own, and what else it has to know of other nodes.
    """

    def __init__(
        self,
        order: SampleOrder,
        lengths: Lengths,
        *,
        cache_bytes: int,
        readahead_bytes: int,
        placements: PlacementHistory | None = None,
        num_samples: int | None = None,
    ) -> None:
        """
        Args:
            order: of the samples whose blocks are fetched.
            lengths: of stored samples.
            cache_bytes: the most that permanent slabs may hold.
            readahead_bytes: the most that may be held for blocks that nobody asked for.
            placements: see above; by default one that knows of no other node.
            num_samples: of the dataset, as it is stored; by default those of the order.
        """
        self._num_samples = order.num_samples if num_samples is None else num_samples
        self.directory = Directory(self._num_samples)
        self.minio = MinIO(cache_bytes)
        self.ahead = ReadAhead(readahead_bytes)
        self.placements = placements if placements is not None else PlacementHistory(order)
        self._order = order
        self._lengths = lengths
        self._numbers = itertools.count(1)  # of slabs, of either kind
        self._plans: dict[PartRequest, PartPlan] = {}  # each is fetched, or read ahead and likely to be
        self._loading: dict[int, Load] = {}  # by slab; every slab that is not full yet
        self._awaited_in: dict[int, int] = {}  # sample -> slab: the samples of all permanent slabs in _loading

    # ---- fetches ----

    def begin_fetch(self, request: PartRequest) -> list[Load]:
        """Begin a fetch of a part, which lasts until `end_fetch`. Returns the slabs to fill."""
        # A part that was read ahead, or that another worker fetches, has a plan: its reads are under way.
        loads = [] if request in self._plans else self._schedule(request)
        plan = self._plans[request]
        plan.fetches += 1
        # Asked for now, and no more read ahead: that budget is free for the blocks that follow.
        for load in plan.loads:
            self.ahead.release(load.slab)
        # Only a node's own parts are read ahead: others come here by chance, while their home is gone.
        if self.ahead.budget_bytes and request == self.placements.own(request.block, request.shuffle):
            self.ahead.follow(request.block, request.shuffle)
        return loads

    def awaited(self, request: PartRequest) -> set[int]:
        """List the slabs, not full yet, that a scheduled part needs."""
        plan = self._plans[request]
        own = {load.slab for load in plan.loads if load.slab in self._loading}
        # Hits that are on their way into the cache, for another part.
        others = plan.sample_ids[plan.hit & (self.directory.slabs(plan.sample_ids) == 0)]
        return own | self.slabs_to_come(others)

    def retry_awaited(self, request: PartRequest) -> list[Load]:
        """Schedule again what a part awaited from another one's slab, where that slab could not read it."""
        plan = self._plans[request]
        return self._read(plan, np.flatnonzero(plan.hit & self._absent(plan.sample_ids)))

    def locate(self, request: PartRequest) -> RowLocations:
        """Tell where the rows of a part lie, once it awaits nothing.

        Raises:
            Exception: whatever kept one of its slabs from being filled.
        """
        plan = self._plans[request]
        if plan.failure is not None:
            raise plan.failure
        return plan.locate(self.directory.lookup(plan.sample_ids))

    def end_fetch(self, request: PartRequest) -> list[int]:
        """End a fetch of a part, which went well or not. Returns the transient slabs to let go."""
        plan = self._plans[request]
        plan.fetches -= 1
        return [] if plan.fetches else self._forget(plan)

    # ---- slabs ----

    def filled(self, load: Load, failures: Failures, origins: NDArray[np.int8] | None = None) -> None:
        """Note that a slab is full, and squeezed: without the samples that could not be read, which are not kept.

        ``origins`` int8[rows] say from where the samples came (`Origin`); by default from storage.
        """
        self._end_loading(load)
        if load.permanent:
            readable = load.readable(failures)
            ids, lengths = load.sample_ids[readable], load.lengths[readable]
            self.minio.give_back(load.nbytes - int(lengths.sum()))
            if len(ids):
                self.directory.publish(load.slab, ids, offsets=pack(lengths), lengths=lengths)
        if plan := self._plan_of(load):
            plan.filled(load, failures, np.zeros(len(load.rows), np.int8) if origins is None else origins)

    def failed(self, load: Load, failure: Exception) -> list[int]:
        """Note that a slab cannot be filled. Returns the other slabs of its part to let go, if that was read ahead."""
        self._end_loading(load)
        if load.permanent:
            self.minio.give_back(load.nbytes)
        plan = self._plan_of(load)
        if plan is None:
            return []
        plan.failure = failure
        if plan.fetches:
            return []
        # Nobody has seen the failure: it may be gone when somebody asks for the block, which then begins afresh.
        self.ahead.retreat(plan.request.block)
        return [slab for slab in self._forget(plan) if slab != load.slab]

    # ---- read-ahead ----

    def look_ahead(self) -> ReadAheadChange:
        """Drop what was read ahead and is expected no more, and schedule blocks ahead within the budget."""
        stale = [p for p in self._plans.values() if not p.fetches and not self._expected(p.request)]
        dropped = [slab for plan in stale for slab in self._forget(plan)]
        loads: list[Load] = []
        for sequence in self.ahead.sequences:
            while sequence.frontier <= sequence.head + DEPTH_BLOCKS:
                request = self._own_ahead(sequence, sequence.frontier)
                # A part that has a plan is read already; one that lacks nothing is kept.
                nbytes = 0 if request in self._plans else self._missing_bytes(request)
                if nbytes and not self.ahead.fits(sequence, nbytes):
                    break  # and no smaller block after it, for this one is needed first
                sequence.frontier += 1
                loads += self._schedule(request, ahead=True) if nbytes else []
        return ReadAheadChange(loads, dropped)

    def upcoming(self, blocks: int) -> list[UpcomingPart]:
        """Tell what the next blocks lack that were not scheduled yet, of the sequence that was fetched from last."""
        if not self.ahead.sequences:
            return []
        sequence = self.ahead.sequences[0]
        following = range(sequence.frontier, sequence.frontier + blocks)
        parts = [self.placements.stored(self._own_ahead(sequence, block)) for block in following]
        lacking = [ids[self._absent(ids)] for ids in parts]
        return [UpcomingPart(len(ids), lack, self._lengths(lack)) for ids, lack in zip(parts, lacking, strict=True)]

    def _own_ahead(self, sequence: FetchSequence, block: int) -> PartRequest:
        """Return this node's own part of a block ahead of a sequence."""
        shuffle, epochs = sequence.shuffle, self._order.epoch_of(block) - self._order.epoch_of(sequence.head)
        if shuffle is not None and epochs:
            # How the next epoch is shuffled is known when it begins. Most likely nobody comes or goes until then; if
            # somebody does, a few samples are read ahead in vain.
            shuffle = shuffle.after(shuffle.epoch + epochs, shuffle.cuts)
        return self.placements.own(block, shuffle)

    def _expected(self, request: PartRequest) -> bool:
        """Tell whether a part that was read ahead will still be asked for.

        Not if the placement has changed, or its epoch is shuffled in another way than was expected.
        """
        block = request.block
        return request == self.placements.own(block, request.shuffle) and any(
            block <= sequence.head or request == self._own_ahead(sequence, block)
            for sequence in self.ahead.sequences
            if sequence.covers(block)
        )

    # ---- samples that move between nodes ----

    def slabs_to_come(self, sample_ids: Ids) -> set[int]:
        """List the slabs, not full yet, in which samples will be kept."""
        return {self._awaited_in[i] for i in sample_ids.tolist() if i in self._awaited_in}

    def move_in(self, sample_ids: Ids) -> list[Load]:
        """Keep samples here that other nodes kept, before anybody asks. Returns the slabs to fill."""
        # Admitted again here: the placement may have changed since the caller asked which samples to move.
        ids = sample_ids[self._absent(sample_ids) & self.placements.admits(sample_ids)]
        admitted = self.minio.admit(self._lengths(ids))  # what there is no room for stays where it is
        ids = ids[admitted]
        holders, keep = self.placements.former_holders(ids), np.ones(len(ids), np.bool_)
        return self._loads(None, np.arange(len(ids)), ids, self._lengths(ids), holders, keep)

    def hand_over(self, sample_ids: Ids) -> list[int]:
        """Keep samples no more that moved to another node. Returns the slabs to let go, which hold nothing else."""
        emptied = self.directory.withdraw(sample_ids)
        # Whole slabs only: the bytes of a sample that went are there until those of its neighbours go.
        self.minio.give_back(sum(emptied.values()))
        return [*emptied]

    # ---- how it is doing ----

    @property
    def keeps_all(self) -> bool:
        """Whether the whole dataset is kept here: nothing will ever lack."""
        return self.directory.samples == self._num_samples

    @property
    def ahead_blocks(self) -> int:
        """Blocks that are read ahead and not asked for yet."""
        return sum(not plan.fetches for plan in self._plans.values())

    @property
    def transient_bytes(self) -> int:
        """Bytes held beside the cache: transient slabs, and permanent ones that are being filled."""
        own = (load for plan in self._plans.values() for load in plan.loads)
        transient = {load.slab: load for load in own if not load.permanent}
        # By slab, because one that is transient and not full yet is in both.
        return sum(load.nbytes for load in (transient | self._loading).values())

    # ---- decisions ----

    def _schedule(self, request: PartRequest, *, ahead: bool = False) -> list[Load]:
        ids = self.placements.stored(request)
        plan = self._plans[request] = PartPlan(request, ids, self._lengths(ids))
        loads = self._read(plan, np.arange(len(ids)))
        for load in loads if ahead else ():
            self.ahead.hold(load.slab, block=request.block, nbytes=load.nbytes)
        return loads

    def _read(self, plan: PartPlan, rows: NDArray[np.int64]) -> list[Load]:
        """Decide for rows of a part: hit, fetched and kept, or fetched for this part alone; and from where."""
        missing = rows[self._absent(plan.sample_ids[rows])]
        ids, lengths = plan.sample_ids[missing], plan.lengths[missing]
        # Only samples that placement gives to this node: whatever else came here, for a part of another node, would
        # take the room of samples that all nodes expect here.
        admits = self.placements.admits(ids)
        keep = admits.copy()
        keep[admits] = self.minio.admit(lengths[admits])
        # Another node hands over only what is to live here from now on; the rest it goes on keeping for its own home.
        holders = np.where(admits, self.placements.former_holders(ids), -1)
        lenders = np.where(admits, -1, self.placements.lenders(plan.request, ids))
        lent = lenders >= 0
        loads = self._loads(
            plan.request, missing[~lent], ids[~lent], lengths[~lent], holders[~lent], keep[~lent]
        ) + self._loads(plan.request, missing[lent], ids[lent], lengths[lent], lenders[lent], keep[lent], lends=True)
        for load in loads:
            plan.add(load)
        return loads

    def _loads(
        self,
        request: PartRequest | None,
        rows: NDArray[np.int64],
        ids: Ids,
        lengths: NDArray[np.int64],
        holders: NDArray[np.integer[Any]],
        keep: NDArray[np.bool_],
        *,
        lends: bool = False,
    ) -> list[Load]:
        """Plan slabs for samples: those that one node may still have go together, and so do those that are kept."""
        name = self.placements.lender if lends else self.placements.holder
        loads = []
        for holder, kept in itertools.product(np.unique(holders).tolist(), (True, False)):
            chosen = (holders == holder) & (keep == kept)
            if chosen.any():
                number = next(self._numbers)
                load = Load(
                    slab=number if kept else -number,
                    request=request,
                    epoch=self._order.chance_epoch(request.block, request.shuffle) if request is not None else None,
                    peer=name(holder) if holder >= 0 else None,
                    rows=rows[chosen],
                    sample_ids=ids[chosen],
                    lengths=lengths[chosen],
                    lends=lends,
                )
                self._begin_loading(load)
                loads.append(load)
        return loads

    def _begin_loading(self, load: Load) -> None:
        self._loading[load.slab] = load
        if load.permanent:
            self._awaited_in.update(dict.fromkeys(load.sample_ids.tolist(), load.slab))

    def _absent(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Tell which samples are neither kept nor being read to be kept: bool[n]."""
        absent = self.directory.slabs(sample_ids) == 0
        # A look into a dict for each sample, but only of those that are not kept, and only while slabs are read.
        if self._awaited_in:
            absent[absent] = [i not in self._awaited_in for i in sample_ids[absent].tolist()]
        return absent

    def _missing_bytes(self, request: PartRequest) -> int:
        ids = self.placements.stored(request)
        return int(self._lengths(ids[self._absent(ids)]).sum())

    def _end_loading(self, load: Load) -> None:
        del self._loading[load.slab]
        if load.permanent:
            self.ahead.release(load.slab)
            for i in load.sample_ids.tolist():
                del self._awaited_in[i]

    def _plan_of(self, load: Load) -> PartPlan | None:
        """Find the plan that the slab was read for, unless it is gone; its part may have a newer one."""
        plan = self._plans.get(load.request) if load.request is not None else None
        return plan if plan and any(load is own for own in plan.loads) else None

    def _forget(self, plan: PartPlan) -> list[int]:
        """End a plan and return its transient slabs; permanent ones that are being read go on."""
        del self._plans[plan.request]
        for slab in plan.transient_slabs():
            self.ahead.release(slab)
            self._loading.pop(slab, None)
        return plan.transient_slabs()

    def validate(self) -> None:
        """Re-check every invariant against every other; costs O(dataset), for tests.

        Raises:
            AssertionError: one of them does not hold.
        """
        self.directory.validate()
        self.ahead.validate()
        permanent = [load for load in self._loading.values() if load.permanent]
        awaited_in = {int(i): load.slab for load in permanent for i in load.sample_ids}
        assert self._awaited_in == awaited_in, "a sample is read for two permanent slabs, or forgotten"
        assert not self.directory.slabs(np.array([*awaited_in], dtype=np.int64)).any(), "kept and read again"
        charged = self.directory.slab_total + sum(load.nbytes for load in permanent)
        assert self.minio.used_bytes == charged <= self.minio.budget_bytes, (charged, self.minio.used_bytes)
        for plan in self._plans.values():
            assert plan.fetches or self.ahead.budget_bytes, f"{plan.request} is fetched by nobody"
            plan.validate()
        self._validate_slabs()

    def _validate_slabs(self) -> None:
        transient = [slab for plan in self._plans.values() for slab in plan.transient_slabs()]
        assert len(transient) == len(set(transient)), "a transient slab belongs to two parts"
        loading = {slab for slab in self._loading if slab < 0}
        assert loading <= set(transient), "a transient slab is read for nobody"
        unasked = {slab for p in self._plans.values() if not p.fetches for slab in p.transient_slabs()}
        held = set(self.ahead.held_slabs())
        assert {slab for slab in held if slab < 0} == unasked, (held, unasked)
        assert {slab for slab in held if slab > 0} <= set(self._loading), (held, self._loading)
