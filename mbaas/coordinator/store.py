"""What feeds keep in the cluster's key-value store, which outlives all of their actors; by feed and by name.

The calls go to the cluster's head and block: a coordinator that serves consumers makes them in a thread.
"""

from __future__ import annotations

from ray.experimental import internal_kv


def put(feed: str, name: str, value: bytes) -> None:
    """Keep a value, in the place of one that was kept under that name."""
    internal_kv._internal_kv_put(_key(feed, name), value, overwrite=True)


def get(feed: str, name: str) -> bytes | None:
    """Return what is kept under a name; None if nothing is."""
    found: bytes | None = internal_kv._internal_kv_get(_key(feed, name))
    return found


def delete(feed: str, name: str) -> None:
    """Delete what is kept under a name, if anything is."""
    internal_kv._internal_kv_del(_key(feed, name))


def names(feed: str, prefix: str) -> list[str]:
    """Return the names that begin with ``prefix`` under which anything is kept."""
    keys: list[bytes] = internal_kv._internal_kv_list(_key(feed, prefix))
    return [key.removeprefix(_key(feed, "")).decode() for key in keys]


def _key(feed: str, name: str) -> bytes:
    return f"mbaas:feed:{feed}:{name}".encode()
