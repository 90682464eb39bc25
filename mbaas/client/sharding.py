"""Computes the ends of an epoch's minibatches and each rank's samples; no I/O.

A minibatch consists of the next samples in the epoch's order, without bad ones; it may end within a block. For
data-parallel trials a plan divides each minibatch among the ranks. Every rank computes this independently. All agree
because their inputs are equal: the order, the plan and the bad samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.client.ledger import NOTHING, Tally
from mbaas.samples.order import Ids, OwnEpoch, SampleOrder, Shuffle
from mbaas.wire.consumers import Resumption
from mbaas.wire.ranks import RankPlan

KEPT_BLOCKS = 2
"""Number of shards kept before the newest.

One is for a minibatch that began in the previous block. The other is needed because a rank's stream requests the next
block's shard while the loader is still at this block.
"""

Rows = NDArray[np.int64]


class BatchEnd(Struct, frozen=True):
    """The end of a minibatch: ``position`` of the next sample in the consumer's own epoch, and ``shuffle`` of the
    stream's.

    ``size`` is the number of this rank's samples, ``elsewhere`` are those of other ranks.
    """

    position: int
    size: int
    elsewhere: Tally = NOTHING
    shuffle: Shuffle | None = None

    @property
    def samples(self) -> int:
        """Number of samples in the minibatch, over all ranks."""
        return self.size + self.elsewhere.samples


NO_IDS: Ids = np.empty(0, np.int64)

NO_SAMPLES = BatchEnd(0, 0)
"""A minibatch before its first sample."""


class BlockShard(Struct, frozen=True):
    """A consumer's rows of one block, and the minibatches in it."""

    # good, rows: rows of the block without bad samples; this rank's among these
    good: Rows
    rows: Rows
    ends: tuple[BatchEnd, ...]  # ends of minibatches in the block. An epoch's last minibatch ends in its last block.
    dropped: Tally  # samples at the epoch's end that are in no minibatch
    # open, open_ids: end so far of the minibatch that continues in the next block; its sample ids, over all ranks, if
    # it may be dropped
    open: BatchEnd
    open_ids: Ids
    is_last: bool  # True for the last block of the consumer's own epoch


class RankSharding:
    """Cuts an epoch into minibatches and divides each among the ranks. A single consumer is rank 0 of 1.

    Args:
        batch_size: samples in a minibatch, over all ranks.
        rank, world_size: rank of this process in its data-parallel trial, and number of ranks.
        drop_last: drop the samples at an epoch's end that do not fill a minibatch. A last minibatch with fewer samples
            than ranks is always dropped.
        is_certain: True if no sample can be bad, so that minibatches are divided as a whole. Otherwise each run of a
            minibatch within one block is divided separately, because the next block's bad samples are not known yet.
        resumed: block and row of the first minibatch, if it begins within an epoch.

    Attributes:
        plans: epoch -> plan that divides its minibatches. Without a plan, ranks take samples in turn.
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
        self._begin = None if resumed is None else (resumed[0].start, resumed[1])
        self._shards: dict[int, BlockShard] = {}  # by block, for the last few blocks
        self._in_turn = RankPlan(("",) * world_size)
        self.plans: dict[int, RankPlan] = {}

    def add_plan(self, epoch: int, plan: RankPlan) -> None:
        """Use ``plan`` for an epoch, and forget the plans of finished epochs."""
        # Keep the previous epoch's plan: a rank's stream is ahead of its loader, which may still be in that epoch.
        self.plans = {**{number: old for number, old in self.plans.items() if number >= epoch - 1}, epoch: plan}

    def renumber(self, by: int) -> None:
        """Add ``by`` to all block numbers. It is 0, or the offset of side epochs (`mbaas.samples.order.ASIDE`)."""
        self._shards = {block + by: shard for block, shard in self._shards.items()}
        self._begin = None if self._begin is None else (self._begin[0] + by, self._begin[1])

    def shard(self, block: int, shuffle: Shuffle, own_epoch: OwnEpoch, bad: Iterable[int]) -> BlockShard:
        """Return the shard of a block of the consumer's ``own_epoch``; ``bad`` are the ids of its bad samples.

        Blocks must be requested in order: a minibatch that continues from the previous block needs that block's shard.
        """
        if block not in self._shards:
            self._shards[block] = self._cut(block, shuffle, own_epoch, np.fromiter(bad, np.int64))
            for old in [number for number in self._shards if number < block - KEPT_BLOCKS]:
                del self._shards[old]
        return self._shards[block]

    def _cut(self, block: int, shuffle: Shuffle, own_epoch: OwnEpoch, bad: Ids) -> BlockShard:
        start, stop = self.order.span(block)
        good = np.arange(stop - start)
        if len(bad):
            good = good[~np.isin(self.order.sample_ids(block, shuffle), bad)]
        used, end, open_ids = good, NO_SAMPLES, NO_IDS
        is_last = block == own_epoch.end - 1
        if is_last and own_epoch.begin % self.order.block_samples:  # the epoch ends within the block
            used = used[used < own_epoch.begin - start]
        if self._begin is not None and block == self._begin[0]:
            used = used[used >= self._begin[1]]
        elif block > own_epoch.first:  # minibatches never cross an epoch's end
            end, open_ids = self._shards[block - 1].open, self._shards[block - 1].open_ids
        # offset from positions in the stream's epoch to positions in the consumer's
        is_in_first = self.order.epoch_of(block) == self.order.epoch_of(own_epoch.first)
        before = own_epoch.begin if is_in_first else own_epoch.begin - self.order.num_samples
        own, ends = np.ones(len(used), np.bool_), []
        for first, last in self._runs(end.samples, len(used)):
            samples, elsewhere = end.samples + last - first, end.elsewhere
            if self.world_size > 1:  # a single consumer has all samples, so ids are not needed
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
            # A rank without a sample would have no mean loss, so such a minibatch is dropped for all ranks.
            if self._drop_last or end.samples < self.world_size:
                dropped = NOTHING.plus(open_ids)
            else:
                ends.append(end)
            end, open_ids = NO_SAMPLES, NO_IDS
        return BlockShard(good, used[own], tuple(ends), dropped, end, open_ids, is_last)

    def _runs(self, filled: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield [first, last) of the samples of each minibatch. The first already has ``filled`` samples."""
        first = 0
        while first < count:
            last = min(count, first + self.batch_size - filled)
            yield first, last
            first, filled = last, 0

    def _ids(self, block: int, shuffle: Shuffle, run: Rows) -> Ids:
        start = self.order.span(block)[0]
        return self.order.samples_at(shuffle, start + int(run[0]), start + int(run[-1]) + 1)[run - run[0]]

    def _ranks(self, block: int, shuffle: Shuffle, run: Rows, filled: int) -> tuple[Ids, NDArray[np.int64]]:
        """Return the ids and ranks of the samples in rows ``run``; ``filled`` samples of the minibatch precede them."""
        plan = self.plans.get(self.order.epoch_of(block), self._in_turn)
        if not self._is_certain:
            ids = self._ids(block, shuffle, run)
            return ids, plan.ranks(ids, filled)
        # Compute the whole minibatch, including samples in other blocks: only as a whole is it divided evenly.
        first = self.order.span(block)[0] + int(run[0]) - filled
        ids = self.order.samples_at(shuffle, first, min(first + self.batch_size, self.order.num_samples))
        of_run = slice(filled, filled + len(run))
        return ids[of_run], plan.ranks(ids)[of_run]
