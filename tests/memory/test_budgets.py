"""Budgets of cache and staging follow from the object stores of a cluster's nodes."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.memory.budgets import (
    MAX_SAMPLE_BYTES,
    STORE_SHARE,
    MemoryClaim,
    cache_budget,
    default_staging,
    free_bytes,
    largest_sample,
    memory_budgets,
    sized_cache,
    staging_room,
)
from mbaas.ray_cluster import resources

GB = 10**9


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 1 GB without CPUs, two nodes of 20 and 10 GB, and a dead node of 1 MB."""
    made = [(0, GB, True), (8, 20 * GB, True), (8, 10 * GB, True), (8, 10**6, False)]
    listed = [
        {
            "NodeID": str(number),
            "Alive": alive,
            "Resources": {"CPU": cpus, "object_store_memory": store} if cpus else {"object_store_memory": store},
        }
        for number, (cpus, store, alive) in enumerate(made)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: listed)


def budgets(**said: Any) -> tuple[int, int]:
    given = {
        "cache_bytes": None,
        "staging_bytes": None,
        "wanted_staging": GB // 2,
        "dataset_bytes": 100 * GB,
        "grows": False,
        "earlier": (),
        **said,
    }
    stores = resources.store_bytes(with_cpus=True).values()
    return memory_budgets(stores=stores, smallest_store=min(resources.store_bytes().values()), **given)


def test_the_cache_may_be_as_large_as_the_largest_node_allows_that_prepares(nodes: None) -> None:
    """70 % of 20 GB is 14 GB. Staging is limited to 15 % of the head's 1 GB, where minibatches may be read, too."""
    assert budgets() == (14 * GB - 150_000_000, 150_000_000)


def test_staging_is_what_the_workers_need_but_no_more_than_a_share() -> None:
    """15 % of 40 GB is 6 GB."""
    wanted = (2**30, 3 * GB, 6 * GB, 60 * GB)
    assert [default_staging(40 * GB, each) for each in wanted] == [2**30, 3 * GB, 6 * GB, 6 * GB]


def test_a_feed_stages_what_its_workers_need(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [{"NodeID": "a", "Alive": True, "Resources": {"CPU": 8, "object_store_memory": 40 * GB}}]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    assert budgets(wanted_staging=3 * GB) == (25 * GB, 3 * GB)
    assert budgets(wanted_staging=3 * GB, earlier=(MemoryClaim(26 * GB, GB),)) == (0, GB), "only what others leave"
    assert budgets(wanted_staging=3 * GB, staging_bytes=2 * GB) == (26 * GB, 2 * GB), "explicit values hold"


@pytest.mark.parametrize(("dataset", "cache"), [(0.1, 13.85 / 2), (5, 13.85 / 2), (10, 10), (100, 13.85)])
def test_a_cache_that_may_keep_decoded_samples_leaves_half_to_later_feeds(
    nodes: None, dataset: float, cache: float
) -> None:
    """Half of the 13.85 GB left by staging, or the size of the dataset if that is larger."""
    found, _ = budgets(dataset_bytes=int(dataset * GB), grows=True)
    assert found == pytest.approx(cache * GB)


@pytest.mark.parametrize(
    ("decoded", "cache"),
    [(0, 1), (0.5, 1), (3.2, 3.2), (9, 7)],
    ids=["none are decoded", "they shrink", "they grow", "there is no room for all"],
)
def test_the_measured_size_of_decoded_samples_lowers_the_default(decoded: float, cache: float) -> None:
    assert sized_cache(7 * GB, GB, decoded * GB) == cache * GB


def test_what_other_feeds_may_use_is_left_to_them(nodes: None) -> None:
    earlier = (MemoryClaim(5 * GB, GB),)
    assert budgets(earlier=earlier) == (8 * GB - 150_000_000, 150_000_000)
    with pytest.raises(ConfigError, match=r"within 8 GB: 70 % of a node's object store \(20 GB\) less 6 GB"):
        budgets(earlier=earlier, cache_bytes=9 * GB)


def test_staging_must_fit_the_smallest_node_that_prepares(nodes: None) -> None:
    assert budgets(cache_bytes=0, staging_bytes=7 * GB) == (0, 7 * GB)
    with pytest.raises(ConfigError, match=r"staging_bytes \(8 GB\) must stay within 7 GB: 70 % .* \(10 GB\)"):
        budgets(cache_bytes=0, staging_bytes=8 * GB)


def test_where_nobody_gives_out_cpus_all_stores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [{"NodeID": "a", "Alive": True, "Resources": {"object_store_memory": GB}}]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    assert resources.store_bytes(with_cpus=True) == resources.store_bytes() == {"a": GB}


def test_each_node_has_a_cache_of_the_size_that_its_own_store_has_room_for() -> None:
    claim, earlier = MemoryClaim(5 * GB, GB), (MemoryClaim(2 * GB, GB),)
    assert [cache_budget(store * GB, claim, ()) for store in (20, 10, 5, 1)] == [5 * GB, 5 * GB, 2.5 * GB, 0]
    assert [cache_budget(store * GB, claim, earlier) for store in (20, 10, 5, 1)] == [5 * GB, 3 * GB, 0, 0]


def test_a_node_that_comes_later_has_room_for_what_its_own_store_leaves() -> None:
    """70 % of 10 GB is 7 GB, and an earlier feed takes 3 GB. On smaller stores its claim leaves nothing."""
    earlier = (MemoryClaim(2 * GB, GB),)
    assert [staging_room(store * GB, earlier) for store in (20, 10, 2, 1)] == [11 * GB, 4 * GB, 0, 0]
    assert staging_room(10 * GB, ()) == 7 * GB


claims = st.lists(st.builds(MemoryClaim, st.integers(0, 50 * GB), st.integers(0, GB)), max_size=6)


@given(claims, st.integers(GB, 100 * GB))
def test_on_no_node_do_feeds_take_more_than_there_is(asked: list[MemoryClaim], store: int) -> None:
    feeds: list[MemoryClaim] = []
    taken = 0
    for claim in asked:
        if claim.staging_bytes > free_bytes(store, feeds):
            continue  # the feed is refused
        taken += cache_budget(store, claim, feeds) + claim.staging_bytes
        feeds.append(claim)
        assert taken + free_bytes(store, feeds) == int(store * STORE_SHARE)
        assert taken <= store * STORE_SHARE


def test_a_sample_may_be_as_large_as_what_budgets_leave_of_the_smallest_store_and_as_an_image_can_be() -> None:
    assert largest_sample([20 * GB, GB]) == 0.3 * GB
    assert largest_sample([20 * GB, 10 * GB]) == MAX_SAMPLE_BYTES
