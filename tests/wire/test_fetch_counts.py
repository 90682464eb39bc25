"""Counts by source of bytes add up, and agree from every point of view."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mbaas.wire.samples import Amount, FetchCounts

AMOUNTS = st.builds(Amount, st.integers(0, 10**9), st.integers(0, 10**15))
COUNTS = st.builds(FetchCounts, local=AMOUNTS, remote=AMOUNTS, disk=AMOUNTS, storage=AMOUNTS)


@given(one=COUNTS, other=COUNTS)
def test_what_was_added_can_be_taken_off(one: FetchCounts, other: FetchCounts) -> None:
    assert one + other == other + one
    assert one + other - other == one
    assert (one + other).all == one.all + other.all
    assert one + FetchCounts() == one


def test_each_tier_is_counted_by_itself() -> None:
    a, b, c, d = (Amount(n, 100 * n) for n in (1, 2, 3, 4))
    counts = FetchCounts(local=a, remote=b, disk=c, storage=d)
    assert counts + counts == FetchCounts(Amount(2, 200), Amount(4, 400), Amount(6, 600), Amount(8, 800))
    assert counts.all == Amount(10, 1000)


def test_the_hit_rate_is_the_share_that_storage_was_not_asked_for() -> None:
    """6 of 8 samples came from memory, another node or a disk."""
    counts = FetchCounts(local=Amount(3), remote=Amount(1), disk=Amount(2), storage=Amount(2))
    assert counts.hit_rate == 0.75
    assert FetchCounts().hit_rate == 0.0
    assert FetchCounts(storage=Amount(5)).hit_rate == 0.0


@given(counts=COUNTS)
def test_what_is_local_to_one_node_is_remote_to_another(counts: FetchCounts) -> None:
    seen = counts.from_afar()
    assert seen.local == Amount()
    assert seen.remote == counts.local + counts.remote
    assert (seen.disk, seen.storage, seen.all) == (counts.disk, counts.storage, counts.all)
