"""How each epoch is shuffled, and shared out between ranks, as it is written down in the cluster's key-value store.

It outlives the coordinator, and the program that served the feed: a rank that comes back must have the same samples of
an epoch as if it had never been away, although its sisters are far ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from zlib import crc32

import msgspec
from msgspec import Struct

from mbaas.coordinator import store
from mbaas.coordinator.background import InternalErrors
from mbaas.coordinator.local_calls import Spawn
from mbaas.core import events as ev
from mbaas.core.ranks import KeptTrial
from mbaas.order import Shuffle

RETRY_S = 1.0
"""Pause after which that is written again which could not be."""


class _Page(Struct):
    fingerprint: str
    shuffles: Mapping[int, Shuffle]


class EpochWriter:
    """Writes down how epochs are shuffled, one page after the other.

    Args:
        feed, fingerprint: whose epochs they are. A feed of the same name and another fingerprint has other epochs.
        tell: is given an `EpochsWritten` for each page that is written.
        errors: where it is reported that the store does not answer.
        spawn: runs a coroutine in the background.
    """

    def __init__(
        self, feed: str, fingerprint: str, *, tell: Callable[[ev.Event], object], errors: InternalErrors, spawn: Spawn
    ) -> None:
        self._feed, self._fingerprint = feed, fingerprint
        self._tell, self._errors, self._spawn = tell, errors, spawn
        self._waiting: dict[int, Mapping[int, Shuffle]] = {}
        self._has_ended = False
        self._rests = asyncio.Event()  # nothing is being written
        self._rests.set()

    def write(self, order: ev.WriteEpochs) -> None:
        """Write a page; in the background."""
        self._waiting[order.page] = order.shuffles
        if self._rests.is_set() and not self._has_ended:
            self._rests.clear()
            self._spawn(self._write_all())

    async def end(self) -> None:
        """Write nothing any more: what is written when this returns can be deleted."""
        self._has_ended = True
        await self._rests.wait()

    async def _write_all(self) -> None:
        # One at a time: a page that is written late must not replace a newer one.
        while self._waiting and not self._has_ended:
            page = next(iter(self._waiting))
            shuffles = self._waiting.pop(page)
            try:
                # In a thread: the call to the cluster's head blocks, and would hold up every consumer.
                await asyncio.to_thread(keep_page, self._feed, self._fingerprint, page, shuffles)
            except Exception as error:  # the store has no error of its own
                self._errors.report(error)
                self._waiting.setdefault(page, shuffles)
                await asyncio.sleep(RETRY_S)
            else:
                self._tell(ev.EpochsWritten(tuple(shuffles)))
        self._rests.set()


def keep_page(feed: str, fingerprint: str, page: int, shuffles: Mapping[int, Shuffle]) -> None:
    """Keep how the epochs of a page are shuffled; delete a page without any."""
    if shuffles:
        store.put(feed, f"epochs-{page}", msgspec.msgpack.encode(_Page(fingerprint, shuffles)))
    else:
        store.delete(feed, f"epochs-{page}")


def recall_epochs(feed: str, fingerprint: str) -> dict[int, Shuffle]:
    """Return epoch -> how it is shuffled, as it was kept; delete what was kept of a feed of another fingerprint."""
    shuffles: dict[int, Shuffle] = {}
    for name in store.names(feed, "epochs-"):
        found = store.get(feed, name)
        page = msgspec.msgpack.decode(found, type=_Page) if found else None
        if page is not None and page.fingerprint == fingerprint:
            shuffles.update(page.shuffles)
        else:
            store.delete(feed, name)
    return shuffles


def keep_trial(feed: str, fingerprint: str, trial: KeptTrial) -> None:
    """Keep by which plans the ranks of a trial share out epochs; delete that of a trial without any."""
    name = f"ranks-{crc32(repr(trial.group).encode()):08x}"
    if trial.plans:
        store.put(feed, name, msgspec.msgpack.encode((fingerprint, trial)))
    else:
        store.delete(feed, name)


def recall_trials(feed: str, fingerprint: str) -> list[KeptTrial]:
    """Return the trials whose plans were kept; delete those of a feed of another fingerprint."""
    trials: list[KeptTrial] = []
    for name in store.names(feed, "ranks-"):
        found = store.get(feed, name)
        kept = msgspec.msgpack.decode(found, type=tuple[str, KeptTrial]) if found else None
        if kept is not None and kept[0] == fingerprint:
            trials.append(kept[1])
        else:
            store.delete(feed, name)
    return trials


def forget(feed: str) -> None:
    """Delete all that was kept of a feed's epochs."""
    for name in [*store.names(feed, "epochs-"), *store.names(feed, "ranks-")]:
        store.delete(feed, name)
