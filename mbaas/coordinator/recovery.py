"""State that a coordinator leaves to its successor in the cluster's key-value store.

It consists of the feed's layout, its dataset, its engine, the consumers' ledgers, the shuffle of each epoch and its
division among ranks. Surviving actors supply the rest: consumers have their cursors, cache nodes their samples. The
dataset, a table of sample locations, is stored so that a feed survives the loss of all its actors. Shuffles and
divisions are stored before any consumer gets a block: a rank that returns must get the same samples of an epoch as
without the interruption, even if the other ranks are far ahead.
"""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import msgspec
import pyarrow as pa
from msgspec import Struct
from ray import cloudpickle

from mbaas.calls.server import Spawn
from mbaas.coordinator import registry
from mbaas.coordinator.background import InternalErrors
from mbaas.core.layout import Layout
from mbaas.core.ranks import KeptTrial
from mbaas.core.staging import events as ev
from mbaas.dataset import Dataset
from mbaas.model.engine_choice import EngineChoice
from mbaas.ray_cluster import store
from mbaas.samples.order import Shuffle
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

RETRY_S = 1.0
"""Pause before a failed write of shuffles is retried, in seconds."""


def remember(feed: str, layout: Layout, dataset: Dataset) -> None:
    """Store the layout and dataset of a feed for the cluster's lifetime, or until `forget`.

    Takes 0.25 s per million files; do not call on an event loop.
    """
    pieces, before = _keep(feed, dataset), _recalled(feed)[1]
    store.put(feed, "layout", pickle.dumps((layout, pieces)))
    for number in range(pieces, before):
        store.delete(feed, f"dataset-{number}")


def recall(feed: str) -> tuple[Layout | None, Dataset | None]:
    """Return the layout and the dataset of a feed; None for each that is not stored."""
    layout, pieces = _recalled(feed)
    packed = [store.get(feed, f"dataset-{number}") for number in range(pieces)]
    there = [piece for piece in packed if piece]
    if not there or len(there) < pieces:
        return layout, None
    with pa.CompressedInputStream(pa.BufferReader(b"".join(there)), CODEC) as content:
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


def keep_page(feed: str, fingerprint: str, page: int, shuffles: Mapping[int, Shuffle]) -> None:
    """Store the shuffles of a page's epochs; delete a page without any."""
    if shuffles:
        store.put(feed, f"epochs-{page}", msgspec.msgpack.encode(_Page(fingerprint, shuffles)))
    else:
        store.delete(feed, f"epochs-{page}")


def recall_epochs(feed: str, fingerprint: str) -> dict[int, Shuffle]:
    """Return the stored shuffles by epoch. Delete pages of a feed with another fingerprint."""
    shuffles: dict[int, Shuffle] = {}
    for name, found in store.items(feed, "epochs-"):
        page = msgspec.msgpack.decode(found, type=_Page)
        if page.fingerprint == fingerprint:
            shuffles.update(page.shuffles)
        else:
            store.delete(feed, name)
    return shuffles


def keep_trial(feed: str, fingerprint: str, trial: KeptTrial) -> None:
    """Store the plans that divide epochs among a trial's ranks; delete the entry of a trial without plans."""
    name = f"ranks-{crc32(repr(trial.group).encode()):08x}"
    if trial.plans:
        store.put(feed, name, msgspec.msgpack.encode((fingerprint, trial)))
    else:
        store.delete(feed, name)


def recall_trials(feed: str, fingerprint: str) -> list[KeptTrial]:
    """Return the trials with stored plans. Delete trials of a feed with another fingerprint."""
    trials: list[KeptTrial] = []
    for name, found in store.items(feed, "ranks-"):
        written_for, trial = msgspec.msgpack.decode(found, type=tuple[str, KeptTrial])
        if written_for == fingerprint:
            trials.append(trial)
        else:
            store.delete(feed, name)
    return trials


def is_kept(feed: str) -> bool:
    """Return whether anything is stored for a feed: it was served on this cluster and not stopped."""
    return bool(store.get(feed, "layout"))


def forget(feed: str) -> None:
    """Delete everything stored for a feed."""
    registry.forget(feed)
    for prefix in ("epochs-", "ranks-", "ledgers-", "dataset-", own_pipeline_key("")):
        store.delete_all(feed, prefix)
    store.delete(feed, "engine")
    store.delete(feed, "layout")


class EpochWriter:
    """Writes the shuffles of epochs page by page, and passes an `EpochsWritten` for each page to ``tell``."""

    def __init__(
        self, feed: str, fingerprint: str, *, tell: Callable[[ev.Event], object], errors: InternalErrors, spawn: Spawn
    ) -> None:
        self._feed, self._fingerprint = feed, fingerprint
        self._tell, self._errors, self._spawn = tell, errors, spawn
        self._waiting: dict[int, Mapping[int, Shuffle]] = {}
        self._has_ended = False
        self._rests = asyncio.Event()  # set while no write is in progress
        self._rests.set()

    def write(self, order: ev.WriteEpochs) -> None:
        """Write a page in the background."""
        self._waiting[order.page] = order.shuffles
        if self._rests.is_set() and not self._has_ended:
            self._rests.clear()
            self._spawn(self._write_all())

    async def end(self) -> None:
        """Stop writing. When this returns, no write is in progress, and stored pages can be deleted."""
        self._has_ended = True
        await self._rests.wait()

    async def _write_all(self) -> None:
        # One at a time: a page that is written late must not replace a newer one.
        while self._waiting and not self._has_ended:
            page = next(iter(self._waiting))
            shuffles = self._waiting.pop(page)
            try:
                # In a thread: the call to the cluster's head blocks, and would delay every consumer.
                await asyncio.to_thread(keep_page, self._feed, self._fingerprint, page, shuffles)
            except Exception as error:  # the store has no exception type of its own
                self._errors.report(error)
                self._waiting.setdefault(page, shuffles)
                await asyncio.sleep(RETRY_S)
            else:
                self._tell(ev.EpochsWritten(tuple(shuffles)))
        self._rests.set()


class _Page(Struct):
    fingerprint: str
    shuffles: Mapping[int, Shuffle]


class _KeptEngine(Struct, frozen=True):
    identity: str
    choice: EngineChoice


class _TooLargeError(Exception):
    """A packed dataset passes `MAX_PACKED_BYTES`."""


class _Packer:
    """File that a pickle is written to. It compresses step by step, so that the whole pickle is never in memory."""

    def __init__(self, stream: Any, packed: Any) -> None:
        self._stream, self._packed = stream, packed

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        for start in range(0, len(content), STEP_BYTES):
            self._stream.write(content[start : start + STEP_BYTES])
            if self._packed.tell() > MAX_PACKED_BYTES:
                raise _TooLargeError
        return len(content)


def _keep(feed: str, dataset: Dataset) -> int:
    """Store the pieces of a dataset; return their number, 0 if it is too large."""
    packed = pa.BufferOutputStream()
    try:
        with pa.CompressedOutputStream(packed, CODEC) as stream:
            # The dataset's class may exist only in the user's program.
            cloudpickle.dump(dataset, _Packer(stream, packed), protocol=5)
    except _TooLargeError:
        return 0
    content = packed.getvalue()
    if content.size > MAX_PACKED_BYTES:
        return 0
    starts = range(0, content.size, PIECE_BYTES)
    for number, start in enumerate(starts):
        store.put(feed, f"dataset-{number}", content[start : start + PIECE_BYTES].to_pybytes())
    return len(starts)


def _recalled(feed: str) -> tuple[Layout | None, int]:
    found = store.get(feed, "layout")
    return pickle.loads(found) if found else (None, 0)
