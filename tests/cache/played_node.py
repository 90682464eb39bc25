"""A simulated cache node: it fills slabs on command, in any order, and checks its planner's decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from mbaas.cache.decoded_tier import HandIn
from mbaas.cache.planner import Planner
from mbaas.cache.slab import Compaction, Load, OtherForm, RowLocations, pack
from mbaas.dataset.subsets import Draws, drawn_ids
from mbaas.samples.placement import ENCODED, PartRequest, PlacementHistory
from support.orders import Order

GROWTH = 3
"""Bytes of a decoded sample per byte in storage."""

FORM, SMALLER = 7, 5
"""Forms of decoded samples; the second one has more transforms applied, and is smaller."""

GROWTHS = {ENCODED: 1, FORM: GROWTH, SMALLER: 2}
"""Form -> bytes of a sample per byte in storage."""


class Node:
    """A cache node without I/O: it fills slabs on command, in any order, and checks its planner's decisions.

    A decoded sample has `GROWTH` times its bytes in storage.

    Args:
        bad: samples that storage cannot read; may change at any time.
        undecoded: samples missing in decoded form on other nodes or the disk, contrary to their reports.
        decoded_elsewhere: samples that another node has decoded, contrary to its report; `undecoded` takes precedence.
        disk: samples decoded on the node's disk.
        disk_bytes: capacity of the disk.
        draws: weighted draws of the samples; by default, an epoch has each sample once.
        by_draws: whether the cache knows how often each sample is drawn.
        check_every: invariants are checked once in this many events, because a check takes O(samples) time.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        block_samples: int,
        cache: int,
        readahead: int = 0,
        name: str = "",
        disk_bytes: int = 0,
        undecoded_share: float = 0.0,
        draws: Draws | None = None,
        by_draws: bool = True,
        check_every: int = 1,
    ) -> None:
        self.check_every, self.events = check_every, 0
        self.lengths = np.array(lengths, dtype=np.int64)
        drawn = len(lengths) if draws is None else draws.samples
        self.order = Order(drawn, seed=3, block_samples=block_samples, redrawn=draws is not None)
        self.placements = PlacementHistory(
            self.order, name, None if draws is None else lambda ids, epoch: drawn_ids(draws, epoch)[ids]
        )
        self.planner = Planner(
            self.order,
            lambda ids: self.lengths[ids],
            cache_bytes=cache,
            readahead_bytes=readahead,
            placements=self.placements,
            decoded_on_disk=lambda ids: np.where(np.isin(ids, [*self.disk]), GROWTH * self.lengths[ids], 0),
            form_on_disk=FORM,
            undecoded_share=undecoded_share,
            num_samples=len(lengths),
            draws=draws.expected if draws is not None and by_draws else None,
        )
        self.disk: set[int] = set()
        self.disk_bytes = disk_bytes
        self.bad: set[int] = set()
        self.undecoded: set[int] = set()
        self.decoded_elsewhere: set[int] = set()
        self.coming: dict[int, HandIn] = {}
        self.compactions: list[Compaction] = []
        self.filling: dict[int, Load] = {}
        self.full: dict[int, dict[int, tuple[int, int]]] = {}  # slab -> offset -> (sample, length)
        self.reads: Counter[int] = Counter()  # by epoch
        self.waiting: Counter[int | PartRequest] = Counter()  # fetches in progress, by block or request

    def request(self, block: int | PartRequest) -> PartRequest:
        """The node's own part of a block, for a pipeline that can use `FORM`; a request itself, for another one."""
        return block if isinstance(block, PartRequest) else self.placements.own(block)._replace(forms=(FORM,))

    def ids(self, block: int | PartRequest) -> list[int]:
        """Samples of a part, each once."""
        ids: list[int] = self.placements.stored(self.request(block)).tolist()
        return ids

    def check(self) -> None:
        self.events += 1
        if self.events % self.check_every:
            return
        self.planner.validate()
        ahead, minio = self.planner.ahead, self.planner.minio
        assert set(self.filling) == set(self.planner._loading)
        assert ahead.used_bytes <= ahead.budget_bytes
        cached = [slab for slab in self.full if slab > 0 and self.planner._is_charged(slab)]
        assert sum(n for slab in cached for _, n in self.full[slab].values()) <= minio.used_bytes
        decoded = set(self.planner.directory.decoded_ids().tolist())
        kept = [(slab, i) for slab in self.full if slab > 0 for i, n in self.full[slab].values() if n]
        homes = self.planner.directory.slabs(np.array([i for _, i in kept], np.int64)).tolist()
        for (slab, i), home in zip(kept, homes, strict=True):
            if home == slab:
                assert (slab in self.planner.tier.slabs) == (i in decoded)
        # Both forms: encoded samples are read if no other node turns out to have them decoded.
        most = (GROWTH + 1) * sum(int(self.lengths[self.ids(b)].sum()) for b in self.waiting)
        assert self.planner.transient_bytes <= ahead.budget_bytes + most + self.orphan_bytes()

    def orphan_bytes(self) -> int:
        """Bytes of permanent slabs that are being read, although their part dropped them or gave them up."""
        loads = self.filling.values()
        return sum(x.nbytes for x in loads if x.permanent and self.planner._plan_of(x) is None)

    def start(self, loads: list[Load]) -> None:
        for load in loads:
            assert load.slab not in self.filling
            assert load.slab not in self.full
            self.filling[load.slab] = load

    def drop(self, slabs: list[int]) -> None:
        for slab in slabs:
            assert (slab in self.filling) != (slab in self.full), f"slab {slab} is not there, or is there twice"
            self.filling.pop(slab, None)
            self.full.pop(slab, None)

    def look_ahead(self) -> None:
        loads = self.planner.look_ahead()
        self.drop(self.planner.take_dropped())
        self.start(loads)
        self.check()

    def give_way(self) -> None:
        self.drop(self.planner.take_dropped())
        self.check()

    # ---- samples that move to other nodes ----

    def lose(self, sample_ids: Iterable[int]) -> None:
        """Hand samples over to another node."""
        self.planner.withdraw(np.array([*sample_ids], np.int64))
        self.give_way()

    def begin_compaction(self) -> None:
        if (compaction := self.planner.begin_compaction()) is not None:
            self.compactions.append(compaction)

    def compact(self) -> None:
        """End the oldest compaction."""
        compaction = self.compactions.pop(0)
        offsets, lengths = pack(compaction.locations["length"]).tolist(), compaction.locations["length"].tolist()
        spans = zip(offsets, compaction.sample_ids.tolist(), lengths, strict=True)
        self.full[compaction.slab] = {offset: (sample, n) for offset, sample, n in spans}
        self.planner.end_compaction(compaction)
        self.give_way()

    # ---- the decoded tier ----

    def aim(self, target: int, form: int = FORM) -> None:
        self.planner.set_decoded_target(form, target, float(GROWTHS[form] * self.lengths.mean()))
        self.give_way()

    def hand_in(
        self,
        block: int | PartRequest,
        sample_ids: Iterable[int],
        unfit: Iterable[int] = (),
        *,
        is_last: bool = True,
        form: int = FORM,
    ) -> HandIn:
        """Hand in samples of a block, as a worker does, and begin to copy them."""
        ids = np.array([*sample_ids], np.int64)
        lengths = GROWTHS[form] * self.lengths[ids]
        hand_in = self.planner.begin_hand_in(self.request(block), form, ids, lengths, [*unfit])
        assert not (hand_in.chosen & hand_in.to_disk).any()
        if is_last:
            self.planner.tier.release(self.request(block))
        if len(hand_in.sample_ids):
            self.coming[hand_in.slab] = hand_in
        for i in ids[hand_in.to_disk].tolist():
            if GROWTH * self.lengths[i] <= self.disk_free_bytes:
                self.disk.add(i)
        self.give_way()
        return hand_in

    @property
    def disk_free_bytes(self) -> int:
        return self.disk_bytes - GROWTH * int(self.lengths[[*self.disk]].sum())

    def land(self, slab: int, *, fails: bool = False) -> None:
        """Finish the copy of a hand-in, or let it fail."""
        hand_in = self.coming.pop(slab)
        if fails:
            self.planner.tier.failed(hand_in)
        else:
            starts = (np.cumsum(hand_in.lengths) - hand_in.lengths).tolist()
            spans = zip(starts, hand_in.sample_ids.tolist(), hand_in.lengths.tolist(), strict=True)
            self.full[slab] = {offset: (sample, n) for offset, sample, n in spans}
            self.planner.hand_in_cached(hand_in)
        self.give_way()

    def asked(self, block: int | PartRequest) -> list[int]:
        """Samples that a worker must hand in when it fetches a block."""
        rows, nbytes = self.planner.to_hand_in(self.request(block))
        assert (nbytes > 0) == (len(rows) > 0)
        ids: list[int] = self.placements.stored(self.request(block))[rows].tolist()
        return ids

    # ---- fetches ----

    def begin(self, block: int | PartRequest, pipeline: str = "") -> None:
        self.planner.tier.disk_free_bytes = self.disk_free_bytes
        self.start(self.planner.begin_fetch(self.request(block), pipeline))
        self.waiting[block] += 1
        self.look_ahead()
        self.start(self.planner.retry_awaited(self.request(block)))

    def fill(self, slab: int) -> None:
        load = self.filling.pop(slab)
        failures = {i: why for i, s in enumerate(load.sample_ids.tolist()) if (why := self.lacks(load, s))}
        self.disk -= self.undecoded  # a disk drops samples that it cannot read
        readable = load.readable(failures)
        elsewhere = sum(isinstance(why, OtherForm) for why in failures.values())
        self.reads[load.epoch] += 0 if load.form else len(load.rows) - elsewhere
        lengths = load.lengths[readable]
        spans = zip((np.cumsum(lengths) - lengths).tolist(), load.sample_ids[readable].tolist(), lengths, strict=True)
        # Empty samples share their offset with a neighbour and are never looked up.
        self.full[slab] = {offset: (sample, int(n)) for offset, sample, n in spans if n}
        if not readable.any():
            del self.full[slab]
            if slab < 0:
                self.full[slab] = {}
        self.planner.filled(load, failures)
        self.look_ahead()
        for block in self.waiting:
            self.start(self.planner.retry_awaited(self.request(block)))

    def lacks(self, load: Load, sample: int) -> str:
        """Reason why a sample of a slab cannot be read; "" if it can."""
        if load.form:
            return OtherForm() if sample in self.undecoded else ""
        if load.peer is not None and sample in self.decoded_elsewhere - self.undecoded:
            return OtherForm(FORM, GROWTH * int(self.lengths[sample]))
        return "gone" if sample in self.bad else ""

    def fail(self, slab: int) -> None:
        self.planner.failed(self.filling.pop(slab), MemoryError("full"))
        self.drop([dropped for dropped in self.planner.take_dropped() if dropped != slab])
        self.check()
        for block in self.waiting:
            self.start(self.planner.retry_awaited(self.request(block)))

    def end(self, block: int | PartRequest) -> None:
        self.waiting[block] -= 1
        self.waiting += Counter()
        self.planner.end_fetch(self.request(block))
        self.drop([slab for slab in self.planner.take_dropped() if self.known(slab)])
        self.check()

    def known(self, slab: int) -> bool:
        return slab in self.filling or slab in self.full

    def ready(self) -> list[int | PartRequest]:
        for block in self.waiting:
            self.start(self.planner.retry_awaited(self.request(block)))
        return [block for block in self.waiting if not self.planner.awaited(self.request(block))]

    def deliver(self, block: int | PartRequest) -> RowLocations:
        """End a fetch and check that every row points at its own sample."""
        rows = self.planner.locate(self.request(block))
        ids = self.ids(block)
        assert rows.counts.all.samples == len(ids)
        slabs, offsets, lengths = rows.slab.tolist(), rows.offset.tolist(), rows.length.tolist()
        expected = self.lengths[ids].tolist()
        growth = []
        for i, sample in enumerate(ids):
            if i in rows.errors:
                assert (slabs[i], lengths[i]) == (-1, 0)
            elif expected[i]:
                slab = self.full[rows.slab_ids[slabs[i]]]
                assert slab[offsets[i]] == (sample, lengths[i])
                growth.append(lengths[i] / expected[i])
        assert {*growth} <= {GROWTHS[form] for form in (ENCODED, *self.request(block).forms)}
        assert len(growth) - growth.count(1) == rows.counts.decoded.samples
        self.end(block)
        return rows

    def fetch(self, block: int | PartRequest, pipeline: str = "") -> RowLocations:
        """Run a whole fetch: fill the slabs that it waits for, then those read ahead."""
        self.begin(block, pipeline)
        while awaited := self.planner.awaited(self.request(block)):
            self.fill(min(awaited))
        rows = self.deliver(block)
        while self.filling:
            self.fill(min(self.filling))
        return rows

    def epoch(self, epoch: int) -> list[RowLocations]:
        blocks = self.order.blocks_per_epoch
        return [self.fetch(epoch * blocks + b) for b in range(blocks)]
