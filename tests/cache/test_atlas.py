"""The atlas: everybody cuts a block in the same way, and knows from where to get what moved."""

from __future__ import annotations

import numpy as np
import pytest

from mbaas.cache.atlas import KEPT_VERSIONS, WHOLE, Atlas, Holders, Share, Wanted
from mbaas.cache.homes import Homes, Host, settle
from mbaas.errors import StateError
from mbaas.order import Sweep

SAMPLES, BLOCK = 1003, 64
SWEEP = Sweep(SAMPLES, seed=5, block_samples=BLOCK)


def homes(nodes: str, version: int = 1, cache_bytes: int = 10**9) -> Homes:
    hosts = [Host(node, cache_bytes) for node in nodes]
    return settle(hosts, num_samples=SAMPLES, lengths=lambda ids: np.full(len(ids), 100), version=version)


def test_without_homes_a_block_is_one_share() -> None:
    atlas = Atlas(SWEEP)
    assert atlas.shares(3) == (WHOLE,)
    assert atlas.rows(Wanted(3)) is None
    assert atlas.ids(Wanted(3)).tolist() == SWEEP.sample_ids(3).tolist()
    assert atlas.own(3) == Wanted(3, WHOLE)


@pytest.mark.parametrize("nodes", ["a", "ab", "abcde"])
def test_the_shares_of_a_block_hold_each_of_its_samples_once_and_in_order(nodes: str) -> None:
    atlas = Atlas(SWEEP)
    atlas.add(homes(nodes))
    for block in (0, SWEEP.blocks_per_epoch - 1, 40):
        ids = SWEEP.sample_ids(block)
        rows = [atlas.rows(Wanted(block, share)) for share in atlas.shares(block)]
        whole = [np.arange(len(ids)) if part is None else part for part in rows]
        assert sorted(np.concatenate(whole).tolist()) == list(range(len(ids)))
        for share, part in zip(atlas.shares(block), whole, strict=True):
            assert len(part)
            assert (np.diff(part) > 0).all()
            assert atlas.ids(Wanted(block, share)).tolist() == ids[part].tolist()
            assert share.home in nodes


def test_a_node_finds_its_own_share_which_is_empty_where_it_is_no_host() -> None:
    atlas, stranger = Atlas(SWEEP, "b"), Atlas(SWEEP, "z")
    for one in (atlas, stranger):
        one.add(homes("abc"))
    assert atlas.own(7) == Wanted(7, Share("b", 1))
    assert 10 < len(atlas.ids(atlas.own(7))) < 35
    assert len(stranger.ids(stranger.own(7))) == 0
    assert not stranger.admits(np.arange(SAMPLES)).any()


def test_an_older_version_still_cuts_as_it_did_until_it_is_forgotten() -> None:
    atlas = Atlas(SWEEP)
    atlas.add(homes("ab", 1))
    old = Wanted(2, Share("a", 1))
    before = atlas.ids(old).tolist()
    atlas.add(homes("abc", 2))
    assert atlas.newest is not None
    assert atlas.newest.version == 2
    assert atlas.ids(old).tolist() == before
    for version in range(3, 3 + KEPT_VERSIONS):
        atlas.add(homes("ab", version))
    assert not atlas.knows(old.share)
    with pytest.raises(StateError, match="homes of version 1 are not known"):
        atlas.ids(old)


def test_samples_that_moved_here_come_from_the_node_that_held_them() -> None:
    """Held by a: the even ones; by b (here): 0 to 99. At home on b: about half of all."""
    index = np.full(SAMPLES, -1, np.int16)
    index[::2] = 0
    index[:100] = 1
    atlas = Atlas(SWEEP, "b")
    atlas.add(homes("ab"), Holders(("a", "b"), index))
    assert atlas.sources(np.array([1, 50, 100, 101, 102])).tolist() == [-1, -1, 0, -1, 0]
    assert atlas.peer(0) == "a"
    moving = atlas.elsewhere()
    assert (moving % 2 == 0).all()
    assert moving.min() >= 100
    assert atlas.admits(moving).all()
    assert 150 < len(moving) < 300


def test_a_node_keeps_only_what_fits_its_memory() -> None:
    """Two memories of 20,000 bytes hold 400 of 1,003 samples of 100 bytes."""
    kept = []
    for node in "ab":
        atlas = Atlas(SWEEP, node)
        atlas.add(homes("ab", cache_bytes=20_000))
        kept.append(atlas.admits(np.arange(SAMPLES)))
        assert (atlas.is_home(np.arange(SAMPLES)) | ~kept[-1]).all()
    assert [int(mask.sum()) for mask in kept] == [200, 200]
    assert not (kept[0] & kept[1]).any()
