"""Process ids of a feed's actors, by kind."""

from __future__ import annotations

from mbaas.ray_cluster import actor_names
from mbaas.tools.chaos.participants import participants


def cache_node_pids(feed: str) -> list[int]:
    return _pids(f"cache:{feed}:")


def relay_pids(feed: str) -> list[int]:
    return _pids(f"relay:{feed}:")


def prep_worker_pids(feed: str) -> list[int]:
    return _pids(f"prep:{feed}:")


def coordinator_pid(feed: str) -> int:
    return _pids(actor_names.actor_name(feed))[0]


def _pids(prefix: str) -> list[int]:
    return [each.pid for each in participants() if each.name.startswith(prefix)]
