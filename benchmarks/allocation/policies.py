"""Ways to divide a pool of workers between jobs that arrive and end.

All but `Feeds` know each job's needs exactly, and move workers at once. `Feeds` decides as running feeds do, from what
it measures (`benchmarks.allocation.feeds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from benchmarks.allocation.workload import TrainingRun
from mbaas.model.curves import whole
from mbaas.model.lending import Job, allocate

WINDOW_S = 30.0
"""A-Dloader's time window: events within it are answered together."""

PAUSE_S = 16.0
"""A-Dloader's pause of a job whose workers change, as measured in the paper."""


class Policy(Protocol):
    """Divides a pool of workers."""

    changes: int
    """Changes of a job's workers so far, apart from its arrival and its end."""

    def workers(self, active: Sequence[TrainingRun], now: float) -> Mapping[str, float]:
        """Return the workers of each active job from ``now`` (seconds) on; called every second."""
        ...

    def trained(self, served: Mapping[str, float]) -> None:
        """Record the samples that each active job took in the second after `workers`."""
        ...


Rule = Callable[[Sequence[TrainingRun], int], Mapping[str, int]]


class AtEvents:
    """Divides the pool by a rule when a job arrives or ends.

    Args:
        window_s: time for which events wait for others; jobs that arrive meanwhile have no workers.
        pause_s: time for which a job gets nothing after its number of workers has changed.
    """

    def __init__(self, rule: Rule, pool: int, *, window_s: float = 0.0, pause_s: float = 0.0) -> None:
        self.changes = 0
        self._rule, self._pool, self._window_s, self._pause_s = rule, pool, window_s, pause_s
        self._shares: dict[str, int] = {}
        self._names: frozenset[str] = frozenset()
        self._due_s: float | None = None
        self._paused: dict[str, float] = {}

    def workers(self, active: Sequence[TrainingRun], now: float) -> Mapping[str, float]:
        names = frozenset(job.name for job in active)
        if names != self._names and self._due_s is None:
            self._due_s = now + self._window_s if self._names else now
        self._names = names
        if self._due_s is not None and now >= self._due_s:
            self._due_s, before = None, self._shares
            self._shares = dict(self._rule(active, self._pool))
            # A job that begins has nothing to pause.
            moved = [name for name, share in self._shares.items() if before.get(name, 0) not in (0, share)]
            self.changes += len(moved)
            self._paused |= dict.fromkeys(moved, now + self._pause_s)
        return {name: 0 if now < self._paused.get(name, now) else self._shares.get(name, 0) for name in names}

    def trained(self, served: Mapping[str, float]) -> None:
        """See `Policy.trained`; needs are known, so nothing is measured."""


def equal_shares(jobs: Sequence[TrainingRun], pool: int) -> Mapping[str, int]:
    """Give each job the same number; the first ones get the rest."""
    each, rest = divmod(pool, max(1, len(jobs)))
    return {job.name: each + (number < rest) for number, job in enumerate(jobs)}


def in_proportion(jobs: Sequence[TrainingRun], pool: int) -> Mapping[str, int]:
    """Give each job workers in proportion to its need, by largest remainders, and one at least while they last."""
    needs = {job.name: job.needed for job in jobs}
    shares = {name: pool * need / sum(needs.values()) for name, need in needs.items()}
    counts = {name: max(1, int(share)) for name, share in shares.items()}
    while sum(counts.values()) > pool and max(counts.values()) > 1:
        counts[max((name for name in counts if counts[name] > 1), key=lambda name: counts[name] - shares[name])] -= 1
    by_remainder = sorted(counts, key=lambda name: counts[name] - shares[name])
    for name in by_remainder[: max(0, pool - sum(counts.values()))]:
        counts[name] += 1
    return _at_most(counts, pool)


def first_come(jobs: Sequence[TrainingRun], pool: int) -> Mapping[str, int]:
    """Give each job what it can use, in the order of arrival; the last ones get nothing."""
    return _at_most({job.name: max(1, whole(job.needed)) for job in jobs}, pool)


def by_surplus(jobs: Sequence[TrainingRun], pool: int) -> Mapping[str, int]:
    """Divide as A-Dloader does: `mbaas.model.lending.allocate`."""
    wants = [
        Job(name=job.name, demand_per_s=min(job.step_per_s, job.fetch_per_s), prep=job.prep, reserved=1) for job in jobs
    ]
    return allocate(wants, pool=pool).workers


def own_pools(jobs: int) -> Rule:
    """Return the rule that gives every job of the workload the same fixed part, whether the others run or not."""

    def rule(active: Sequence[TrainingRun], pool: int) -> Mapping[str, int]:
        each, rest = divmod(pool, jobs)
        return {job.name: each + (int(job.name.partition("-")[0]) < rest) for job in active}

    return rule


def _at_most(counts: Mapping[str, int], pool: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, count in counts.items():
        found[name] = min(count, pool - sum(found.values()))
    return found
