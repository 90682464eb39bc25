"""Consumers with different pipelines read the same samples from one cache, in blocks of other sizes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_node import FORM, SMALLER, Node

from mbaas.cache.shared_reads import ACTIVE_FETCHES
from mbaas.model.tiers import COPIES
from mbaas.samples.placement import PartRequest, StreamKey

SAMPLES, BYTES = 2400, 10


def node(share: float, *, readahead: int = 0, block_samples: int = 24) -> Node:
    """A node whose cache holds a part of 2,400 samples of 10 bytes."""
    cache = int(share * SAMPLES * BYTES)
    return Node([BYTES] * SAMPLES, block_samples=block_samples, cache=cache, readahead=readahead, check_every=100)


def blocks(of: Node, size: int, epoch: int) -> list[PartRequest]:
    """An epoch in blocks of ``size`` samples."""
    length = SAMPLES // size
    return [of.placements.own(block, None, StreamKey(size)) for block in range(epoch * length, (epoch + 1) * length)]


def read_together(of: Node, epochs: range, behind: dict[int, float]) -> None:
    """Consumers with blocks of these sizes go through epochs side by side, each behind the first by a part of one."""
    waiting = {size: [request for epoch in epochs for request in blocks(of, size, epoch)] for size in behind}
    while any(waiting.values()):
        size = max(behind, key=lambda size: len(waiting[size]) * size / SAMPLES - behind[size] if waiting[size] else -9)
        of.fetch(waiting[size].pop(0), str(size))


def shared(share: float, spread: float) -> float:
    """The formula of `mbaas.cache.shared_reads`, for positions within ``spread``, and parts of 24 samples."""
    return (1 - share) / (1 - COPIES * (spread + 2 * 24 / SAMPLES))


def read_in(of: Node, epoch: int) -> float:
    """Samples that were read from storage for blocks of an epoch, as a share of the dataset."""
    return of.reads[epoch] / SAMPLES


@pytest.mark.parametrize("readahead", [0, 400, 4000])
@pytest.mark.parametrize("share", [0.35, 0.5, 0.75])
def test_pipelines_at_one_position_read_each_sample_from_storage_once(share: float, readahead: int) -> None:
    """However far the node reads ahead. Positions differ by up to a part of 24 samples."""
    of = node(share, readahead=readahead)
    of.epoch(0)
    read_together(of, range(1, 5), dict.fromkeys((24, 12, 8, 6), 0.0))
    assert read_in(of, 4) == pytest.approx(shared(share, 24 / SAMPLES), abs=0.01)
    assert of.planner.minio.used_bytes <= of.planner.minio.budget_bytes


@pytest.mark.parametrize(("share", "spread"), [(0.35, 0.2), (0.5, 0.05), (0.75, 0.2)])
def test_copies_stay_until_the_last_pipeline_has_come_by(share: float, spread: float) -> None:
    """Without copies, four pipelines read four times as much as one."""
    of = node(share, readahead=200)
    of.epoch(0)
    read_together(of, range(1, 4), {24: 0.0, 12: spread / 3, 8: spread / 2, 6: spread})
    assert read_in(of, 3) == pytest.approx(shared(share, spread), abs=0.01)
    assert of.planner.minio.used_bytes <= of.planner.minio.budget_bytes


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_in_the_first_epoch_each_sample_is_read_once(share: float) -> None:
    """Until the cache is full nothing else is needed; after that all samples of a part need copies, not a share."""
    of = node(share, readahead=400)
    read_together(of, range(1), {24: 0.0, 12: 0.02, 8: 0.03, 6: 0.04})
    assert read_in(of, 0) == pytest.approx(1, abs=0.03)


def test_a_pipeline_far_from_the_others_reads_alone_and_takes_no_copies_from_them() -> None:
    of = node(0.5, readahead=200)
    of.epoch(0)
    read_together(of, range(1, 4), {24: 0.0, 12: 0.02, 8: 0.04, 6: 0.5})
    assert 2 * 0.5 < read_in(of, 3) < 2 * shared(0.5, 0.04)


def test_a_pipeline_alone_reads_what_is_not_cached() -> None:
    of = node(0.5, readahead=400)
    for epoch in range(4):
        of.epoch(epoch)
    assert of.reads[3] == SAMPLES / 2
    assert not of.planner._recent
    assert of.planner._home is None, "no look at all samples without other pipelines"


def test_recent_samples_stay_for_good_when_pipelines_are_gone() -> None:
    of = node(0.5, readahead=400)
    of.epoch(0)
    read_together(of, range(1, 2), {24: 0.0, 12: 0.0})
    assert of.planner._recent
    for epoch in range(2, 7 + ACTIVE_FETCHES // 100):
        of.epoch(epoch)
    last = max(of.reads)
    assert of.reads[last] <= SAMPLES / 2 + 24


def test_nothing_is_kept_for_a_while_if_everything_fits() -> None:
    of = node(1.0, readahead=400)
    of.epoch(0)
    read_together(of, range(1, 2), {24: 0.0, 12: 0.0})
    assert not of.planner._recent
    assert of.reads[1] == 0


def finish(of: Node, request: int | PartRequest) -> None:
    """Deliver a part, unless a slab that it needs failed."""
    if of.planner._plans[of.request(request)].failure is None:
        of.deliver(request)
    else:
        of.end(request)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(0, 30), min_size=8, max_size=60),
    share=st.sampled_from([0.0, 0.4, 0.9, 2.0]),
    readahead=st.sampled_from([0, 60, 500]),
    decoded=st.booleans(),
)
def test_any_schedule_with_several_pipelines_keeps_every_invariant(
    seed: int, lengths: list[int], share: float, readahead: int, decoded: bool
) -> None:
    rng = random.Random(seed)
    of = Node(lengths, block_samples=5, cache=int(sum(lengths) * share), readahead=readahead)
    if decoded:
        of.aim(int(sum(lengths) * share))
    sizes = (0, 2, 3, 7)
    for _ in range(60):
        move = rng.randrange(10)
        if move < 4 and len(of.waiting) < 5:
            size = rng.choice(sizes)
            length = -(-len(lengths) // (size or 5))
            forms = rng.choice([(), (FORM,), (FORM, SMALLER)]) if decoded else ()
            request = of.placements.own(rng.randrange(3 * length), None, StreamKey(size, forms))
            of.begin(request, str(rng.choice([size, 0, 1])))
        elif move < 7 and of.filling:
            of.fill(rng.choice([*of.filling]))
        elif move < 9 and (ready := of.ready()):
            finish(of, rng.choice(ready))
        elif of.filling and rng.random() < 0.2:
            of.fail(rng.choice([*of.filling]))
    while of.waiting:
        for request in of.ready():
            finish(of, request)
        if of.waiting and of.filling:
            of.fill(min(of.filling))


def test_a_pipeline_that_cannot_use_decoded_samples_gets_them_as_they_are_stored() -> None:
    """All samples are cached decoded. It reads them from storage, and the others go on without."""
    of = node(4.0)
    of.aim(4 * SAMPLES * BYTES)
    for block in range(SAMPLES // 24):
        of.begin(block)
        while awaited := of.planner.awaited(of.request(block)):
            of.fill(min(awaited))
        asked = of.asked(block)
        of.deliver(block)
        hand_in = of.hand_in(block, asked)
        of.land(hand_in.slab)
    assert of.fetch(50).counts.decoded.samples == 24
    encoded = of.placements.own(51)
    rows = of.fetch(encoded)
    assert (rows.counts.decoded.samples, rows.counts.storage.samples) == (0, 24)
    assert set(rows.length.tolist()) == {BYTES}
    assert of.fetch(51).counts.decoded.samples == 24


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.3, 0.5, 0.8]),
    readahead=st.sampled_from([60, 300, 1000]),
)
def test_any_schedule_of_pipelines_close_to_each_other_keeps_every_invariant(
    seed: int, share: float, readahead: int
) -> None:
    """Copies that were read ahead are charged, dropped, or given up in the middle of a read."""
    rng = random.Random(seed)
    of = Node([rng.randrange(5, 15) for _ in range(240)], block_samples=8, cache=int(share * 2400), readahead=readahead)
    following = dict.fromkeys((8, 6, 4), 0)
    for _ in range(150):
        move = rng.randrange(10)
        if move < 4 and len(of.waiting) < 4:
            size = min(following, key=lambda size: following[size] * size + rng.randrange(40))
            request = of.placements.own(following[size], None, StreamKey(size))
            following[size] += rng.choice([1, 1, 1, 1, 2, 9])
            if not of.waiting[request]:
                of.begin(request, str(size))
        elif move < 7 and of.filling:
            of.fill(rng.choice([*of.filling]))
        elif move < 9 and of.waiting:
            ready = of.ready()
            if ready:
                finish(of, rng.choice(ready))
            elif rng.random() < 0.2:  # the caller gave up
                of.end(rng.choice([*of.waiting]))
        elif of.filling and rng.random() < 0.1:
            of.fail(rng.choice([*of.filling]))
