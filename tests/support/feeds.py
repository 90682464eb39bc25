"""Feeds shared by many tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

import mbaas
from mbaas.ray_cluster import actor_names
from support.trials import record_epoch

EPOCHS = 40
"""Decoded samples are cached as epochs run, so a few epochs suffice unless the caches cannot fill."""


def warm(feed: mbaas.Feed) -> mbaas.Feed:
    """Run epochs until the caches are full, with all samples in one form, so that tests do not change them."""
    with mbaas.join(feed.name, consumer="warm", format="numpy", wait_timeout_s=60) as loader:
        kept = -1
        for _ in range(EPOCHS):
            record_epoch(loader)
            status = feed.status()
            whole = status.samples - len({sample.sample_id for sample in status.skipped})
            if status.cached_bytes == kept and status.decoded.samples in (0, whole):
                return feed
            kept = status.cached_bytes
    raise AssertionError(f"the cache of {feed.name} still changes after {EPOCHS} epochs: {feed.status()}")


def through_objects(feed: mbaas.Feed) -> mbaas.Feed:
    """Make all blocks of a feed go through Ray's object store, even on one node."""
    assert in_coordinator(feed.name, lambda coordinator: coordinator._running.service._slot_use.give_up())
    return feed


def in_coordinator(feed: str, function: Callable[[Any], Any], timeout_s: float = 30.0) -> Any:
    """Call a function with a feed's `FeedCoordinator`, in the coordinator's process."""
    actor: Any = ray.get_actor(actor_names.actor_name(feed), actor_names.NAMESPACE)
    return ray.get(actor.__ray_call__.remote(lambda actor: function(actor._coordinator)), timeout=timeout_s)
