"""State that a coordinator leaves to its successor in the cluster's key-value store.

It consists of the feed's layout, its dataset, its engine, the consumers' ledgers and the shuffles of its epochs
(`mbaas.coordinator.written_epochs`). Surviving actors supply the rest: consumers have their cursors, cache nodes their
samples. The dataset, a table of sample locations, is stored so that a feed survives the loss of all its actors.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import Struct
from ray import cloudpickle

from mbaas.coordinator import registry, written_epochs
from mbaas.core.layout import Layout
from mbaas.dataset import Dataset
from mbaas.model.engine_choice import EngineChoice
from mbaas.ray_cluster import store
from mbaas.wire.blocks import own_pipeline_key

MAX_PACKED_BYTES = 256 << 20
"""Largest packed size of a stored dataset. The store is in the memory of the cluster's head.

Larger datasets survive in the cache nodes only. A table of 2 million files takes 18 to 30 MB, so this is enough for
about 20 million.
"""

PIECE_BYTES = 4 << 20
"""A dataset is stored in pieces, so that no single call blocks the store for long."""

STEP_BYTES = 1 << 20
"""Bytes compressed per step: one column of a large table can have hundreds of megabytes."""

# Measured 2026-11-22 on 2 cores of an AMD EPYC, with 2 million ImageNet names and 2 million random names: zstd takes
# 0.32 and 0.46 s of CPU for 17.7 and 30.2 MB; zlib at level 1 takes 0.70 and 1.42 s for 18.9 and 35.3 MB.
CODEC = "zstd"


def remember(feed: str, layout: Layout, dataset: Dataset) -> None:
    """Store the layout and dataset of a feed for the cluster's lifetime, or until `forget`.

    Takes 0.25 s per million files; do not call on an event loop.
    """
    pieces, before = _keep(feed, dataset), _recalled(feed)[1]
    store.put(feed, "layout", pickle.dumps((layout, pieces)))
    _forget_pieces(feed, pieces, before)


def recall(feed: str) -> tuple[Layout | None, Dataset | None]:
    """Return the layout and the dataset of a feed; None for each that is not stored."""
    layout, pieces = _recalled(feed)
    packed = [store.get(feed, f"dataset-{number}") for number in range(pieces)]
    there = [piece for piece in packed if piece]
    if not there or len(there) < pieces:
        return layout, None
    with pa.CompressedInputStream(pa.PythonFile(_Source(there), "r"), CODEC) as content:
        return layout, pickle.load(io.BufferedReader(content))


def recall_layout(feed: str) -> Layout | None:
    """Return the layout of a feed; None if none is stored."""
    return _recalled(feed)[0]


def keep_ledgers(feed: str, pages: Mapping[int, bytes | None]) -> None:
    """Store pages of a feed's ledgers by number; None deletes a page."""
    for number, page in pages.items():
        if page is None:
            store.delete(feed, f"ledgers-{number}")
        else:
            store.put(feed, f"ledgers-{number}", page)


def recall_ledgers(feed: str) -> dict[int, bytes]:
    """Return the stored pages of a feed's ledgers by number."""
    return {int(name.removeprefix("ledgers-")): page for name, page in store.items(feed, "ledgers-")}


def forget_ledgers(feed: str) -> None:
    """Delete the stored ledgers of a feed."""
    store.delete_all(feed, "ledgers-")


def keep_engine(feed: str, identity: str, choice: EngineChoice) -> None:
    """Store the engine of a feed; ``identity`` is its `FeedInfo.fingerprint`."""
    store.put(feed, "engine", msgspec.json.encode(_KeptEngine(identity, choice)))


def recall_engine(feed: str, identity: Callable[[], str]) -> EngineChoice | None:
    """Return the engine of an earlier feed with the same name and ``identity`` that was not stopped, or None."""
    found = store.get(feed, "engine")
    kept = msgspec.json.decode(found, type=_KeptEngine) if found else None
    return kept.choice if kept is not None and kept.identity == identity() else None


def is_kept(feed: str) -> bool:
    """Return whether anything is stored for a feed: it was served on this cluster and not stopped."""
    return bool(store.get(feed, "layout"))


def forget(feed: str) -> None:
    """Delete everything stored for a feed."""
    written_epochs.forget(feed)
    forget_ledgers(feed)
    store.delete_all(feed, own_pipeline_key(""))
    registry.forget(feed)
    store.delete(feed, "engine")
    store.delete_all(feed, "dataset-")
    store.delete(feed, "layout")


class _KeptEngine(Struct, frozen=True):
    identity: str
    choice: EngineChoice


class _TooLargeError(Exception):
    """A packed dataset passes `MAX_PACKED_BYTES`."""


class _Pieces(io.RawIOBase):
    def __init__(self, feed: str) -> None:
        self._feed, self._rest, self._nbytes = feed, bytearray(), 0
        self.count = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = memoryview(data).nbytes
        self._rest += data
        self._nbytes += written
        while len(self._rest) >= PIECE_BYTES:
            self._keep(PIECE_BYTES)
        return written

    def check(self) -> None:
        if self._nbytes > MAX_PACKED_BYTES:
            raise _TooLargeError

    def finish(self) -> None:
        if self._rest:
            self._keep(len(self._rest))

    def _keep(self, nbytes: int) -> None:
        store.put(self._feed, f"dataset-{self.count}", bytes(self._rest[:nbytes]))
        del self._rest[:nbytes]
        self.count += 1


class _Packer:
    """File that a pickle is written to. It compresses step by step, so that the whole pickle is never in memory."""

    def __init__(self, packed: Any, pieces: _Pieces) -> None:
        self._packed, self._pieces = packed, pieces

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        for start in range(0, len(content), STEP_BYTES):
            self._packed.write(content[start : start + STEP_BYTES])
            self._pieces.check()
        return len(content)


class _Source(io.RawIOBase):
    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._rest = iter(pieces), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        given = min(len(self._rest), len(buffer))
        buffer[:given], self._rest = self._rest[:given], self._rest[given:]
        return given


def _keep(feed: str, dataset: Dataset) -> int:
    pieces = _Pieces(feed)
    try:
        with pa.CompressedOutputStream(pa.PythonFile(pieces, "w"), CODEC) as packed:
            # The dataset's class may exist only in the user's program.
            cloudpickle.dump(dataset, _Packer(packed, pieces), protocol=5)
            packed.flush()
        pieces.check()
    except _TooLargeError:
        _forget_pieces(feed, 0, pieces.count)
        return 0
    pieces.finish()
    return pieces.count


def _recalled(feed: str) -> tuple[Layout | None, int]:
    found = store.get(feed, "layout")
    return pickle.loads(found) if found else (None, 0)


def _forget_pieces(feed: str, first: int, end: int) -> None:
    for number in range(first, end):
        store.delete(feed, f"dataset-{number}")
