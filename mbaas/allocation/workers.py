"""Division of prep workers between concurrent feeds: A-Dloader's worker allocation.

Each job (a feed with its trials) first gets the fewest workers with which loading is as fast as training. While the sum
exceeds the pool, the most over-provisioned job gives up one worker ("A Data-Loader Tunable Knob to Shorten GPU
Idleness", 2022).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from msgspec import Struct

from mbaas import units
from mbaas.allocation.throughput import ROUNDING, ThroughputCurve
from mbaas.errors import ConfigError

Limit = Literal["prep", "training", "pool"]
"""Bottleneck of a job: its own prep at its peak, its training, or the size of the pool."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A feed that competes for workers.

    Attributes:
        demand_per_s: samples/s that its training could consume, measured.
        prep: samples/s against workers, measured; `ThroughputCurve.linear` of one worker's rate is enough.
        reserved: workers that it keeps when the pool is short, if it can use them.
    """

    name: str
    demand_per_s: float
    prep: ThroughputCurve
    reserved: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.demand_per_s < math.inf:
            raise ConfigError(f"demand_per_s of {self.name} must be 0 or more and finite, got {self.demand_per_s}")
        if self.reserved < 1:
            raise ConfigError(f"reserved of {self.name} must be at least 1, got {self.reserved}")

    @cached_property
    def reachable(self) -> bool:
        """True if some number of workers prepares as fast as training consumes."""
        return self.prep.smallest_reaching(self.demand_per_s) is not None

    @cached_property
    def needed(self) -> float:
        """Workers at which loading is as fast as training (d'), or the count at prep's peak if it never is."""
        fraction = self.prep.fraction_reaching(self.demand_per_s)
        return float(self.prep.peak().count) if fraction is None else fraction

    @cached_property
    def useful(self) -> int:
        """The most workers that the job can use: `needed` rounded up, at least one."""
        return max(1, math.ceil(self.needed * (1 - ROUNDING)))  # 3.0000000004 workers are 3


class JobWorkers(Struct, frozen=True):
    """Workers of one job, its bottleneck, and the reason in one sentence."""

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
        """Number of workers by job, including jobs without workers."""
        return {given.job: given.workers for given in self.by_job}


def allocate(jobs: Sequence[Job], *, pool: int) -> Allocation:
    """Divide ``pool`` workers between jobs.

    No job gets more than it can use; the rest stays idle. If there are no more workers than jobs, the first jobs get
    one each. Otherwise every job has at least one, and its reserved workers unless the pool is too small for all
    reservations. Among equally over-provisioned jobs, the last one gives first.

    Raises:
        ConfigError: two jobs have the same name, or the pool is negative.
    """
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        raise ConfigError(f"names of jobs must differ, got {', '.join(names)}")
    if pool < 0:
        raise ConfigError(f"pool must be 0 workers or more, got {pool}")
    # The paper's rule needs at least one worker for each job. Below that, the oldest jobs are served.
    if pool <= len(jobs):
        counts = [int(index < pool) for index in range(len(jobs))]
    else:
        counts = [min(job.useful, pool) for job in jobs]
        _take(counts, jobs, [min(job.reserved, job.useful) for job in jobs], pool=pool)
        # If the pool is too small for all reservations, every job gives, down to one.
        _take(counts, jobs, [1] * len(jobs), pool=pool)
    by_job = tuple(_job_workers(job, count, pool=pool) for job, count in zip(jobs, counts, strict=True))
    return Allocation(by_job, pool - sum(counts))


def _take(counts: list[int], jobs: Sequence[Job], floors: list[int], *, pool: int) -> None:
    # The head has the most workers beyond its need. Indices are negated so that the last job gives first in a tie.
    heap = [(jobs[i].needed - count, -i) for i, count in enumerate(counts) if count > floors[i]]
    heapq.heapify(heap)
    excess = sum(counts) - pool
    while excess > 0 and heap:
        lack, negative = heap[0]
        counts[-negative] -= 1
        excess -= 1
        if counts[-negative] > floors[-negative]:
            heapq.heapreplace(heap, (lack + 1, negative))
        else:
            heapq.heappop(heap)


def _job_workers(job: Job, workers: int, *, pool: int) -> JobWorkers:
    demand = f"the {units.number(job.demand_per_s)} samples/s that its training could consume"
    prepared_per_s, needed = units.number(job.prep.rate(workers)), units.number(job.needed)
    prepared = f"{job.name} prepares {prepared_per_s} samples/s with {workers} of the pool of {pool}"
    if workers < job.useful:
        return JobWorkers(
            job.name, workers, "pool", f"{prepared}; {demand} need {needed}, but other jobs need some too"
        )
    if job.reachable:
        return JobWorkers(job.name, workers, "training", f"{prepared}, enough for {demand} (these need {needed})")
    return JobWorkers(
        job.name, workers, "prep", f"{prepared}, less than {demand}, but more workers would not be faster"
    )
