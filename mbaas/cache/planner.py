"""What the cache node decides: what is a hit, what is read, what is kept, in which form, what is read ahead. Pure.

No Ray, clock, thread or I/O: events come in as calls (`begin_fetch`, `filled`, `failed`, `retry_awaited`, `end_fetch`,
`look_ahead`, `begin_keeping`, `kept`), what is to be done comes back as `Load`s to fill and numbers of slabs to let go.

Everything is decided when a part of a block is scheduled, from the known lengths. So two parts that are in flight at
the same time never read a sample twice if the cache keeps it: the later one counts it as a hit and waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.cache.decoded_tier import DecodedTier, HandIn
from mbaas.cache.directory import Directory, MinIO, among, fitting
from mbaas.cache.readahead import DEPTH_BLOCKS, FetchSequence, ReadAhead
from mbaas.cache.slab import Failures, Load, OtherForm, PartPlan, RowLocations, pack
from mbaas.order import Ids, SampleOrder
from mbaas.placement import PartRequest, PlacementHistory

SEEN = 32
"""Decoded samples whose mean size is believed more than what was estimated."""

Lengths = Callable[[Ids], NDArray[np.int64]]
"""Bytes of samples: int64[n] -> int64[n]."""


class ReadAheadChange(Struct, frozen=True):
    """What read-ahead asks for: slabs to fill, and slabs to let go, which need not be full yet."""

    loads: list[Load]
    dropped: list[int]


class UpcomingPart(Struct, frozen=True, eq=False):
    """A part of a block of which this node is the home, and that will be asked for.

    Attributes:
        samples: of the part.
        lacking: int64[k], those that are neither kept nor being read to be kept.
        lengths: int64[k], their bytes.
    """

    samples: int
    lacking: Ids
    lengths: NDArray[np.int64]


def _none_of(sample_ids: Ids) -> NDArray[np.int64]:
    return np.zeros(len(sample_ids), np.int64)


class _Found(NamedTuple):
    """Where samples are read, and in which form.

    Attributes:
        sample_ids: int64[n].
        lengths: int64[n], bytes of what is read.
        holders: int[n], another node that may have each; -1 where none has.
        decoded: bool[n], whether it has it decoded.
    """

    sample_ids: Ids
    lengths: NDArray[np.int64]
    holders: NDArray[np.integer[Any]]
    decoded: NDArray[np.bool_]

    def only(self, chosen: NDArray[np.bool_]) -> _Found:
        """Return the chosen ones: bool[n]."""
        return _Found(self.sample_ids[chosen], self.lengths[chosen], self.holders[chosen], self.decoded[chosen])


class Planner:
    """The state of one cache node.

    Attributes:
        directory: the samples of all permanent slabs that are full.
        minio: charged with exactly the samples in the directory and in permanent slabs that are being read, and with
            what the decoded tier promises and is handed in.
        tier: which samples are kept decoded, and how many bytes are for these; none until `aim`.
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
        decoded_on_disk: Lengths | None = None,
        undecoded_share: float = 0.0,
    ) -> None:
        """
        Args:
            order: of the samples whose blocks are fetched.
            lengths: of stored samples.
            cache_bytes: the most that permanent slabs may hold.
            readahead_bytes: the most that may be held for blocks that nobody asked for.
            placements: see above; by default one that knows of no other node.
            num_samples: of the dataset, as it is stored; by default those of the order.
            decoded_on_disk: of decoded samples that this node's disk has, 0 for others; by default it has none.
            undecoded_share: of the samples, none of which is kept decoded; see `DecodedSamples`.
        """
        self._num_samples = order.num_samples if num_samples is None else num_samples
        self.directory = Directory(self._num_samples)
        self.minio = MinIO(cache_bytes)
        self.tier = DecodedTier(undecoded_share=undecoded_share)
        self.ahead = ReadAhead(readahead_bytes)
        self.placements = placements if placements is not None else PlacementHistory(order)
        self._order = order
        # An epoch at most: after it the same samples come again, and until then most of them will be kept.
        self._depth = min(DEPTH_BLOCKS, max(2, order.blocks_per_epoch))
        self._lengths = lengths
        self._decoded_on_disk = decoded_on_disk if decoded_on_disk is not None else _none_of
        self._numbers = itertools.count(1)  # of slabs, of either kind
        self._plans: dict[PartRequest, PartPlan] = {}  # each is fetched, or read ahead and likely to be
        self._loading: dict[int, Load] = {}  # by slab; every slab that is not full yet
        self._awaited_in: dict[int, int] = {}  # sample -> slab: the samples of all permanent slabs in _loading
        self._other_forms: dict[int, int] = {}  # since the placement: sample -> its bytes if decoded elsewhere, or 0
        self._passing: set[int] = set()  # permanent slabs whose samples were to be handed in decoded when it was filled
        self._dropped: list[int] = []  # slabs that gave way, until somebody takes them

    # ---- fetches ----

    def begin_fetch(self, request: PartRequest) -> list[Load]:
        """Begin a fetch of a part, which lasts until `end_fetch`. Returns the slabs to fill."""
        self.minio.give_back(self.tier.fetched(request))
        # For what will be promised next. Not while blocks are read ahead, whose bytes are counted before.
        self._make_room(self._decoded_bytes(request), decoded=True)
        # A part that was read ahead, or that another worker fetches, has a plan: its reads are under way.
        if (plan := self._plans.get(request)) is None:
            loads = self._schedule(request)
            plan = self._plans[request]
        else:
            loads = []
            self._promise(plan)  # there may have been no room when it was read ahead
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

    def to_hand_in(self, request: PartRequest) -> tuple[NDArray[np.int64], int]:
        """Tell which rows of a part the worker that fetches it is to hand in decoded, and how many bytes at most."""
        expected, nbytes = self.tier.promised(request)
        if not expected:
            return np.zeros(0, np.int64), 0
        ids = self._plans[request].sample_ids
        return np.flatnonzero(among(ids, expected)), nbytes

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
        readable = load.readable(failures)
        if load.permanent:
            ids, lengths = load.sample_ids[readable], load.lengths[readable]
            self._give_back(load, load.nbytes - int(lengths.sum()))
            if len(ids):
                offsets = pack(lengths)
                self.directory.publish(load.slab, ids, offsets=offsets, lengths=lengths, decoded=load.decoded)
                if load.passing:
                    self._passing.add(load.slab)
        elsewhere = {i: why.decoded_bytes for i, why in failures.items() if isinstance(why, OtherForm)}
        self._other_forms.update(zip(load.sample_ids[list(elsewhere)].tolist(), elsewhere.values(), strict=True))
        if load.request is not None and elsewhere:  # what comes decoded need not be handed in
            self._end_promise(load.request, load.sample_ids[[i for i, nbytes in elsewhere.items() if nbytes]])
        if plan := self._plan_of(load):
            plan.filled(load, failures, np.zeros(len(load.rows), np.int8) if origins is None else origins)

    def failed(self, load: Load, failure: Exception) -> list[int]:
        """Note that a slab cannot be filled. Returns the other slabs of its part to let go, if that was read ahead."""
        self._end_loading(load)
        if load.permanent:
            self._give_back(load, load.nbytes)
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
            while sequence.frontier <= sequence.head + self._depth:
                request = self._own_ahead(sequence, sequence.frontier)
                # A part that has a plan is read already; one that lacks nothing is kept.
                nbytes = 0 if self.keeps_all or request in self._plans else self._missing_bytes(request)
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
        found = self._found_at(self.placements.former_holders(ids), ids, self._lengths(ids))
        every = np.ones(len(ids), np.bool_)
        found = found.only(self._admit(found, every, lasting=every))  # the rest stays where it is
        return self._loads(None, np.arange(len(found.sample_ids)), found, np.ones(len(found.sample_ids), np.bool_))

    def in_form(
        self, sample_ids: Ids, wanted: NDArray[np.bool_], lengths: NDArray[np.int64], *, decoded: bool
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Tell which of the samples that another node wants are kept in the form for which it asks.

        Args:
            sample_ids: int64[n].
            wanted: bool[n].
            lengths: int64[n], bytes for which it has room.
            decoded: whether it asks for decoded ones.

        Returns:
            bool[n], those that are; and int64[n], of those that are kept in the other form their bytes if they are
            decoded, 0 if not; -1 for all others. Lengths alone do not tell: both forms may have as many bytes.
        """
        kept = self.directory.lookup(sample_ids)
        wanted = wanted & (kept["slab"] > 0)
        alike = wanted & (kept["decoded"] == decoded)
        other = np.where(wanted & ~alike, np.where(kept["decoded"], kept["length"], 0), -1)
        return alike & (kept["length"] == lengths), other

    def hand_over(self, sample_ids: Ids) -> list[int]:
        """Keep samples no more that moved to another node. Returns the slabs to let go, which hold nothing else."""
        # Whole slabs only: the bytes of a sample that went are there until those of its neighbours go.
        return self._withdraw(sample_ids)

    def placement_changed(self) -> None:
        """Note that there is a new placement, and news of who keeps what."""
        self._other_forms.clear()

    # ---- the decoded tier ----

    def aim(self, target_bytes: int, sample_bytes: float) -> None:
        """Set what decoded samples may take of the memory. What is kept by then gives way only to what needs the room.

        Args:
            target_bytes: of decoded samples; the rest is for samples as storage has them.
            sample_bytes: of one decoded sample, on average.
        """
        self.tier.target_bytes, self.tier.sample_bytes = min(target_bytes, self.minio.budget_bytes), sample_bytes

    def begin_keeping(
        self, request: PartRequest, sample_ids: Ids, lengths: NDArray[np.int64], unfit: Sequence[int] = ()
    ) -> HandIn:
        """Choose what to keep of what a worker hands in. Unless that is nothing, `kept` or `keeping_failed` follows.

        A worker may hand in a part in pieces; `not_handed_in` ends what else was expected.

        Args:
            request: the part that the worker made.
            sample_ids: int64[n], decoded samples of it, each once.
            lengths: int64[n], bytes of each.
            unfit: samples that were asked for and cannot be kept decoded.
        """
        done = np.array([*sample_ids.tolist(), *unfit], np.int64)
        promised = self._end_promise(request, done)[: len(sample_ids)]
        self.tier.unfit.update(unfit)
        new = self.placements.admits(sample_ids) & ~self.directory.lookup(sample_ids)["decoded"]
        new &= ~among(sample_ids, self._awaited_in)
        self._make_room(min(int(lengths[new].sum()), self.tier.free_bytes), decoded=True)
        hand_in = self.tier.admit(
            next(self._numbers),
            sample_ids,
            lengths,
            new=new,
            promised=promised,
            to_disk=self._absent(sample_ids) & self.placements.is_home(sample_ids),
            free=self.minio.free_bytes,
        )
        self.minio.take(hand_in.nbytes)
        return hand_in

    def kept(self, hand_in: HandIn) -> None:
        """Note that the slab of a hand-in is readable. The same samples are kept in one form only."""
        self.tier.arrived(hand_in)
        ids, lengths = hand_in.sample_ids, hand_in.lengths
        self._dropped += self._withdraw(ids[self.directory.slabs(ids) > 0])
        self.directory.publish(hand_in.slab, ids, offsets=pack(lengths), lengths=lengths, decoded=True)
        # Some may have moved to another node meanwhile.
        self._dropped += self._withdraw(ids[~self.placements.admits(ids)])
        if (decoded := self.directory.decoded).samples >= SEEN:
            self.tier.sample_bytes = decoded.nbytes / decoded.samples

    def keeping_failed(self, hand_in: HandIn) -> None:
        """Note that the slab of a hand-in could not be made."""
        self.tier.arrived(hand_in)
        self.tier.dropped(hand_in.slab)
        self.minio.give_back(hand_in.nbytes)

    def not_handed_in(self, request: PartRequest) -> None:
        """Note that nothing more will be handed in for a part."""
        self.minio.give_back(self.tier.release(request))

    def take_dropped(self) -> list[int]:
        """Return the slabs to let go that gave way to others since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

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
        plan = self._plans[request] = PartPlan(request, ids, self._lengths(ids).copy())
        self._promise(plan)
        loads = self._read(plan, np.arange(len(ids)), ahead=ahead)
        for load in loads if ahead else ():
            self.ahead.hold(load.slab, block=request.block, nbytes=load.nbytes)
        return loads

    def _promise(self, plan: PartPlan) -> None:
        """Choose the samples of a part that its worker is to hand in decoded."""
        request, ids = plan.request, plan.sample_ids
        if not self.tier.free_bytes + self.tier.disk_free_bytes:
            return
        if request != self.placements.own(request.block, request.shuffle):
            return  # of other nodes' parts nothing is kept here
        if self.tier.promised(request)[0]:
            return
        ids = ids[~self.directory.lookup(ids)["decoded"]]
        if not len(ids):
            return
        ids = ids[~among(ids, self._awaited_in)]
        ids = ids[self._decoded_at(self.placements.former_holders(ids), ids) == 0]
        # What lacks here, and what memory keeps as storage has it.
        in_memory = ids[self.placements.admits(ids)]
        in_memory = in_memory[self.tier.wanted(in_memory, min(self.tier.free_bytes, self.minio.free_bytes))]
        # What memory has no room for, and does not keep.
        on_disk = ids[~np.isin(ids, in_memory) & self._absent(ids) & self.placements.is_home(ids)]
        on_disk = on_disk[self.tier.wanted(on_disk, self.tier.disk_free_bytes)]
        self.minio.take(self.tier.promise(request, in_memory, on_disk))

    def _end_promise(self, request: PartRequest, sample_ids: Ids) -> NDArray[np.bool_]:
        """End the promise for some samples of a part: bool[n], for which room in memory was set aside."""
        before = self.tier.promised_bytes
        in_memory = self.tier.keep_promise(request, sample_ids)
        self.minio.give_back(before - self.tier.promised_bytes)
        return in_memory

    def _read(self, plan: PartPlan, rows: NDArray[np.int64], *, ahead: bool = False) -> list[Load]:
        """Decide for rows of a part: hit, fetched and kept, or fetched for it alone; from where, and in which form."""
        missing = rows[self._absent(plan.sample_ids[rows])]
        if not len(missing):
            return []
        if ahead:
            missing = missing[~self._comes_decoded(plan.request, plan.sample_ids[missing])]
        ids = plan.sample_ids[missing]
        found, admits, lent = self._sources(plan.request, ids)
        # What a worker of this part will hand in decoded is kept as storage has it until then, if there is room; what
        # comes decoded from another part is not kept for this one, too.
        passing = self.tier.expects(ids)
        own = among(ids, self.tier.for_memory(plan.request))
        keep = self._admit(found, admits & (own | ~passing), lasting=~passing)
        loads = []
        for lends, chosen in ((False, ~lent), (True, lent)):
            loads += self._loads(
                plan.request, missing[chosen], found.only(chosen), keep[chosen], passing=passing[chosen], lends=lends
            )
        for load in loads:
            plan.add(load)
        return loads

    def _comes_decoded(self, request: PartRequest, ids: Ids) -> NDArray[np.bool_]:
        """Tell which samples other parts will most likely have handed in by the time that this one is fetched.

        They are not read ahead; what lacks then is read then.
        """
        return self.tier.expects(ids) & ~among(ids, self.tier.promised(request)[0])

    def _sources(self, request: PartRequest, ids: Ids) -> tuple[_Found, NDArray[np.bool_], NDArray[np.bool_]]:
        """Tell where samples are read that a part lacks, which of them are to be kept here, and which are lent."""
        # Only samples that placement gives to this node: whatever else came here, for a part of another node, would
        # take the room of samples that all nodes expect here.
        admits = self.placements.admits(ids)
        # Another node hands over only what is to live here from now on; the rest it goes on keeping for its own home.
        holders = np.where(admits, self.placements.former_holders(ids), -1)
        lenders = np.where(admits, -1, self.placements.lenders(request, ids))
        lent = lenders >= 0
        return self._found_at(np.where(lent, lenders, holders), ids, self._lengths(ids)), admits, lent

    def _decoded_at(self, holders: NDArray[np.integer[Any]], sample_ids: Ids) -> NDArray[np.int64]:
        """Return the bytes of samples that the disk has decoded, or another node may have, 0 for others: int64[n]."""
        lengths = self._decoded_on_disk(sample_ids)
        elsewhere = (lengths == 0) & (holders >= 0)
        lengths[elsewhere] = self.placements.decoded_bytes(sample_ids[elsewhere])
        if self._other_forms:
            told = np.array([self._other_forms.get(i, -1) for i in sample_ids.tolist()], np.int64)
            lengths = np.where(told < 0, lengths, told)
        return lengths

    def _found_at(self, holders: NDArray[np.integer[Any]], sample_ids: Ids, lengths: NDArray[np.int64]) -> _Found:
        """Tell in which form samples are read, of these lengths in storage, if other nodes may have them."""
        decoded = self._decoded_at(holders, sample_ids)
        return _Found(sample_ids, np.where(decoded > 0, decoded, lengths), holders, decoded > 0)

    def _admit(self, found: _Found, keep: NDArray[np.bool_], *, lasting: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Admit samples to the cache, of those that are to be kept: bool[n].

        Args:
            found: the n samples.
            keep: bool[n], which are to be kept.
            lasting: bool[n], which are to be kept for good, and not only until they are handed in decoded.
        """
        admitted = np.zeros(len(keep), np.bool_)
        for form in (found.decoded, ~found.decoded):
            chosen = np.concatenate([np.flatnonzero(keep & form & which) for which in (lasting, ~lasting)])
            if not len(chosen):
                continue
            lengths, decoded = found.lengths[chosen], bool(found.decoded[chosen[0]])
            if decoded:
                self._make_room(min(int(lengths.sum()), self.tier.free_bytes), decoded=True)
                lengths = np.where(fitting(lengths, self.tier.free_bytes), lengths, 0)
            else:
                self._drop_passing(int(lengths[lasting[chosen]].sum()))
                if self.tier.excess_bytes:
                    self._make_room(int(lengths.sum()), decoded=False)
            admitted[chosen] = self.minio.admit(lengths)
        return admitted

    def _loads(
        self,
        request: PartRequest | None,
        rows: NDArray[np.int64],
        found: _Found,
        keep: NDArray[np.bool_],
        *,
        passing: NDArray[np.bool_] | None = None,
        lends: bool = False,
    ) -> list[Load]:
        """Plan slabs for samples: those go together that one node may still have, that are kept, and of one form."""
        name = self.placements.lender if lends else self.placements.holder
        passing = np.zeros(len(rows), np.bool_) if passing is None else passing
        loads = []
        # A number for each kind, so that all samples of one are found at once.
        kinds = ((found.holders.astype(np.int64) * 2 + keep) * 2 + found.decoded) * 2 + passing
        for kind in np.unique(kinds)[::-1].tolist():
            chosen = np.flatnonzero(kinds == kind)
            first, number = chosen[0], next(self._numbers)
            holder = int(found.holders[first])
            load = Load(
                slab=number if keep[first] else -number,
                request=request,
                epoch=self._order.chance_epoch(request.block, request.shuffle) if request is not None else None,
                peer=name(holder) if holder >= 0 else None,
                rows=rows[chosen],
                sample_ids=found.sample_ids[chosen],
                lengths=found.lengths[chosen],
                lends=lends,
                decoded=bool(found.decoded[first]),
                passing=bool(passing[first]),
            )
            self._begin_loading(load)
            loads.append(load)
        return loads

    def _decoded_bytes(self, request: PartRequest) -> int:
        """Estimate what samples of a part take that will be kept decoded here, and for which nothing is promised."""
        if not self.tier.free_bytes or request != self.placements.own(request.block, request.shuffle):
            return 0
        ids = self.placements.stored(request)
        # As they are promised: for a part of one, or for those that cannot be kept decoded, nothing need give way.
        ids = ids[~self.directory.lookup(ids)["decoded"]]
        return int(self.tier.wanted(ids, self.tier.free_bytes).sum() * self.tier.sample_bytes)

    def _make_room(self, nbytes: int, *, decoded: bool) -> None:
        """Drop slabs of the other form until so many bytes are free, or until that form is within its part.

        Those with the fewest samples go first: what they hold beside is free memory to nobody.
        """
        while self.minio.free_bytes < nbytes:
            excess = self._encoded_excess if decoded else self.tier.excess_bytes
            slabs = [slab for slab in self.directory.slab_bytes if (slab in self.tier.slabs) != decoded]
            if excess <= 0 or not slabs:
                return
            slab = min(slabs, key=lambda slab: (self.directory.live_samples(slab), slab))
            self._dropped += self._withdraw(self.directory.samples_in(slab))

    def _drop_passing(self, nbytes: int) -> None:
        """Free so many bytes by dropping slabs that are kept only until their samples are handed in decoded.

        Those stay that a part still waits for. A worker keeps what it was told of.
        """
        if self.minio.free_bytes >= nbytes:
            return
        read = {load.slab for plan in self._plans.values() for load in plan.loads}
        for slab in sorted(self._passing - read):
            if self.minio.free_bytes >= nbytes:
                return
            self._dropped += self._withdraw(self.directory.samples_in(slab))

    @property
    def _encoded_excess(self) -> int:
        """Bytes that samples as storage has them take beyond what decoded samples leave."""
        encoded = self.minio.used_bytes - self.tier.used_bytes - self.tier.promised_bytes
        return encoded - (self.minio.budget_bytes - self.tier.target_bytes)

    def _withdraw(self, sample_ids: Ids) -> list[int]:
        """Keep samples no more. Returns the slabs to let go, which hold nothing else."""
        emptied = self.directory.withdraw(sample_ids)
        self.minio.give_back(sum(emptied.values()))
        self._passing -= emptied.keys()
        for slab in self.tier.slabs.keys() & emptied.keys():
            self.tier.dropped(slab)
        for plan in self._plans.values() if emptied else ():
            plan.lose(emptied)
        return [*emptied]

    def _give_back(self, load: Load, nbytes: int) -> None:
        """Free bytes of a permanent slab that it turned out not to need."""
        self.minio.give_back(nbytes)
        if load.decoded:
            self.tier.shrunk(load.slab, nbytes)

    def _begin_loading(self, load: Load) -> None:
        self._loading[load.slab] = load
        if load.permanent:
            self._awaited_in.update(dict.fromkeys(load.sample_ids.tolist(), load.slab))
            if load.decoded:
                self.tier.take(load.slab, load.nbytes)

    def _absent(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Tell which samples are neither kept nor being read to be kept: bool[n]."""
        absent = self.directory.slabs(sample_ids) == 0
        # A look into a dict for each sample, but only of those that are not kept, and only while slabs are read.
        if self._awaited_in:
            absent[absent] = ~among(sample_ids[absent], self._awaited_in)
        return absent

    def _missing_bytes(self, request: PartRequest) -> int:
        ids = self.placements.stored(request)
        ids = ids[self._absent(ids)]
        found, _, _ = self._sources(request, ids[~self._comes_decoded(request, ids)])
        return int(found.lengths.sum())

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
        assert self._passing <= self.directory.slab_bytes.keys(), self._passing
        self.ahead.validate()
        permanent = [load for load in self._loading.values() if load.permanent]
        awaited_in = {int(i): load.slab for load in permanent for i in load.sample_ids}
        assert self._awaited_in == awaited_in, "a sample is read for two permanent slabs, or forgotten"
        assert not self.directory.slabs(np.array([*awaited_in], dtype=np.int64)).any(), "kept and read again"
        self.tier.validate()
        charged = self.directory.slab_total + sum(load.nbytes for load in permanent) + self.tier.promised_bytes
        charged += sum(hand_in.nbytes for hand_in in self.tier.coming.values())
        assert not self.tier.coming.keys() & self.directory.slab_bytes.keys(), "readable and still coming"
        holding = {load.slab for load in permanent if load.decoded} | self.tier.coming.keys()
        holding |= {int(slab) for slab in np.unique(self.directory.slabs(self.directory.decoded_ids()))}
        assert holding == self.tier.slabs.keys(), (holding, self.tier.slabs)
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
