"""Minibatch bounds and rank shares are right for any blocks, batch sizes, ranks and bad samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.client.ledger import NOTHING, EpochProgress, Tally
from mbaas.client.saved_state import STATE_VERSION, SavedRank, SavedState, levels_of, resumption
from mbaas.client.sharding import BatchEnd, BlockShard, RankSharding
from mbaas.samples.order import OwnEpoch, SampleOrder, Shuffle
from mbaas.samples.placement import NodeWeight, Placement
from mbaas.wire.consumers import Resumption
from mbaas.wire.ranks import RankPlan

NODES = tuple(NodeWeight(f"node-{letter}", 0, weight) for letter, weight in zip("abc", (1.0, 2.0, 0.5), strict=True))
PLACEMENT = Placement(7, NODES, (np.inf,) * len(NODES))


def saved_at(position: int, *, feed_epoch: int, begin: int = 0, shuffle: Any = ()) -> SavedState:
    return SavedState(
        version=STATE_VERSION,
        fingerprint="",
        engine="cpu",
        epoch=0,
        feed_epoch=feed_epoch,
        position=position,
        samples=0,
        id_hash=0,
        left_out=[],
        share=SavedRank(rank=0, world_size=1, samples=0, id_hash=0),
        begin=begin,
        shuffle=[*shuffle],
    )


def plan(*nodes: str) -> RankPlan:
    return RankPlan(tuple(f"node-{node}" for node in nodes), PLACEMENT)


def own_epoch(order: SampleOrder, epoch: int) -> OwnEpoch:
    return OwnEpoch.at(epoch * order.blocks_per_epoch, order.blocks_per_epoch, order.block_samples)


def shards_of(
    sharding: RankSharding, order: SampleOrder, epoch: int, bad: list[int], first: int = 0
) -> Iterator[tuple[int, BlockShard]]:
    """Yield the epoch's blocks, starting with its block ``first``, each with its shard."""
    begin = epoch * order.blocks_per_epoch
    for block in range(begin + first, begin + order.blocks_per_epoch):
        ids = order.sample_ids(block)
        yield block, sharding.shard(block, Shuffle(epoch), own_epoch(order, epoch), ids[np.isin(ids, bad)].tolist())


def batches_of(
    sharding: RankSharding, order: SampleOrder, epoch: int, bad: list[int], first: int = 0
) -> list[list[int]]:
    """Sample ids of each of a rank's minibatches, cut as the loader cuts them."""
    ids: list[int] = []
    cut = []
    for block, shard in shards_of(sharding, order, epoch, bad, first):
        ids += order.sample_ids(block)[shard.rows].tolist()
        for end in shard.ends:
            cut.append(ids[: end.size])
            ids = ids[end.size :]
    return cut


def shardings(order: SampleOrder, ranks: RankPlan, epoch: int, **options: object) -> list[RankSharding]:
    size = len(ranks.nodes)
    found = [RankSharding(order, rank=rank, world_size=size, **options) for rank in range(size)]  # type: ignore[arg-type]
    for sharding in found:
        sharding.plans[epoch] = ranks
    return found


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 300),
    block=st.integers(1, 90),
    per_rank=st.integers(1, 40),
    extra=st.integers(0, 3),
    ranks=st.lists(st.sampled_from("abcd"), min_size=1, max_size=5),
    some=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_ranks_make_equal_steps_and_together_the_minibatches(samples, block, per_rank, extra, ranks, some, drop_last):
    """Good samples make whole minibatches, and a last one if it has a sample for each rank."""
    p = len(ranks)
    batch = p * per_rank + extra % p
    order, epoch = SampleOrder(samples, 5, block), 3
    bad = list(range(0, samples, 7))[:some]
    good = [i for i in order.samples_at(Shuffle(epoch), 0, samples).tolist() if i not in bad]
    minibatches = [good[i : i + batch] for i in range(0, len(good), batch)]
    if minibatches and (len(minibatches[-1]) < p or (drop_last and len(minibatches[-1]) < batch)):
        minibatches.pop()
    options = {"batch_size": batch, "drop_last": drop_last, "is_certain": not bad}
    by_rank = [batches_of(sharding, order, epoch, bad) for sharding in shardings(order, plan(*ranks), epoch, **options)]
    assert [len(steps) for steps in by_rank] == [len(minibatches)] * p
    for step, minibatch in enumerate(minibatches):
        parts = [steps[step] for steps in by_rank]
        assert sorted(i for part in parts for i in part) == sorted(minibatch)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert min(map(len, parts)) >= 1
        for part in parts:
            assert part == [i for i in minibatch if i in part], "canonical order"


@pytest.mark.parametrize("is_certain", [True, False])
def test_a_rank_gets_what_lies_on_its_node(is_certain):
    """Per seven samples a has two, b four and c one. Ranks on a and b need half each, so all of a's stay there."""
    order, epoch = SampleOrder(1000, 0, 96), 0
    by_rank = shardings(order, plan("a", "b"), epoch, batch_size=96, is_certain=is_certain)
    for block in range(order.blocks_per_epoch):
        placement = PLACEMENT.of(order.sample_ids(block))
        first, second = (
            sharding.shard(block, Shuffle(epoch), own_epoch(order, epoch), ()).rows for sharding in by_rank
        )
        kept = min((placement == 0).sum(), len(first))
        assert (placement[first] == 0).sum() == kept
        assert (placement[second] == 0).sum() == (placement == 0).sum() - kept


def test_bad_samples_are_not_known_ahead_and_shares_stay_even():
    """Minibatches of 100 span blocks of 64 with bad samples in each, so their pieces are shared out one by one."""
    order, epoch, bad = SampleOrder(1003, 2, 64), 1, list(range(0, 1003, 11))
    by_rank = [
        batches_of(sharding, order, epoch, bad)
        for sharding in shardings(order, plan("a", "b", "b"), epoch, batch_size=100, is_certain=False)
    ]
    good = 1003 - len(bad)
    sizes = np.array([[len(step) for step in steps] for steps in by_rank])
    assert sizes.sum(axis=0).tolist() == [100] * (good // 100) + [good % 100]
    assert (np.ptp(sizes, axis=0) <= 1).all()


@pytest.mark.parametrize("is_certain", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_loaded_position_goes_on_with_the_same_shares(is_certain, steps):
    order, epoch = SampleOrder(500, 3, 70), 2
    options = {"batch_size": 60, "is_certain": is_certain}
    whole = [batches_of(sharding, order, epoch, []) for sharding in shardings(order, plan("a", "c"), epoch, **options)]
    first = steps * 60 // 70
    begin = epoch * order.blocks_per_epoch
    own = OwnEpoch(begin, begin + order.blocks_per_epoch)
    resumed = Resumption(begin + first, own, epoch, Shuffle(epoch)), steps * 60 - first * 70
    tails = shardings(order, plan("a", "c"), epoch, resumed=resumed, **options)
    for rank, sharding in enumerate(tails):
        assert [sorted(step) for step in batches_of(sharding, order, epoch, [], first)] == [
            sorted(step) for step in whole[rank][steps:]
        ]


@pytest.mark.parametrize("block", [32, 70])
@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_the_state_of_eight_ranks_is_gone_on_with_by_any_number(ranks: int, block: int) -> None:
    """States are taken after each of an epoch's four minibatches of 48, and after the last one of 18.

    The ranks together read the remaining minibatches in order, also with another block size.
    """
    order, other, epoch = SampleOrder(210, 5, 32), SampleOrder(210, 5, block), 2
    (minibatches,) = (batches_of(one, order, epoch, []) for one in shardings(order, plan("a"), epoch, batch_size=48))
    eight = [batches_of(one, order, epoch, []) for one in shardings(order, plan(*"abcabcab"), epoch, batch_size=48)]
    assert [sorted(itertools.chain(*parts)) for parts in zip(*eight, strict=True)] == [*map(sorted, minibatches)]
    nodes = [*itertools.islice(itertools.cycle("abc"), ranks)]
    for done in range(1, len(minibatches) + 1):
        saved = saved_at(min(48 * done, 210), feed_epoch=epoch)
        resumed = resumption(saved, other)
        first = resumed[0].start - epoch * other.blocks_per_epoch
        found = shardings(other, plan(*nodes), epoch, batch_size=48, resumed=resumed)
        by_rank = [batches_of(one, other, epoch, [], first) for one in found]
        assert [len(steps) for steps in by_rank] == [len(minibatches) - done] * ranks
        for minibatch, parts in zip(minibatches[done:], zip(*by_rank, strict=True), strict=True):
            assert sorted(itertools.chain(*parts)) == sorted(minibatch)
            assert all(part == [i for i in minibatch if i in part] for part in parts)


def test_own_and_others_samples_and_dropped_ones_add_up_to_the_epoch():
    """103 samples in minibatches of 10 for 4 ranks: the last 3 are dropped."""
    order = SampleOrder(103, 0, 25)
    for rank, sharding in enumerate(shardings(order, plan("a", "b", "b", "c"), 0, batch_size=10)):
        progress = EpochProgress(rank, 4, feed_epoch=0)
        shards = list(shards_of(sharding, order, 0, []))
        ends = [end for _, shard in shards for end in shard.ends]
        ids = iter(np.concatenate([order.sample_ids(block)[shard.rows] for block, shard in shards]).tolist())
        for end in ends:
            assert end.samples == 10
            progress.count(
                np.fromiter(itertools.islice(ids, end.size), np.int64),
                position=end.position,
                shuffle=end.shuffle,
                elsewhere=end.elsewhere,
            )
        progress.dropped = shards[-1][1].dropped
        assert progress.dropped == NOTHING.plus(order.samples_at(Shuffle(0), 100, 103))
        assert progress.close(order.num_samples, 0).exact
        assert progress.received.samples + progress.elsewhere.samples == 100


def test_positions_are_those_after_the_last_good_sample():
    """Blocks of 10, minibatches of 5. Rows 1, 7, 8 and 9 of the first block are bad, so rows 0 and 2 to 5 make one."""
    order = SampleOrder(35, 4, 10)
    bad = order.sample_ids(0)[[1, 7, 8, 9]].tolist()
    sharding = RankSharding(order, batch_size=5, is_certain=False)
    ends = [end for _, shard in shards_of(sharding, order, 0, bad) for end in shard.ends]
    assert [end.position for end in ends] == [6, 14, 19, 24, 29, 34, 35]
    assert {end.elsewhere for end in ends} == {NOTHING}


def test_without_a_plan_ranks_take_turns_in_order():
    order = SampleOrder(20, 0, 20)
    ranks = [RankSharding(order, batch_size=10, rank=rank, world_size=3) for rank in range(3)]
    rows = [sharding.shard(0, Shuffle(0), own_epoch(order, 0), ()).rows.tolist() for sharding in ranks]
    assert rows == [[0, 1, 2, 3, 10, 11, 12, 13], [4, 5, 6, 14, 15, 16], [7, 8, 9, 17, 18, 19]]


# ---- epochs that begin in the middle of the feed's epoch ----


def read_own_epoch(
    sharding: RankSharding,
    order: SampleOrder,
    shuffles: dict[int, Shuffle],
    own: OwnEpoch,
    bad: list[int],
    first: int | None = None,
) -> tuple[list[list[int]], list[BatchEnd], Tally]:
    """Read from block ``first`` to the end of an own epoch: minibatches, their ends and the dropped samples."""
    rest: list[int] = []
    batches: list[list[int]] = []
    ends: list[BatchEnd] = []
    for block in range(own.first if first is None else first, own.end):
        shuffle = shuffles[order.epoch_of(block)]
        ids = order.sample_ids(block, shuffle)
        shard = sharding.shard(block, shuffle, own, ids[np.isin(ids, bad)].tolist())
        rest += ids[shard.rows].tolist()
        for end in shard.ends:
            batches.append(rest[: end.size])
            ends.append(end)
            rest = rest[end.size :]
        assert shard.is_last == (block == own.end - 1)
    assert len(rest) == shard.dropped.samples
    return batches, ends, shard.dropped


@settings(max_examples=150, deadline=None)
@given(
    samples=st.integers(2, 200),
    block_sizes=st.lists(st.integers(1, 70), min_size=2, max_size=2),
    batch=st.integers(1, 60),
    at=st.floats(0, 1, exclude_max=True),
    some=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_an_epoch_that_begins_in_the_middle_has_each_sample_once_and_goes_on_anywhere(
    samples: int, block_sizes: list[int], batch: int, at: float, some: int, drop_last: bool
) -> None:
    """The second feed has other block bounds than the one where the epoch began."""
    order, other = (SampleOrder(samples, 5, size) for size in block_sizes)
    first = 3 * order.blocks_per_epoch + int(at * order.blocks_per_epoch)
    begin = order.span(first)[0]
    bad = list(range(0, samples, 7))[:some]
    shuffles = {3: Shuffle(3), 4: Shuffle(3).after(4, [begin] if begin else [])}
    options: dict[str, Any] = {"batch_size": batch, "drop_last": drop_last, "is_certain": False}
    own = OwnEpoch.at(first, order.blocks_per_epoch, order.block_samples)
    batches, ends, dropped = read_own_epoch(RankSharding(order, **options), order, shuffles, own, bad)

    good = [i for i in range(samples) if i not in bad]
    had = [i for ids in batches for i in ids]
    assert len(had) + dropped.samples == len(good)
    assert len({*had}) == len(had)
    assert NOTHING.plus(np.array(had, np.int64)) + dropped == NOTHING.plus(np.array(good, np.int64))
    assert all(len(ids) == batch for ids in batches[:-1])
    assert [end.position for end in ends] == sorted(end.position for end in ends)

    for number, end in enumerate(ends):  # restore the state after each minibatch in a feed with other blocks
        levels = [(epoch, cuts) for epoch, cuts in levels_of(end.shuffle)]
        saved = saved_at(end.position, feed_epoch=3, begin=begin, shuffle=levels)
        found, row = resumption(saved, other)
        sharding = RankSharding(other, resumed=(found, row), **options)
        rest, _, left = read_own_epoch(sharding, other, shuffles, found.own_epoch, bad, found.start)
        assert rest == batches[number + 1 :]
        assert left == dropped
        assert found.shuffle == shuffles[found.epoch]
