"""What a feed waits for: which worker, cache node, lane or placement, for how long so far, and when its log says so.

Told from the supervisor's tables alone. A wait goes on as long as its kind is there, even if another
worker is awaited by then: to those that wait, a start that failed and is tried again is no new wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mbaas.core.homes import Homes
from mbaas.core.supervised import (
    CachePhase,
    LanePhase,
    SupervisedCache,
    SupervisedLane,
    SupervisedWorker,
    WorkerPhase,
)
from mbaas.units import counted, duration

FIRST_NOTE_S = 10.0
"""A wait as long as this goes to the feed's log, and again whenever it has become twice as long."""

SHOWN_NAMES = 3
"""Names of workers that a sentence lists."""


@dataclass
class _Wait:
    """A wait that goes on.

    Attributes:
        what: who or what is awaited now; changes without ending the wait.
        since: when it began.
        note_after_s: it goes to the log when it has lasted this long.
    """

    what: str
    since: float
    note_after_s: float = FIRST_NOTE_S


class WaitTable:
    """The waits of a feed that go on; between two looks each kind is there at most once."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}

    def look(self, awaited: Mapping[str, str], now: float) -> list[str]:
        """Take in what is awaited now, by kind; the sentences that the log should get."""
        self._waits = {kind: self._waits.get(kind, _Wait(what, now)) for kind, what in awaited.items()}
        notes = []
        for kind, wait in self._waits.items():
            wait.what = awaited[kind]
            if now - wait.since >= wait.note_after_s:
                notes.append(_sentence(wait, now))
                wait.note_after_s = 2 * (now - wait.since)
        return notes

    @property
    def awaited(self) -> tuple[str, ...]:
        """What is awaited, without for how long: it changes only when the waits do."""
        return tuple(wait.what for wait in self._waits.values())

    def sentences(self, now: float) -> tuple[str, ...]:
        """What is awaited, and for how long so far."""
        return tuple(_sentence(wait, now) for wait in self._waits.values())


def _sentence(wait: _Wait, now: float) -> str:
    return f"{wait.what} (for {duration(max(0.0, now - wait.since))} so far)"


def awaited(
    workers: Mapping[str, SupervisedWorker],
    caches: Mapping[str, SupervisedCache],
    homes: Homes,
    lanes: Mapping[int, SupervisedLane],
    *,
    missing: int,
    needs: str,
    last_failure: str,
) -> dict[str, str]:
    """Tell who or what is awaited, by kind of wait, those first without whom nothing else goes on.

    Args:
        workers, caches, homes, lanes: the supervisor's.
        missing: workers that are to be started after a pause.
        needs: the resources that a worker waits for: "1 CPU".
        last_failure: why the last start failed, if none has succeeded since; else "".
    """
    found: dict[str, str] = {}
    for lane in lanes.values():
        if lane.phase is not LanePhase.SERVING:
            what = "is being started" if lane.phase is LanePhase.BRIEFING else "does not answer"
            found[f"lane {lane.number}"] = f"lane {lane.number} {what}"
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
        found["told"] = f"{_are(told)} being told where samples have their homes"
    if homes.lacks_homes():  # a move between machines that all have homes keeps nobody waiting
        how = "to be given, after a pause," if homes.move is None else "being given"
        found["homes"] = f"samples are {how} homes where workers are"
    return found


def _about_cache(cache: SupervisedCache | None) -> str:
    """What is awaited of a cache node where a worker is; "" if nothing is."""
    if cache is None:
        return "is to be started again after a pause"
    if cache.phase is CachePhase.STARTING:
        return "is being started"
    if cache.phase is CachePhase.DOUBTED:
        return "is asked whether it lives, and has not answered yet"
    return ""


def _are(names: list[str]) -> str:
    """The subject of a sentence: "prep-1 is", "prep-1, prep-2, prep-3 and 4 more are"."""
    more = len(names) - SHOWN_NAMES
    return (
        ", ".join(names[:SHOWN_NAMES])
        + (f" and {more} more" if more > 0 else "")
        + (" is" if len(names) == 1 else " are")
    )
