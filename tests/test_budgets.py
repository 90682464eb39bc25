"""Budgets of cache and staging by the object stores of a cluster's nodes."""

from __future__ import annotations

import pytest
import ray

from mbaas import runtime
from mbaas.errors import ConfigError

GB = 10**9


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 1 GB that gives out no CPU, two machines of 20 and 10 GB, and a dead one of 1 MB."""
    made = [(0, GB, True), (8, 20 * GB, True), (8, 10 * GB, True), (8, 10**6, False)]
    listed = [
        {
            "Alive": alive,
            "Resources": {"CPU": cpus, "object_store_memory": store} if cpus else {"object_store_memory": store},
        }
        for cpus, store, alive in made
    ]
    monkeypatch.setattr(ray, "nodes", lambda: listed)


def budgets(**said: int | None) -> tuple[int, int]:
    return runtime.memory_budgets(
        **{"cache_bytes": None, "staging_bytes": None, "dataset_bytes": 100 * GB, "claimed_bytes": 0, **said}  # type: ignore[arg-type]
    )


def test_the_cache_is_not_bounded_by_a_head_on_which_none_is(nodes: None) -> None:
    """70 % of 10 GB are 7 GB; staged minibatches may be read on the head, too: 15 % of its 1 GB."""
    assert budgets() == (7 * GB - 150_000_000, 150_000_000)


def test_what_other_feeds_may_use_is_left_to_them(nodes: None) -> None:
    assert budgets(claimed_bytes=6 * GB) == (850_000_000, 150_000_000)
    with pytest.raises(ConfigError, match=r"within 1000 MB: 70% of a node's object store \(10000 MB\) less 6000 MB"):
        budgets(claimed_bytes=6 * GB, cache_bytes=2 * GB)


def test_where_nobody_gives_out_cpus_all_stores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"object_store_memory": GB}}])
    assert runtime.store_bytes(with_cpus=True) == runtime.store_bytes() == GB
