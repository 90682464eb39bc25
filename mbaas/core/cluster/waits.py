"""Current waits of a feed for workers, cache nodes or placements: their duration, and when they are logged.

They are derived from the supervisor's tables alone. A wait lasts as long as its kind is present, even if the awaited
worker changes: a failed start and its retry are one wait for consumers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mbaas.base.units import counted, duration
from mbaas.core.cluster.homes import Homes
from mbaas.core.cluster.supervised import CachePhase, SupervisedCache, SupervisedWorker, WorkerPhase

FIRST_NOTE_S = 10.0
"""A wait is logged after this many seconds, and again each time its duration has doubled."""

SHOWN_NAMES = 3
"""Largest number of worker names in a sentence."""


@dataclass
class _Wait:
    what: str
    since: float
    note_after_s: float = FIRST_NOTE_S


class WaitTable:
    """Current waits of a feed, at most one of each kind."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}

    def look(self, awaited: Mapping[str, str], now: float) -> list[str]:
        """Update the current waits, by kind; return the sentences to log."""
        self._waits = {kind: self._waits.get(kind, _Wait(what, now)) for kind, what in awaited.items()}
        notes = []
        for kind, wait in self._waits.items():
            wait.what = awaited[kind]
            if now - wait.since >= wait.note_after_s:
                notes.append(_sentence(wait, now))
                wait.note_after_s = 2 * (now - wait.since)
        return notes

    def sentences(self, now: float) -> tuple[str, ...]:
        """Return a sentence for each wait, with its duration."""
        return tuple(_sentence(wait, now) for wait in self._waits.values())


def _sentence(wait: _Wait, now: float) -> str:
    return f"{wait.what} (for {duration(max(0.0, now - wait.since))} so far)"


def awaited(
    workers: Mapping[str, SupervisedWorker],
    caches: Mapping[str, SupervisedCache],
    homes: Homes,
    *,
    missing: int,
    needs: str,
    last_failure: str,
) -> dict[str, str]:
    """Return the current waits by kind, in order of importance: later ones depend on earlier ones.

    ``missing`` is the number of workers to start after a pause, ``needs`` the resources of a worker as text ("1 CPU"),
    and ``last_failure`` why the last start failed ("" after a success).
    """
    found: dict[str, str] = {}
    starting = [worker for worker in workers.values() if worker.phase is WorkerPhase.STARTING]
    asked_for = [worker.name for worker in starting if worker.key is None]
    coming = [worker.name for worker in starting if worker.key is not None]
    because = f", and the last one did not start: {last_failure}" if last_failure else ""
    if asked_for:
        each = "it" if len(asked_for) == 1 else "each"
        found["workers"] = f"{_are(asked_for)} being started, {each} needs {needs}{because}"
    elif missing > 0:
        found["workers"] = f"{counted(missing, 'prep worker')} to be started again after a pause{because}"
    if coming:
        found["coming"] = f"{_are(coming)} on the way from another feed"
    for node in sorted({worker.node for worker in workers.values() if worker.stays} | caches.keys()):
        if what := _about_cache(caches.get(node)):
            found[f"cache {node}"] = f"the cache of node {node[:8]} {what}"
    told = [worker.name for worker in workers.values() if worker.stays and worker.deadline is not None]
    if told:
        found["told"] = f"{_are(told)} being told which nodes cache and prepare which samples"
    if homes.lacks_homes():  # moves between nodes that all have homes delay no consumer
        how = "to be divided, after a pause," if homes.move is None else "being divided"
        found["homes"] = f"the samples are {how} among the nodes with workers"
    return found


def _about_cache(cache: SupervisedCache | None) -> str:
    if cache is None:
        return "is to be started again after a pause"
    if cache.phase is CachePhase.STARTING:
        return "is being started"
    if cache.phase is CachePhase.DOUBTED:
        return "is being probed, and has not answered yet"
    return ""


def _are(names: list[str]) -> str:
    # "prep-1 is", "prep-1, prep-2, prep-3 and 4 more are"
    more = len(names) - SHOWN_NAMES
    return (
        ", ".join(names[:SHOWN_NAMES])
        + (f" and {more} more" if more > 0 else "")
        + (" is" if len(names) == 1 else " are")
    )
