"""Values that feeds keep in the cluster's key-value store, which outlives their actors; by feed and name.

Values that concern all feeds have None in the place of a feed. Calls block on the cluster's head, so a coordinator that
serves consumers makes them in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from ray.experimental import internal_kv


def put(feed: str | None, name: str, value: bytes) -> None:
    """Store a value, replacing an earlier one."""
    internal_kv._internal_kv_put(_key(feed, name), value, overwrite=True)


def put_new(feed: str | None, name: str, value: bytes) -> None:
    """Store a value unless the name has one; atomic, so of several callers the value of one is stored."""
    internal_kv._internal_kv_put(_key(feed, name), value, overwrite=False)


def get(feed: str | None, name: str) -> bytes | None:
    """Return the value of a name, or None."""
    return internal_kv._internal_kv_get(_key(feed, name))


def delete(feed: str | None, name: str) -> None:
    """Delete the value of a name, if any."""
    internal_kv._internal_kv_del(_key(feed, name))


def names(feed: str | None, prefix: str) -> list[str]:
    """Return the stored names that begin with ``prefix``."""
    keys: list[bytes] = internal_kv._internal_kv_list(_key(feed, prefix))
    return [key.removeprefix(_key(feed, "")).decode() for key in keys]


def items(feed: str | None, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Yield the stored names that begin with ``prefix``, and their values."""
    for name in names(feed, prefix):
        if found := get(feed, name):
            yield name, found


def delete_all(feed: str | None, prefix: str) -> None:
    """Delete the values of all names that begin with ``prefix``."""
    internal_kv._internal_kv_del(_key(feed, prefix), del_by_prefix=True)


def _key(feed: str | None, name: str) -> bytes:
    return (f"mbaas:{name}" if feed is None else f"mbaas:feed:{feed}:{name}").encode()
