"""The decisions of a cache node: hits, reads, admission, sample form and read-ahead.

Pure: events arrive as method calls, which return `Load`s to fill; `take_dropped` returns slabs to drop. Each decision
is made when a part is scheduled, from the known sample lengths. Two parts in flight therefore never read a cached
sample twice: the later part counts a hit and waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbaas.cache.decoded_tier import DecodedTier, HandIn
from mbaas.cache.directory import Directory, DrawRanks, MinIO, fitting, member_mask
from mbaas.cache.readahead import DEPTH_BLOCKS, FetchSequence, ReadAhead
from mbaas.cache.shared_reads import SharedReads, Span
from mbaas.cache.slab import Compaction, Failures, Load, OtherForm, PartPlan, RowLocations, pack
from mbaas.samples.order import Ids, SampleOrder, Shuffle
from mbaas.samples.placement import ENCODED, DecodedSizes, Lengths, PartRequest, PlacementHistory, StreamKey
from mbaas.wire.samples import Amount

COMPACTED_SHARE = 0.25
"""A slab is compacted if withdrawn samples hold at least this share of it: at most 3 bytes are copied to free one."""

MIN_MEASURED = 32
"""Decoded samples required before their mean size replaces the estimate."""


class _Sources(NamedTuple):
    """Sources and forms of n samples to read."""

    sample_ids: Ids
    lengths: NDArray[np.int64]  # int64[n], bytes to read
    holders: NDArray[np.integer[Any]]  # index of another node that may have the sample; -1 for none
    forms: NDArray[np.int32]  # int32[n], form at the source

    @property
    def is_decoded(self) -> NDArray[np.bool_]:
        return self.forms != ENCODED


class _Recent(NamedTuple):
    """A slab's bytes, the samples that were read into it, and the end of their part in epochs.

    A slab that was read ahead is charged to the cache when the fetch of its part ends. If there is no room for it then,
    it is dropped.
    """

    nbytes: int
    sample_ids: Ids
    end: float
    is_charged: bool


class Planner:
    """The state of one cache node."""

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
        form_on_disk: int = ENCODED,
        undecoded_share: float = 0.0,
        draws: NDArray[np.float64] | None = None,
    ) -> None:
        """
        Args:
            order, lengths: the sample order, and bytes of stored samples.
            cache_bytes: capacity of permanent slabs.
            readahead_bytes: capacity for blocks that were not requested yet.
            placements: by default, this is the only node.
            num_samples: stored samples of the dataset; by default, the order's samples.
            decoded_on_disk: bytes of samples cached decoded on this node's disk, 0 for others; by default 0 for all.
            form_on_disk: form of those samples.
            undecoded_share: fraction of samples that are never cached decoded; see `DecodedSamples`.
            draws: float64[num_samples], expected draws of each stored sample in an epoch; by default, all are equal.
        """
        self._num_samples = order.num_samples if num_samples is None else num_samples
        self.directory = Directory(self._num_samples)  # the samples of all full permanent slabs
        # Charged with permanent slabs, full or being read, and with promises and hand-ins of decoded samples.
        self.minio = MinIO(cache_bytes)
        # The samples cached decoded, and their share of memory; 0 bytes until `set_decoded_target` is called.
        self.tier = DecodedTier(self.minio, undecoded_share=undecoded_share)
        # Slabs of blocks that were not requested yet; permanent slabs only until they are full.
        self.ahead = ReadAhead(readahead_bytes)
        # This node's part of each block, and the nodes that cache other samples.
        self.placements = placements if placements is not None else PlacementHistory(order)
        self._order = order
        # At most one epoch: it contains every sample once, and most samples will be cached by its end.
        self._depth = min(DEPTH_BLOCKS, max(2, order.blocks_per_epoch))
        self.lengths = lengths
        self._decoded_on_disk = decoded_on_disk if decoded_on_disk is not None else np.zeros_like
        self._form_on_disk = form_on_disk
        self._numbers = itertools.count(1)  # for slabs of both kinds
        self._plans: dict[PartRequest, PartPlan] = {}  # parts that are being fetched or were read ahead
        self._loading: dict[int, Load] = {}  # by slab; all slabs that are not full yet
        self._awaited_in: dict[int, int] = {}  # sample -> slab, for the permanent slabs in _loading
        self._other_forms: dict[int, OtherForm] = {}  # sample -> form on another node; reset by each placement
        # Permanent slabs whose samples give way to others: they were to be handed in decoded, when the slab was filled,
        # or they are not among the samples drawn most often that fit.
        self._interim: set[int] = set()
        self._dropped: list[int] = []  # until `take_dropped`
        # Permanent slabs that stay only for a while, oldest first. Their samples do not fit in the cache for good, but
        # consumers with other pipelines need them soon.
        self._recent: dict[int, _Recent] = {}
        self.shared = SharedReads(self._share_that_fits)
        self._home: Amount | None = None  # stored samples whose home is this node, if known
        self._draws = draws if draws is not None and np.ptp(draws) > 0 else None
        self._ranks: DrawRanks | None = None  # by `_draws`; reset by each placement

    # ---- fetches ----

    def begin_fetch(self, request: PartRequest, pipeline: str = "") -> list[Load]:
        """Begin a fetch of a part, which lasts until `end_fetch`. Return the slabs to fill.

        ``pipeline`` is the name of the pipeline that the part is for.
        """
        self.shared.fetched(pipeline, self._span_of(request))
        self.tier.fetched(request)
        # Room for the next promises. Not during read-ahead, where bytes are counted beforehand.
        self._make_room_for_decoded(self._decoded_bytes(request))
        # A part that was read ahead, or that another worker is fetching, has a plan and its reads are in progress.
        if (plan := self._plans.get(request)) is None:
            loads = self._schedule(request, pipeline)
            plan = self._plans[request]
        else:
            loads = []
            self._promise(plan)  # there may have been no free space when it was read ahead
        plan.fetches += 1
        # No longer read ahead, so its budget is free for the following blocks.
        for load in plan.loads:
            self.ahead.release(load.slab)
        # Only the node's own parts are read ahead. Others are fetched here only while their home node is gone.
        if self.ahead.budget_bytes and self.placements.is_own(request):
            self.ahead.follow(request.block, request.shuffle, request.stream, pipeline)
        return loads

    def awaited(self, request: PartRequest) -> set[int]:
        """Return the slabs that a scheduled part needs and that are not full yet."""
        plan = self._plans[request]
        own = {load.slab for load in plan.loads if load.slab in self._loading}
        # Hits that are being read into the cache for another part.
        others = plan.sample_ids[plan.hit & (self.directory.slabs(plan.sample_ids) == 0)]
        return own | self.slabs_to_come(others)

    def retry_awaited(self, request: PartRequest) -> list[Load]:
        """Reschedule samples that this part expected from another part's slab and that could not be read there."""
        plan = self._plans[request]
        return self._read(plan, np.flatnonzero(plan.hit & self._unusable(request, plan.sample_ids)))

    def locate(self, request: PartRequest) -> RowLocations:
        """Return the locations of a part's rows, once `awaited` is empty. Raises the error of a slab that failed."""
        plan = self._plans[request]
        if plan.failure is not None:
            raise plan.failure
        return plan.locate(self.directory.lookup(plan.sample_ids))

    def to_hand_in(self, request: PartRequest) -> tuple[NDArray[np.int64], int]:
        """Return the rows of a part that its prep worker should hand in decoded, and their expected bytes in total."""
        expected, nbytes = self.tier.promised(request)
        if not expected:
            return np.zeros(0, np.int64), 0
        ids = self._plans[request].sample_ids
        return np.flatnonzero(member_mask(ids, expected)), nbytes

    def end_fetch(self, request: PartRequest) -> None:
        """End a fetch of a part, successful or not."""
        plan = self._plans[request]
        plan.fetches -= 1
        if not plan.fetches:
            self._forget(plan)

    # ---- slabs ----

    def filled(self, load: Load, failures: Failures, origins: NDArray[np.int8] | None = None) -> None:
        """Record that a slab is full, without the unreadable samples. ``origins`` is int8[rows], by default storage."""
        self._end_loading(load)
        readable = load.readable(failures)
        if load.permanent:
            ids, lengths = load.sample_ids[readable], load.lengths[readable]
            self._refund(load, load.nbytes - int(lengths.sum()))
            if len(ids):
                offsets = pack(lengths)
                self.directory.publish(load.slab, ids, offsets=offsets, lengths=lengths, form=load.form)
                if load.interim:
                    self._interim.add(load.slab)
            if load.slab in self._recent:
                self._recent[load.slab] = self._recent[load.slab]._replace(nbytes=int(lengths.sum()))
                if not len(ids):
                    del self._recent[load.slab]
                    self.ahead.release(load.slab)
                elif self._plan_of(load) is None:
                    self._settle_recent(load.slab)
        elsewhere = {i: why for i, why in failures.items() if isinstance(why, OtherForm)}
        self._other_forms.update(zip(load.sample_ids[list(elsewhere)].tolist(), elsewhere.values(), strict=True))
        if load.request is not None and elsewhere:  # samples that arrive decoded need no hand-in
            self.tier.keep_promise(load.request, load.sample_ids[[i for i, why in elsewhere.items() if why.nbytes]])
        if plan := self._plan_of(load):
            plan.filled(load, failures, np.zeros(len(load.rows), np.int8) if origins is None else origins)

    def failed(self, load: Load, failure: Exception) -> None:
        """Record that a slab cannot be filled. If its part was read ahead, its other slabs are dropped, too."""
        self._end_loading(load)
        if load.permanent:
            self._refund(load, load.nbytes)
            self._recent.pop(load.slab, None)
            self.ahead.release(load.slab)
        if plan := self._plan_of(load):
            plan.failure = failure
            if not plan.fetches:
                # No fetch has received the failure, and it may be temporary. A later fetch of the block starts afresh.
                self.ahead.retreat(plan.request.block, plan.request.stream)
                self._forget(plan)

    # ---- read-ahead ----

    def look_ahead(self) -> list[Load]:
        """Drop read-ahead that is no longer expected, and schedule further blocks within the budget."""
        for plan in [p for p in self._plans.values() if not p.fetches and not self._expected(p.request)]:
            self._forget(plan)
        loads: list[Load] = []
        for sequence in self.ahead.sequences:
            # Called after every event: what a block needs is found out again only when there may be room for it.
            while sequence.frontier <= sequence.head + self._depth and not self.ahead.waits_for_room(sequence):
                request = self._own_ahead(sequence, sequence.frontier)
                # A part with a plan is already being read; a part without missing samples is cached.
                nothing = request in self._plans or (self.keeps_all and self._takes_all(sequence.stream))
                nbytes = 0 if nothing else self._missing_bytes(request)
                if nbytes and not self.ahead.fits(sequence, nbytes):
                    sequence.lacked = sequence.frontier, nbytes
                    break  # even if a later, smaller block would fit: this one is needed first
                sequence.frontier += 1
                loads += self._schedule(request, sequence.pipeline, ahead=True) if nbytes else []
        return loads

    def upcoming(self, blocks: int) -> list[tuple[int, Ids]]:
        """Return this node's parts of the next unscheduled blocks, in the most recently fetched sequence.

        For each, its number of samples, and those that are neither cached nor being read into the cache.
        """
        if not self.ahead.sequences:
            return []
        sequence = self.ahead.sequences[0]
        following = range(sequence.frontier, sequence.frontier + blocks)
        parts = [self.placements.stored(self._own_ahead(sequence, block)) for block in following]
        return [(len(ids), ids[self._absent(ids)]) for ids in parts]

    def _own_ahead(self, sequence: FetchSequence, block: int) -> PartRequest:
        return self.placements.own(block, self._shuffle_ahead(sequence, block), sequence.stream)

    def _shuffle_ahead(self, sequence: FetchSequence, block: int) -> Shuffle | None:
        shuffle = sequence.shuffle
        if shuffle is None:
            return None
        order = self.placements.order(sequence.stream.block_samples)
        epochs = order.epoch_of(block) - order.epoch_of(sequence.head)
        # The next epoch's shuffle is decided when it begins. The guess assumes that no consumer joins or leaves; a
        # wrong guess costs a few useless reads.
        return shuffle.after(shuffle.epoch + epochs, shuffle.cuts) if epochs else shuffle

    def _expected(self, request: PartRequest) -> bool:
        """Return whether read-ahead for a part is still valid: placement and shuffle are as predicted."""
        if not self.placements.is_own(request):
            return False
        block, stream = request.block, request.stream  # made once: `look_ahead` checks each part that was read ahead
        return any(
            block <= sequence.head or request.shuffle == self._shuffle_ahead(sequence, block)
            for sequence in self.ahead.sequences
            if sequence.covers(block, stream)
        )

    # ---- samples that move between nodes ----

    def slabs_to_come(self, sample_ids: Ids) -> set[int]:
        """Return the unfilled slabs that will cache some of the samples."""
        return {self._awaited_in[i] for i in sample_ids.tolist() if i in self._awaited_in}

    def move_in(self, sample_ids: Ids) -> list[Load]:
        """Cache samples that other nodes hold, before they are requested. Return the slabs to fill."""
        # Checked again, because the placement may have changed since the caller listed the samples.
        ids = sample_ids[self._absent(sample_ids) & self.placements.admits(sample_ids)]
        found = self._found_at(None, self.placements.former_holders(ids), ids)
        every = np.ones(len(ids), np.bool_)
        lasting = self._is_favoured(ids)
        rows = np.flatnonzero(self._admit(found, every, lasting=lasting))  # the rest stays on its node
        found = _Sources._make(column[rows] for column in found)
        every, none = every[rows], ~every[rows]
        return self._loads(None, np.arange(len(rows)), found, every, interim=~lasting[rows], lent=none, recent=none)

    def in_form(
        self, sample_ids: Ids, wanted: NDArray[np.bool_], lengths: NDArray[np.int64], form: int
    ) -> tuple[NDArray[np.bool_], dict[int, OtherForm]]:
        """Find the samples that are cached in the form requested by another node.

        Args:
            sample_ids, wanted: int64[n], bool[n].
            lengths: int64[n], bytes per sample reserved by the other node.
            form: the requested form.

        Returns:
            bool[n], samples cached in the requested form and length; and those cached in another form, by row.
                (Lengths do not suffice, because two forms may have the same size.)
        """
        kept = self.directory.lookup(sample_ids)
        wanted = wanted & (kept["slab"] > 0)
        alike = wanted & (kept["form"] == form)
        others = np.flatnonzero(wanted & ~alike)
        nbytes = np.where(kept["form"] == ENCODED, 0, kept["length"])[others].tolist()
        found = map(OtherForm, kept["form"][others].tolist(), nbytes)
        return alike & (kept["length"] == lengths), dict(zip(others.tolist(), found, strict=True))

    def withdraw(self, sample_ids: Ids) -> None:
        """Stop caching samples, for example because they moved to another node. Slabs that are empty now are dropped.

        Memory is freed by whole slabs: a withdrawn sample's bytes stay until its slab is empty or compacted.
        """
        emptied = self.directory.withdraw(sample_ids)
        self.minio.used_bytes -= sum(nbytes for slab, nbytes in emptied.items() if self._is_charged(slab))
        self._interim -= emptied.keys()
        for slab in self._recent.keys() & emptied.keys():
            del self._recent[slab]
            self.ahead.release(slab)
        for slab in self.tier.slabs.keys() & emptied.keys():
            self.tier.dropped(slab)
        for plan in self._plans.values() if emptied else ():
            plan.forget_slabs(emptied)
        self._dropped += emptied

    def begin_compaction(self) -> Compaction | None:
        """Choose slabs of one form to compact, those with the most withdrawn bytes first; None if no slab is worth it.

        The new slab is no larger than the largest of the slabs that it could replace.
        """
        withdrawn, sizes = self.directory.withdrawn_bytes, self.directory.slab_bytes
        worth = [slab for slab in withdrawn if withdrawn[slab] >= COMPACTED_SHARE * sizes[slab]]
        passing = self._interim | self._recent.keys()
        worth = sorted((slab for slab in worth if slab not in passing), key=withdrawn.__getitem__, reverse=True)
        for form in (ENCODED, *self.directory.by_form):
            alike = [slab for slab in worth if self.tier.forms.get(slab, ENCODED) == form]
            room, chosen = max((sizes[slab] for slab in alike), default=0), []
            for slab in alike:
                if (left := sizes[slab] - withdrawn[slab]) <= room:
                    chosen.append(slab)
                    room -= left
            if chosen:
                ids = self.directory.samples_in(*chosen)
                return Compaction(next(self._numbers), ids, self.directory.lookup(ids), form)
        return None

    def end_compaction(self, compaction: Compaction) -> None:
        """Record that a compaction's slab is readable.

        The old slabs are dropped, or the new one if too few of its samples are still where they were.
        """
        ids, slab, nbytes = compaction.sample_ids, compaction.slab, compaction.nbytes
        unmoved = self.directory.lookup(ids) == compaction.locations
        ids, locations = ids[unmoved], compaction.locations[unmoved]
        freed = sum(self.directory.slab_bytes[old] for old in np.unique(locations["slab"]).tolist())
        if nbytes > freed:
            self._dropped.append(slab)
            return
        self.withdraw(ids)
        self.minio.used_bytes += nbytes
        if compaction.form != ENCODED:
            self.tier.take(slab, nbytes, compaction.form)
        offsets, lengths = pack(compaction.locations["length"])[unmoved], locations["length"]
        self.directory.publish(slab, ids, offsets=offsets, lengths=lengths, form=compaction.form, slab_bytes=nbytes)

    def placement_changed(self) -> None:
        """Forget sample forms on other nodes and the home samples, which the previous placement determined."""
        self._other_forms.clear()
        self._home = self._ranks = None

    # ---- samples drawn by weight ----

    def disk_classes(self, sample_ids: Ids, capacities: Sequence[float]) -> NDArray[np.int64] | None:
        """Choose disks for samples that memory is not for: int64[n], index in ``capacities`` (bytes), -1 for none.

        Returns None if all samples are drawn equally often, so that their order of arrival decides.
        """
        if (ranks := self._draw_ranks) is None:
            return None
        return ranks.classes(sample_ids, self._favoured[1], capacities)

    @property
    def _draw_ranks(self) -> DrawRanks | None:
        if self._draws is not None and self._ranks is None:
            every = np.arange(self._num_samples)
            self._ranks = DrawRanks(self._draws, self.lengths(every), self.placements.is_home(every))
        return self._ranks

    @property
    def _favoured(self) -> tuple[int, int]:
        """Number of the samples drawn most often to cache decoded, and in either form."""
        assert self._ranks is not None
        tier, budget = self.tier, self.minio.budget_bytes
        return self._ranks.in_memory(budget, min(budget, tier.target_bytes), tier.sample_bytes)

    def _is_favoured(self, sample_ids: Ids, *, decoded: bool = False) -> NDArray[np.bool_]:
        """Return which samples memory is for, because no others are drawn more often: bool[n]. All without weights."""
        if (ranks := self._draw_ranks) is None:
            return np.ones(len(sample_ids), np.bool_)
        return ranks.among_first(sample_ids, self._favoured[0 if decoded else 1])

    # ---- the decoded tier ----

    def set_decoded_target(self, form: int, target_bytes: int, sample_bytes: float) -> None:
        """Set the form of decoded samples, their memory and their mean size, in bytes.

        Samples in another form, or beyond their share of memory, are evicted only when others need the space.
        """
        self.tier.set_form(form)
        self.tier.target_bytes, self.tier.sample_bytes = min(target_bytes, self.minio.budget_bytes), sample_bytes
        self._measure_decoded()

    def _measure_decoded(self) -> None:
        measured = self.directory.by_form.get(self.tier.form, Amount())
        if measured.samples >= MIN_MEASURED:
            self.tier.sample_bytes = measured.nbytes / measured.samples

    def begin_hand_in(
        self, request: PartRequest, form: int, sample_ids: Ids, lengths: NDArray[np.int64], unfit: Sequence[int] = ()
    ) -> HandIn:
        """Choose the samples to cache from a worker's hand-in.

        If any are chosen, `hand_in_cached` or `DecodedTier.failed` must follow. A worker may hand in a part in pieces;
        `DecodedTier.release` cancels the rest.

        Args:
            request, form: the part that the worker prepared, and the form of its decoded samples.
            sample_ids, lengths: int64[n], its decoded samples, each once, and their bytes.
            unfit: requested samples that cannot be cached decoded.
        """
        if form != self.tier.form:  # the form has changed since samples were requested
            none = np.zeros(len(sample_ids), np.bool_)
            return HandIn(next(self._numbers), none, none, sample_ids[none], lengths[none], form)
        done = np.array([*sample_ids.tolist(), *unfit], np.int64)
        promised = self.tier.keep_promise(request, done)[: len(sample_ids)]
        self.tier.unfit.update(unfit)
        new = self.placements.admits(sample_ids) & (self.directory.lookup(sample_ids)["form"] != form)
        new &= ~member_mask(sample_ids, self._awaited_in)
        self._make_room(min(int(lengths[new].sum()), self.tier.free_bytes), decoded=True)
        return self.tier.admit(
            next(self._numbers),
            sample_ids,
            lengths,
            new=new,
            promised=promised,
            to_disk=self._absent(sample_ids) & self.placements.is_home(sample_ids),
        )

    def hand_in_cached(self, hand_in: HandIn) -> None:
        """Record that a hand-in's slab is readable. Encoded copies of its samples are dropped."""
        self.tier.arrived(hand_in)
        ids, lengths = hand_in.sample_ids, hand_in.lengths
        self.withdraw(ids[self.directory.slabs(ids) > 0])
        self.directory.publish(hand_in.slab, ids, offsets=pack(lengths), lengths=lengths, form=hand_in.form)
        # Some may have moved to another node in the meantime.
        self.withdraw(ids[~self.placements.admits(ids)])
        self._measure_decoded()

    def take_dropped(self) -> list[int]:
        """Return the slabs to drop since the last call, possibly before they are full."""
        dropped, self._dropped = self._dropped, []
        return dropped

    # ---- monitoring ----

    @property
    def keeps_all(self) -> bool:
        """True if the whole dataset is cached on this node, so no sample will ever be missing."""
        return self.directory.samples == self._num_samples

    @property
    def ahead_blocks(self) -> int:
        """Number of blocks that were read ahead and not requested yet."""
        return sum(not plan.fetches for plan in self._plans.values())

    @property
    def transient_bytes(self) -> int:
        """Bytes held outside the cache: transient slabs, recent ones read ahead, and permanent ones being filled."""
        # Merged by slab, because a slab that is not full may be in two of them.
        own = [load for plan in self._plans.values() for load in plan.loads if not load.permanent]
        nbytes = {slab: each.nbytes for slab, each in self._recent.items() if not each.is_charged}
        nbytes |= {load.slab: load.nbytes for load in (*own, *self._loading.values())}
        return sum(nbytes.values())

    # ---- decisions ----

    def _schedule(self, request: PartRequest, pipeline: str, *, ahead: bool = False) -> list[Load]:
        ids = self.placements.stored(request)
        plan = self._plans[request] = PartPlan(request, ids, self.lengths(ids).copy(), pipeline=pipeline)
        self._promise(plan)
        loads = self._read(plan, np.arange(len(ids)), ahead=ahead)
        for load in loads if ahead else ():
            self.ahead.hold(load.slab, block=request.block, nbytes=load.nbytes, stream=request.stream)
        return loads

    def _promise(self, plan: PartPlan) -> None:
        request, ids = plan.request, plan.sample_ids
        if not self.tier.free_bytes + self.tier.disk_free_bytes:
            return
        if not self._hands_in(request) or self.tier.promised(request)[0]:
            return
        ids = ids[self._lacks_form(request, ids)]
        if not len(ids):
            return
        ids = ids[~member_mask(ids, self._awaited_in)]
        ids = ids[self._decoded_at(request, self.placements.former_holders(ids), ids).nbytes == 0]
        # For memory: samples that are missing or cached encoded.
        in_memory = ids[self.placements.admits(ids) & self._is_favoured(ids, decoded=True)]
        in_memory = in_memory[self.tier.wanted(in_memory, min(self.tier.free_bytes, self.minio.free_bytes))]
        # For disk: samples that do not fit in memory and are not cached there.
        on_disk = ids[~np.isin(ids, in_memory) & self._absent(ids) & self.placements.is_home(ids)]
        on_disk = on_disk[self.tier.wanted(on_disk, self.tier.disk_free_bytes)]
        self.tier.promise(request, in_memory, on_disk)

    def _read(self, plan: PartPlan, rows: NDArray[np.int64], *, ahead: bool = False) -> list[Load]:
        """Plan reads for the rows of a part that are not hits: source, form, and whether to cache each one."""
        missing = rows[self._unusable(plan.request, plan.sample_ids[rows])]
        if not len(missing):
            return []
        if ahead:
            missing = missing[~self._comes_decoded(plan.request, plan.sample_ids[missing])]
        ids = plan.sample_ids[missing]
        found, admits, lent = self._sources(plan.request, ids)
        # Samples of this part that a worker will hand in are cached encoded until then, space permitting. Samples that
        # another part's worker will hand in are not cached for this part as well.
        admits &= self._absent(ids)  # excludes those cached in a form that this pipeline cannot use
        handed_in = self.tier.expects(ids)
        own = member_mask(ids, self.tier.for_memory(plan.request))
        favoured = self._is_favoured(ids)
        interim = handed_in | ~favoured
        wanted = admits & (own | ~handed_in) & (favoured | ~found.is_decoded)  # decoded samples give way to none
        keep = self._admit(found, wanted, lasting=~interim)
        recent = admits & ~keep & ~handed_in & ~lent & ~found.is_decoded
        interim &= ~recent
        recent = self._admit_recent(plan, found, recent, ahead=ahead)
        loads = self._loads(plan.request, missing, found, keep, interim=interim, lent=lent, recent=recent)
        for load in loads:
            plan.add(load)
            if recent[np.searchsorted(missing, load.rows[0])]:
                end = self._span_of(plan.request).end
                self._recent[load.slab] = _Recent(load.nbytes, load.sample_ids, end, is_charged=not ahead)
        return loads

    def _comes_decoded(self, request: PartRequest, ids: Ids) -> NDArray[np.bool_]:
        """Return which samples other parts will probably hand in before this part's fetch: bool[n]. Not read ahead."""
        return self.tier.expects(ids) & ~member_mask(ids, self.tier.promised(request)[0])

    def _sources(self, request: PartRequest, ids: Ids) -> tuple[_Sources, NDArray[np.bool_], NDArray[np.bool_]]:
        """Find the sources of missing samples; also return which to cache here and which are lent: bool[n] each."""
        # Only samples with their home here: any others would displace samples that all nodes expect on this one.
        admits = self.placements.admits(ids)
        # Another node hands over only samples whose home is here now. It keeps the rest for their own home nodes.
        holders = np.where(admits, self.placements.former_holders(ids), -1)
        lenders = np.where(admits, -1, self.placements.lenders(request, ids))
        lent = lenders >= 0
        return self._found_at(request, np.where(lent, lenders, holders), ids), admits, lent

    def _decoded_at(
        self, request: PartRequest | None, holders: NDArray[np.integer[Any]], sample_ids: Ids
    ) -> DecodedSizes:
        """Return the samples that are decoded on this disk or probably on another node, in forms that a part can use.

        If a holder has another form, the sample must be read encoded, and its holder is set to -1.
        """
        found = DecodedSizes.none(len(sample_ids))
        if request is None or self._form_on_disk in request.forms:
            found.nbytes[:] = self._decoded_on_disk(sample_ids)
            found.forms[found.nbytes > 0] = self._form_on_disk
        elsewhere = np.flatnonzero((found.nbytes == 0) & (holders >= 0))
        found.put(elsewhere, self.placements.decoded(sample_ids[elsewhere]))
        for row, i in enumerate(sample_ids.tolist()) if self._other_forms else ():
            if (other := self._other_forms.get(i)) is not None:
                found.forms[row], found.nbytes[row] = other.form, other.nbytes
        if request is not None:
            useless = ~request.takes(found.forms)
            found.forms[useless] = found.nbytes[useless] = 0
            holders[useless] = -1
        return found

    def _found_at(self, request: PartRequest | None, holders: NDArray[np.integer[Any]], sample_ids: Ids) -> _Sources:
        """Find samples at their holders, in forms that the part can use; in any form if there is no part."""
        decoded = self._decoded_at(request, holders, sample_ids)
        lengths = np.where(decoded.nbytes > 0, decoded.nbytes, self.lengths(sample_ids))
        return _Sources(sample_ids, lengths, holders, decoded.forms)

    def _admit(self, found: _Sources, keep: NDArray[np.bool_], *, lasting: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Admit samples marked in ``keep`` to the cache: bool[n]. If not ``lasting``, they give way to others."""
        admitted = np.zeros(len(keep), np.bool_)
        for decoded in (True, False):
            alike = keep & (found.is_decoded == decoded)
            chosen = np.concatenate([np.flatnonzero(alike & which) for which in (lasting, ~lasting)])
            if not len(chosen):
                continue
            lengths = found.lengths[chosen]
            # Lasting samples must not take the room for recent ones.
            reserved = max(0, self._most_recent_bytes - self._recent_bytes)
            if decoded:
                self._make_room(min(int(lengths.sum()), self.tier.free_bytes), decoded=True)
                lengths = np.where(fitting(lengths, self.tier.free_bytes), lengths, 0)
            else:
                self._drop_interim(int(lengths[lasting[chosen]].sum()))
                if self.tier.excess_bytes:
                    self._make_room(int(lengths.sum()), decoded=False)
            admitted[chosen] = self.minio.admit(lengths, reserved)
        return admitted

    def _loads(
        self,
        request: PartRequest | None,
        rows: NDArray[np.int64],
        found: _Sources,
        keep: NDArray[np.bool_],
        *,
        interim: NDArray[np.bool_],
        lent: NDArray[np.bool_],
        recent: NDArray[np.bool_],
    ) -> list[Load]:
        """Plan slabs for samples, one slab per combination of source node, caching and form."""
        loads, keep = [], keep | recent
        # One integer per combination, so that `np.unique` groups the samples.
        forms, form = np.unique(found.forms, return_inverse=True)
        kinds = (((found.holders.astype(np.int64) * 2 + keep) * len(forms) + form) * 2 + interim) * 2 + lent
        kinds = kinds * 2 + recent
        for kind in np.unique(kinds)[::-1].tolist():
            chosen = np.flatnonzero(kinds == kind)
            first, number = chosen[0], next(self._numbers)
            holder, lends = int(found.holders[first]), bool(lent[first])
            name = self.placements.lender if lends else self.placements.holder
            load = Load(
                slab=number if keep[first] else -number,
                request=request,
                epoch=self.placements.chance_epoch(request) if request is not None else None,
                peer=name(holder) if holder >= 0 else None,
                rows=rows[chosen],
                sample_ids=found.sample_ids[chosen],
                lengths=found.lengths[chosen],
                lends=lends,
                form=int(found.forms[first]),
                interim=bool(interim[first]),
            )
            self._begin_loading(load)
            loads.append(load)
        return loads

    def _admit_recent(
        self, plan: PartPlan, found: _Sources, wanted: NDArray[np.bool_], *, ahead: bool
    ) -> NDArray[np.bool_]:
        """Choose samples to cache for a while: bool[n]. None unless other pipelines need them soon."""
        admitted = np.zeros(len(wanted), np.bool_)
        if not wanted.any() or not self.shared.is_awaited(plan.pipeline, self._span_of(plan.request)):
            return admitted
        chosen = np.flatnonzero(wanted & (found.lengths > 0))
        if not ahead:
            nbytes = found.lengths[chosen]
            chosen = chosen[fitting(nbytes, self._make_room_for_recent(int(nbytes.sum())))]
            self.minio.used_bytes += int(found.lengths[chosen].sum())
        admitted[chosen] = True
        return admitted

    def _make_room_for_recent(self, nbytes: int) -> int:
        """Free up to ``nbytes`` for recent samples, and return the free bytes.

        Evicts recent samples that all pipelines have passed and, within the limit for recent ones, lasting samples.
        """
        most_bytes, passed = self._most_recent_bytes, self.shared.passed_position
        nbytes = min(nbytes, most_bytes)
        if self._recent_bytes + nbytes <= most_bytes and nbytes <= self.minio.free_bytes:
            return nbytes
        in_use = self._slabs_in_use()  # never evicted: otherwise parts would evict each other's samples forever
        if self._recent_bytes + nbytes > most_bytes:
            oldest = [slab for slab, each in self._recent.items() if slab not in in_use and each.end <= passed][::-1]
            while self._recent_bytes + nbytes > most_bytes and oldest:
                self._drop_recent(oldest.pop())
        free_bytes = max(0, most_bytes - self._recent_bytes)
        nbytes = min(nbytes, free_bytes)
        if self.minio.free_bytes < nbytes:
            others = self.directory.slab_bytes.keys() - self.tier.slabs.keys() - self._recent.keys() - in_use
            lasting = sorted(others, key=lambda slab: (self.directory.live_samples(slab), slab), reverse=True)
            while self.minio.free_bytes < nbytes and lasting:
                self.withdraw(self.directory.samples_in(lasting.pop()))
        return min(free_bytes, self.minio.free_bytes)

    def _settle_recent(self, slab: int) -> None:
        """Charge a slab that was read ahead and whose fetch has ended; drop it if it is not needed or has no room."""
        if slab in self._loading or self._is_charged(slab):
            return
        nbytes, end = self._recent[slab].nbytes, self._recent[slab].end
        if end <= self.shared.passed_position or self._make_room_for_recent(nbytes) < nbytes:
            self._drop_recent(slab)
            return
        self.minio.used_bytes += nbytes
        self._recent[slab] = self._recent[slab]._replace(is_charged=True)

    def _drop_recent(self, slab: int) -> None:
        ids = self._recent[slab].sample_ids
        self.withdraw(ids[self.directory.slabs(ids) == slab])

    def _is_charged(self, slab: int) -> bool:
        return slab not in self._recent or self._recent[slab].is_charged

    def _slabs_in_use(self) -> set[int]:
        return {load.slab for plan in self._plans.values() for load in plan.loads} | self._loading.keys()

    @property
    def _recent_bytes(self) -> int:
        return sum(each.nbytes for each in self._recent.values() if each.is_charged)

    @property
    def _most_recent_bytes(self) -> int:
        """Most bytes charged for recent samples; 0 unless pipelines share copies."""
        if not self.shared.group.pipelines:  # the usual case; `_of_home` takes O(dataset) time once
            return 0
        return min(self.minio.budget_bytes, int(self.shared.share * self._of_home.nbytes))

    def _share_that_fits(self) -> float:
        """Return the share of this node's samples that the cache can hold, at the mean size of the cached ones."""
        home, directory = self._of_home, self.directory
        mean = max(1, directory.nbytes) / directory.samples if directory.samples else home.nbytes / max(1, home.samples)
        return min(1.0, self.minio.budget_bytes / max(1.0, mean * home.samples))

    @property
    def _of_home(self) -> Amount:
        if self._home is None:
            share = self.placements.home_share(self._num_samples)
            total = int(self.lengths(np.arange(self._num_samples)).sum())
            self._home = Amount(round(share * self._num_samples), round(share * total))
        return self._home

    def _span_of(self, request: PartRequest) -> Span:
        blocks = self.placements.order(request.block_samples).blocks_per_epoch
        return Span(request.block / blocks, (request.block + 1) / blocks)

    def _decoded_bytes(self, request: PartRequest) -> int:
        room = self.tier.free_bytes + self.tier.outdated_bytes
        if not room or not self._hands_in(request):
            return 0
        ids = self.placements.stored(request)
        # The same choice as in `_promise`, so nothing is evicted for samples that cannot be cached decoded.
        ids = ids[self._lacks_form(request, ids) & self._is_favoured(ids, decoded=True)]
        return int(self.tier.wanted(ids, room).sum() * self.tier.sample_bytes)

    def _hands_in(self, request: PartRequest) -> bool:
        """Return whether a part's worker can hand in samples. Samples of other nodes' parts are not cached here."""
        return self.tier.form in request.forms and self.placements.is_own(request)

    def _lacks_form(self, request: PartRequest, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples a part's worker cannot get in the tier's form or a later one: bool[n]."""
        forms, before = self.directory.lookup(sample_ids)["form"], request.forms.index(self.tier.form)
        return ~request._replace(forms=request.forms[before:]).takes(forms) | (forms == ENCODED)

    def _make_room_for_decoded(self, nbytes: int) -> None:
        """Evict decoded samples not in the current form, and encoded ones beyond their share."""
        outdated = set(self.tier.outdated()) & self.directory.slab_bytes.keys() if nbytes else set()
        for slab in sorted(outdated, key=lambda slab: (self.directory.live_samples(slab), slab)):
            if min(self.tier.free_bytes, self.minio.free_bytes) >= nbytes:
                return
            self.withdraw(self.directory.samples_in(slab))
        self._make_room(min(nbytes, self.tier.free_bytes), decoded=True)

    def _takes_all(self, stream: StreamKey) -> bool:
        """Return whether a pipeline can use all cached forms of decoded samples."""
        return self.directory.by_form.keys() <= {*stream.forms}

    def _make_room(self, nbytes: int, *, decoded: bool) -> None:
        """Evict slabs of the other kind until `nbytes` are free, or until that kind is within its share."""
        now = self.tier.form
        if decoded and self._draws is not None:
            self._drop_interim(nbytes)

        def order(slab: int) -> tuple[bool, int, int]:
            # Slabs in an old form first, because few pipelines can use them. Then those with the fewest live samples,
            # because the space of withdrawn samples is wasted.
            return self.tier.forms.get(slab, now) == now, self.directory.live_samples(slab), slab

        while self.minio.free_bytes < nbytes:
            excess = self._encoded_excess if decoded else self.tier.excess_bytes
            slabs = [slab for slab in self.directory.slab_bytes if (slab in self.tier.slabs) != decoded]
            if excess <= 0 or not slabs:
                return
            slab = min(slabs, key=order)
            self.withdraw(self.directory.samples_in(slab))

    def _drop_interim(self, nbytes: int) -> None:
        """Free `nbytes` from slabs that give way to others, except slabs that a part still waits for."""
        if self.minio.free_bytes >= nbytes:
            return
        read = {load.slab for plan in self._plans.values() for load in plan.loads}
        for slab in sorted(self._interim - read):
            if self.minio.free_bytes >= nbytes:
                return
            self.withdraw(self.directory.samples_in(slab))

    @property
    def _encoded_excess(self) -> int:
        encoded = self.minio.used_bytes - self.tier.used_bytes - self.tier.promised_bytes
        return encoded - (self.minio.budget_bytes - self.tier.target_bytes)

    def _refund(self, load: Load, nbytes: int) -> None:
        if self._is_charged(load.slab):
            self.minio.used_bytes -= nbytes
        if load.form != ENCODED:
            self.tier.shrunk(load.slab, nbytes)

    def _begin_loading(self, load: Load) -> None:
        self._loading[load.slab] = load
        if load.permanent:
            self._awaited_in.update(dict.fromkeys(load.sample_ids.tolist(), load.slab))
            if load.form != ENCODED:
                self.tier.take(load.slab, load.nbytes, load.form)

    def _absent(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples are neither cached nor being read into the cache: bool[n]."""
        absent = self.directory.slabs(sample_ids) == 0
        if self._awaited_in:  # if empty, do not copy the uncached samples
            absent[absent] = ~member_mask(sample_ids[absent], self._awaited_in)
        return absent

    def _unusable(self, request: PartRequest, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples must be read for a part: bool[n]."""
        absent = self._absent(sample_ids)
        if self._takes_all(request.stream):
            return absent
        return absent | ~request.takes(self.directory.lookup(sample_ids)["form"])

    def _missing_bytes(self, request: PartRequest) -> int:
        ids = self.placements.stored(request)
        ids = ids[self._unusable(request, ids)]
        found, _, _ = self._sources(request, ids[~self._comes_decoded(request, ids)])
        return int(found.lengths.sum())

    def _end_loading(self, load: Load) -> None:
        del self._loading[load.slab]
        if load.permanent:
            if load.slab not in self._recent:  # lasting: useful whenever its part is fetched
                self.ahead.release(load.slab)
            for i in load.sample_ids.tolist():
                del self._awaited_in[i]

    def _plan_of(self, load: Load) -> PartPlan | None:
        plan = self._plans.get(load.request) if load.request is not None else None
        return plan if plan and any(load is own for own in plan.loads) else None

    def _forget(self, plan: PartPlan) -> None:
        """End a plan and drop its transient slabs. Permanent slabs continue to be read."""
        del self._plans[plan.request]
        for load in plan.loads:
            if load.slab in self._recent:
                self.ahead.release(load.slab)
                self._settle_recent(load.slab)
        for slab in plan.transient_slabs():
            self.ahead.release(slab)
            self._loading.pop(slab, None)
            self._dropped.append(slab)

    def validate(self) -> None:
        """Check all invariants, in O(dataset) time; for tests. Raises AssertionError."""
        self.directory.validate()
        assert self._interim <= self.directory.slab_bytes.keys(), self._interim
        assert self._recent.keys() <= self.directory.slab_bytes.keys() | self._loading.keys(), self._recent
        for slab, recent in self._recent.items():
            assert recent.nbytes == self.directory.slab_bytes.get(slab, recent.nbytes), (slab, recent)
            assert recent.is_charged or slab in self.ahead.held_slabs() or slab in self._slabs_in_use(), (slab, recent)
        self.ahead.validate()
        permanent = [load for load in self._loading.values() if load.permanent]
        awaited_in = {int(i): load.slab for load in permanent for i in load.sample_ids}
        assert self._awaited_in == awaited_in, "a sample is read for two permanent slabs, or forgotten"
        assert not self.directory.slabs(np.array([*awaited_in], dtype=np.int64)).any(), "kept and read again"
        self.tier.validate()
        charged = self.directory.slab_total + sum(load.nbytes for load in permanent) + self.tier.promised_bytes
        charged += sum(hand_in.nbytes for hand_in in self.tier.coming.values())
        charged -= sum(each.nbytes for each in self._recent.values() if not each.is_charged)
        assert not self.tier.coming.keys() & self.directory.slab_bytes.keys(), "readable and still coming"
        holding = {load.slab for load in permanent if load.form != ENCODED} | self.tier.coming.keys()
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
        assert {slab for slab in held if slab > 0} <= self._loading.keys() | self._recent.keys(), (held, self._loading)
