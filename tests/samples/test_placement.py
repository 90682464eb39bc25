"""Placement follows weights, fits memory and moves few samples.

All nodes cut a block the same way, and find moved samples at their former holders.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mbaas.errors import ConfigError, PlacementGoneError, PlacementUnknownError
from mbaas.samples.order import SampleOrder
from mbaas.samples.placement import (
    KEPT_VERSIONS,
    WHOLE,
    BlockPart,
    Holders,
    NodeWeight,
    PartRequest,
    Placement,
    PlacementHistory,
    place_samples,
)

SAMPLES = 20_000
IDS = np.arange(SAMPLES)
SIZES = np.random.default_rng(0).integers(50, 200, SAMPLES)
TOTAL = int(SIZES.sum())
PLENTY = 10**12

CUT_SAMPLES, BLOCK = 1003, 64
ORDER = SampleOrder(CUT_SAMPLES, seed=5, block_samples=BLOCK)

# ---- home nodes of samples ----


def found(node_weights: dict[str, tuple[int, float]]) -> Placement:
    """A placement on nodes, given as node -> (bytes, weight)."""
    weights = [NodeWeight(node, cache_bytes, weight) for node, (cache_bytes, weight) in node_weights.items()]
    return place_samples(weights, num_samples=SAMPLES, lengths=lambda ids: SIZES[ids], version=1)


def nodes_of(placement: Placement) -> np.ndarray:
    return np.array(placement.nodes)[placement.of(IDS)]


def kept_bytes(placement: Placement) -> dict[str, int]:
    home, kept = placement.homes_and_kept(IDS)
    return {node: int(SIZES[kept & (home == i)].sum()) for i, node in enumerate(placement.nodes)}


def test_samples_follow_the_weights() -> None:
    """Weights 1, 1, 2 divide 20,000 samples into 5,000, 5,000 and 10,000, with a standard deviation of at most 71."""
    counts = np.bincount(found({"a": (PLENTY, 1), "b": (PLENTY, 1), "c": (PLENTY, 2)}).of(IDS))
    assert np.abs(counts - [5000, 5000, 10_000]).max() < 5 * 71


def test_a_node_that_comes_takes_only_its_own_samples_and_one_that_goes_leaves_only_its_own() -> None:
    """A quarter of the samples moves to the fourth node; no other sample moves."""
    three = nodes_of(found(dict.fromkeys("abc", (PLENTY, 1))))
    four = nodes_of(found(dict.fromkeys("abcd", (PLENTY, 1))))
    moved = three != four
    assert set(four[moved]) == {"d"}
    assert abs(moved.mean() - 0.25) < 0.02
    assert (four == "d").sum() == moved.sum()


def test_a_small_memory_gives_the_rest_to_the_others_and_nothing_is_left_out() -> None:
    placement = found({"a": (TOTAL // 10, 1), "b": (PLENTY, 1), "c": (PLENTY, 1)})
    assert placement.homes_and_kept(IDS)[1].all()
    assert 0.999 * TOTAL / 10 < kept_bytes(placement)["a"] <= TOTAL // 10


def test_memories_that_just_hold_the_dataset_hold_all_of_it() -> None:
    """Each of four memories is 0.1 % above a quarter. Plain hashing would make the largest part 1 % too large."""
    budget = int(TOTAL / 4 * 1.001)
    placement = found(dict.fromkeys("abcd", (budget, 1)))
    assert placement.homes_and_kept(IDS)[1].mean() > 0.9995
    assert max(kept_bytes(placement).values()) <= budget


def test_memories_that_do_not_hold_the_dataset_are_filled() -> None:
    placement = found(dict.fromkeys("abcd", (TOTAL // 8, 1)))
    assert abs(placement.homes_and_kept(IDS)[1].mean() - 0.5) < 0.01
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
    monkeypatch.setattr("mbaas.samples.placement.LOOKED_AT", 5000)
    budget = TOTAL // 5
    placement = found(dict.fromkeys("abc", (budget, 1)))
    assert all(0.96 * budget < used <= 1.02 * budget for used in kept_bytes(placement).values())


def test_without_limits_each_node_chooses_among_all_samples_at_home_there() -> None:
    weights = [NodeWeight("a", TOTAL // 10), NodeWeight("b", 0, 3.0)]
    placement = place_samples(weights, num_samples=SAMPLES, lengths=lambda ids: SIZES[ids], version=1, limited=False)
    home, kept = placement.homes_and_kept(IDS)
    assert kept.all()
    assert np.mean(home == 1) == pytest.approx(0.75, abs=0.02)


def test_homes_do_not_depend_on_the_order_of_nodes() -> None:
    one = found({"a": (TOTAL // 3, 1), "b": (TOTAL // 3, 2), "c": (TOTAL // 3, 3)})
    other = found({"c": (TOTAL // 3, 3), "a": (TOTAL // 3, 1), "b": (TOTAL // 3, 2)})
    assert one == other


@pytest.mark.parametrize("node_weights", [[], [NodeWeight("a", 1), NodeWeight("a", 2)]])
def test_no_node_and_a_node_twice_are_refused(node_weights: list[NodeWeight]) -> None:
    with pytest.raises(ConfigError, match="at least one node and each node once, got"):
        place_samples(node_weights, num_samples=1, lengths=lambda ids: SIZES[ids], version=1)


@pytest.mark.parametrize(("cache_bytes", "weight"), [(-1, 1.0), (1, 0.0)])
def test_a_node_without_speed_or_with_negative_memory_is_refused(cache_bytes: int, weight: float) -> None:
    with pytest.raises(ConfigError, match="weight must be above 0 and cache_bytes at least 0"):
        NodeWeight("a", cache_bytes, weight)


# ---- parts of blocks ----


def even_placement(nodes: str, version: int = 1, cache_bytes: int = 10**9) -> Placement:
    node_weights = [NodeWeight(node, cache_bytes) for node in nodes]
    return place_samples(
        node_weights, num_samples=CUT_SAMPLES, lengths=lambda ids: np.full(len(ids), 100), version=version
    )


def test_without_a_placement_a_block_is_one_part() -> None:
    placements = PlacementHistory(ORDER)
    assert placements.parts(3) == (WHOLE,)
    assert placements.rows(PartRequest(3)) is None
    assert placements.ids(PartRequest(3)).tolist() == ORDER.sample_ids(3).tolist()
    assert placements.own(3) == PartRequest(3, WHOLE)


@pytest.mark.parametrize("nodes", ["a", "ab", "abcde"])
def test_the_parts_of_a_block_hold_each_of_its_samples_once_and_in_order(nodes: str) -> None:
    placements = PlacementHistory(ORDER)
    placements.add(even_placement(nodes))
    for block in (0, ORDER.blocks_per_epoch - 1, 40):
        ids = ORDER.sample_ids(block)
        cut = [placements.rows(PartRequest(block, block_part)) for block_part in placements.parts(block)]
        whole = [np.arange(len(ids)) if rows is None else rows for rows in cut]
        assert sorted(np.concatenate(whole).tolist()) == list(range(len(ids)))
        for block_part, rows in zip(placements.parts(block), whole, strict=True):
            assert len(rows)
            assert (np.diff(rows) > 0).all()
            assert placements.ids(PartRequest(block, block_part)).tolist() == ids[rows].tolist()
            assert block_part.home in nodes


def test_samples_that_each_epoch_draws_are_at_home_where_the_stored_sample_is() -> None:
    """Each draw is one of ten stored samples, whose home nodes are some of the twelve nodes."""

    def stored_ids(ids: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return (ids + epoch) % 10

    order = SampleOrder(CUT_SAMPLES, seed=3, block_samples=64, redrawn=True)
    stranger, placements = PlacementHistory(order), PlacementHistory(order, "b", stored_ids)
    for each in (stranger, placements):
        each.add(even_placement("abcdefghijkl"))
    newest = placements.newest
    assert newest is not None
    for block in (0, order.blocks_per_epoch + 1):
        parts = placements.parts(block)
        assert parts == stranger.parts(block), "the cut is the same without knowing the drawn samples"
        assert [part.home for part in parts] == [*"abcdefghijkl"], "even homes without samples"
        drawn = stored_ids(order.sample_ids(block), block // order.blocks_per_epoch)
        rows = [placements.rows(PartRequest(block, part)) for part in parts]
        cut = [range(0) if own is None else own.tolist() for own in rows]
        assert sorted(itertools.chain(*cut)) == list(range(64))
        for part, own in zip(parts, cut, strict=True):
            request = PartRequest(block, part)
            assert placements.ids(request).tolist() == order.sample_ids(block)[[*own]].tolist()
            assert placements.stored(request).tolist() == np.unique(drawn[[*own]]).tolist()
            assert {newest.nodes[home] for home in newest.of(drawn[[*own]])} <= {part.home}
        assert not all(len(own) for own in cut)


def test_a_node_finds_its_own_part_which_is_empty_where_nothing_is_at_home() -> None:
    placements, stranger = PlacementHistory(ORDER, "b"), PlacementHistory(ORDER, "z")
    for one in (placements, stranger):
        one.add(even_placement("abc"))
    assert placements.own(7) == PartRequest(7, BlockPart("b", 1))
    assert 10 < len(placements.ids(placements.own(7))) < 35
    assert len(stranger.ids(stranger.own(7))) == 0
    assert not stranger.admits(np.arange(CUT_SAMPLES)).any()


def test_an_older_version_still_cuts_as_it_did_until_it_is_forgotten() -> None:
    placements = PlacementHistory(ORDER)
    placements.add(even_placement("ab", 1))
    old = PartRequest(2, BlockPart("a", 1))
    before = placements.ids(old).tolist()
    placements.add(even_placement("abc", 2))
    assert placements.newest is not None
    assert placements.newest.version == 2
    assert placements.ids(old).tolist() == before
    for version in range(3, 3 + KEPT_VERSIONS):
        placements.add(even_placement("ab", version))
    assert not placements.knows(old.block_part)
    with pytest.raises(PlacementGoneError, match="version 1 of the placement is not known here"):
        placements.ids(old)


def test_a_version_that_is_not_known_yet_is_told_from_one_that_never_will_be() -> None:
    placements, asked = PlacementHistory(ORDER), PartRequest(2, BlockPart("a", 2))
    with pytest.raises(PlacementUnknownError) as caught:
        placements.ids(asked)
    assert not isinstance(caught.value, PlacementGoneError)
    placements.add(even_placement("ab", 1))
    with pytest.raises(PlacementUnknownError) as caught:
        placements.ids(asked)
    assert not isinstance(caught.value, PlacementGoneError)
    placements.add(even_placement("ab", 3))
    with pytest.raises(PlacementGoneError):
        placements.ids(asked)
    placements.add_older([even_placement("ab", 2)])
    assert len(placements.ids(asked))


def test_samples_that_moved_here_come_from_the_node_that_held_them() -> None:
    """Node a holds the even samples, node b (this one) 0 to 99. About half of all samples have their home on b."""
    index = np.full(CUT_SAMPLES, -1, np.int16)
    index[::2] = 0
    index[:100] = 1
    placements = PlacementHistory(ORDER, "b")
    placements.add(even_placement("ab"), Holders(("a", "b"), index))
    assert placements.former_holders(np.array([1, 50, 100, 101, 102])).tolist() == [-1, -1, 0, -1, 0]
    assert placements.holder(0) == "a"
    moving = placements.held_elsewhere()
    assert (moving % 2 == 0).all()
    assert moving.min() >= 100
    assert placements.admits(moving).all()
    assert 150 < len(moving) < 300


def test_of_a_part_that_was_cut_before_others_have_what_this_node_handed_over() -> None:
    placements, everything = PlacementHistory(ORDER, "b"), np.arange(CUT_SAMPLES)
    placements.add(even_placement("bc", 1))
    placements.add(even_placement("abc", 2))
    assert placements.newest is not None
    home = placements.newest.of(everything)
    lenders = placements.lenders(PartRequest(0, BlockPart("b", 1)), everything)
    assert [placements.lender(index) for index in (0, 1, 2)] == ["a", "b", "c"]
    assert lenders.tolist() == np.where(home == 1, -1, home).tolist()
    for part in (BlockPart("b", 2), BlockPart("c", 1), WHOLE):
        assert (placements.lenders(PartRequest(0, part), everything) == -1).all()
    small = PlacementHistory(ORDER, "b")
    small.add(even_placement("bc", 1))
    small.add(even_placement("abc", 2, cache_bytes=0))
    assert (small.lenders(PartRequest(0, BlockPart("b", 1)), everything) == -1).all(), "no home has a cache"


def test_a_node_keeps_only_what_fits_its_memory() -> None:
    """Two memories of 20,000 bytes hold 400 of 1,003 samples of 100 bytes."""
    kept = []
    for node in "ab":
        placements = PlacementHistory(ORDER, node)
        placements.add(even_placement("ab", cache_bytes=20_000))
        kept.append(placements.admits(np.arange(CUT_SAMPLES)))
        assert (placements.is_home(np.arange(CUT_SAMPLES)) | ~kept[-1]).all()
    assert [int(mask.sum()) for mask in kept] == [200, 200]
    assert not (kept[0] & kept[1]).any()
