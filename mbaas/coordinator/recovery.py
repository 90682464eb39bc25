"""What a coordinator leaves to its successor: a few hundred bytes in the cluster's key-value store.

All the rest is told by those who live on: consumers know their cursors, cache nodes their samples and the dataset.
"""

from __future__ import annotations

import pickle

from ray.experimental import internal_kv

from mbaas.core.layout import Layout


def remember(feed: str, layout: Layout) -> None:
    """Keep the layout of a feed as long as the cluster lives, or until `forget`."""
    internal_kv._internal_kv_put(_key(feed), pickle.dumps(layout), overwrite=True)


def recall(feed: str) -> Layout | None:
    """The layout of a feed, or None if there is none."""
    found = internal_kv._internal_kv_get(_key(feed))
    return pickle.loads(found) if found else None


def forget(feed: str) -> None:
    internal_kv._internal_kv_del(_key(feed))


def _key(feed: str) -> bytes:
    return f"mbaas:feed:{feed}:layout".encode()
