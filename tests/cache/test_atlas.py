"""The atlas: everybody cuts a block in the same way, and knows from where to get what moved."""

from __future__ import annotations

import numpy as np
import pytest

from mbaas.errors import StateError
from mbaas.order import SampleOrder
from mbaas.placement import (
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

SAMPLES, BLOCK = 1003, 64
SWEEP = SampleOrder(SAMPLES, seed=5, block_samples=BLOCK)


def placement(nodes: str, version: int = 1, cache_bytes: int = 10**9) -> Placement:
    node_weights = [NodeWeight(node, cache_bytes) for node in nodes]
    return place_samples(node_weights, num_samples=SAMPLES, lengths=lambda ids: np.full(len(ids), 100), version=version)


def test_without_homes_a_block_is_one_share() -> None:
    placements = PlacementHistory(SWEEP)
    assert placements.parts(3) == (WHOLE,)
    assert placements.rows(PartRequest(3)) is None
    assert placements.ids(PartRequest(3)).tolist() == SWEEP.sample_ids(3).tolist()
    assert placements.own(3) == PartRequest(3, WHOLE)


@pytest.mark.parametrize("nodes", ["a", "ab", "abcde"])
def test_the_shares_of_a_block_hold_each_of_its_samples_once_and_in_order(nodes: str) -> None:
    placements = PlacementHistory(SWEEP)
    placements.add(placement(nodes))
    for block in (0, SWEEP.blocks_per_epoch - 1, 40):
        ids = SWEEP.sample_ids(block)
        rows = [placements.rows(PartRequest(block, block_part)) for block_part in placements.parts(block)]
        whole = [np.arange(len(ids)) if part is None else part for part in rows]
        assert sorted(np.concatenate(whole).tolist()) == list(range(len(ids)))
        for block_part, part in zip(placements.parts(block), whole, strict=True):
            assert len(part)
            assert (np.diff(part) > 0).all()
            assert placements.ids(PartRequest(block, block_part)).tolist() == ids[part].tolist()
            assert block_part.home in nodes


def test_a_node_finds_its_own_share_which_is_empty_where_it_is_no_host() -> None:
    placements, stranger = PlacementHistory(SWEEP, "b"), PlacementHistory(SWEEP, "z")
    for one in (placements, stranger):
        one.add(placement("abc"))
    assert placements.own(7) == PartRequest(7, BlockPart("b", 1))
    assert 10 < len(placements.ids(placements.own(7))) < 35
    assert len(stranger.ids(stranger.own(7))) == 0
    assert not stranger.admits(np.arange(SAMPLES)).any()


def test_an_older_version_still_cuts_as_it_did_until_it_is_forgotten() -> None:
    placements = PlacementHistory(SWEEP)
    placements.add(placement("ab", 1))
    old = PartRequest(2, BlockPart("a", 1))
    before = placements.ids(old).tolist()
    placements.add(placement("abc", 2))
    assert placements.newest is not None
    assert placements.newest.version == 2
    assert placements.ids(old).tolist() == before
    for version in range(3, 3 + KEPT_VERSIONS):
        placements.add(placement("ab", version))
    assert not placements.knows(old.block_part)
    with pytest.raises(StateError, match="homes of version 1 are not known"):
        placements.ids(old)


def test_samples_that_moved_here_come_from_the_node_that_held_them() -> None:
    """Held by a: the even ones; by b (here): 0 to 99. At home on b: about half of all."""
    index = np.full(SAMPLES, -1, np.int16)
    index[::2] = 0
    index[:100] = 1
    placements = PlacementHistory(SWEEP, "b")
    placements.add(placement("ab"), Holders(("a", "b"), index))
    assert placements.sources(np.array([1, 50, 100, 101, 102])).tolist() == [-1, -1, 0, -1, 0]
    assert placements.peer(0) == "a"
    moving = placements.elsewhere()
    assert (moving % 2 == 0).all()
    assert moving.min() >= 100
    assert placements.admits(moving).all()
    assert 150 < len(moving) < 300


def test_a_node_keeps_only_what_fits_its_memory() -> None:
    """Two memories of 20,000 bytes hold 400 of 1,003 samples of 100 bytes."""
    kept = []
    for node in "ab":
        placements = PlacementHistory(SWEEP, node)
        placements.add(placement("ab", cache_bytes=20_000))
        kept.append(placements.admits(np.arange(SAMPLES)))
        assert (placements.is_home(np.arange(SAMPLES)) | ~kept[-1]).all()
    assert [int(mask.sum()) for mask in kept] == [200, 200]
    assert not (kept[0] & kept[1]).any()
