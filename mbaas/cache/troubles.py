"""The samples that storage did not give when it was asked, and when each is asked for again. Pure.

Nobody sleeps here, and no thread is held by a sample: clock and chances come in as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mbaas.cache.slab import PassingReason
from mbaas.errors import StorageError
from mbaas.units import counted, seconds

FIRST_PAUSE_S = 0.2
"""The first pause is drawn from zero to this; the bound doubles with each attempt."""

MAX_PAUSE_S = 10.0
"""The bound grows no further, so storage that is back is noticed within this time."""

HOLD_S = 2.0
"""How long a fetch waits for a sample in trouble. Then it is answered without the sample, and may ask again."""

SHORT_S = 5.0
"""The patience for a sample that was given up before, and for a single file that is missing while its folder is there,
once another such file was given up.

A sector that cannot be read would else cost the whole patience again in every epoch, and a thousand files that were
deleted a thousand times. The first missing file has the whole patience: a server of the file system may be away, with
only its share of the files, or a network file system may remember for a minute that a file was not there.
"""

FORGOTTEN_S = 30.0
"""A sample that has been due for this long without being asked for is forgotten; a later request starts its patience
afresh. So is one that was given up this long ago; until then each further failure makes it bad at once.
"""


@dataclass(eq=False)
class _Trouble:
    """What is known of a sample in trouble.

    Attributes:
        since: when an attempt failed for the first time, as long as nobody gave it up.
        attempts: how many failed since then.
        due: when the next may be made; None once it is given up.
        reason: what the last one met.
        is_missing: whether that was a single file that is missing.
        again: whether it was given up before, and not read since.
        given_up: when, if it was.
    """

    since: float
    again: bool
    attempts: int = 0
    due: float | None = None
    reason: str = ""
    is_missing: bool = False
    given_up: float = 0.0


class Troubles:
    """The samples of one cache node that are in trouble.

    Args:
        storage_s: how long a sample is asked for before it counts as bad.
        draw: a number from [0, 1); full jitter, so that readers which failed together do not come back together.
    """

    def __init__(self, storage_s: float, draw: Callable[[], float]) -> None:
        self._storage_s, self._draw = storage_s, draw
        self._known: dict[int, _Trouble] = {}  # by sample; those that were given up stay until they are read
        # Of the single files that were missing, the last one whose fate is known stayed away.
        self._files_are_gone = False
        self._told_since: float | None = None  # since when samples are in trouble, as the log says
        self._given_up = self._came = 0  # samples, since the log was last written, and since it told of trouble

    def failed(self, sample_id: int, error: StorageError, now: float) -> str:
        """Note a failed attempt, and return why: a `PassingReason` as long as the sample is not bad."""
        trouble = self._known.get(sample_id)
        # A fetch that waited for it reads it once more, with all that goes with it, and must get the verdict then.
        if trouble is not None and trouble.due is None and now - trouble.given_up <= FORGOTTEN_S:
            return self._verdict(trouble, error)
        if trouble is None or trouble.due is None or now - trouble.due > FORGOTTEN_S:
            given_up = trouble is not None and trouble.due is None
            trouble = self._known[sample_id] = _Trouble(now, again=given_up)
        trouble.attempts += 1
        left_s = trouble.since + self._limit_s(trouble, error) - now
        bound_s = min(FIRST_PAUSE_S * 2 ** min(trouble.attempts - 1, 20), MAX_PAUSE_S)
        # The last attempt is made when the time is over, so that all of it is given.
        trouble.due = now + min(self._draw() * bound_s, left_s) if left_s > 0 else None
        trouble.reason, trouble.is_missing = error.reason, error.is_missing
        if trouble.due is not None:
            return PassingReason(error.reason)
        trouble.given_up = now
        self._given_up += 1
        self._files_are_gone |= error.is_missing
        return self._verdict(trouble, error)

    def _verdict(self, trouble: _Trouble, error: StorageError) -> str:
        return f"{error.reason} ({counted(trouble.attempts, 'attempt')} in {seconds(trouble.given_up - trouble.since)})"

    def _limit_s(self, trouble: _Trouble, error: StorageError) -> float:
        is_short = trouble.again or (error.is_missing and self._files_are_gone)
        return min(SHORT_S, self._storage_s) if is_short else self._storage_s

    def resolved(self, sample_ids: Iterable[int]) -> None:
        """Note that samples were read, or are bad for a reason that cannot pass."""
        if not self._known:
            return
        came = [trouble for sample_id in sample_ids if (trouble := self._known.pop(sample_id, None)) is not None]
        self._came += len(came)
        if any(trouble.is_missing for trouble in came):
            self._files_are_gone = False

    def among(self, sample_ids: Iterable[int]) -> dict[int, str]:
        """Find which of the samples are in trouble and not given up: id -> what the last attempt met."""
        if not self._known:
            return {}
        found = {i: trouble for i in sample_ids if (trouble := self._known.get(i)) is not None}
        return {i: trouble.reason for i, trouble in found.items() if trouble.due is not None}

    def pause_s(self, sample_ids: Iterable[int], now: float) -> float:
        """Tell how long to wait before all of these, which are in trouble, may be asked for again."""
        return max(0.0, *(due - now for i in sample_ids if (due := self._known[i].due) is not None))

    def are_new(self, sample_ids: Iterable[int]) -> bool:
        """Tell whether these samples, which are in trouble, may all be asked for again while that is new."""
        troubles = [self._known[i] for i in sample_ids]
        return all(trouble.due is not None and trouble.due < trouble.since + HOLD_S for trouble in troubles)

    def log(self, uri: Callable[[int], str], now: float) -> list[str]:
        """Write sentences about what has changed since the last call."""
        told = []
        old = {i: trouble for i, trouble in self._known.items() if now - trouble.since >= HOLD_S}
        waiting = {i: t for i, t in old.items() if t.due is not None and now - t.due <= FORGOTTEN_S}
        if waiting and self._told_since is None:
            first = min(waiting, key=lambda i: waiting[i].since)
            self._told_since, self._came = waiting[first].since, 0
            told.append(
                f"storage does not give {counted(len(waiting), 'sample')}, for instance {uri(first)}: "
                f"{waiting[first].reason}; asked again for up to {seconds(self._storage_s)}"
            )
        if self._given_up:
            told.append(f"gave up {counted(self._given_up, 'sample')} that storage did not give")
            self._given_up = 0
        if self._told_since is not None and not waiting:
            if self._came:
                told.append(f"storage gives what it is asked for again, after {seconds(now - self._told_since)}")
            self._told_since = None
        return told
