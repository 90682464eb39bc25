"""The fast LRU hits like a plain one, access by access, and approaches its closed form."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.model.supply import lru_hits
from mbaas.tools.simulator.chance import Lru, hit_fractions


class PlainLru:
    """Reference LRU: evicts the least recently read samples until the rest fits."""

    def __init__(self, capacity_bytes: int, sizes: np.ndarray) -> None:
        self.capacity_bytes, self.sizes = capacity_bytes, sizes
        self.held: OrderedDict[int, int] = OrderedDict()

    def read(self, sample: int) -> bool:
        hit = sample in self.held
        self.held[sample] = int(self.sizes[sample])
        self.held.move_to_end(sample)
        while sum(self.held.values()) > self.capacity_bytes:
            self.held.popitem(last=False)
        return hit


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    samples=st.integers(1, 150),
    share=st.floats(0, 1.2),
    part=st.sampled_from([1.0, 0.4]),
    sized=st.booleans(),
)
def test_it_hits_what_a_plain_one_hits(seed: int, samples: int, share: float, part: float, sized: bool) -> None:
    """Several sweeps over all samples or a random part; integer sizes make sums exact."""
    chance = np.random.default_rng(seed)
    sizes = chance.integers(1, 9, samples) if sized else np.ones(samples, dtype=np.int64)
    capacity_bytes = int(share * sizes.sum())
    fast, plain = Lru(capacity_bytes=capacity_bytes, sizes=sizes), PlainLru(capacity_bytes, sizes)
    for _ in range(4):
        order = chance.permutation(samples)[: max(1, int(part * samples))]
        assert fast.read(order).tolist() == [plain.read(int(sample)) for sample in order]


def test_it_hits_what_a_plain_one_hits_in_a_larger_sweep() -> None:
    """3,001 samples are read in stretches of 64, so floors, stretches and doubtful accesses all occur."""
    chance = np.random.default_rng(5)
    sizes = np.ones(3001, dtype=np.int64)
    fast, plain = Lru(capacity_bytes=1700, sizes=sizes), OrderedDict[int, None]()
    for _ in range(3):
        order = chance.permutation(3001)
        hits = []
        for sample in order.tolist():
            hits.append(sample in plain)
            plain[sample] = None
            plain.move_to_end(sample)
            if len(plain) > 1700:
                plain.popitem(last=False)
        assert fast.read(order).tolist() == hits


def test_the_same_order_again_and_again_never_hits() -> None:
    """The classic case: five samples in turn, room for four."""
    cache = Lru(capacity_bytes=4, sizes=np.ones(5))
    assert not any(cache.read(np.arange(5)).any() for _ in range(3))


@pytest.mark.parametrize("cached", [0.1, 0.5, 0.9])
def test_lru_comes_to_its_closed_form(cached: float) -> None:
    """x + (1 - x) ln(1 - x); the standard deviation of a hit fraction of 50,000 samples is below 0.0023."""
    hits = hit_fractions("lru", cached=cached, epochs=3, samples=50_000)
    assert hits[0] == 0
    assert hits[1:] == pytest.approx([lru_hits(cached)] * 2, abs=0.01)


def test_minio_hits_what_it_holds() -> None:
    """0.35 of 1,003 samples is 351.05, so 351 fit."""
    assert hit_fractions("minio", cached=0.35, epochs=4, samples=1003) == (0, *[351 / 1003] * 3)


@pytest.mark.parametrize("cached", [0.0, 1.0])
def test_the_ends_of_both(cached: float) -> None:
    for policy in ("minio", "lru"):
        assert hit_fractions(policy, cached=cached, epochs=3, samples=101)[1:] == (cached, cached)


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"cached must be a share from 0 to 1, got 1\.5"):
        hit_fractions("lru", cached=1.5, epochs=2)
