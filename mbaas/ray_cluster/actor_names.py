"""The names under which a feed's actors are registered, their look-up, and the actor of this process."""

from __future__ import annotations

import contextlib
from typing import Any

import ray

NAMESPACE = "mbaas"
"""The Ray namespace of all feeds, so that every job of a cluster finds them."""

CHILDREN = ("prep", "cache", "relay")
"""The kinds of actors that belong to a feed."""


def actor_name(feed: str) -> str:
    """Return the name under which a feed's coordinator is registered."""
    return f"feed:{feed}"


def find_coordinator(feed: str) -> Any | None:
    """Return a feed's coordinator, or None."""
    try:
        return ray.get_actor(actor_name(feed), namespace=NAMESPACE)
    except ValueError:
        return None


def child_options(feed: str, kind: str, name: str) -> dict[str, Any]:
    """Return the options of an actor that belongs to a feed and survives coordinator restarts; see `end_with`."""
    return {
        "name": f"{kind}:{feed}:{name}",
        "namespace": NAMESPACE,
        "lifetime": "detached",  # otherwise it would die with its owner, the coordinator, and lose its cache
        "enable_task_events": False,
    }


def family(kind: str) -> dict[tuple[str, str], Any]:
    """Return all feeds' actors of a kind: (feed, name) -> handle."""
    found = {}
    for name in _names(f"{kind}:"):
        feed, _, own = name.rpartition(":")  # a feed's name may contain colons, an actor's own name does not
        with contextlib.suppress(ValueError):  # it may have ended since it was listed
            found[feed, own] = ray.get_actor(f"{kind}:{name}", namespace=NAMESPACE)
    return found


def children(feed: str, kind: str) -> dict[str, Any]:
    """Return a feed's actors of a kind: name -> handle."""
    return {name: actor for (owner, name), actor in family(kind).items() if owner == feed}


def id_of(actor: Any) -> str:
    """Return the id of an actor in hex digits, from its handle. Ray has no public API for this."""
    return actor._actor_id.hex()


def pid_of(actor: Any) -> int | None:
    """Return the process id of an actor that has its resources, even if it does not answer yet, or None.

    Ray has no public API for this, and a slowly starting actor cannot be called.
    """
    return ray._private.state.actors(id_of(actor)).get("Pid") or None


def this_actor() -> Any | None:
    """Return the object of the actor that runs in this process, even while it is constructed, or None."""
    worker: Any = ray._private.worker.global_worker
    return worker.actors.get(worker.actor_id) if ray.is_initialized() else None


def was_restarted() -> bool:
    """Return whether Ray has restarted the actor that runs in this process."""
    # `RuntimeContext.was_current_actor_reconstructed` uses a deprecated property of its own, and users see the warning.
    own = ray.get_runtime_context().get_actor_id()
    return bool(ray._private.state.actors(own).get("NumRestarts"))


def live_actors() -> list[dict[str, Any]]:
    """Return Ray's descriptions of all actors of the cluster that are alive: Name, Pid, Address and others."""
    # Private: Ray's state API needs the dashboard, and an embedded Ray has none. Ray also remembers dead actors, up to
    # 100,000, so it must select.
    return [*ray._private.state.actors(actor_state_name="ALIVE").values()]


def feed_names() -> list[str]:
    """Return the names of the feeds that run on this cluster, sorted."""
    return sorted(_names("feed:"))


def _names(prefix: str) -> list[str]:
    # not `ray.util.state.list_actors`, which needs the dashboard, and an embedded Ray has none
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
