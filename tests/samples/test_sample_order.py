"""Every epoch visits each sample once, in its own order, cut into blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.samples.order import SampleOrder, Shuffle

orders = st.builds(
    SampleOrder,
    num_samples=st.integers(1, 700),
    seed=st.integers(0, 2**63 - 1),
    block_samples=st.integers(1, 300),
)


@given(order=orders, epoch=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_blocks_of_an_epoch_hold_each_sample_once(order: SampleOrder, epoch: int) -> None:
    first = epoch * order.blocks_per_epoch
    blocks = range(first, first + order.blocks_per_epoch)
    ids = np.concatenate([order.sample_ids(block) for block in blocks])
    assert np.array_equal(np.sort(ids), np.arange(order.num_samples))
    assert {order.epoch_of(block) for block in blocks} == {epoch}


@given(order=orders, epoch=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_spans_follow_each_other_and_only_the_last_is_shorter(order: SampleOrder, epoch: int) -> None:
    first = epoch * order.blocks_per_epoch
    spans = [order.span(block) for block in range(first, first + order.blocks_per_epoch)]
    assert spans[0][0] == 0
    assert spans[-1][1] == order.num_samples
    assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]
    assert all(stop - start == order.block_samples for start, stop in spans[:-1])
    assert 1 <= spans[-1][1] - spans[-1][0] <= order.block_samples


def test_how_an_epoch_is_cut_does_not_change_its_order() -> None:
    orders = []
    for block_samples in (1, 64, 1_000, 5_000):
        order = SampleOrder(num_samples=1_000, seed=1, block_samples=block_samples)
        orders.append(np.concatenate([order.sample_ids(g) for g in range(order.blocks_per_epoch)]).tolist())
    assert all(order == orders[0] for order in orders)


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    """Unrelated orders of 1,000 agree at 1 position on average. (seed 1, epoch 0) differs from (seed 0, epoch 1)."""
    names = [(0, 0), (0, 1), (1, 0), (1, 1), (2**63 - 1, 0), (0, 2**32)]
    orders = [SampleOrder(1_000, seed, 10).samples_at(Shuffle(epoch), 0, 1_000) for seed, epoch in names]
    for i in range(len(orders)):
        for j in range(i):
            assert (orders[i] == orders[j]).sum() < 12, (names[i], names[j])


def test_a_sample_is_equally_likely_in_every_tenth_of_an_epoch() -> None:
    """One sample over 5,000 epochs: 500 +- 21 in each tenth."""
    order = SampleOrder(num_samples=1_000, seed=9, block_samples=1)
    positions = [int(np.flatnonzero(order.samples_at(Shuffle(epoch), 0, 1_000) == 123)[0]) for epoch in range(5_000)]
    counts = np.bincount(np.array(positions) // 100, minlength=10)
    assert counts.min() > 500 - 4 * 21
    assert counts.max() < 500 + 4 * 21


def test_the_order_never_changes() -> None:
    """A feed resumed with a later release must continue in the same order."""
    assert SampleOrder(num_samples=100_000, seed=7, block_samples=4).sample_ids(25_001).tolist() == [
        25459,
        60853,
        31321,
        82117,
    ]


@pytest.mark.parametrize("seed", [-1, 2**63, 0.5, "7", None])
def test_a_seed_out_of_range_is_refused_with_both_values(seed: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SampleOrder(num_samples=10, seed=seed, block_samples=1)  # type: ignore[arg-type]
    assert "[0, 2**63)" in str(caught.value)
    assert repr(seed) in str(caught.value)


def test_a_sweep_over_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_samples must be at least 1, got 0"):
        SampleOrder(num_samples=0, seed=0, block_samples=1)
    with pytest.raises(ConfigError, match="block_samples must be at least 1, got -2"):
        SampleOrder(num_samples=1, seed=0, block_samples=-2)
