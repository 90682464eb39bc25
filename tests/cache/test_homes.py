"""Homes: shares in proportion, bounded memory, few moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.placement import NodeWeight, Placement, place_samples

SAMPLES = 20_000
IDS = np.arange(SAMPLES)
SIZES = np.random.default_rng(0).integers(50, 200, SAMPLES)
TOTAL = int(SIZES.sum())
PLENTY = 10**12


def found(node_weights: dict[str, tuple[int, float]]) -> Placement:
    """Homes on hosts, given as node -> (bytes, weight)."""
    all_hosts = [NodeWeight(node, cache_bytes, weight) for node, (cache_bytes, weight) in node_weights.items()]
    return place_samples(all_hosts, num_samples=SAMPLES, lengths=lambda ids: SIZES[ids], version=1)


def nodes_of(placement: Placement) -> np.ndarray:
    return np.array(placement.nodes)[placement.of(IDS)]


def kept_bytes(placement: Placement) -> dict[str, int]:
    home, kept = placement.homes_and_kept(IDS)
    return {node: int(SIZES[kept & (home == i)].sum()) for i, node in enumerate(placement.nodes)}


def test_shares_follow_the_weights() -> None:
    """Weights 1, 1, 2 of 20,000 samples: 5,000, 5,000 and 10,000; the deviation of a share is at most 71."""
    counts = np.bincount(found({"a": (PLENTY, 1), "b": (PLENTY, 1), "c": (PLENTY, 2)}).of(IDS))
    assert np.abs(counts - [5000, 5000, 10_000]).max() < 5 * 71


def test_a_node_that_comes_takes_only_its_own_share_and_one_that_goes_leaves_only_its_own() -> None:
    """A quarter of the samples moves to the fourth node; no other sample moves."""
    three = nodes_of(found(dict.fromkeys("abc", (PLENTY, 1))))
    four = nodes_of(found(dict.fromkeys("abcd", (PLENTY, 1))))
    moved = three != four
    assert set(four[moved]) == {"d"}
    assert abs(moved.mean() - 0.25) < 0.02
    assert (four == "d").sum() == moved.sum()


def test_a_small_memory_gives_the_rest_to_the_others_and_nothing_is_left_out() -> None:
    placement = found({"a": (TOTAL // 10, 1), "b": (PLENTY, 1), "c": (PLENTY, 1)})
    assert placement.kept(IDS).all()
    assert 0.999 * TOTAL / 10 < kept_bytes(placement)["a"] <= TOTAL // 10


def test_memories_that_just_hold_the_dataset_hold_all_of_it() -> None:
    """Four memories of a quarter and 0.1 %: by plain hashing the largest share would be 1 % too large."""
    budget = int(TOTAL / 4 * 1.001)
    placement = found(dict.fromkeys("abcd", (budget, 1)))
    assert placement.kept(IDS).mean() > 0.9995
    assert max(kept_bytes(placement).values()) <= budget


def test_memories_that_do_not_hold_the_dataset_are_filled() -> None:
    placement = found(dict.fromkeys("abcd", (TOTAL // 8, 1)))
    assert abs(placement.kept(IDS).mean() - 0.5) < 0.01
    for used in kept_bytes(placement).values():
        assert 0.999 * TOTAL / 8 < used <= TOTAL // 8


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text("abcdef0123", min_size=1, max_size=8),
        st.tuples(st.integers(0, TOTAL), st.floats(0.1, 10.0)),
        min_size=1,
        max_size=6,
    )
)
def test_no_memory_is_ever_overfilled_and_all_is_kept_where_there_is_room(
    node_weights: dict[str, tuple[int, float]],
) -> None:
    placement = found(node_weights)
    if len(node_weights) == 1:
        return
    used = kept_bytes(placement)
    assert all(used[node] <= node_weights[node][0] for node in node_weights)
    room = max(node_weights[node][0] - used[node] for node in node_weights)
    left_out = TOTAL - sum(used.values())
    assert left_out == 0 or room <= 0.001 * TOTAL, (room, left_out)


def test_a_large_dataset_is_looked_at_in_part_and_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mbaas.placement.LOOKED_AT", 5000)
    budget = TOTAL // 5
    placement = found(dict.fromkeys("abc", (budget, 1)))
    assert all(0.96 * budget < used <= 1.02 * budget for used in kept_bytes(placement).values())


def test_homes_do_not_depend_on_the_order_of_hosts() -> None:
    one = found({"a": (TOTAL // 3, 1), "b": (TOTAL // 3, 2), "c": (TOTAL // 3, 3)})
    other = found({"c": (TOTAL // 3, 3), "a": (TOTAL // 3, 1), "b": (TOTAL // 3, 2)})
    assert one == other


@pytest.mark.parametrize("node_weights", [[], [NodeWeight("a", 1), NodeWeight("a", 2)]])
def test_no_host_and_a_host_twice_are_refused(node_weights: list[NodeWeight]) -> None:
    with pytest.raises(ConfigError, match="at least one host and each node once, got"):
        place_samples(node_weights, num_samples=1, lengths=lambda ids: SIZES[ids], version=1)


@pytest.mark.parametrize(("cache_bytes", "weight"), [(-1, 1.0), (1, 0.0)])
def test_a_host_without_speed_or_with_negative_memory_is_refused(cache_bytes: int, weight: float) -> None:
    with pytest.raises(ConfigError, match="weight must be above 0 and cache_bytes at least 0"):
        NodeWeight("a", cache_bytes, weight)
