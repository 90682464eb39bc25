"""Changes of a feed's workers: the gain that was predicted, and the one that came.

Both gains are samples/s of prep up to the demand of the trials before the change. Samples beyond that only fill the
staging memory, for example at the start of a feed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from msgspec import Struct

from mbaas.model.scaling import Observation

GAIN_S = 8.0
"""Rates before and after a change are means over this time, in seconds."""

KEPT_CHANGES = 100
"""Changes that are kept, the newest ones."""


@dataclass(frozen=True, kw_only=True)
class WorkerChange:
    """A change of a feed's prep workers; changes within `GAIN_S` of each other are one.

    Attributes:
        at_s: seconds from the feed's start to the (first) change.
        causes: "started", "ended" (also by a fault), "borrowed", "returned" to the owner, "lent", "back" from a loan.
        before, after: workers that were up.
        predicted_per_s: samples/s that the change was to add at the demand of the trials, below 0 for a loss.
        gained_per_s: samples/s up to that demand that prep delivered more afterwards; None until that is measured.
        basis: the measurement behind the prediction, as a clause.
    """

    at_s: float
    causes: tuple[str, ...]
    before: int
    after: int
    predicted_per_s: float
    gained_per_s: float | None
    basis: str


class WorkerCounts(Struct, frozen=True):
    """Workers of a feed: all that are up, the borrowed ones among them, and own ones at other feeds (or moving)."""

    here: int
    borrowed: int = 0
    away: int = 0

    def causes(self, before: WorkerCounts) -> tuple[str, ...]:
        """Return the reasons of the difference to ``before``."""
        borrowed, away = self.borrowed - before.borrowed, self.away - before.away
        rest = self.here - before.here - borrowed + away
        signs = (borrowed, "borrowed", "returned"), (away, "lent", "back"), (rest, "started", "ended")
        return tuple(more if change > 0 else fewer for change, more, fewer in signs if change)


class _Pending(Struct, frozen=True):
    """The newest change while its gain is not known: the rate and the observation before it, and its last moment."""

    per_s: float
    seen: Observation
    since: float
    samples: float


class GainLog:
    """The last changes of one feed's workers."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._changes: deque[WorkerChange] = deque(maxlen=KEPT_CHANGES)
        self._pending: _Pending | None = None
        self._before: tuple[WorkerCounts, Observation] | None = None
        self._made: deque[tuple[float, float]] = deque()  # (time, samples so far) of the last `GAIN_S`

    @property
    def changes(self) -> tuple[WorkerChange, ...]:
        """The changes, oldest first."""
        return tuple(self._changes)

    def observe(self, counts: WorkerCounts, seen: Observation, *, samples: float, now: float) -> None:
        """Record the workers at ``now`` (seconds), the observation of the feed, and its samples prepared so far."""
        if self._before is not None and counts.here != self._before[0].here:
            self._changed(counts, *self._before, samples=samples, now=now)
        elif self._pending is not None and now - self._pending.since >= GAIN_S:
            per_s = (samples - self._pending.samples) / (now - self._pending.since)
            per_s = min(per_s, self._pending.seen.demand_per_s)
            self._changes[-1] = replace(self._changes[-1], gained_per_s=per_s - self._pending.per_s)
            self._pending = None
        self._before = counts, seen
        self._made.append((now, samples))
        while len(self._made) > 2 and now - self._made[1][0] >= GAIN_S:
            self._made.popleft()

    def _changed(
        self, counts: WorkerCounts, before: WorkerCounts, seen: Observation, *, samples: float, now: float
    ) -> None:
        causes, first = counts.causes(before), before.here
        at_s, per_s = now - self._began, min(self._per_s(), seen.demand_per_s)
        if self._pending is not None:  # the change before it had no time to show: both together
            last = self._changes.pop()
            causes, first, at_s = tuple(dict.fromkeys((*last.causes, *causes))), last.before, last.at_s
            seen, per_s = self._pending.seen, self._pending.per_s
        self._pending = _Pending(per_s, seen, now, samples)
        self._changes.append(
            WorkerChange(
                at_s=at_s,
                causes=causes,
                before=first,
                after=counts.here,
                predicted_per_s=seen.gain_per_s(first, counts.here),
                gained_per_s=None,
                basis=seen.measured.basis,
            )
        )

    def _per_s(self) -> float:
        (begin, first), (end, last) = self._made[0], self._made[-1]
        return (last - first) / (end - begin) if end > begin else 0.0
