"""Prep workers of concurrent feeds: each feed's default, their allocation, and loans between feeds.

The allocation is A-Dloader's ("A Data-Loader Tunable Knob to Shorten GPU Idleness", 2022). Each job (a feed with its
trials) first gets the fewest workers with which loading is as fast as training. While the sum exceeds the pool, the
most over-provisioned job gives up one worker.

Every feed runs a `Lender`, reads the reports of all feeds and computes the same allocation of the existing workers. It
acts only on its own surplus, one worker at a time. An allocation must persist before a feed acts on it, and each move
is followed by a pause, so that simultaneous events are answered together (the paper's time window).

By default, the feeds of a cluster share all CPUs but one, which is left for a trial. Each feed takes half of the CPUs
left by earlier ones. GPUs belong to trials: a worker that prepares on a GPU reserves no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from msgspec import Struct

from mbaas.base import units
from mbaas.model.curves import ROUNDING, ThroughputCurve, whole
from mbaas.settings import Lending

Limit = Literal["prep", "training", "pool", "quota"]
"""Bottleneck of a job: its own prep at its peak, its training, the size of the pool, or its quota of workers."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A feed that competes for workers.

    ``demand_per_s`` is measured, as is ``prep``, samples/s against workers; where fetch is slower, ``prep`` ends at its
    rate. It keeps ``reserved`` workers when the pool is short, if it can use them.

    Attributes:
        least, most: bounds on its workers; ``least`` also holds for workers that it cannot use.
        weight: priority when the pool is short: a lack of workers counts that many times.
    """

    name: str
    demand_per_s: float
    prep: ThroughputCurve
    reserved: int = 1
    least: int = 1
    most: int | None = None
    weight: float = 1.0

    @cached_property
    def needed(self) -> float:
        """Workers at which loading is as fast as training (d'), or the count at prep's peak."""
        return self.prep.workers_for(self.demand_per_s)

    @cached_property
    def useful(self) -> int:
        """`needed` rounded up, within the bounds."""
        useful = max(self.least, whole(self.needed))
        return useful if self.most is None else min(useful, max(self.least, self.most))

    def surplus(self, workers: int) -> float:
        """Return how many of its workers a job does not need; below 0 for a lack, which counts by its weight."""
        surplus = workers - self.needed
        return surplus if surplus >= 0 else surplus * self.weight


class JobWorkers(Struct, frozen=True):
    job: str
    workers: int
    limit: Limit
    reason: str


class Allocation(Struct, frozen=True):
    """Workers of each job, in the order of the jobs, and workers that no job can use."""

    by_job: tuple[JobWorkers, ...]
    idle: int

    @property
    def workers(self) -> dict[str, int]:
        return {given.job: given.workers for given in self.by_job}


def fair_shares(needs: Sequence[float], capacity: float) -> list[float]:
    """Divide a capacity by max-min fairness."""
    shares = [0.0] * len(needs)
    # Smallest need first: the unused rest of its even share goes to the others.
    for served, number in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        shares[number] = min(needs[number], capacity / (len(needs) - served))
        capacity -= shares[number]
    return shares


def allocate(jobs: Sequence[Job], *, pool: int) -> Allocation:
    """Divide ``pool`` workers between jobs.

    No job gets more than it can use; the rest stays idle. If there are no more workers than jobs, the first jobs get
    one each. Otherwise every job has at least one, and its reserved workers unless the pool is too small for all
    reservations. Among equally over-provisioned jobs, the last one gives first.

    A-Dloader does not weight jobs, and names fairness between them as an open question. Here jobs lack workers in
    inverse proportion to their weights, and the rule is the paper's if all weights are 1.
    """
    # The paper's rule needs at least one worker for each job. Below that, the oldest jobs are served.
    if pool <= len(jobs):
        counts = [int(index < pool) for index in range(len(jobs))]
    else:
        counts = [min(job.useful, pool) for job in jobs]
        _take(counts, jobs, [min(max(job.reserved, job.least), job.useful) for job in jobs], pool=pool)
        # If the pool is too small for all reservations, every job gives, down to its least number and then to one.
        _take(counts, jobs, [job.least for job in jobs], pool=pool)
        _take(counts, jobs, [1] * len(jobs), pool=pool)
    by_job = tuple(_job_workers(job, count, pool=pool) for job, count in zip(jobs, counts, strict=True))
    return Allocation(by_job, pool - sum(counts))


def _take(counts: list[int], jobs: Sequence[Job], floors: list[int], *, pool: int) -> None:
    while sum(counts) > pool and (givers := [i for i, count in enumerate(counts) if count > floors[i]]):
        # The job with the most workers beyond its need gives; in a tie, the last one.
        counts[max(givers, key=lambda i: (jobs[i].surplus(counts[i]), i))] -= 1


def _job_workers(job: Job, workers: int, *, pool: int) -> JobWorkers:
    demand = f"the {units.number(job.demand_per_s)} samples/s that its training could consume"
    prepared_per_s, needed = units.number(job.prep.rate(workers)), units.number(job.needed)
    prepared = f"{job.name} prepares {prepared_per_s} samples/s with {workers} of the pool of {pool}"
    if job.most is not None and workers == job.most < whole(job.needed):
        return JobWorkers(job.name, workers, "quota", f"{prepared}; {demand} need {needed}, more than its quota")
    if workers < job.useful:
        return JobWorkers(
            job.name, workers, "pool", f"{prepared}; {demand} need {needed}, but other jobs need some too"
        )
    if job.prep.rate(job.useful) >= job.demand_per_s * (1 - ROUNDING):
        return JobWorkers(job.name, workers, "training", f"{prepared}, enough for {demand} (these need {needed})")
    return JobWorkers(
        job.name, workers, "prep", f"{prepared}, less than {demand}, but more workers would not be faster"
    )


class DemandReport(Struct, frozen=True, kw_only=True):
    """Demand and workers of a feed, published to the other feeds.

    Attributes:
        kind: properties of its workers (engine, GPU share, allowed nodes); workers move only between feeds of one kind.
        workers: workers that are up and stay, including ``borrowed`` ones, by lending feed.
        demand_per_s: samples/s of prep at which none of its trials would wait; 0 without trials, or if all is ready.
        loading: samples/s that it loads against workers, the lower of prep and fetch; None if not known yet.
        basis: the measurement behind it, as a clause.
        least, max_borrowed, weight: its ``lending`` options.
    """

    feed: str
    kind: str
    workers: int
    borrowed: dict[str, int]
    reserved: int
    demand_per_s: float
    loading: ThroughputCurve | None
    basis: str = ""
    least: int = 1
    max_borrowed: int | None = None
    weight: float = 1.0

    @property
    def job(self) -> Job:
        """The feed as a job that competes for workers."""
        own = max(self.workers - sum(self.borrowed.values()), self.reserved)  # those at other feeds may come back
        return Job(
            name=self.feed,
            demand_per_s=self.demand_per_s,
            prep=ThroughputCurve.linear(1.0) if self.loading is None else self.loading,
            reserved=self.reserved,
            least=self.least,
            most=None if self.max_borrowed is None else own + self.max_borrowed,
            weight=self.weight,
        )


class WorkerMove(Struct, frozen=True):
    """Transfer of one worker to feed ``target``, as a loan or to its owner."""

    target: str
    is_return: bool
    reason: str


class Lender:
    def __init__(self, feed: str, settings: Lending) -> None:
        self._feed, self._settings = feed, settings
        self._target: str | None = None  # target of the pending move
        self._since = self._moved_s = -math.inf  # start of the pending move, time of the last one

    def observe(self, reports: Sequence[DemandReport], now: float) -> WorkerMove | None:
        """Return the move due at ``now`` (monotonic seconds), given the reports of all feeds of one kind."""
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
        known = {report.feed: report for report in reports if report.loading is not None or not report.demand_per_s}
        me = known.get(self._feed)
        # Keep the last worker: without one, a feed cannot measure its rate.
        if me is None or me.workers < 2 or len(known) < 2 or (me.workers <= me.least and not me.borrowed):
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
        basis = f" ({known[poorest].basis})" if known[poorest].basis else ""
        reason = f"{me.feed} {verb} a worker to {target}: {reasons[me.feed]}; {reasons[poorest]}{basis}"
        return WorkerMove(target, bool(owners), reason)


def allocate_workers(reports: Sequence[DemandReport]) -> Allocation:
    return allocate([report.job for report in reports], pool=sum(report.workers for report in reports))


TRIAL_CPUS = 1
"""CPUs left free by every default: Ray Tune's default for a trial."""

GRAIN = 10_000
"""Ray counts fractions of a CPU in ten-thousandths."""


class PrepResources(Struct, frozen=True):
    """Prep workers and the CPUs that each reserves: 1, a shared fraction of one, or several with one thread each."""

    workers: int
    cpus_per_worker: float = 1.0
    threads: int = 1

    @property
    def cpus(self) -> float:
        return self.workers * self.cpus_per_worker


class GpuRoom(Struct, frozen=True, kw_only=True):
    """GPUs available for prep: their number, workers that may share one, and CPUs per GPU on nodes with GPUs."""

    count: int
    workers: int
    cpus: float


def default_prep(
    *, cpus: float, claimed_cpus: float = 0.0, gpus: GpuRoom | None = None, also_on_cpus: bool = False
) -> PrepResources:
    """Return the default prep workers of a feed, given the CPUs of the cluster and those claimed by other feeds.

    With ``gpus``, workers prepare on GPUs, and with ``also_on_cpus`` on CPUs as well.

    Example:
        On 8 CPUs, the first feed takes half of 7, rounded up: 4. The second takes half of 3, rounded up: 2. The third
        takes half of 1: one worker that reserves half a CPU. 1.5 CPUs are left to trials. On 2 CPUs, the first feed
        takes half a CPU and the second a quarter.
    """
    half = (cpus - claimed_cpus - TRIAL_CPUS) / 2
    if half < 1:
        # A worker with a fractional reservation, or none, may still use a whole CPU. It competes with others for the
        # CPU, which is better than a search that never starts.
        return PrepResources(1, max(0, math.floor(half * GRAIN)) / GRAIN)
    workers = math.ceil(half)
    if gpus is None:
        return PrepResources(workers)
    # CPUs of nodes without a GPU are useless to GPU workers. Nodes with GPUs keep half of their CPUs for trials.
    room = max(1, math.floor(gpus.cpus / 2))
    per_gpu = min(gpus.workers, room)
    few = max(1, min(workers, gpus.count * per_gpu))
    each = max(1, min(workers // few, room // per_gpu)) if also_on_cpus else 1
    return PrepResources(few, each, threads=each)


def node_for_part(part: float, free_cpus: Mapping[str, float]) -> str | None:
    """Return the node whose shared CPU the worker fills best; None if no CPU is shared yet, or none has room.

    Otherwise the fractions of several feeds could leave no node a whole CPU for a trial. ``part`` is the fraction of a
    CPU that the worker reserves, in [0, 1), and ``free_cpus`` the unreserved CPUs by node.
    """
    rests = {node: round(free % 1 * GRAIN) for node, free in free_cpus.items()}
    fitting = [(rest, node) for node, rest in rests.items() if rest and rest >= round(part * GRAIN) > 0]
    return min(fitting, default=(0, None))[1]
