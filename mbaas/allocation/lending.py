"""Decides when a feed lends one of its prep workers to another feed, or gives one back: a state machine.

Every feed sees the reports of all, divides the workers that there are by A-Dloader's allocation (`workers`), and
acts on what concerns itself alone: who has more than that gives one. A feed keeps the workers it reserved as long
as it can use them. An allocation has to stay for a while before anybody acts on it, and after each move there is a
pause, so that events which come together are answered together (the paper's time window).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from mbaas.allocation.throughput import ThroughputCurve
from mbaas.allocation.workers import Allocation, Job, allocate
from mbaas.settings import Lending


class DemandReport(Struct, frozen=True, kw_only=True):
    """What a feed tells other feeds about itself.

    Attributes:
        feed: its name.
        kind: what its workers are like: engine, GPU share, where they may run; workers move between feeds of one kind.
        workers: how many are up and stay, borrowed ones included.
        borrowed: feed -> how many of these are that feed's own.
        reserved: how many workers it was promised when it was served.
        demand_per_s: samples/s that prep would have to make for no trial of it to wait; 0 without trials, or if all
            that they will ask for is ready.
        worker_per_s: samples/s that one worker prepares; 0 if not known yet.
    """

    feed: str
    kind: str
    workers: int
    borrowed: dict[str, int]
    reserved: int
    demand_per_s: float
    worker_per_s: float


class WorkerMove(Struct, frozen=True):
    """One worker goes to another feed: lent to it, or given back if it is its own. ``reason`` is a sentence."""

    target: str
    is_return: bool
    reason: str


class Lender:
    """Decides for one feed, one look after the other."""

    def __init__(self, feed: str, settings: Lending) -> None:
        self._feed, self._settings = feed, settings
        self._target: str | None = None  # of the move that would be right now
        self._since = self._moved_s = -math.inf  # when that began to be so; when a worker was moved last

    def observe(self, reports: Sequence[DemandReport], now: float) -> WorkerMove | None:
        """Return the move that is due at ``now`` seconds, if any.

        Args:
            reports: those of all feeds of one kind, this one included.
            now: the time, on any clock that does not go back.
        """
        # sorted, because feeds hear of each other in any order, and all must come to the same allocation
        move = self._propose(sorted(reports, key=lambda report: report.feed))
        if move is None or move.target != self._target:
            self._target, self._since = (move.target if move else None), now
        if move is None or now - self._since < self._settings.hold_s or now - self._moved_s < self._settings.pause_s:
            return None
        self._moved_s, self._since = now, now
        return move

    def _propose(self, reports: Sequence[DemandReport]) -> WorkerMove | None:
        """Return the move that would be right if nothing had to be waited for."""
        # A feed with trials but no rate yet would get workers by a guess: until it is measured nobody deals with it.
        known = {report.feed: report for report in reports if report.worker_per_s > 0 or not report.demand_per_s}
        me = known.get(self._feed)
        # The last worker stays: a feed without any could not even say how fast it would be with one.
        if me is None or me.workers < 2 or len(known) < 2:
            return None
        allocation = allocate_workers(tuple(known.values()))
        if me.workers <= allocation.workers[me.feed]:
            return None
        lack = {name: allocation.workers[name] - report.workers for name, report in known.items()}
        # All feeds see the same reports and break ties by name, so no two of them serve the same lack twice over.
        poorest = max(lack, key=lambda name: (lack[name], name))
        if lack[poorest] <= 0:
            return None
        # What is another's goes home first, even if a third feed lacks more: its owner knows best whom to lend it to.
        owners = sorted(me.borrowed, key=lambda name: (-lack.get(name, 0), name))
        target = owners[0] if owners else poorest
        reasons = {given.job: given.reason for given in allocation.by_job}
        verb = "gives back" if owners else "lends"
        reason = f"{me.feed} {verb} a worker to {target}: {reasons[me.feed]}; {reasons[poorest]}"
        return WorkerMove(target, bool(owners), reason)


def allocate_workers(reports: Sequence[DemandReport]) -> Allocation:
    """Divide all workers of the feeds between them."""
    jobs = [
        Job(
            name=report.feed,
            demand_per_s=report.demand_per_s,
            # one worker's rate is all that a running feed knows; contention shows when it is measured again
            prep=ThroughputCurve.linear(report.worker_per_s or 1.0),
            reserved=report.reserved,
        )
        for report in reports
    ]
    return allocate(jobs, pool=sum(report.workers for report in reports))
