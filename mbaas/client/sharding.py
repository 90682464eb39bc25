"""The way through an epoch: where its minibatches end, and which samples of each are a rank's own. Pure arithmetic.

A minibatch is the next so many samples of the epoch's order, bad ones left out; it may end in the middle of a block.
For data-parallel trials each is shared out between the ranks by a plan. Every rank computes that for itself, and they
agree because the same numbers go in: the order, the plan, and which samples were bad.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.client.ledger import NOTHING, Tally
from mbaas.messages import RankPlan
from mbaas.order import Ids, SampleOrder

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class BatchEnd:
    """The end of a minibatch.

    Attributes:
        position: in the epoch's order, of the sample after it.
        size: samples of it that are this rank's.
        elsewhere: samples of it that are other ranks'.
    """

    position: int
    size: int
    elsewhere: Tally = NOTHING

    @property
    def samples(self) -> int:
        """Of the minibatch, over all ranks."""
        return self.size + self.elsewhere.samples


NO_SAMPLES = BatchEnd(0, 0)
"""Before the first sample of a minibatch."""


@dataclass(frozen=True)
class BlockShard:
    """The part of the way that one block is.

    Attributes:
        good: rows of the block without those that were left out as bad.
        rows: those of them that are this rank's.
        marks: minibatches that end in the block; if it is an epoch's last, with the last one.
        dropped: how many samples at the epoch's end make no minibatch.
        open: the minibatch that goes on in the next block, as far as it is here.
    """

    good: Rows
    rows: Rows
    marks: tuple[BatchEnd, ...]
    dropped: int
    open: BatchEnd


class RankSharding:
    """Where a consumer's minibatches end.

    Args:
        sweep: the feed's order.
        batch_size: samples in a minibatch, over all ranks.
        rank, world_size: of a data-parallel trial.
        drop_last: leave out the samples at an epoch's end that do not fill a minibatch. A last minibatch with fewer
            samples than ranks is left out in any case.
        is_certain: whether no sample will be bad, so that a minibatch is shared out as a whole; else each run of it
            that lies in one block is shared out for itself, because the next block's bad samples are not known yet.
        begin: (block, position in its epoch's order) at which the first minibatch begins; by default an epoch's
            beginning.

    Attributes:
        plans: epoch -> by what it is shared out; without, ranks take turns in the order of the samples.
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
        begin: tuple[int, int] | None = None,
    ) -> None:
        self._order, self._batch_size = order, batch_size
        self._rank, self._world_size = rank, world_size
        self._drop_last, self._is_certain, self._begin = drop_last, is_certain, begin
        self._legs: dict[int, BlockShard] = {}  # by block; of the last few
        self._consecutive = RankPlan(("",) * world_size)
        self.plans: dict[int, RankPlan] = {}

    def leg(self, block: int, bad: Iterable[int]) -> BlockShard:
        """Of a block whose predecessor was asked for before, unless an epoch or the course begins in it.

        Args:
            block: its number.
            bad: ids of its samples that were left out.
        """
        if block not in self._legs:
            self._legs[block] = self._find(block, np.fromiter(bad, np.int64))
            for old in [number for number in self._legs if number < block - 2]:
                del self._legs[old]
        return self._legs[block]

    def _find(self, block: int, bad: Ids) -> BlockShard:
        start, stop = self._order.span(block)
        good = np.arange(stop - start)
        if len(bad):
            good = good[~np.isin(self._order.sample_ids(block), bad)]
        used, mark = good, NO_SAMPLES
        if self._begin is not None and block == self._begin[0]:
            used = good[good >= self._begin[1] - start]
        elif start > 0:
            mark = self._legs[block - 1].open
        own, marks = np.ones(len(used), np.bool_), []
        for first, last in self._runs(mark.samples, len(used)):
            samples, elsewhere = mark.samples + last - first, mark.elsewhere
            if self._world_size > 1:
                ids, ranks = self._ranks(block, used[first:last], mark.samples)
                own[first:last] = ranks == self._rank
                elsewhere = elsewhere.plus(ids[~own[first:last]])
            mark = BatchEnd(start + int(used[last - 1]) + 1, samples - elsewhere.samples, elsewhere)
            if mark.samples == self._batch_size:
                marks.append(mark)
                mark = NO_SAMPLES
        dropped = 0
        if stop == self._order.num_samples and mark.samples:
            if self._drop_last or mark.samples < self._world_size:
                dropped = mark.samples
            else:
                marks.append(mark)
            mark = NO_SAMPLES
        return BlockShard(good, used[own], tuple(marks), dropped, mark)

    def _runs(self, filled: int, count: int) -> Iterator[tuple[int, int]]:
        """[first, last) of the samples that belong to one minibatch each; ``filled`` of the first one came before."""
        first = 0
        while first < count:
            last = min(count, first + self._batch_size - filled)
            yield first, last
            first, filled = last, 0

    def _ranks(self, block: int, run: Rows, filled: int) -> tuple[Ids, NDArray[np.int64]]:
        """The ids of the samples in rows ``run``, before which the minibatch has ``filled`` others, and their ranks."""
        epoch, start = self._order.epoch_of(block), self._order.span(block)[0]
        plan = self.plans.get(epoch, self._consecutive)
        if not self._is_certain:
            ids = self._order.samples_at(epoch, start + int(run[0]), start + int(run[-1]) + 1)[run - run[0]]
            return ids, plan.ranks(ids, filled)
        first = start + int(run[0]) - filled
        ids = self._order.samples_at(epoch, first, min(first + self._batch_size, self._order.num_samples))
        of_run = slice(filled, filled + len(run))
        return ids[of_run], plan.ranks(ids)[of_run]
