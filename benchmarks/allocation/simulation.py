"""Simulates a workload in steps of one second, the period at which feeds decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.allocation.feeds import Feeds
from benchmarks.allocation.policies import (
    PAUSE_S,
    WINDOW_S,
    AtEvents,
    Policy,
    by_surplus,
    equal_shares,
    first_come,
    in_proportion,
    own_pools,
)
from benchmarks.allocation.workload import TrainingRun, at_once, pool_of, workload

OURS = "feeds of mbaas"
EQUAL = "equal shares"
BOUND = "no job waits for prep (bound)"

SETTLE_S, RATED_S = 300, 300
"""Seconds for feeds to measure their needs and divide the workers, and the seconds after them whose rates count."""

LIMIT_S = 200_000.0
"""A workload that takes longer is stuck."""


@dataclass(frozen=True)
class Outcome:
    """Result of one policy.

    Attributes:
        makespan_s: from the start to the end of the last job.
        stall: waiting, as a share of the jobs' time from arrival to end.
        job_s: mean time of a job from arrival to end.
        slowdown: mean of that time divided by the time of a job that never waits; large for starved jobs.
        changes: changes of workers of running jobs.
    """

    policy: str
    jobs: int
    pool: int
    makespan_s: float
    stall: float
    job_s: float
    slowdown: float
    changes: float


@dataclass(frozen=True)
class StaticOutcome:
    """Rates of jobs that all train at once, with one policy.

    Attributes:
        samples_per_s: of all jobs together.
        least: rate of the slowest job, relative to its rate without waiting.
    """

    policy: str
    jobs: int
    pool: int
    samples_per_s: float
    least: float


def simulate(jobs: Sequence[TrainingRun], policy: Policy) -> dict[str, float]:
    """Return the time at which each job ends, in seconds."""
    left = {job.name: job.samples for job in jobs}
    ends: dict[str, float] = {}
    now = 0.0
    while len(ends) < len(jobs):
        assert now < LIMIT_S, f"{sorted(left.keys() - ends.keys())} do not end"
        active = [job for job in jobs if job.arrives_s <= now and job.name not in ends]
        workers = policy.workers(active, now)
        served = {job.name: min(left[job.name], job.rate_per_s(workers[job.name])) for job in active}
        policy.trained(served)
        for job in active:
            left[job.name] -= served[job.name]
            if left[job.name] <= 0:
                ends[job.name] = now + served[job.name] / job.rate_per_s(workers[job.name])
        now += 1.0
    return ends


def settled_rates(jobs: Sequence[TrainingRun], policy: Policy) -> dict[str, float]:
    """Return the samples/s of each job, for jobs that are all there from the start and do not end."""
    totals = dict.fromkeys((job.name for job in jobs), 0.0)
    for second in range(SETTLE_S + RATED_S):
        workers = policy.workers(jobs, float(second))
        served = {job.name: job.rate_per_s(workers[job.name]) for job in jobs}
        policy.trained(served)
        if second >= SETTLE_S:
            totals = {name: total + served[name] for name, total in totals.items()}
    return {name: total / RATED_S for name, total in totals.items()}


def policies(jobs: int, pool: int, *, seed: int) -> dict[str, Callable[[], Policy]]:
    """Return how to make each policy, by its name in the table."""
    return {
        OURS: lambda: Feeds(pool, seed=seed),
        "A-Dloader, 30 s window, 16 s pause": lambda: AtEvents(by_surplus, pool, window_s=WINDOW_S, pause_s=PAUSE_S),
        EQUAL: lambda: AtEvents(equal_shares, pool),
        "in proportion to need": lambda: AtEvents(in_proportion, pool),
        "first come, first served": lambda: AtEvents(first_come, pool),
        "a pool for each": lambda: AtEvents(own_pools(jobs), pool),
    }


def measure(jobs: int, *, seeds: int, tell: Callable[[str], None]) -> list[Outcome]:
    """Simulate workloads of so many jobs with every policy; results are means over the seeds."""
    pool = pool_of(jobs)
    runs = [workload(jobs, seed=seed) for seed in range(seeds)]
    found: dict[str, list[Outcome]] = {}
    for seed, each in enumerate(runs):
        for name, make in policies(jobs, pool, seed=seed).items():
            tell(f"{jobs} jobs, workload {seed + 1} of {seeds}: {name}")
            policy = make()
            ends = simulate(each, policy)
            found.setdefault(name, []).append(_outcome(name, each, pool, ends, policy.changes))
        bound = {run.name: run.arrives_s + run.least_s for run in each}
        found.setdefault(BOUND, []).append(_outcome(BOUND, each, pool, bound, 0))
    return [_mean(outcomes) for outcomes in found.values()]


def measure_static(jobs: int, *, seeds: int) -> list[StaticOutcome]:
    """Divide the pool between so many jobs that all train at once (A-Dloader's static experiment), by each policy."""
    pool = pool_of(jobs)
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        runs = at_once(jobs, seed=seed)
        for name, make in policies(jobs, pool, seed=seed).items():
            rates = settled_rates(runs, make())
            least = min(rates[run.name] / min(run.step_per_s, run.fetch_per_s) for run in runs)
            found.setdefault(name, []).append((sum(rates.values()), least))
    return [
        StaticOutcome(name, jobs, pool, mean(rate for rate, _ in each), mean(least for _, least in each))
        for name, each in found.items()
    ]


def _outcome(name: str, runs: Sequence[TrainingRun], pool: int, ends: Mapping[str, float], changes: int) -> Outcome:
    took_s = [ends[run.name] - run.arrives_s for run in runs]
    return Outcome(
        policy=name,
        jobs=len(runs),
        pool=pool,
        makespan_s=max(ends.values()),
        stall=1 - sum(run.samples / run.step_per_s for run in runs) / sum(took_s),
        job_s=mean(took_s),
        slowdown=mean(took / run.least_s for run, took in zip(runs, took_s, strict=True)),
        changes=changes,
    )


def _mean(found: Sequence[Outcome]) -> Outcome:
    first = found[0]
    figures = ("makespan_s", "stall", "job_s", "slowdown", "changes")
    return Outcome(first.policy, first.jobs, first.pool, *(mean(getattr(o, name) for o in found) for name in figures))
