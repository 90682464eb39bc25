"""The shuffle of each epoch and its division among ranks, stored in the cluster's key-value store.

They outlive the coordinator and the program that served the feed. A rank that returns must get the same samples of an
epoch as without the interruption, even if the other ranks are far ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from zlib import crc32

import msgspec
from msgspec import Struct

from mbaas.calls.server import Spawn
from mbaas.coordinator.background import InternalErrors
from mbaas.core.ranks import KeptTrial
from mbaas.core.staging import events as ev
from mbaas.ray_cluster import store
from mbaas.samples.order import Shuffle

RETRY_S = 1.0
"""Pause before a failed write is retried, in seconds."""


class _Page(Struct):
    fingerprint: str
    shuffles: Mapping[int, Shuffle]


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


def forget(feed: str) -> None:
    """Delete everything stored about a feed's epochs."""
    store.delete_all(feed, "epochs-")
    store.delete_all(feed, "ranks-")
