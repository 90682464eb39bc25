"""The planner: workers by A-Dloader, threads by Lobster, caches by savings, nodes by speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from mbaas.base import units
from mbaas.errors import ConfigError
from mbaas.model.costs import HOUR_S
from mbaas.model.curves import MeasuredCurve, ThroughputCurve
from mbaas.model.lending import Job, JobWorkers, allocate
from mbaas.model.quantity import AsJson
from mbaas.model.scaling import bounded_workers
from mbaas.model.supply import ResourceTimes
from mbaas.model.threads import ThreadSplit, divide_threads, split_threads
from mbaas.tools.plan.jobs import Cluster, TrainingJob
from mbaas.tools.plan.supply import (
    CachedPart,
    DecodedPart,
    Fetch,
    bytes_by_tier,
    cache_bytes,
    decoding_clause,
    fetches,
    fill_caches,
    fill_with_decoded,
    misfit,
    network_rates,
    pool_of,
)

AS_GOOD = 0.99
"""Fewer nodes are preferred if jobs reach this share of the best speed."""


Limit = Literal["training", "prep", "pool", "memory", "disk", "storage", "network"]
"""Bottleneck of a job: its step, its own prep at its peak, the pool's size, a tier that bytes come from, or the network
between nodes."""


@dataclass(frozen=True)
class FitQuality:
    """Agreement of a fitted curve with its points.

    Attributes:
        r_squared: share of the variance that is explained; 1 is perfect.
        worst_error: largest relative difference from a point.
        lines, slope: (count, rate) at each bend, from the origin; rate that one more adds beyond the last bend.
        most: largest count of a point; beyond it the curve is a guess.
    """

    points: int
    r_squared: float
    worst_error: float
    lines: tuple[tuple[float, float], ...]
    slope: float
    most: float


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Resources and predicted speed of one job.

    Attributes:
        workers: prep workers on all nodes, the value for ``prep_workers``.
        scaler_workers: number that the running feed would request from one worker's rate, a good ``max_prep_workers``.
        needed: prep workers, with a fraction of the last one, at which loading is as fast as possible.
        step_per_s, prep_per_s, fetch_per_s: samples/s of a trial's step, of its workers, and of caches and storage.
        network_per_s: samples/s that the network would deliver to each node; infinite with one node.
        trial_per_s: predicted samples/s of each trial, the lowest of these rates.
        trial_low_per_s, trial_high_per_s: its interval, from the uncertainty of the measured step and prep.
        epoch_s: seconds of an epoch at that rate.
        limit, reason: bottleneck, as a word and as a sentence.
        decoded_share: share of its samples that its feed caches decoded, from 0 to 1; all rates include its effect.
        decoding: decoding's share of prep, and the effect of memory for decoded samples, as a clause; or empty.
        threads: split of one node's threads for this job between prep and reading.
        fit: agreement of its prep curve with the points.
        cpu_h: CPU hours of prep per epoch and trial: a trial's part of the shared work.
        alone_cpu_h: the same if each trial has its own DataLoader.
        price, alone_price: cost of these hours; None without the price of a core.
    """

    job: str
    dataset: str
    trials: int
    workers: int
    scaler_workers: int
    needed: float
    step_per_s: float
    prep_per_s: float
    fetch_per_s: float
    network_per_s: float
    trial_per_s: float
    trial_low_per_s: float
    trial_high_per_s: float
    epoch_s: float
    limit: Limit
    reason: str
    decoded_share: float
    decoding: str
    threads: ThreadSplit
    fit: FitQuality
    cpu_h: float
    alone_cpu_h: float
    price: float | None
    alone_price: float | None


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Cached part of one dataset.

    Attributes:
        memory_bytes, disk_bytes: cached on each node by all feeds on the dataset, including decoded samples.
        memory_share, disk_share: cached shares of the dataset, on all nodes together.
        epochs_per_h: epochs that all jobs together would read if fetch were unlimited; caches are divided by it.
    """

    dataset: str
    dataset_bytes: int
    memory_bytes: int
    disk_bytes: int
    memory_share: float
    disk_share: float
    epochs_per_h: float


@dataclass(frozen=True, kw_only=True)
class Plan(AsJson):
    """A plan for a cluster.

    Attributes:
        nodes, why_nodes: number of nodes to request from the autoscaler, and the reason in one sentence.
        least_nodes, most_nodes: the autoscaler's bounds.
        pool, idle_workers: prep workers that fit next to the trials, and those that no job can use.
        cache_memory_bytes: memory of a node that caches may use.
        jobs, caches: in the given order.
        storage: fit of the storage rate, in bytes/s.
    """

    nodes: int
    least_nodes: int
    most_nodes: int
    why_nodes: str
    pool: int
    idle_workers: int
    cache_memory_bytes: int
    jobs: tuple[JobPlan, ...]
    caches: tuple[CachePlan, ...]
    storage: FitQuality


def plan(jobs: Sequence[TrainingJob], cluster: Cluster) -> Plan:
    """Plan for the fewest nodes that are as good as any number within the bounds.

    The measure is the mean over jobs of predicted speed / full speed.
    """
    if not jobs:
        raise ConfigError("a plan needs at least 1 job, got 0")
    names = [job.name for job in jobs]  # results are by name
    if len(set(names)) < len(names):
        raise ConfigError(f"names of jobs must differ, got {', '.join(names)}")
    if why := misfit(jobs, cluster, cluster.most_nodes):  # jobs that do not fit the most nodes fit no fewer
        raise ConfigError(why)
    # Tries every number of nodes: one node more may move a dataset from disk to memory, so speed grows unevenly.
    counts = range(cluster.least_nodes, cluster.most_nodes + 1)
    plans = [plan_on(jobs, cluster, nodes) for nodes in counts if not misfit(jobs, cluster, nodes)]
    best = max(map(speed, plans))
    chosen = next(index for index, made in enumerate(plans) if speed(made) >= AS_GOOD * best)
    # Only a comparison of all plans explains the number of nodes.
    return replace(plans[chosen], why_nodes=_why_nodes(jobs, cluster, plans, chosen))


def speed(made: Plan) -> float:
    """Return the mean over jobs of predicted speed / full speed."""
    return sum(job.trial_per_s / job.step_per_s for job in made.jobs) / len(made.jobs)


def plan_on(jobs: Sequence[TrainingJob], cluster: Cluster, nodes: int) -> Plan:
    """Plan for a given number of nodes.

    1. Datasets get cache space by how often jobs would read them if fetch were unlimited. Decoded samples get the rest.
    2. Storage is divided between jobs by their demand beyond the caches.
    3. Prep workers go to jobs by A-Dloader's rule: as fast as training, or as fetch if that is slower.
    4. The network is divided by the resulting traffic, and each node's threads by Lobster's rule.
    """
    pool = pool_of(jobs, cluster, nodes)
    # Demand of each job if fetch were unlimited. Caches and storage are divided by it before workers are. A job that
    # gets fewer workers leaves part of its share unused, so the plan promises the others too little, not too much.
    demands = {job.name: _demand(job, job.prep_curve(cluster.node.cores).over(nodes), pool) for job in jobs}
    memory_bytes = cache_bytes(jobs, cluster, nodes)
    kept = _kept(jobs, demands, nodes=nodes, memory_bytes=memory_bytes, disk_bytes=cluster.node.disk_bytes)
    spare_bytes = memory_bytes - sum(each.memory_bytes for each in kept.values())
    decoded = fill_with_decoded(
        jobs,
        nodes=nodes,
        kept=kept,
        spare_bytes=spare_bytes,
        epochs_per_s={job.name: demands[job.name] / job.dataset.samples for job in jobs},
    )
    spare_bytes -= sum(each.more_bytes for each in decoded.values())
    shares = {name: each.share for name, each in decoded.items()}
    # Workers contend only within their own node.
    curves = {job.name: job.prep_curve(cluster.node.cores, shares[job.name]).over(nodes) for job in jobs}
    demands = {job.name: _demand(job, curves[job.name], pool) for job in jobs}
    fetch = fetches(jobs, cluster, nodes, kept=kept, decoded=shares, demands=demands)
    wanted = {job.name: min(job.step_per_s, fetch[job.name].per_s) for job in jobs}
    wants = [
        Job(name=j.name, demand_per_s=wanted[j.name], prep=curves[j.name], reserved=j.reserved_workers) for j in jobs
    ]
    allocation = allocate(wants, pool=pool)
    prepared = {given.job: curves[given.job].rate(given.workers) for given in allocation.by_job}
    # Last, because only samples that workers really prepare travel.
    network = network_rates(
        jobs, cluster, nodes, rates={name: min(rate, prepared[name]) for name, rate in wanted.items()}
    )
    made = [
        _JobDecision(
            job,
            want,
            given,
            fetch[job.name],
            prepared[job.name],
            network[job.name],
            kept[job.dataset.name],
            decoded[job.name],
        )
        for job, want, given in zip(jobs, wants, allocation.by_job, strict=True)
    ]
    threads, per_h = _threads(made, cluster, nodes), cluster.node.cpu_price_per_h
    told = [
        decoding_clause(
            m.job,
            cluster,
            nodes,
            workers=m.given.workers,
            kept=m.decoded,
            room_bytes=spare_bytes + m.kept.memory_bytes + m.decoded.more_bytes,
        )
        for m in made
    ]
    return Plan(
        nodes=nodes,
        least_nodes=cluster.least_nodes,
        most_nodes=cluster.most_nodes,
        why_nodes="",
        pool=pool,
        idle_workers=allocation.idle,
        cache_memory_bytes=memory_bytes,
        jobs=tuple(
            _job_plan(each, split, pool=pool, decoding=said, per_h=per_h)
            for each, split, said in zip(made, threads, told, strict=True)
        ),
        caches=_caches(jobs, kept, decoded, demands),
        storage=quality(cluster.storage, lines=cluster.storage_curve),
    )


def quality(curve: MeasuredCurve, *, lines: ThroughputCurve | None = None) -> FitQuality:
    """Return how well a curve, or other ``lines`` for it, agrees with its points."""
    lines = curve.fit.curve if lines is None else lines
    return FitQuality(
        points=len(curve.points),
        r_squared=curve.fit.r_squared,
        worst_error=max(abs(lines.rate(count) / rate.value - 1) for count, rate in curve.points),
        lines=lines.knots,
        slope=lines.slope,
        most=curve.most,
    )


@dataclass(frozen=True)
class _JobDecision:
    """Decisions for one job; ``prepared_per_s`` and ``network_per_s`` in samples/s."""

    job: TrainingJob
    want: Job
    given: JobWorkers
    fetch: Fetch
    prepared_per_s: float
    network_per_s: float
    kept: CachedPart
    decoded: DecodedPart

    def times(self, *, full_per_s: float, prep: float = 1.0) -> ResourceTimes:
        """Return the seconds of a sample at a rate of the step, with prep that many times as fast."""
        return ResourceTimes(
            compute={"training": 1 / full_per_s},
            prep={"prep": 1 / (self.prepared_per_s * prep), "network": 1 / self.network_per_s},
            fetch=self.fetch.seconds,
        )

    @property
    def limit(self) -> str:
        """The bottleneck; "prep" also if the pool is too small."""
        limit = self.times(full_per_s=self.job.step_per_s).limit
        if limit == "prep" and self.given.limit == "training":  # as many workers as fetch can use
            return max(self.fetch.seconds, key=self.fetch.seconds.__getitem__)
        return limit

    def rate_per_s(self, *, full_per_s: float | None = None, prep: float = 1.0) -> float:
        """Return the samples/s of each trial; exactly the step's if that is the limit."""
        full_per_s = self.job.step_per_s if full_per_s is None else full_per_s
        times = self.times(full_per_s=full_per_s, prep=prep)
        return full_per_s if times.limit == "training" else 1 / times.pace_s


def _demand(job: TrainingJob, curve: ThroughputCurve, pool: int) -> float:
    return min(job.step_per_s, curve.peak(most=pool).rate_per_s)


def _epochs_per_s(jobs: Sequence[TrainingJob], demands: Mapping[str, float]) -> dict[str, float]:
    found = dict.fromkeys((job.dataset.name for job in jobs), 0.0)
    for job in jobs:
        found[job.dataset.name] += demands[job.name] / job.dataset.samples
    return found


def _kept(
    jobs: Sequence[TrainingJob], demands: Mapping[str, float], *, nodes: int, memory_bytes: int, disk_bytes: int
) -> dict[str, CachedPart]:
    epochs_per_s = _epochs_per_s(jobs, demands)
    ranked = [(dataset, epochs_per_s[name]) for name, dataset in {j.dataset.name: j.dataset for j in jobs}.items()]
    return fill_caches(ranked, nodes=nodes, memory_bytes=memory_bytes, disk_bytes=disk_bytes)


def _caches(
    jobs: Sequence[TrainingJob],
    kept: Mapping[str, CachedPart],
    decoded: Mapping[str, DecodedPart],
    demands: Mapping[str, float],
) -> tuple[CachePlan, ...]:
    epochs_per_s = _epochs_per_s(jobs, demands)
    more_bytes = dict.fromkeys(epochs_per_s, 0)
    for job in jobs:
        more_bytes[job.dataset.name] += decoded[job.name].more_bytes
    return tuple(
        CachePlan(
            dataset=name,
            dataset_bytes=dataset.dataset_bytes,
            **vars(replace(kept[name], memory_bytes=kept[name].memory_bytes + more_bytes[name])),
            epochs_per_h=HOUR_S * epochs_per_s[name],
        )
        for name, dataset in {job.dataset.name: job.dataset for job in jobs}.items()
    )


def _threads(made: Sequence[_JobDecision], cluster: Cluster, nodes: int) -> list[ThreadSplit]:
    """Split a node's threads for each job. Each has a reading thread; reading time decides on the others."""
    reader_per_s = cluster.storage_curve.rate(1)
    reading = [m.rate_per_s() * m.fetch.stored_bytes / reader_per_s for m in made]
    more = divide_threads(max(0, cluster.node.read_threads - len(made)), lengths=reading)
    splits = []
    for each, readers in zip(made, more, strict=True):
        workers = max(1, math.ceil(each.given.workers / nodes))  # on the node with the most, which sets the pace
        splits.append(
            split_threads(
                workers + 1 + readers,
                # More threads than workers cannot prepare, so the rest reads.
                prep=each.job.prep_curve(cluster.node.cores, each.decoded.share).flat_beyond(workers),
                samples=each.job.batch_size / nodes,
                tiers=bytes_by_tier(each.job, cluster, nodes, each.kept, each.decoded.share),
                step_s=each.job.batch_size / each.job.step_per_s,
            )
        )
    return splits


def _job_plan(made: _JobDecision, split: ThreadSplit, *, pool: int, decoding: str, per_h: float | None) -> JobPlan:
    job, (limit, reason), rate_per_s = made.job, _limit(made, pool=pool), made.rate_per_s()
    # Storage, disks and the network are stated without an interval.
    slow, fast = job.spread(made.decoded.share)
    # A worker that never waits for bytes keeps one core busy, in a feed or in a DataLoader. But a DataLoader decodes in
    # every epoch.
    alone_cpu_h = job.dataset.samples / job.worker_per_s() / HOUR_S
    cpu_h = job.dataset.samples / job.worker_per_s(made.decoded.share) / HOUR_S / job.trials
    return JobPlan(
        job=job.name,
        dataset=job.dataset.name,
        trials=job.trials,
        workers=made.given.workers,
        # As the scaler of the running feed decides, from the rate of one worker; a feed always keeps one.
        scaler_workers=bounded_workers(
            min(job.step_per_s, made.fetch.per_s),
            job.worker_per_s(made.decoded.share),
            reserved=min(job.reserved_workers, pool),
            most=pool,
        )
        or 1,
        needed=made.want.needed,
        step_per_s=job.step_per_s,
        prep_per_s=made.prepared_per_s,
        fetch_per_s=made.fetch.per_s,
        network_per_s=made.network_per_s,
        trial_per_s=rate_per_s,
        trial_low_per_s=made.rate_per_s(full_per_s=job.step.low, prep=slow),
        trial_high_per_s=made.rate_per_s(full_per_s=job.step.high, prep=fast),
        epoch_s=job.dataset.samples / rate_per_s,
        limit=limit,
        reason=reason,
        decoded_share=made.decoded.share,
        decoding=decoding,
        threads=split,
        fit=quality(job.prep),
        cpu_h=cpu_h,
        alone_cpu_h=alone_cpu_h,
        price=None if per_h is None else cpu_h * per_h,
        alone_price=None if per_h is None else alone_cpu_h * per_h,
    )


def _limit(made: _JobDecision, *, pool: int) -> tuple[Limit, str]:
    full_per_s, fetch = made.job.step_per_s, made.fetch
    workers, verb = units.counted(made.given.workers, "worker"), "prepares" if made.given.workers == 1 else "prepare"
    prepared = f"{workers} {verb} {_rate(made.prepared_per_s)}"
    fetched = f"caches and storage bring {_rate(fetch.per_s)}"
    could = f"training could take {_rate(full_per_s)}"
    limit = made.limit
    if limit == "training":
        return "training", f"trains at full speed, {_rate(full_per_s)} in each trial: {prepared}, {fetched}"
    if limit == "network":
        return "network", f"the network brings each node {_rate(made.network_per_s)} of finished pixels; {could}"
    if limit in ("storage", "disk", "memory"):
        # Tiers are read in turn, so the slowest one is the one to make faster.
        stored = f", {units.percent(fetch.stored_share)} of its samples from storage" if limit == "storage" else ""
        return cast(Limit, limit), f"{fetched}{stored}; {prepared}, {could}"
    # Only prep is left: either other jobs needed the workers, or more of them would contend for the same cores.
    if made.given.limit == "pool":
        return "pool", f"{prepared}; {could}, but the pool of {pool} has no more workers for it"
    return "prep", f"{prepared}, and more would not be faster; {could}"


def _rate(per_s: float) -> str:
    return "any number of samples/s" if math.isinf(per_s) else f"{units.number(per_s)} samples/s"


def _why_nodes(jobs: Sequence[TrainingJob], cluster: Cluster, plans: Sequence[Plan], chosen: int) -> str:
    made = plans[chosen]
    nodes, least, most = made.nodes, cluster.least_nodes, cluster.most_nodes
    if least == most:
        return f"{units.counted(nodes, 'node')} given; jobs reach {units.percent(speed(made))} of full speed"
    if nodes == least:
        fewer = "the fewest there may be"
    elif why := misfit(jobs, cluster, nodes - 1):
        fewer = f"{nodes - 1} would not do, because {why}"
    else:
        fewer = f"with {nodes - 1} jobs would reach only {units.percent(speed(plans[chosen - 1]))}"
    more = "the most there may be" if nodes == most else f"up to {most} make them hardly any faster"
    return f"{units.counted(nodes, 'node')}: jobs reach {units.percent(speed(made))} of full speed; {fewer}; {more}"
