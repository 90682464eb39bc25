"""Access frequency, imbalance traffic and hit rates match hand calculations and counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.model.balance import assign
from mbaas.model.page_cache import page_cache_hits
from mbaas.tools.simulator.chance import POLICIES, belady_hits, frequency, hit_fractions, imbalance
from mbaas.tools.simulator.world import orders_of


def test_frequency_by_hand() -> None:
    """N = 2, E = 4, delta = 0.5: mu = 2. More than 3 reads are 4, with probability 1/16: 100 of 1,600 samples.

    Exactly 3 reads do not count, because the inequality is strict.
    """
    found = frequency(workers=2, epochs=4, samples=1600, delta=0.5)
    assert found.least == 4
    assert found.expected == pytest.approx(100)
    assert found.simulated is None


def test_delta_is_taken_as_it_is_written() -> None:
    """N = 3, E = 30, delta = 0.1: exactly 11 is not more than 1.1 x 10, although 1.1 * 10 is less in some roundings."""
    for delta, least in ((0.1, 12), (0.3, 14), (0.6, 17), (0.7, 18), (0.0, 11), (-1.0, 1)):
        assert frequency(workers=3, epochs=30, samples=1, delta=delta).least == least


def test_the_papers_example() -> None:
    """NoPFS, section 3: N = 16, E = 90, ImageNet-1k. scipy: binom.sf(10, 90, 1/16) * 1281167 = 31634.686."""
    found = frequency(workers=16, epochs=90, samples=1_281_167, delta=0.8)
    assert found.expected == pytest.approx(31_634.686, abs=0.001)
    assert math.fsum(found.expected_counts) == pytest.approx(1_281_167)


@pytest.mark.parametrize(("workers", "epochs", "delta"), [(4, 12, 0.4), (7, 33, 0.2)])
def test_orders_of_a_feed_have_that_frequency(workers: int, epochs: int, delta: float) -> None:
    """Counts of 30,011 samples are within five standard deviations, sqrt(F p (1 - p)), of the expected count."""
    found = frequency(workers=workers, epochs=epochs, samples=30_011, delta=delta, monte_carlo=True, seed=3)
    share = found.expected / 30_011
    assert found.simulated is not None
    assert found.simulated_counts is not None
    assert abs(found.simulated - found.expected) < 5 * math.sqrt(30_011 * share * (1 - share))
    assert found.simulated_counts.sum() == 30_011
    again = frequency(workers=workers, epochs=epochs, samples=30_011, delta=delta, monte_carlo=True, seed=4)
    assert again.simulated != found.simulated


def test_one_worker_reads_everything_once_an_epoch() -> None:
    found = frequency(workers=1, epochs=5, samples=103, delta=0, monte_carlo=True)
    assert (found.expected, found.simulated) == (0, 0)
    assert found.simulated_counts is not None
    assert found.simulated_counts.tolist() == [0, 0, 0, 0, 0, 103]


def test_imbalance_of_two_nodes_with_one_sample_each() -> None:
    """In half of the steps one node has both samples, and one of the two is moved; otherwise none is."""
    found = imbalance(nodes=2, local_batch=1, steps=4000, seed=1)
    assert set(found.tolist()) == {0, 0.5}
    assert found.mean() == pytest.approx(0.25, abs=0.025)


def test_imbalance_is_what_balancing_moves() -> None:
    """The same step, balanced by the function of real loaders."""
    chance = np.random.default_rng(2)
    owned = chance.multinomial(5 * 7, [1 / 5] * 5, size=1)[0]
    found = imbalance(nodes=5, local_batch=7, steps=1, seed=2)
    homes = np.repeat(np.arange(5), owned)
    assert found.tolist() == [(assign(homes, rank_nodes=np.arange(5)) != homes).mean()]


def test_imbalance_depends_on_the_local_batch_and_hardly_on_nodes() -> None:
    """The traffic is about 0.4 / sqrt(B), so four times the batch halves it."""
    medians = {(p, b): np.median(imbalance(nodes=p, local_batch=b, steps=400)) for p in (16, 128) for b in (16, 64)}
    assert medians[16, 16] / medians[16, 64] == pytest.approx(2, rel=0.1)
    assert medians[16, 64] == pytest.approx(medians[128, 64], rel=0.1)
    assert medians[128, 64] == pytest.approx(0.4 / 8, rel=0.05)


@pytest.mark.parametrize("cached", [0.2, 0.5, 0.8])
def test_the_page_cache_comes_to_its_formula(cached: float) -> None:
    """The second epoch finds what strict LRU would find; the lists settle in the next ones."""
    hits = hit_fractions("page_cache", cached=cached, epochs=6, samples=10_000)
    assert hits[0] == 0
    assert hits[3:] == pytest.approx([page_cache_hits(cached)] * 3, abs=0.04)


def test_minio_hits_what_it_holds() -> None:
    """0.35 of 1,003 samples is 351.05, so 351 fit."""
    assert hit_fractions("minio", cached=0.35, epochs=4, samples=1003) == (0, *[351 / 1003] * 3)


@pytest.mark.parametrize("cached", [0.0, 1.0])
def test_the_ends_of_both(cached: float) -> None:
    for policy in ("minio", "page_cache"):
        assert hit_fractions(policy, cached=cached, epochs=3, samples=101)[1:] == (cached, cached)


def plain_hits(orders: list[list[int]], room: int) -> list[int]:
    """Hits of each epoch if the sample with the furthest next read leaves, computed read by read."""
    reads = [sample for order in orders for sample in order]
    held: set[int] = set()
    hits = []
    for now, sample in enumerate(reads):
        hits.append(sample in held)
        held.add(sample)
        if len(held) > room:
            later = reads[now + 1 :]
            held.remove(max(held, key=lambda each: later.index(each) if each in later else len(reads)))
    return np.add.reduceat(hits, np.arange(0, len(reads), len(orders[0]))).tolist()


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(1, 13), epochs=st.integers(1, 4), room=st.integers(0, 14), seed=st.integers(0, 99))
def test_belady_hits_what_a_plain_eviction_hits(samples: int, epochs: int, room: int, seed: int) -> None:
    orders = orders_of(samples, seed=seed)
    found = list(belady_hits(orders, room=room, samples=samples, epochs=epochs))
    assert found == plain_hits([orders(epoch).tolist() for epoch in range(epochs)], room)


@pytest.mark.parametrize("cached", [0.0, 0.1, 0.5, 1.0])
def test_minio_reaches_the_bound(cached: float) -> None:
    """Hits of an epoch were cached at its start, so there are at most as many as the cache holds: 0.1 x 2,003."""
    found = {policy: hit_fractions(policy, cached=cached, epochs=4, samples=2003) for policy in POLICIES}
    assert found["belady"] == found["minio"] == (0, *[int(cached * 2003) / 2003] * 3)
    assert all(sum(hits) <= sum(found["belady"]) for hits in found.values())


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ConfigError, match="local_batch must be at least 1, got 0"):
        imbalance(nodes=2, local_batch=0, steps=1)
    with pytest.raises(ConfigError, match="delta must be at least -1 and finite, got -2"):
        frequency(workers=2, epochs=1, samples=1, delta=-2)
    with pytest.raises(ConfigError, match=r"cached must be a share from 0 to 1, got 1\.5"):
        hit_fractions("page_cache", cached=1.5, epochs=2)
    with pytest.raises(ConfigError, match="policy must be one of minio, page_cache, belady, got 'lru'"):
        hit_fractions("lru", cached=0.5, epochs=2)
