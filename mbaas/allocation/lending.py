"""Lending of prep workers between feeds: a state machine that each feed runs for itself.

Every feed reads the reports of all feeds and divides the existing workers by A-Dloader's allocation (`workers`). A feed
acts only on its own surplus: it hands over one worker at a time. It keeps its reserved workers as long as it can use
them. An allocation must persist before a feed acts on it, and each move is followed by a pause, so that simultaneous
events are answered together (the paper's time window).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from mbaas.allocation.throughput import ThroughputCurve
from mbaas.allocation.workers import Allocation, Job, allocate
from mbaas.settings import Lending


class DemandReport(Struct, frozen=True, kw_only=True):
    """Demand and workers of a feed, published to the other feeds.

    Attributes:
        kind: properties of its workers (engine, GPU share, allowed nodes); workers move only between feeds of one kind.
        workers: workers that are up and stay, including borrowed ones.
        borrowed: lending feed -> borrowed workers.
        reserved: workers reserved for the feed when it was served.
        demand_per_s: samples/s of prep at which none of its trials would wait; 0 without trials, or if everything that
            they will request is ready.
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
    """Transfer of one worker to feed ``target``, as a loan or to its owner. ``reason`` is a sentence."""

    target: str
    is_return: bool
    reason: str


class Lender:
    """Decides for one feed, one observation at a time."""

    def __init__(self, feed: str, settings: Lending) -> None:
        self._feed, self._settings = feed, settings
        self._target: str | None = None  # target of the pending move
        self._since = self._moved_s = -math.inf  # start of the pending move, time of the last one

    def observe(self, reports: Sequence[DemandReport], now: float) -> WorkerMove | None:
        """Return the move due at ``now`` seconds on a monotonic clock, given the reports of all feeds of one kind."""
        # Sorted, because feeds receive reports in different orders and must all compute the same allocation.
        move = self._propose(sorted(reports, key=lambda report: report.feed))
        if move is None or move.target != self._target:
            self._target, self._since = (move.target if move else None), now
        if move is None or now - self._since < self._settings.hold_s or now - self._moved_s < self._settings.pause_s:
            return None
        self._moved_s, self._since = now, now
        return move

    def _propose(self, reports: Sequence[DemandReport]) -> WorkerMove | None:
        """Return the best move now, without regard to holds and pauses."""
        # The allocation of a feed with trials but without a rate would be a guess: ignore it until it is measured.
        known = {report.feed: report for report in reports if report.worker_per_s > 0 or not report.demand_per_s}
        me = known.get(self._feed)
        # Keep the last worker: without one, a feed cannot measure its rate.
        if me is None or me.workers < 2 or len(known) < 2:
            return None
        allocation = allocate_workers(tuple(known.values()))
        if me.workers <= allocation.workers[me.feed]:
            return None
        lack = {name: allocation.workers[name] - report.workers for name, report in known.items()}
        # All feeds see the same reports and break ties by name, so no two of them fill the same gap.
        poorest = max(lack, key=lambda name: (lack[name], name))
        if lack[poorest] <= 0:
            return None
        # A borrowed worker returns first, even if a third feed lacks more: its owner decides who borrows it next.
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
            # A running feed measures only one worker's rate. Contention shows in the next measurement.
            prep=ThroughputCurve.linear(report.worker_per_s or 1.0),
            reserved=report.reserved,
        )
        for report in reports
    ]
    return allocate(jobs, pool=sum(report.workers for report in reports))
