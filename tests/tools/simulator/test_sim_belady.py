"""Belady's eviction equals a plain one, and no cache without prefetching has more hits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.tools.simulator.chance import POLICIES, belady_hits, hit_fractions
from mbaas.tools.simulator.world import orders_of


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
def test_it_hits_what_a_plain_one_hits(samples: int, epochs: int, room: int, seed: int) -> None:
    orders = orders_of(samples, seed=seed)
    found = list(belady_hits(orders, room=room, samples=samples, epochs=epochs))
    assert found == plain_hits([orders(epoch).tolist() for epoch in range(epochs)], room)


@pytest.mark.parametrize("cached", [0.0, 0.1, 0.5, 1.0])
def test_minio_reaches_the_bound(cached: float) -> None:
    """Hits of an epoch were cached at its start, so there are at most as many as the cache holds: 0.1 x 2,003."""
    found = {policy: hit_fractions(policy, cached=cached, epochs=4, samples=2003) for policy in POLICIES}
    assert found["belady"] == found["minio"] == (0, *[int(cached * 2003) / 2003] * 3)
    assert all(sum(hits) <= sum(found["belady"]) for hits in found.values())
