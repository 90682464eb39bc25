"""Computes where the minibatches of an epoch end, and which samples of each are a rank's own: pure arithmetic.

A minibatch is the next samples of the epoch's order, without bad ones; it may end in the middle of a block.
For data-parallel trials each is shared out between the ranks by a plan. Every rank computes that for itself, and they
agree because the same numbers go in: the order, the plan, and which samples were bad.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.client.ledger import NOTHING, Tally
from mbaas.messages import RankPlan, Resumption
from mbaas.order import Ids, OwnEpoch, SampleOrder, Shuffle

KEPT_BLOCKS = 2
"""Number of blocks before the newest whose shards are kept: one for a minibatch that began in the block before, and one
because a rank's stream asks for the next block's shard while the loader is still at this one.
"""

Rows = NDArray[np.int64]


class BatchEnd(Struct, frozen=True):
    """The end of a minibatch.

    Attributes:
        position: where in the consumer's own epoch the sample after it is.
        size: number of this rank's samples of it.
        elsewhere: other ranks' samples of it.
        shuffle: of the stream's epoch in which it ends.
    """

    position: int
    size: int
    elsewhere: Tally = NOTHING
    shuffle: Shuffle | None = None

    @property
    def samples(self) -> int:
        """Number of samples of the minibatch, over all ranks."""
        return self.size + self.elsewhere.samples


NO_IDS: Ids = np.empty(0, np.int64)

NO_SAMPLES = BatchEnd(0, 0)
"""What there is of a minibatch before its first sample."""


class BlockShard(Struct, frozen=True):
    """What a consumer has to take of one block, and how minibatches lie in it.

    Attributes:
        good: rows of the block without those that were left out as bad.
        rows: those of them that are this rank's.
        ends: the ends of the minibatches that end in the block; an epoch's last minibatch ends in its last block.
        dropped: samples at the epoch's end that make no minibatch.
        open: the minibatch that goes on in the next block, as far as it lies in this one and those before.
        open_ids: its samples so far, over all ranks, if they might make no minibatch.
        is_last: whether it is the last block of the consumer's own epoch.
    """

    good: Rows
    rows: Rows
    ends: tuple[BatchEnd, ...]
    dropped: Tally
    open: BatchEnd
    open_ids: Ids
    is_last: bool


class RankSharding:
    """Cuts an epoch into minibatches and shares each out between ranks; a single consumer is rank 0 of 1.

    Args:
        order: the order of the feed.
        batch_size: samples in a minibatch, over all ranks.
        rank, world_size: which rank of a data-parallel trial this is, of how many.
        drop_last: leave out the samples at an epoch's end that do not fill a minibatch. A last minibatch with fewer
            samples than ranks is left out in any case.
        is_certain: whether no sample will be bad, so that a minibatch is shared out as a whole; else each run of it
            that lies in one block is shared out for itself, because the next block's bad samples are not known yet.
        resumed: where the first minibatch begins, if that is in the middle of an epoch; and the first row of that block
            which the consumer lacks.

    Attributes:
        order, rank, world_size, batch_size: as given.
        plans: epoch -> the plan by which it is shared out; without one, ranks take turns in the order of the samples.
    """

    def __init__(
        self,
        order: SampleOrder,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        is_certain: bool = True,
        resumed: tuple[Resumption, int] | None = None,
    ) -> None:
        self.order, self.batch_size = order, batch_size
        self.rank, self.world_size = rank, world_size
        self._drop_last, self._is_certain = drop_last, is_certain
        self._own = None if resumed is None else resumed[0].own_epoch
        self._begin = None if resumed is None else (resumed[0].start, resumed[1])
        self._shards: dict[int, BlockShard] = {}  # by block; of the last few
        self._in_turn = RankPlan(("",) * world_size)
        self.plans: dict[int, RankPlan] = {}

    def add_plan(self, epoch: int, plan: RankPlan) -> None:
        """Share an epoch out by ``plan``; forget the plans of epochs that are over."""
        # not that of the epoch before: a rank's stream is ahead of its loader, which may still be there
        self.plans = {**{number: old for number, old in self.plans.items() if number >= epoch - 1}, epoch: plan}

    def renumber(self, by: int) -> None:
        """Count all blocks from another number on: by 0, or to go on in epochs aside."""
        self._shards = {block + by: shard for block, shard in self._shards.items()}
        self._own = None if self._own is None else self._own.moved(by)
        self._begin = None if self._begin is None else (self._begin[0] + by, self._begin[1])

    def shard(self, block: int, shuffle: Shuffle, bad: Iterable[int]) -> BlockShard:
        """Return what to take of a block.

        Blocks are asked for in order: where a minibatch goes on from the block before, that one's shard says how far.

        Args:
            block: its number.
            shuffle: of its epoch.
            bad: ids of its samples that were left out.
        """
        if block not in self._shards:
            self._shards[block] = self._cut(block, shuffle, np.fromiter(bad, np.int64))
            for old in [number for number in self._shards if number < block - KEPT_BLOCKS]:
                del self._shards[old]
        return self._shards[block]

    def _own_epoch(self, block: int) -> OwnEpoch:
        """Return the consumer's own epoch that a block belongs to; one outside of the last begins the next."""
        if self._own is None or not self._own.first <= block < self._own.end:
            self._own = OwnEpoch.at(block, self.order.blocks_per_epoch, self.order.block_samples)
        return self._own

    def _cut(self, block: int, shuffle: Shuffle, bad: Ids) -> BlockShard:
        start, stop = self.order.span(block)
        good = np.arange(stop - start)
        if len(bad):
            good = good[~np.isin(self.order.sample_ids(block, shuffle), bad)]
        used, end, open_ids = good, NO_SAMPLES, NO_IDS
        own_epoch = self._own_epoch(block)
        is_last = block == own_epoch.end - 1
        if is_last and own_epoch.begin % self.order.block_samples:  # it ends in the middle of the block
            used = used[used < own_epoch.begin - start]
        if self._begin is not None and block == self._begin[0]:
            used = used[used >= self._begin[1]]
        elif block > own_epoch.first:  # no minibatch reaches across an epoch's end
            end, open_ids = self._shards[block - 1].open, self._shards[block - 1].open_ids
        # from a position of the stream's epoch to one of the consumer's
        before = own_epoch.begin if self._is_in_first(block, own_epoch) else own_epoch.begin - self.order.num_samples
        own, ends = np.ones(len(used), np.bool_), []
        for first, last in self._runs(end.samples, len(used)):
            samples, elsewhere = end.samples + last - first, end.elsewhere
            if self.world_size > 1:  # a single consumer has all of them, whatever their ids
                ids, ranks = self._ranks(block, shuffle, used[first:last], end.samples)
                own[first:last] = ranks == self.rank
                elsewhere = elsewhere.plus(ids[~own[first:last]])
            position = start + int(used[last - 1]) + 1 - before
            end = BatchEnd(position, samples - elsewhere.samples, elsewhere, shuffle)
            if end.samples == self.batch_size:
                ends.append(end)
                end, open_ids = NO_SAMPLES, NO_IDS
            elif self._drop_last or self.world_size > 1:
                open_ids = np.concatenate([open_ids, self._ids(block, shuffle, used[first:last])])
        dropped = NOTHING
        if is_last and end.samples:
            # a rank without a sample would have no mean loss, so such a minibatch is left out for all
            if self._drop_last or end.samples < self.world_size:
                dropped = NOTHING.plus(open_ids)
            else:
                ends.append(end)
            end, open_ids = NO_SAMPLES, NO_IDS
        return BlockShard(good, used[own], tuple(ends), dropped, end, open_ids, is_last)

    def _is_in_first(self, block: int, own_epoch: OwnEpoch) -> bool:
        """Whether a block lies in the stream's epoch in which the consumer's own began."""
        return self.order.epoch_of(block) == self.order.epoch_of(own_epoch.first)

    def _runs(self, filled: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield [first, last) of the samples that belong to one minibatch; ``filled`` of the first one came before."""
        first = 0
        while first < count:
            last = min(count, first + self.batch_size - filled)
            yield first, last
            first, filled = last, 0

    def _ids(self, block: int, shuffle: Shuffle, run: Rows) -> Ids:
        """Return the ids of the samples in rows ``run``."""
        start = self.order.span(block)[0]
        return self.order.samples_at(shuffle, start + int(run[0]), start + int(run[-1]) + 1)[run - run[0]]

    def _ranks(self, block: int, shuffle: Shuffle, run: Rows, filled: int) -> tuple[Ids, NDArray[np.int64]]:
        """Return the ids of the samples in rows ``run``, and their ranks.

        The minibatch has ``filled`` samples before these.
        """
        plan = self.plans.get(self.order.epoch_of(block), self._in_turn)
        if not self._is_certain:
            ids = self._ids(block, shuffle, run)
            return ids, plan.ranks(ids, filled)
        # The whole minibatch, blocks before and after included, because only as a whole is it shared out evenly.
        first = self.order.span(block)[0] + int(run[0]) - filled
        ids = self.order.samples_at(shuffle, first, min(first + self.batch_size, self.order.num_samples))
        of_run = slice(filled, filled + len(run))
        return ids[of_run], plan.ranks(ids)[of_run]
