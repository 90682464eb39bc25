"""Counts trials' waits for minibatches by length, and the steps in which the ranks of a trial wait unequally.

Ranks wait for each other in each step, so the longest wait delays them all. Lobster ("Load Balance-Aware I/O for
Distributed DNN Training", ICPP 2022, section 4.3) minimizes the gap between the slowest and the fastest rank of an
iteration. It counts iterations in which they differ. Here a step counts as uneven if the ranks' waits differ by
more than `UNEVEN_PERCENT` of the step. A loader cannot see how long its rank waits for the other ranks, which makes
all steps equally long. So it compares waits for data, and not whole steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

WAIT_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the classes of waits, in seconds; longer waits are in one more class."""

CLASSES = len(WAIT_BOUNDS_S) + 1

UNEVEN_PERCENT = 10
"""Difference between the ranks' waits above which a step is uneven, in percent of the step."""

KEPT_STEPS = 500
"""Steps of a trial that wait for the reports of its other ranks; the oldest ones are dropped.

Ranks report every few seconds, so of a trial with more than some hundred steps per second not all are compared.
"""

KEPT_TRIALS = 100
KEPT_LOADERS = 1_000
"""Number of remembered trials and loaders; the ones whose last report is oldest are forgotten."""


def wait_class(wait_s: float) -> int:
    """Return the class of a wait in seconds, 0 to ``CLASSES - 1``."""
    return bisect_left(WAIT_BOUNDS_S, wait_s)


@dataclass(frozen=True)
class WaitCounts:
    """Numbers of minibatches by the time that a consumer waited for each, in the classes of `WAIT_BOUNDS_S`."""

    counts: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=CLASSES, max_length=CLASSES)] = (
        0,
    ) * CLASSES

    def __add__(self, other: WaitCounts) -> WaitCounts:
        return WaitCounts(tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def __sub__(self, other: WaitCounts) -> WaitCounts:
        return WaitCounts(tuple(a - b for a, b in zip(self.counts, other.counts, strict=True)))

    @property
    def total(self) -> int:
        """The number of minibatches."""
        return sum(self.counts)

    def within_s(self, share: float) -> float:
        """Return the seconds within which this share of the minibatches arrived, 0 without any.

        It is the upper bound of a class, and infinite for the last class.
        """
        due, arrived = share * self.total, 0
        for count, bound_s in zip(self.counts, (*WAIT_BOUNDS_S, math.inf), strict=True):
            arrived += count
            if count and arrived >= due:
                return bound_s
        return 0.0


NO_WAITS = WaitCounts()


@dataclass(frozen=True)
class RankSteps:
    """Steps of a data-parallel trial that all ranks have reported, and the number of uneven ones."""

    trial: str
    ranks: int
    steps: int = 0
    uneven: int = 0


class _Trial:
    def __init__(self, ranks: int) -> None:
        self.ranks, self.steps, self.uneven = ranks, 0, 0
        self.open: dict[int, dict[str, int]] = {}  # step -> rank -> its wait in percent of the step


class UnevenSteps:
    """Compares the waits of the ranks of each trial, step by step.

    Attributes:
        steps, uneven: totals of all trials, including forgotten ones.
    """

    def __init__(self) -> None:
        self.steps = self.uneven = 0
        self._trials: dict[str, _Trial] = {}  # the latest report last
        self._taken: dict[str, int] = {}  # loader -> number of its steps that were compared

    def take(
        self, trial: str, rank: str, *, ranks: int, loader: str, first: int, waits: Sequence[tuple[int, int]]
    ) -> None:
        """Add a report of a rank; steps that an earlier report contained are ignored.

        Args:
            trial, rank, ranks: name of the trial, of this rank, and number of ranks.
            loader: id of the rank's loader.
            first: number of the loader's steps before the first one in ``waits``.
            waits: number of each step in the trial, and the rank's wait in percent of the step.
        """
        taken = self._taken.pop(loader, 0)
        self._taken[loader] = max(taken, first + len(waits))
        _forget(self._taken, KEPT_LOADERS)
        found = self._trials.pop(trial, None)
        if found is None or found.ranks != ranks:
            found = _Trial(ranks)
        self._trials[trial] = found
        _forget(self._trials, KEPT_TRIALS)
        for step, percent in waits[max(0, taken - first) :]:
            self._enter(found, step, rank, percent)
        _forget(found.open, KEPT_STEPS)

    def _enter(self, trial: _Trial, step: int, rank: str, percent: int) -> None:
        seen = trial.open.setdefault(step, {})
        seen[rank] = percent
        if len(seen) == trial.ranks:
            del trial.open[step]
            uneven = max(seen.values()) - min(seen.values()) > UNEVEN_PERCENT
            trial.steps, trial.uneven = trial.steps + 1, trial.uneven + uneven
            self.steps, self.uneven = self.steps + 1, self.uneven + uneven

    def by_trial(self, trials: Iterable[str]) -> tuple[RankSteps, ...]:
        """Return the counts of these trials, except trials without ranks."""
        known = ((name, self._trials[name]) for name in sorted({*trials}) if name in self._trials)
        return tuple(RankSteps(name, trial.ranks, trial.steps, trial.uneven) for name, trial in known)


def _forget(kept: dict[Any, Any], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]
