"""What a coordinator leaves to its successor in the cluster's key-value store: the feed's layout and its dataset, the
ledgers of its consumers, and the epoch with which it would begin anew.

All the rest is told by those who live on: consumers know their cursors, cache nodes their samples. The dataset, a
table of where its samples lie, is there so that a feed goes on although all of its actors died together.
"""

from __future__ import annotations

import asyncio
import io
import json
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from ray import cloudpickle
from ray.experimental import internal_kv

from mbaas.coordinator import kept_claims
from mbaas.coordinator.served_by import forget_server
from mbaas.core.layout import Layout
from mbaas.dataset import Dataset

MAX_PACKED_BYTES = 256 << 20
"""Datasets that are larger when packed are not kept: the store lives in the memory of the cluster's head. They survive
in the cache nodes. A table of 2 million files takes 18 to 30 MB, so this is enough for about 20 million.
"""

PIECE_BYTES = 4 << 20
"""A dataset is kept in pieces, so that no single call holds the store up for long."""

STEP_BYTES = 1 << 20
"""How much is packed at a time: a column of a large table has hundreds of megabytes."""

# Both measured with tables of 2 million names, ImageNet's and random ones, 2 cores of an AMD EPYC, 22 November 2026:
# zstd 0.32 and 0.46 s of CPU for 17.7 and 30.2 MB; zlib at level 1 0.70 and 1.42 s for 18.9 and 35.3 MB.
CODEC = "zstd"


def remember(feed: str, layout: Layout, dataset: Dataset) -> None:
    """Keep what is known of a feed as long as the cluster lives, or until `forget`.

    It takes a quarter of a second for each million files, so not to be called on an event loop.
    """
    pieces = _keep(feed, dataset)
    before = _pieces(feed)
    _put(_key(feed, "layout"), pickle.dumps((layout, pieces)))
    _forget_pieces(feed, pieces, before)


def recall(feed: str) -> tuple[Layout | None, Dataset | None]:
    """Return the layout of a feed and its dataset; None for each that is not there."""
    layout, pieces = _recalled(feed)
    packed = [internal_kv._internal_kv_get(_key(feed, f"dataset-{number}")) for number in range(pieces)]
    if not packed or not all(packed):
        return layout, None
    with pa.CompressedInputStream(pa.PythonFile(_Source(packed), "r"), CODEC) as content:
        return layout, pickle.load(io.BufferedReader(content))


def recall_layout(feed: str) -> Layout | None:
    """Return the layout of a feed; None if none is kept."""
    return _recalled(feed)[0]


def keep_epoch(feed: str, fingerprint: str, epoch: int) -> None:
    """Keep the epoch with which a successor begins: also for a feed of that name that another program serves."""
    _put(_key(feed, "epoch"), json.dumps({"fingerprint": fingerprint, "epoch": epoch}).encode())


class KeptEpoch:
    """The epoch with which a successor begins, as it is kept.

    Args:
        feed, fingerprint: as for `keep_epoch`.
        epoch: the one that need not be kept, nor any before it.
    """

    def __init__(self, feed: str, fingerprint: str, epoch: int) -> None:
        self._feed, self._fingerprint, self._epoch = feed, fingerprint, epoch
        self._keeping = asyncio.Lock()

    def is_due(self, epoch: int) -> bool:
        """Return whether a later epoch is to be kept than is; not while one is being kept."""
        return epoch > self._epoch and not self._keeping.locked()

    async def keep(self, epoch: int) -> None:
        """Keep an epoch, if it is later than the one that is kept. One whose writing fails is not kept."""
        async with self._keeping:  # one that is written late must not replace a later one
            if epoch > self._epoch:
                # In a thread: the call to the cluster's head blocks, and would hold up every consumer.
                await asyncio.to_thread(keep_epoch, self._feed, self._fingerprint, epoch)
                self._epoch = epoch


def recall_epoch(feed: str, fingerprint: str) -> int:
    """Return the epoch with which a feed begins: what was kept for one of its name and fingerprint, else 0."""
    found = internal_kv._internal_kv_get(_key(feed, "epoch"))
    kept = json.loads(found) if found else {}
    return int(kept["epoch"]) if kept.get("fingerprint") == fingerprint else 0


def keep_ledgers(feed: str, pages: Mapping[int, bytes | None]) -> None:
    """Keep pages of a feed's ledgers, by number; None deletes one."""
    for number, page in pages.items():
        key = _key(feed, f"ledgers-{number}")
        if page is None:
            internal_kv._internal_kv_del(key)
        else:
            _put(key, page)


def recall_ledgers(feed: str) -> dict[int, bytes]:
    """Return the pages of a feed's ledgers that were kept, by number."""
    found = {int(key.rsplit(b"-", 1)[1]): internal_kv._internal_kv_get(key) for key in _ledger_keys(feed)}
    return {number: page for number, page in found.items() if page}


def forget_ledgers(feed: str) -> None:
    """Delete the ledgers that were kept of a feed."""
    for key in _ledger_keys(feed):
        internal_kv._internal_kv_del(key)


def _ledger_keys(feed: str) -> list[bytes]:
    found: list[bytes] = internal_kv._internal_kv_list(_key(feed, "ledgers-"))
    return found


def is_kept(feed: str) -> bool:
    """Return whether anything is kept of a feed: it was served on this cluster, and nobody has stopped it."""
    return bool(internal_kv._internal_kv_get(_key(feed, "layout")))


def forget(feed: str) -> None:
    """Delete what was kept of a feed."""
    internal_kv._internal_kv_del(_key(feed, "epoch"))
    forget_ledgers(feed)
    kept_claims.forget(feed)
    forget_server(feed)
    _forget_pieces(feed, 0, _pieces(feed))
    internal_kv._internal_kv_del(_key(feed, "layout"))


class _TooLargeError(Exception):
    """A packed dataset passes `MAX_PACKED_BYTES`."""


class _Pieces(io.RawIOBase):
    """Keeps what is written to it, as pieces of a feed's dataset.

    Attributes:
        count: pieces that were kept.
    """

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
        """Raise `_TooLargeError` if there is too much by now."""
        if self._nbytes > MAX_PACKED_BYTES:
            raise _TooLargeError

    def finish(self) -> None:
        """Keep the rest, which may be less than a piece."""
        if self._rest:
            self._keep(len(self._rest))

    def _keep(self, nbytes: int) -> None:
        _put(_key(self._feed, f"dataset-{self.count}"), bytes(self._rest[:nbytes]))
        del self._rest[:nbytes]
        self.count += 1


class _Packer:
    """What a pickle is written to: it is packed step by step, and never there as a whole."""

    def __init__(self, packed: Any, pieces: _Pieces) -> None:
        self._packed, self._pieces = packed, pieces

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        for start in range(0, len(content), STEP_BYTES):
            self._packed.write(content[start : start + STEP_BYTES])
            self._pieces.check()
        return len(content)


class _Source(io.RawIOBase):
    """A file for reading that consists of pieces, one after the other."""

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
    """Keep a dataset, and return in how many pieces: 0 if it is too large."""
    pieces = _Pieces(feed)
    try:
        with pa.CompressedOutputStream(pa.PythonFile(pieces, "w"), CODEC) as packed:
            # The dataset's class may be one that only the user's program has.
            cloudpickle.dump(dataset, _Packer(packed, pieces), protocol=5)
            packed.flush()
        pieces.check()
    except _TooLargeError:
        _forget_pieces(feed, 0, pieces.count)
        return 0
    pieces.finish()
    return pieces.count


def _pieces(feed: str) -> int:
    """Return in how many pieces the feed's dataset is kept."""
    return _recalled(feed)[1]


def _recalled(feed: str) -> tuple[Layout | None, int]:
    """Return the layout of a feed, and in how many pieces its dataset is kept."""
    found = internal_kv._internal_kv_get(_key(feed, "layout"))
    return pickle.loads(found) if found else (None, 0)


def _forget_pieces(feed: str, first: int, end: int) -> None:
    for number in range(first, end):
        internal_kv._internal_kv_del(_key(feed, f"dataset-{number}"))


def _put(key: bytes, value: bytes) -> None:
    internal_kv._internal_kv_put(key, value, overwrite=True)


def _key(feed: str, what: str) -> bytes:
    return f"mbaas:feed:{feed}:{what}".encode()
