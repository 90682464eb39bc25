"""A node keeps the right samples decoded under schedules that no real clock would produce."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from played_node import FORM, GROWTH, Node

from mbaas.cache.decoded_tier import LAPSE_FETCHES
from mbaas.cache.directory import Directory
from mbaas.cache.slab import Load, Origin, PartPlan, pack
from mbaas.dataset.subsets import Draws
from mbaas.samples.order import in_share
from mbaas.samples.placement import ENCODED, DecodedSizes, Holders, NodeWeight, PartRequest, Placement
from mbaas.wire.samples import Amount, FetchCounts

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=60)


def epoch(node: Node, number: int) -> int:
    """Run an epoch whose workers hand in every sample requested; return the number of samples that arrived decoded."""
    decoded, blocks = 0, node.order.blocks_per_epoch
    for block in range(number * blocks, (number + 1) * blocks):
        node.begin(block)
        while awaited := node.planner.awaited(node.request(block)):
            node.fill(min(awaited))
        asked = node.asked(block)
        decoded += node.deliver(block).counts.decoded.samples
        node.hand_in(block, asked)
        for slab in [*node.coming]:
            node.land(slab)
    return decoded


def test_what_is_decoded_anyway_is_kept_as_it_comes_and_storage_is_not_read_again() -> None:
    node = Node([5] * 40, block_samples=7, cache=40 * 5 * GROWTH)
    node.aim(40 * 5 * GROWTH)
    assert epoch(node, 0) == 0
    assert node.planner.directory.decoded.samples == 40
    assert node.planner.minio.used_bytes == 40 * 5 * GROWTH, "nothing is kept in two forms"
    assert epoch(node, 1) == 40
    assert (node.reads[0], node.reads[1]) == (40, 0)


def epochs_at_any_pace(node: Node, numbers: range, chance: random.Random) -> list[int]:
    """Run epochs of workers with up to four blocks in progress.

    Slabs are filled, and hand-ins arrive and land, at any time within an epoch. Return the number of samples of each
    epoch that arrived decoded.
    """
    blocks, in_hand, decoded = node.order.blocks_per_epoch, list[tuple[int, list[int]]](), []

    def go_on(most: int, share: float) -> None:
        for slab in [*node.filling]:
            if slab in node.filling and chance.random() < share:
                node.fill(slab)
        while len(in_hand) > most or (in_hand and chance.random() < share):
            node.hand_in(*in_hand.pop(0))
        for slab in [*node.coming]:
            if chance.random() < share:
                node.land(slab)

    for number in numbers:
        decoded.append(0)
        for block in range(number * blocks, (number + 1) * blocks):
            node.begin(block)
            go_on(4, 0.3)
            while awaited := node.planner.awaited(node.request(block)):
                node.fill(chance.choice(sorted(awaited)))
            asked = node.asked(block)
            decoded[-1] += node.deliver(block).counts.decoded.samples
            in_hand.append((block, asked))
            go_on(3, 0.3)
        go_on(0, 1.0)
    return decoded


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1.0, 1.5, 2.0, 3.0, 3.5]))
def test_nothing_is_read_twice_whenever_it_is_handed_in(seed: int, memory: float) -> None:
    """With 2 bytes of memory per byte in storage, half of the samples are decoded: 3 x + 1 (1 - x) = 2."""
    node = Node([5] * 80, block_samples=16, cache=int(80 * 5 * memory))
    decoded = min(80, int(80 * (memory - 1) / (GROWTH - 1)))
    node.aim(decoded * 5 * GROWTH)
    assert epochs_at_any_pace(node, range(3), random.Random(seed)) == [0, decoded, decoded]
    assert node.reads.total() == 80


@pytest.mark.parametrize(("decoded", "beside", "kept"), [(32, 200, [0, 16, 16]), (24, 120, [16, 8])])
def test_copies_of_what_is_to_be_handed_in_give_way_no_more_than_needed(
    decoded: int, beside: int, kept: list[int]
) -> None:
    """Blocks of 80 bytes, without any hand-in. For the last block, 40 bytes are free next to the promises.

    First case: two blocks are promised, and the third lacks 40 bytes, so one block's copies are dropped. Second case:
    one and a half blocks are promised, and the rest of the second just fits. Nothing is dropped, and copies of its
    promised half do not fit.
    """
    cache = decoded * 5 * GROWTH + beside
    node = Node([5] * 80, block_samples=16, cache=cache)
    node.aim(decoded * 5 * GROWTH)
    for block in range(len(kept)):
        node.fetch(block)
    slabs = [node.planner.directory.slabs(node.order.sample_ids(block)) for block in range(len(kept))]
    assert [int((slab > 0).sum()) for slab in slabs] == kept


def test_what_another_part_still_waits_for_gives_way_to_none() -> None:
    """Workers fetch all blocks of an epoch at once. Half is to be decoded, and its copies take the room of the rest."""
    node = Node([5] * 80, block_samples=16, cache=80 * 5 * 2)
    node.aim(40 * 5 * GROWTH)
    for block in range(5):
        node.begin(block)
        while node.filling:
            node.fill(min(node.filling))
    assert node.planner.directory.samples > 0
    for block in range(5):
        node.deliver(block)
    assert node.reads.total() == 80


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 60, 400]))
def test_all_samples_are_soon_decoded_where_epochs_are_short_and_memory_just_has_room(seed: int, spare: int) -> None:
    """Memory for all decoded samples and hardly more: samples planned before there was room are handed in as well."""
    cache = 30 * 5 * GROWTH + spare
    node = Node([5] * 30, block_samples=10, cache=cache, readahead=10_000)
    node.aim(cache)
    chance = random.Random(seed)
    epochs_at_any_pace(node, range(4), chance)
    assert node.planner.directory.decoded.samples == 30
    reads = node.reads.total()
    assert epochs_at_any_pace(node, range(4, 8), chance) == [30] * 4
    assert node.reads.total() == reads


def test_what_had_no_room_when_it_was_read_ahead_is_asked_for_when_it_is_fetched() -> None:
    """Copies of encoded samples fill the memory at first, so the last of five blocks is planned without a promise.

    If only samples requested at read-ahead were handed in, 64 samples would be decoded in the second epoch.
    """
    cache, decoded = 80 * 5 * GROWTH, []
    for seed in range(20):
        node = Node([5] * 80, block_samples=16, cache=cache, readahead=10_000)
        node.aim(cache)
        decoded.append(epochs_at_any_pace(node, range(2), random.Random(seed))[1])
    assert min(decoded) > 64


def test_what_was_handed_in_decoded_since_it_was_read_is_taken_from_there() -> None:
    """A part read three samples, the last one unsuccessfully; two were handed in meanwhile."""
    plan = PartPlan(PartRequest(0, forms=(FORM,)), np.arange(3), np.full(3, 5, np.int64))
    load = Load(-1, plan.request, 0, None, np.arange(3), np.arange(3), np.full(3, 5, np.int64))
    plan.add(load)
    plan.filled(load, {2: "gone"}, np.full(3, Origin.STORAGE, np.int8))
    directory = Directory(3)
    assert plan.locate(directory.lookup(plan.sample_ids)).errors == {2: "gone"}
    lengths = np.full(2, 5 * GROWTH, np.int64)
    directory.publish(7, np.array([1, 2]), offsets=pack(lengths), lengths=lengths, form=FORM)
    rows = plan.locate(directory.lookup(plan.sample_ids))
    assert not rows.errors
    assert [rows.slab_ids[slab] for slab in rows.slab] == [-1, 7, 7]
    assert (rows.offset.tolist(), rows.length.tolist()) == ([0, 0, 15], [5, 15, 15])
    assert rows.counts == FetchCounts(local=Amount(2, 30), storage=Amount(1, 5), decoded=Amount(2, 30))


def test_what_dali_makes_beside_the_cpu_engine_is_never_asked_for() -> None:
    node = Node([5] * 40, block_samples=7, cache=40 * 5 * GROWTH, undecoded_share=0.6)
    node.aim(40 * 5 * GROWTH)
    for number in range(3):
        epoch(node, number)
    assert node.planner.directory.decoded_ids().tolist() == np.flatnonzero(~in_share(np.arange(40), 0.6)).tolist()
    assert len(node.planner.directory.cached_ids()) == 40
    assert not node.planner.tier.unfit


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_memory_is_divided_by_the_plan_and_what_was_admitted_stays(share: float) -> None:
    node = Node([5] * 100, block_samples=7, cache=300)
    node.aim(int(share * 300))
    for number in range(3):
        epoch(node, number)
    kept = node.planner.directory.cached_ids().tolist()
    decoded = node.planner.directory.decoded_ids().tolist()
    assert len(decoded) == int(share * 300) // (5 * GROWTH)
    assert len(kept) == len(decoded) + (300 - len(decoded) * 5 * GROWTH) // 5
    assert epoch(node, 3) == len(decoded)
    assert node.reads[3] == 100 - len(kept)
    assert (node.planner.directory.cached_ids().tolist(), node.planner.directory.decoded_ids().tolist()) == (
        kept,
        decoded,
    )


def test_what_one_form_has_beyond_its_part_gives_way_when_the_other_needs_the_room() -> None:
    node = Node([5] * 60, block_samples=6, cache=300)
    epoch(node, 0)
    assert (node.planner.directory.samples, node.planner.directory.decoded.samples) == (60, 0)
    node.aim(150)
    for number in range(1, 5):
        epoch(node, number)
    assert node.planner.directory.decoded.samples == 10
    # In slabs shared with other samples, the bytes of handed-in samples remain.
    assert 10 + 30 * 0.8 <= node.planner.directory.samples <= 10 + 30
    node.aim(0)
    for number in range(5, 8):
        epoch(node, number)
    assert node.planner.directory.decoded.samples == 0
    assert 60 * 0.9 <= node.planner.directory.samples <= 60


@pytest.mark.parametrize("rest", [5, 5 * GROWTH - 1])
def test_what_is_left_beside_whole_decoded_samples_keeps_encoded_ones_for_good(rest: int) -> None:
    """The rest is less than one decoded sample.

    Its encoded samples must not be dropped and read again for each part.
    """
    node = Node([5] * 60, block_samples=6, cache=7 * 5 * GROWTH + rest)
    node.aim(7 * 5 * GROWTH + rest)
    for number in range(4):
        epoch(node, number)
    kept = node.planner.directory.cached_ids().tolist()
    assert node.planner.directory.decoded.samples == 7
    assert len(kept) == 7 + rest // 5
    for number in range(4, 7):
        epoch(node, number)
        assert node.planner.directory.cached_ids().tolist() == kept
        assert node.reads[number] == 60 - len(kept)


def test_nothing_gives_way_to_samples_that_are_never_kept_decoded() -> None:
    """Some samples belong to DALI, ten turn out unfit. Room for five more decoded ones keeps encoded ones for good."""
    others = np.flatnonzero(~in_share(np.arange(60), 0.4)).tolist()
    unfit = others[:10]
    cache = (len(others) - len(unfit) + 5) * 5 * GROWTH
    node = Node([5] * 60, block_samples=6, cache=cache, undecoded_share=0.4)
    node.aim(cache)
    seen = []
    for number in range(6):
        for block in range(number * node.order.blocks_per_epoch, (number + 1) * node.order.blocks_per_epoch):
            node.begin(block)
            while awaited := node.planner.awaited(node.request(block)):
                node.fill(min(awaited))
            asked = node.asked(block)
            node.deliver(block)
            node.hand_in(block, [i for i in asked if i not in unfit], [i for i in asked if i in unfit])
            for slab in [*node.coming]:
                node.land(slab)
        seen.append(node.planner.directory.cached_ids().tolist())
    assert node.planner.directory.decoded.samples == len(others) - len(unfit)
    assert len(seen[-1]) == node.planner.directory.decoded.samples + 5 * GROWTH
    assert seen[-1] == seen[-2] == seen[-3]


def test_while_there_is_room_for_both_nothing_gives_way() -> None:
    """All decoded samples fit. Encoded ones in the cache are handed in when they occur, and not dropped."""
    node = Node([5] * 60, block_samples=6, cache=60 * 5 * (GROWTH + 1))
    epoch(node, 0)
    node.aim(60 * 5 * GROWTH)
    epoch(node, 1)
    assert node.reads[1] == 0
    assert node.planner.directory.decoded.samples == 60
    assert node.planner.minio.used_bytes == 60 * 5 * GROWTH, "their slabs were freed with the last sample"


def test_a_sample_that_cannot_be_handed_in_is_kept_as_storage_has_it() -> None:
    node = Node([5] * 10, block_samples=10, cache=1000)
    node.aim(900)
    node.begin(0)
    node.fill(min(node.filling))
    asked = node.asked(0)
    node.deliver(0)
    node.hand_in(0, [i for i in asked if i != 3], unfit=[3])
    node.land(*node.coming)
    node.begin(1)
    assert node.asked(1) == []
    node.deliver(1)
    assert node.planner.directory.samples == 10
    assert node.planner.directory.decoded.samples == 9


def test_a_promise_to_a_worker_that_died_lapses() -> None:
    node = Node([5] * 10 * 300, block_samples=10, cache=10 * 5 * GROWTH)
    node.aim(10 * 5 * GROWTH)
    node.fetch(0)
    assert node.planner.minio.free_bytes == 0
    for block in range(1, LAPSE_FETCHES + 1):
        node.fetch(block)
        assert node.planner.minio.free_bytes == 0
    node.begin(LAPSE_FETCHES + 1)
    assert len(node.asked(LAPSE_FETCHES + 1)) == 10


def test_a_worker_that_comes_late_or_twice_does_no_harm() -> None:
    node = Node([5] * 20, block_samples=10, cache=1000)
    node.aim(1000)
    node.fetch(0)
    ids = node.order.sample_ids(0).tolist()
    first = node.hand_in(0, ids)
    again = node.hand_in(0, ids)
    assert (first.chosen.sum(), again.chosen.sum()) == (10, 0)
    node.land(first.slab)
    assert node.hand_in(0, ids).chosen.sum() == 0
    assert node.planner.directory.decoded.samples == 10


def test_what_memory_has_no_room_for_goes_to_disk_and_comes_from_there() -> None:
    """Room for 10 of 40 decoded in memory, and for 20 on disk. Memory has 50 bytes left for the other 10."""
    node = Node([5] * 40, block_samples=8, cache=200, disk_bytes=20 * 5 * GROWTH)
    node.aim(10 * 5 * GROWTH)
    for number in range(2):
        epoch(node, number)
    assert node.planner.directory.decoded.samples == 10
    assert len(node.disk) == 20
    assert node.planner.directory.samples == 20
    assert not node.disk & set(node.planner.directory.cached_ids().tolist()), "samples on disk are not also in memory"
    assert epoch(node, 2) == 30
    assert node.reads[2] == 0


def test_what_a_disk_has_lost_is_read_from_storage() -> None:
    node = Node([5] * 40, block_samples=8, cache=0, disk_bytes=40 * 5 * GROWTH)
    node.aim(0)
    epoch(node, 0)
    assert len(node.disk) == 40
    node.undecoded = {1, 2, 3}
    assert epoch(node, 1) == 37
    assert node.reads[1] == 3


def moved_to(decoded: list[int], *, cache: int, readahead: int = 0) -> Node:
    """A new home of all 40 samples; their previous node has decoded some."""
    node = Node([5] * 40, block_samples=8, cache=cache, readahead=readahead, name="b")
    move_all_to(node, decoded)
    return node


def move_all_to(node: Node, decoded: list[int]) -> None:
    """Make this node the home of all samples, which another node keeps, some decoded."""
    kept = DecodedSizes.none(len(node.lengths))
    kept.forms[decoded], kept.nbytes[decoded] = FORM, GROWTH * node.lengths[decoded]
    placement = Placement(2, (NodeWeight("b", node.planner.minio.budget_bytes),), (np.inf,))
    node.placements.add(placement, Holders(("a",), np.zeros(len(node.lengths), np.int16), kept))


def test_decoded_samples_move_as_they_are_and_as_far_as_the_plan_of_their_new_home_has_room() -> None:
    node = moved_to([*range(20)], cache=10 * 5 * GROWTH + 20 * 5)
    node.aim(10 * 5 * GROWTH)
    loads = node.planner.move_in(np.arange(40))
    assert {(load.peer, load.form, len(load.rows), load.nbytes) for load in loads} == {
        ("a", FORM, 10, 10 * 5 * GROWTH),
        ("a", ENCODED, 20, 20 * 5),
    }
    node.start(loads)
    for load in loads:
        node.fill(load.slab)
    assert node.planner.directory.decoded.samples == 10
    assert node.planner.directory.samples == 30


def test_a_sample_that_its_last_home_has_decoded_no_more_is_read_from_storage() -> None:
    node = moved_to([*range(20)], cache=1000)
    node.aim(1000)
    node.undecoded = {*range(5, 40)}
    rows = node.fetch(0)
    assert not rows.errors
    assert rows.length.tolist() == [5 * GROWTH if i < 5 else 5 for i in node.order.sample_ids(0).tolist()]


@pytest.mark.parametrize("readahead", [0, 400])
def test_what_its_last_home_has_decoded_meanwhile_moves_as_it_is_and_is_not_read_from_storage(readahead: int) -> None:
    """The samples were handed in there between that node's report and the move."""
    node = moved_to([*range(20)], cache=40 * 5 * GROWTH + 40 * 5, readahead=readahead)
    node.aim(40 * 5 * GROWTH)
    node.decoded_elsewhere = {*range(15, 30)}
    rows = [node.fetch(block) for block in range(5)]
    assert not any(row.errors for row in rows)
    assert sum(row.counts.decoded.samples for row in rows) == node.planner.directory.decoded.samples == 30
    assert node.reads.total() == 10, "of 40, 30 are there decoded"


def test_what_moves_before_anybody_asks_stays_where_it_is_if_it_is_there_in_another_form() -> None:
    node = moved_to([], cache=1000)
    node.aim(1000)
    node.decoded_elsewhere = {3, 4}
    for asked, kept in ((40, 38), (2, 40)):
        loads = node.planner.move_in(node.placements.held_elsewhere())
        assert sum(len(load.rows) for load in loads) == asked
        node.start(loads)
        for load in loads:
            node.fill(load.slab)
        assert node.planner.directory.samples == kept
    assert node.planner.directory.decoded_ids().tolist() == [3, 4]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lengths=SIZES,
    block_samples=st.integers(1, 13),
    share=st.sampled_from([0.0, 0.4, 1.0, 2.0, 5.0]),
    readahead=st.sampled_from([0, 60, 500]),
)
# A sample that a node had in another form is read again, and the slab that it was to come in is dropped meanwhile.
@example(seed=4000, lengths=[1, 19, 1, 10, 1, 30, 11, 7, 1], block_samples=7, share=2.0, readahead=500)
def test_any_schedule_of_events_keeps_every_invariant(
    seed: int, lengths: list[int], block_samples: int, share: float, readahead: int
) -> None:
    """Fetches and hand-ins in any order: late, twice, never, in part, or of other samples.

    The plan changes meanwhile.
    """
    any_schedule(seed, lengths, block_samples, share, readahead)


def any_schedule(seed: int, lengths: list[int], block_samples: int, share: float, readahead: int) -> None:
    chance = random.Random(seed)
    cache = int(sum(lengths) * share)
    disk_bytes = chance.choice([0, 0, cache])
    draws = Draws(np.array([chance.randint(1, 9) for _ in lengths], float), 2 * len(lengths), seed=seed)
    node = Node(
        lengths,
        block_samples=block_samples,
        cache=cache,
        readahead=readahead,
        disk_bytes=disk_bytes,
        name="b",
        draws=chance.choice([None, None, draws]),
    )
    if chance.random() < 0.5:
        move_all_to(node, [i for i in range(len(lengths)) if chance.random() < 0.5])
    node.aim(chance.randint(0, cache))
    wanted, given_out = 0, {0: list[int]()}
    for _ in range(80):
        action = chance.choices(
            ["demand", "land", "deliver", "abort", "give up", "spoil", "hand in", "copied", "aim", "lose", "compact"],
            [4, 6, 6, 1, 1, 1, 4, 4, 0.5, 1, 2],
        )[0]
        if action == "demand" and len(node.waiting) < 6:
            wanted = chance.choice([wanted + 1, wanted + 1, wanted + 1, max(0, wanted - 3), chance.randrange(300)])
            node.begin(wanted)
        elif action == "land" and node.filling:
            node.fill(chance.choice(list(node.filling)))
        elif action == "abort" and node.filling:
            node.fail(chance.choice(list(node.filling)))
        elif action == "lose" and (cached := node.planner.directory.cached_ids().tolist()):
            node.lose(chance.sample(cached, chance.randrange(1, len(cached) + 1)))
        elif action == "compact":
            node.begin_compaction() if chance.random() < 0.5 or not node.compactions else node.compact()
        elif action == "deliver" and node.ready():
            block = chance.choice(node.ready())
            if node.planner._plans[node.request(block)].failure:
                node.end(block)
            else:
                given_out[block] = node.asked(block)
                node.deliver(block)
        elif action == "give up" and node.waiting:
            node.end(chance.choice(list(node.waiting)))
        elif action == "spoil":
            node.bad = set(chance.sample(range(len(lengths)), min(3, len(lengths))))
            node.undecoded = set(chance.sample(range(len(lengths)), min(3, len(lengths))))
            node.decoded_elsewhere = {i for i in range(len(lengths)) if chance.random() < 0.3}
        elif action == "hand in":
            block = chance.choice([*given_out])
            ids = given_out[block] or chance.sample(range(len(lengths)), min(4, len(lengths)))
            some = [i for i in ids if chance.random() < 0.9]
            unfit = [i for i in ids[:1] if i % 5 == 0 and i not in some]
            node.hand_in(block, some, unfit, is_last=chance.random() < 0.7)
        elif action == "copied" and node.coming:
            node.land(chance.choice(list(node.coming)), fails=chance.random() < 0.1)
        elif action == "aim":
            node.aim(chance.randint(0, cache))
    while node.waiting or node.filling or node.coming:  # nothing waits forever
        for slab in list(node.filling):
            if slab in node.filling:
                node.fill(slab)
        for slab in list(node.coming):
            node.land(slab)
        for block in node.ready():
            node.end(block)
    assert node.planner.transient_bytes == node.planner.ahead.used_bytes
    assert not node.planner.tier.coming
    assert np.all(node.planner.directory.lookup(node.planner.directory.decoded_ids())["length"] % GROWTH == 0)
