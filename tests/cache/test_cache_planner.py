"""The planner keeps its invariants under schedules that no real clock would produce."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from played_node import Node

from mbaas.cache.readahead import DEPTH_BLOCKS, IDLE_FETCHES

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(
    lengths=SIZES,
    block_samples=st.integers(1, 13),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 2.0]),
    readahead=st.sampled_from([0, 1, 40, 10_000]),
)
@example(lengths=[7] * 37, block_samples=5, share=0.35, readahead=70)
@example(lengths=[0, 0, 0], block_samples=2, share=1.0, readahead=10)
def test_after_the_first_epoch_hits_are_the_cached_samples_and_storage_reads_the_rest(
    lengths: list[int], block_samples: int, share: float, readahead: int
) -> None:
    """Per epoch e > 0: hits = cached, reads = D - cached; read-ahead counts towards a later epoch."""
    budget = int(sum(lengths) * share)
    node = Node(lengths, block_samples=block_samples, cache=budget, readahead=readahead)
    first = node.epoch(0)
    assert sum(rows.counts.local.samples for rows in first) == 0
    cached = node.planner.directory.cached_ids()
    assert node.planner.directory.nbytes <= budget
    left_out = [n for i, n in enumerate(lengths) if n and i not in set(cached.tolist())]
    assert all(n > node.planner.minio.free_bytes for n in left_out), "a sample was left out although it fits"
    if share >= 1:
        assert not left_out
    for epoch in (1, 2):
        later = node.epoch(epoch)
        assert sum(rows.counts.local.samples for rows in later) == len(cached)
        assert sum(rows.counts.local.nbytes for rows in later) == node.lengths[cached].sum()
        assert sum(rows.counts.storage.nbytes for rows in later) == sum(lengths) - node.lengths[cached].sum()
        assert node.reads[epoch] == len(lengths) - len(cached)
    assert node.planner.directory.cached_ids().tolist() == cached.tolist(), "something was evicted"
    assert node.reads[0] == len(lengths)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lengths=SIZES,
    block_samples=st.integers(1, 13),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    readahead=st.sampled_from([0, 60, 500]),
)
def test_any_schedule_of_events_keeps_every_invariant(
    seed: int, lengths: list[int], block_samples: int, share: float, readahead: int
) -> None:
    """Fetches near and far, repeated and given up; slabs that land late, in part, or not at all."""
    chance = random.Random(seed)
    node = Node(lengths, block_samples=block_samples, cache=int(sum(lengths) * share), readahead=readahead)
    wanted = 0
    for _ in range(60):
        actions = {"demand": 4, "land": 6, "deliver": 6, "abort": 1, "give up": 1, "spoil": 1, "lose": 2, "compact": 2}
        action = chance.choices([*actions], [*actions.values()])[0]
        if action == "demand" and len(node.waiting) < 6:
            wanted = chance.choice([wanted + 1, wanted + 1, wanted + 1, max(0, wanted - 3), chance.randrange(300)])
            node.begin(wanted)
        elif action == "land" and node.filling:
            node.fill(chance.choice(list(node.filling)))
        elif action == "abort" and node.filling:
            node.fail(chance.choice(list(node.filling)))
        elif action == "deliver" and node.ready():
            block = chance.choice(node.ready())
            if node.planner._plans[node.request(block)].failure:
                with pytest.raises(MemoryError):
                    node.planner.locate(node.request(block))
                node.end(block)
            else:
                node.deliver(block)
        elif action == "give up" and node.waiting:
            node.end(chance.choice(list(node.waiting)))
        elif action == "lose" and (cached := node.planner.directory.cached_ids().tolist()):
            node.lose(chance.sample(cached, chance.randrange(1, len(cached) + 1)))
        elif action == "compact":
            node.begin_compaction() if chance.random() < 0.5 or not node.compactions else node.compact()
        elif action == "spoil":
            node.bad = set(chance.sample(range(len(lengths)), min(3, len(lengths))))
    while node.waiting or node.filling:  # nothing waits forever
        for slab in list(node.filling):
            if slab in node.filling:
                node.fill(slab)
        for block in node.ready():
            node.end(block)
    assert node.planner.transient_bytes == node.planner.ahead.used_bytes


def test_compaction_frees_the_bytes_of_samples_that_moved_away() -> None:
    """Half of each of 4 slabs moves away: the rest, 40 bytes, fits into slabs of at most 20 bytes, and 40 are free."""
    node = Node([2] * 40, block_samples=10, cache=80)
    node.epoch(0)
    kept = node.planner.directory.cached_ids()
    slabs = node.planner.directory.slabs(kept)
    lost = [i for slab in set(slabs.tolist()) for i in kept[slabs == slab][:5].tolist()]
    node.lose(lost)
    assert (node.planner.minio.free_bytes, node.planner.directory.nbytes) == (0, 40)
    node.begin_compaction()
    while node.compactions:
        node.compact()
        node.begin_compaction()
    assert (node.planner.minio.free_bytes, len(node.full)) == (40, 2)
    assert node.planner.directory.cached_ids().tolist() == sorted({*range(40)} - {*lost})
    node.epoch(1)


def test_few_withdrawn_bytes_are_no_reason_for_a_compaction() -> None:
    """Less than a quarter: 4 of 20 bytes."""
    node = Node([2] * 10, block_samples=10, cache=20)
    node.epoch(0)
    node.lose([0, 1])
    assert node.planner.begin_compaction() is None


def test_a_compaction_that_lost_its_samples_meanwhile_is_dropped() -> None:
    node = Node([2] * 10, block_samples=10, cache=20)
    node.epoch(0)
    node.lose(range(5))
    node.begin_compaction()
    node.lose(range(5, 10))
    node.compact()
    assert (node.planner.minio.used_bytes, node.full) == (0, {})
    node.epoch(1)


def test_a_sample_that_an_earlier_block_is_reading_is_a_hit_and_waits() -> None:
    """One block an epoch: block 1 requests a sample that block 0 is still reading."""
    node = Node([5] * 7, block_samples=7, cache=100)
    node.begin(0)
    node.begin(1)
    assert len(node.filling) == 1
    assert node.ready() == []
    node.fill(min(node.filling))
    assert node.deliver(0).counts.storage.samples == 7
    rows = node.deliver(1)
    assert (rows.counts.local.samples, rows.counts.storage.samples, rows.counts.storage.nbytes) == (7, 0, 0)
    assert node.reads == {0: 7}


def test_a_block_fetched_twice_at_once_is_read_once() -> None:
    node = Node([5] * 7, block_samples=7, cache=12)
    node.begin(0)
    node.begin(0)
    assert sorted(load.nbytes for load in node.filling.values()) == [10, 25]
    for slab in list(node.filling):
        node.fill(slab)
    assert node.deliver(0).counts.storage.samples == 7
    assert node.deliver(0).counts.storage.samples == 7
    assert node.reads == {0: 7}
    again = node.fetch(0)
    assert (again.counts.local.samples, again.counts.storage.samples) == (2, 5)


def test_a_failed_read_is_an_error_of_its_row_unadmits_and_is_tried_again() -> None:
    node = Node([5] * 10, block_samples=10, cache=50)
    node.bad = {3}
    rows = node.fetch(0)
    row = node.order.sample_ids(0).tolist().index(3)
    assert rows.errors == {row: "gone"}
    assert node.planner.minio.used_bytes == 45
    assert node.fetch(1).errors.keys() == {node.order.sample_ids(1).tolist().index(3)}
    node.bad = set()
    rows = node.fetch(2)
    assert (rows.errors, rows.counts.local.samples, rows.counts.storage.samples) == ({}, 9, 1)
    assert node.planner.minio.used_bytes == 50
    assert node.fetch(3).counts.local.samples == 10


def test_bytes_of_a_failed_read_go_to_another_sample() -> None:
    """Room for three of four, and one fails: the fourth takes its bytes if it is read later."""
    node = Node([5] * 4, block_samples=4, cache=15)
    node.bad = {int(node.order.sample_ids(0)[0])}
    good = int(node.order.sample_ids(0)[3])
    node.fetch(0)
    for epoch in range(1, 20):
        assert node.planner.directory.samples == 2
        node.fetch(epoch)
        order = node.order.sample_ids(epoch).tolist()
        if order.index(good) < order.index(min(node.bad)):
            break
    assert node.planner.directory.samples == 3
    assert good in node.planner.directory.cached_ids()


def test_whoever_waited_for_a_read_that_failed_reads_for_itself() -> None:
    """An error is not inherited: the next epoch's block retries, and succeeds."""
    node = Node([5] * 6, block_samples=6, cache=100)
    node.begin(0)
    node.begin(1)
    node.bad = {2}
    node.fill(min(node.filling))
    node.bad = set()
    assert len(node.deliver(0).errors) == 1
    assert node.ready() == [], "block 1 reads sample 2 itself"
    node.fill(min(node.filling))
    rows = node.deliver(1)
    assert (rows.errors, rows.counts.local.samples, rows.counts.storage.samples) == ({}, 5, 1)
    assert node.reads == {0: 6, 1: 1}


def test_a_read_that_its_block_gave_up_fails_for_nobody() -> None:
    """Its fetch ended early. The block is fetched again, waits for the same slab, and retries on its own."""
    node = Node([5] * 6, block_samples=6, cache=100)
    node.begin(0)
    node.end(0)
    node.begin(0)
    assert len(node.filling) == 1
    node.bad = {2}
    node.fill(min(node.filling))
    node.bad = set()
    assert node.ready() == []
    node.fill(min(node.filling))
    rows = node.deliver(0)
    assert (rows.errors, rows.counts.local.samples, rows.counts.storage.samples) == ({}, 5, 1)


def test_a_slab_that_cannot_be_filled_fails_its_fetches_and_nobody_elses() -> None:
    node = Node([5] * 6, block_samples=6, cache=100)
    node.begin(0)
    node.begin(1)
    node.fail(min(node.filling))
    with pytest.raises(MemoryError, match="full"):
        node.planner.locate(node.request(0))
    node.end(0)
    assert node.planner.minio.used_bytes == 30, "block 1 reads them now, to cache them"
    node.fill(min(node.filling))
    assert node.deliver(1).counts.storage.samples == 6


def test_what_could_not_be_read_ahead_is_tried_again_with_the_next_fetch_and_not_before() -> None:
    node = Node([5] * 40, block_samples=4, cache=0, readahead=20)
    node.begin(0)
    slab = next(slab for slab, load in node.filling.items() if load.request.block == 1)
    node.fail(slab)
    assert [load.request.block for load in node.filling.values()] == [0]
    node.begin(0)
    assert [load.request.block for load in node.filling.values()] == [0, 1]


def test_read_ahead_stays_within_its_bytes_and_goes_on_as_blocks_are_fetched() -> None:
    """Blocks of 4 x 5 bytes and a window of 50: two blocks are read ahead, never a third."""
    node = Node([5] * 40, block_samples=4, cache=0, readahead=50)
    node.begin(0)
    assert [load.request.block for load in node.filling.values()] == [0, 1, 2]
    assert node.planner.ahead.used_bytes == 40
    for slab in list(node.filling):
        node.fill(slab)
    node.deliver(0)
    assert node.planner.ahead.used_bytes == 40, "samples read ahead are still held"
    node.begin(1)
    assert [load.request.block for load in node.filling.values()] == [3]
    assert node.deliver(1).counts.storage.samples == 4
    assert node.planner.ahead_blocks == 2


def test_read_ahead_into_the_cache_costs_its_window_nothing_once_it_is_there() -> None:
    node = Node([5] * 4 * 100, block_samples=4, cache=10_000, readahead=20)
    node.begin(0)
    while node.filling:
        node.fill(min(node.filling))
    assert node.planner.ahead.used_bytes == 0
    assert node.planner.ahead_blocks == DEPTH_BLOCKS
    assert node.deliver(0).counts.local.samples == 0
    assert node.fetch(1).counts.local.samples == 0, "the first epoch has no hits, even on samples read ahead"


@pytest.mark.parametrize(("samples", "ahead"), [(4, 2), (12, 3), (400, DEPTH_BLOCKS)])
def test_no_more_than_an_epoch_is_read_ahead(samples: int, ahead: int) -> None:
    """Without a cache each block ahead has its own copies; with epochs of one block there are two copies."""
    node = Node([5] * samples, block_samples=4, cache=0, readahead=10_000)
    node.begin(0)
    assert sum(len(load.rows) for load in node.filling.values()) == 4 * (1 + ahead)
    assert node.planner.ahead_blocks == ahead


def test_what_is_read_ahead_and_never_fetched_is_dropped() -> None:
    node = Node([5] * 4 * 500, block_samples=4, cache=0, readahead=60)
    node.fetch(0)
    assert node.planner.ahead_blocks == 3
    for block in range(200, 200 + IDLE_FETCHES + 2):
        node.fetch(block)
    assert {p.request.block for p in node.planner._plans.values()} == {266, 267, 268}
    assert len(node.full) == 3


def test_two_places_of_the_order_share_the_window_without_reading_twice() -> None:
    """A slow consumer reads an earlier part of the order: each block is read once for each of the two."""
    node = Node([5] * 4 * 500, block_samples=4, cache=0, readahead=80)
    for i in range(40):
        node.fetch(300 + i)
        node.fetch(i)
    ahead = {p.request.block for p in node.planner._plans.values()}
    assert ahead == {340, 341, 40, 41}
    assert node.reads.total() == 4 * (80 + len(ahead))


@pytest.mark.parametrize("spoil", ["minio.used_bytes", "ahead.used_bytes", "directory.nbytes"])
def test_validate_sees_a_wrong_sum(spoil: str) -> None:
    node = Node([5] * 30, block_samples=4, cache=50, readahead=50)
    node.fetch(0)
    part, name = spoil.split(".")
    setattr(getattr(node.planner, part), name, 7)
    with pytest.raises(AssertionError):
        node.planner.validate()


def test_validate_sees_a_sample_in_two_permanent_slabs() -> None:
    node = Node([5] * 8, block_samples=4, cache=40)
    node.begin(0)
    node.begin(1)
    first, second = node.filling.values()
    second.sample_ids[0] = first.sample_ids[0]
    with pytest.raises(AssertionError, match="two permanent slabs"):
        node.planner.validate()


def test_what_comes_is_what_the_next_blocks_lack() -> None:
    """Blocks of 4 of 10 samples; all of block 0 is cached. Read-ahead has processed block 1, so 2 and 3 are next.

    An epoch has 3 blocks: block 3 is the first of the next epoch, with samples of any block of this one.
    """
    node = Node([10] * 10, block_samples=4, cache=1000, readahead=40)
    assert node.planner.upcoming(2) == []
    node.begin(0)
    node.look_ahead()
    first, second = node.planner.upcoming(2)
    held = {int(i) for load in node.filling.values() for i in load.sample_ids}
    assert len(held) == 8
    assert (first[0], set(first[1].tolist())) == (2, set(node.order.sample_ids(2).tolist()))
    assert (second[0], set(second[1].tolist())) == (4, set(node.order.sample_ids(3).tolist()) - held)


@pytest.mark.parametrize(("cache", "keeps_all"), [(100, True), (99, False)])
def test_all_is_kept_where_the_last_sample_has_landed_too(cache: int, keeps_all: bool) -> None:
    node = Node([10] * 10, block_samples=4, cache=cache)
    for block in range(3):
        node.begin(block)
        assert not node.planner.keeps_all
        for slab in list(node.filling):
            node.fill(slab)
        node.end(block)
    assert node.planner.keeps_all is keeps_all


def test_a_block_without_room_is_read_ahead_as_soon_as_there_is_room() -> None:
    """It has room for four blocks of 20 bytes."""
    node = Node([5] * 4 * 100, block_samples=4, cache=0, readahead=80)
    for block in range(10):
        node.fetch(block)
        assert {p.request.block for p in node.planner._plans.values()} == {*range(block + 1, block + 5)}
        (sequence,) = node.planner.ahead.sequences
        assert sequence.lacked == (block + 5, 20)
