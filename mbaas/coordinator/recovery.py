"""What a coordinator leaves to its successor in the cluster's key-value store: the feed's layout and its dataset, and
the epoch with which it would begin anew.

All the rest is told by those who live on: consumers know their cursors, cache nodes their samples. The dataset, a
table of where its samples lie, is there so that a feed goes on although all of its actors died together.
"""

from __future__ import annotations

import json
import pickle
import zlib

from ray import cloudpickle
from ray.experimental import internal_kv

from mbaas.core.layout import Layout
from mbaas.dataset import Dataset

MAX_DATASET_BYTES = 256 << 20
"""Size of the largest table that is kept: the store lives in the memory of the cluster's head. Larger ones survive in
the cache nodes only.
"""

CHUNK_BYTES = 4 << 20
"""A table is kept in pieces, so that no single call holds the store up for long."""


def remember(feed: str, layout: Layout, dataset: Dataset) -> None:
    """Keep what is known of a feed as long as the cluster lives, or until `forget`."""
    content = cloudpickle.dumps(dataset, protocol=5)  # the dataset's class may be one that only the user's program has
    pieces = 0
    if len(content) <= MAX_DATASET_BYTES:
        packed = zlib.compress(content, level=1)  # level 1: a table of URIs shrinks to a tenth, at 100 MB/s
        for start in range(0, len(packed), CHUNK_BYTES):
            _put(_key(feed, f"dataset-{pieces}"), packed[start : start + CHUNK_BYTES])
            pieces += 1
    # Last, with the number of pieces: whoever finds a layout finds all of the dataset that belongs to it.
    _put(_key(feed, "layout"), pickle.dumps((layout, pieces)))


def recall(feed: str) -> tuple[Layout | None, Dataset | None]:
    """Return the layout of a feed and its dataset; None for each that is not there."""
    found = internal_kv._internal_kv_get(_key(feed, "layout"))
    if not found:
        return None, None
    layout, pieces = pickle.loads(found)
    packed = [internal_kv._internal_kv_get(_key(feed, f"dataset-{number}")) for number in range(pieces)]
    if not packed or not all(packed):
        return layout, None
    return layout, pickle.loads(zlib.decompress(b"".join(packed)))


def keep_epoch(feed: str, fingerprint: str, epoch: int) -> None:
    """Keep the epoch with which a successor begins: also for a feed of that name that another program serves."""
    _put(_key(feed, "epoch"), json.dumps({"fingerprint": fingerprint, "epoch": epoch}).encode())


def recall_epoch(feed: str, fingerprint: str) -> int:
    """Return the epoch with which a feed begins: what was kept for one of its name and fingerprint, else 0."""
    found = internal_kv._internal_kv_get(_key(feed, "epoch"))
    kept = json.loads(found) if found else {}
    return int(kept["epoch"]) if kept.get("fingerprint") == fingerprint else 0


def is_kept(feed: str) -> bool:
    """Return whether anything is kept of a feed: it was served on this cluster, and nobody has stopped it."""
    return bool(internal_kv._internal_kv_get(_key(feed, "layout")))


def forget(feed: str) -> None:
    """Delete what was kept of a feed."""
    internal_kv._internal_kv_del(_key(feed, "epoch"))
    found = internal_kv._internal_kv_get(_key(feed, "layout"))
    pieces = pickle.loads(found)[1] if found else 0
    for number in range(pieces):
        internal_kv._internal_kv_del(_key(feed, f"dataset-{number}"))
    internal_kv._internal_kv_del(_key(feed, "layout"))


def _put(key: bytes, value: bytes) -> None:
    internal_kv._internal_kv_put(key, value, overwrite=True)


def _key(feed: str, what: str) -> bytes:
    return f"mbaas:feed:{feed}:{what}".encode()
