"""Samples that storage failed to deliver, and the schedule of their retries.

Pure: clock and random numbers are arguments, and nothing here sleeps or blocks a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mbaas.base.units import counted, seconds
from mbaas.cache.slab import TemporaryReason
from mbaas.errors import StorageError

FIRST_PAUSE_S = 0.2
"""Upper bound of the first random pause; the bound doubles with each attempt."""

MAX_PAUSE_S = 10.0
"""Limit of the bound: after an outage, samples are read again within this time."""

HOLD_S = 2.0
"""Longest wait of a fetch for a failing sample. Then the reply omits the sample, and the caller may retry."""

SHORT_RETRY_S = 5.0
"""Shorter retry time, for samples given up before, and for missing files after another missing file was given up.

Otherwise an unreadable sector would cost the full time in every epoch, and a thousand deleted files a thousand times
that. The first missing file gets the full time, because a server may be down, or a network file system may cache an
absence for a minute. A file counts as missing only if its folder exists.
"""

FORGET_S = 30.0
"""Time after which a sample's failures are forgotten.

It starts when a retry is due and nothing requests the sample; a later request has the full retry time. For a sample
given up, it starts at that point; until then each further failure makes the sample bad at once.
"""


@dataclass(eq=False)
class _FailingSample:
    since: float  # first failed attempt, since it was last given up
    again: bool  # it was given up before, and not read since
    attempts: int = 0  # failed ones since then
    due: float | None = None  # time of the next attempt; None once it is given up
    reason: str = ""  # of the last failure
    is_missing: bool = False  # the last failure was a missing file
    given_up: float = 0.0  # time when it was given up


class Retries:
    """The failing samples of one cache node, retried for ``storage_s`` before they count as bad.

    ``draw`` returns random numbers in [0, 1), so that simultaneous failures are retried at different times.
    """

    def __init__(self, storage_s: float, draw: Callable[[], float]) -> None:
        self._storage_s, self._draw = storage_s, draw
        self._known: dict[int, _FailingSample] = {}  # by sample; samples given up stay until they are read
        # The most recently resolved missing file was given up.
        self._files_are_gone = False
        self._outage_since: float | None = None  # start of the outage that was logged
        # Samples given up since the last `log` call, and samples read since the outage was logged.
        self._given_up = self._came = 0

    def failed(self, sample_id: int, error: StorageError, now: float) -> str:
        """Record a failed attempt. Return the reason, as a `TemporaryReason` unless the sample is bad now."""
        failing = self._known.get(sample_id)
        # A fetch that waited for the sample reads it again with its whole slab, and must then get the final error.
        if failing is not None and failing.due is None and now - failing.given_up <= FORGET_S:
            return self._verdict(failing, error)
        if failing is None or failing.due is None or now - failing.due > FORGET_S:
            given_up = failing is not None and failing.due is None
            failing = self._known[sample_id] = _FailingSample(now, again=given_up)
        failing.attempts += 1
        is_short = failing.again or (error.is_missing and self._files_are_gone)
        limit_s = min(SHORT_RETRY_S, self._storage_s) if is_short else self._storage_s
        left_s = failing.since + limit_s - now
        bound_s = min(FIRST_PAUSE_S * 2 ** min(failing.attempts - 1, 20), MAX_PAUSE_S)
        # The last attempt is at the end of the time limit, so that the limit is used in full.
        failing.due = now + min(self._draw() * bound_s, left_s) if left_s > 0 else None
        failing.reason, failing.is_missing = error.reason, error.is_missing
        if failing.due is not None:
            return TemporaryReason(error.reason)
        failing.given_up = now
        self._given_up += 1
        self._files_are_gone |= error.is_missing
        return self._verdict(failing, error)

    def _verdict(self, failing: _FailingSample, error: StorageError) -> str:
        return f"{error.reason} ({counted(failing.attempts, 'attempt')} in {seconds(failing.given_up - failing.since)})"

    def resolved(self, sample_ids: Iterable[int]) -> None:
        """Record samples that were read, or are bad for a permanent reason."""
        if not self._known:
            return
        came = [failing for sample_id in sample_ids if (failing := self._known.pop(sample_id, None)) is not None]
        self._came += len(came)
        if any(failing.is_missing for failing in came):
            self._files_are_gone = False

    def failing(self, sample_ids: Iterable[int]) -> dict[int, str]:
        """Return the samples that fail and are not given up: id -> reason of the last failure."""
        if not self._known:
            return {}
        found = {i: failing for i in sample_ids if (failing := self._known.get(i)) is not None}
        return {i: failing.reason for i, failing in found.items() if failing.due is not None}

    def pause_s(self, sample_ids: Iterable[int], now: float) -> float:
        """Return the seconds until all of the given failing samples may be retried."""
        return max(0.0, *(due - now for i in sample_ids if (due := self._known[i].due) is not None))

    def are_new(self, sample_ids: Iterable[int]) -> bool:
        """Return whether all given failing samples are due for a retry within `HOLD_S` of their first failure."""
        known = [self._known[i] for i in sample_ids]
        return all(failing.due is not None and failing.due < failing.since + HOLD_S for failing in known)

    def log(self, uri: Callable[[int], str], now: float) -> list[str]:
        """Return log lines about changes since the last call."""
        lines = []
        old = {i: failing for i, failing in self._known.items() if now - failing.since >= HOLD_S}
        waiting = {i: t for i, t in old.items() if t.due is not None and now - t.due <= FORGET_S}
        if waiting and self._outage_since is None:
            first = min(waiting, key=lambda i: waiting[i].since)
            self._outage_since, self._came = waiting[first].since, 0
            lines.append(
                f"storage does not give {counted(len(waiting), 'sample')}, for instance {uri(first)}: "
                f"{waiting[first].reason}; asked again for up to {seconds(self._storage_s)}"
            )
        if self._given_up:
            lines.append(f"gave up {counted(self._given_up, 'sample')} that storage did not give")
            self._given_up = 0
        if self._outage_since is not None and not waiting:
            if self._came:
                lines.append(f"storage gives what it is asked for again, after {seconds(now - self._outage_since)}")
            self._outage_since = None
        return lines
