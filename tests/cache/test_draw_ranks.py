"""A cache of samples that are drawn by weight keeps those that are drawn most often."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from played_node import GROWTH, Node

from mbaas.cache.directory import DrawRanks
from mbaas.dataset import synthetic
from mbaas.dataset.subsets import Draws

SAMPLES, BYTES, EPOCHS, MEASURED = 1200, 10, 36, 8

FEW = np.where(np.arange(SAMPLES) % 10 == 3, 9.0, 1.0)
"""A tenth of the samples is drawn in half of the draws, as with balanced classes of 90 % and 10 %."""

ZIPF = 1 / (1 + np.arange(SAMPLES)[::-1])


def weighted(weights: NDArray[np.float64], share: float, *, by_draws: bool = True, readahead: int = 0) -> Node:
    """A node whose cache holds a part of the samples; an epoch has as many draws as there are samples."""
    return Node(
        [BYTES] * SAMPLES,
        block_samples=24,
        cache=int(share * SAMPLES * BYTES),
        draws=Draws(weights, SAMPLES, seed=7),
        by_draws=by_draws,
        readahead=readahead,
        check_every=200,
    )


def settled_reads(node: Node) -> tuple[float, NDArray[np.int64]]:
    """Mean reads of an epoch once the cache is full, and the samples that it holds then."""
    for epoch in range(EPOCHS):
        node.epoch(epoch)
    reads = sum(node.reads[epoch] for epoch in range(EPOCHS - MEASURED, EPOCHS)) / MEASURED
    return reads, node.planner.directory.cached_ids()


def expected_reads(weights: NDArray[np.float64], cached: NDArray[np.int64], blocks: float = SAMPLES / 24) -> float:
    """Blocks that contain a sample that is not cached, summed over these samples.

    A sample drawn e times falls into about blocks (1 - (1 - 1 / blocks)^e) of them, and is read once for each.
    """
    drawn = weights / weights.sum() * SAMPLES
    low = np.floor(drawn)
    times = [blocks * (1 - (1 - 1 / blocks) ** count) for count in (low, low + 1)]
    lacking = np.setdiff1d(np.arange(SAMPLES), cached)
    return float((times[0] + (drawn - low) * (times[1] - times[0]))[lacking].sum())


@pytest.mark.parametrize("readahead", [0, 2000])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.35])
@pytest.mark.parametrize("weights", [FEW, ZIPF])
def test_reads_are_the_draws_of_what_is_not_cached(weights: NDArray[np.float64], share: float, readahead: int) -> None:
    node = weighted(weights, share, readahead=readahead)
    reads, cached = settled_reads(node)
    assert reads == pytest.approx(expected_reads(weights, cached), rel=0.02, abs=3)
    best = np.argsort(-weights, kind="stable")[: int(share * SAMPLES)]
    missing = np.setdiff1d(best, cached)
    # Only samples that are drawn once in many epochs have not come by yet.
    assert weights[missing].sum() <= 0.01 * weights[best].sum()
    assert len(missing) <= 0.05 * len(best)


@pytest.mark.parametrize(("weights", "least"), [(FEW, 0.25), (ZIPF, 0.1)])
def test_fewer_are_read_than_where_the_first_to_come_stay(weights: NDArray[np.float64], least: float) -> None:
    reads, _ = settled_reads(weighted(weights, 0.1))
    by_arrival, cached = settled_reads(weighted(weights, 0.1, by_draws=False))
    assert by_arrival == pytest.approx(expected_reads(weights, cached), rel=0.02)
    assert reads <= (1 - least) * by_arrival


def test_room_that_the_most_drawn_samples_do_not_need_yet_is_used() -> None:
    """After a sixth of an epoch, some of them have not come by, but the cache is full."""
    node = weighted(FEW, 0.1)
    for block in range(node.order.blocks_per_epoch // 6):
        node.fetch(block)
    assert node.planner.minio.free_bytes < 24 * BYTES
    assert 0.2 < np.mean(FEW[node.planner.directory.cached_ids()] == 1) < 0.8


def test_equal_weights_change_nothing() -> None:
    both = [weighted(np.ones(SAMPLES), 0.3, by_draws=by_draws) for by_draws in (True, False)]
    for node in both:
        node.epoch(0)
    first, second = (node.planner.directory.cached_ids().tolist() for node in both)
    assert first == second


def test_the_most_drawn_samples_are_decoded() -> None:
    """Memory for 120 samples: half of it for 20 decoded ones of three times the bytes, and 60 encoded ones."""
    node = weighted(ZIPF, 0.1)
    node.aim(SAMPLES * BYTES // 20)
    for block in range(12 * node.order.blocks_per_epoch):
        node.begin(block)
        while awaited := node.planner.awaited(node.request(block)):
            node.fill(min(awaited))
        asked = node.asked(block)
        node.deliver(block)
        node.hand_in(block, asked)
        for slab in list(node.coming):
            node.land(slab)
    best = np.argsort(-ZIPF)
    directory = node.planner.directory
    assert set(directory.decoded_ids().tolist()) == {*best[: SAMPLES // 20 // GROWTH].tolist()}
    rest = np.setdiff1d(directory.cached_ids(), directory.decoded_ids())
    assert np.isin(best[20:80], rest).mean() > 0.9


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    seed=st.integers(0, 99),
    memory=st.integers(0, 100),
    disks=st.lists(st.integers(0, 60), max_size=3),
)
def test_classes_are_filled_in_order(lengths: list[int], seed: int, memory: int, disks: list[int]) -> None:
    """No class exceeds its bytes, and no sample is in a slower class than one that is drawn less often."""
    chance, sizes, every = np.random.default_rng(seed), np.array(lengths), np.arange(len(lengths))
    draws, is_home = chance.integers(1, 5, len(lengths)).astype(float), chance.random(len(lengths)) < 0.8
    ranks = DrawRanks(draws, sizes, is_home)
    _, in_memory = ranks.in_memory(memory, 0, 0.0)
    classes = np.where(ranks.among_first(every, in_memory), 0, 1 + ranks.classes(every, in_memory, disks))
    classes[(classes == 0) & ~ranks.among_first(every, in_memory)] = 9
    for index, capacity in enumerate([memory, *disks]):
        there = classes == index
        assert sizes[there].sum() <= capacity
        slower = draws[is_home & (sizes > 0) & (classes > index)]
        if there.any() and len(slower):
            assert draws[there].min() >= slower.max()
    assert (classes[~is_home | (sizes == 0)] == 9).all()


def test_expected_draws_of_a_dataset_are_those_that_come() -> None:
    data = synthetic(50)
    drawn = data.resample(np.arange(50), samples=200)
    assert drawn.stored_draws is not None
    counts = sum(np.bincount(drawn.stored_ids(np.arange(200), epoch), minlength=49) for epoch in range(200)) / 200
    np.testing.assert_allclose(counts, drawn.stored_draws, atol=0.15)
    assert data.stored_draws is None
    assert data.resample(np.arange(50), samples=200, each_epoch=False).stored_draws is None
