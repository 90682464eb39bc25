"""The planner: workers by A-Dloader, threads by Lobster, caches by savings, nodes by speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mbaas import units
from mbaas.analysis.plan.decoded import KeptDecoded, about_decoding, fill_with_decoded
from mbaas.analysis.plan.jobs import Cluster, Points, TrainingJob
from mbaas.analysis.plan.result import CachePlan, FitQuality, JobPlan, Limit, Plan
from mbaas.analysis.plan.supply import (
    Fetch,
    Kept,
    bytes_by_tier,
    cache_bytes,
    fetches,
    fill_caches,
    misfit,
    network_rates,
    pool_of,
)
from mbaas.costs import HOUR_S
from mbaas.errors import ConfigError
from mbaas.model.curves import Fit, ThroughputCurve
from mbaas.model.lending import Job, JobWorkers, allocate
from mbaas.model.scaling import Observation
from mbaas.model.threads import Split, divide_threads, split_threads

AS_GOOD = 0.99
"""Fewer nodes are preferred if jobs reach this share of the best speed."""


CLOSE = 1e-6
"""Relative tolerance for rounding errors."""


def plan(jobs: Sequence[TrainingJob], cluster: Cluster) -> Plan:
    """Plan for the fewest nodes that are as good as any number within the bounds.

    The measure is the mean over jobs of predicted speed / full speed.

    Raises:
        ConfigError: no jobs, jobs that do not fit even the most nodes, or two jobs of the same name.
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
    curves = {job.name: job.blended_curve(cluster.node.cores, shares[job.name]).over(nodes) for job in jobs}
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
        _Made(
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
        about_decoding(
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
        storage=quality(cluster.storage_fit, cluster.storage),
    )


def quality(fit: Fit, points: Points) -> FitQuality:
    """Return how well a fit agrees with its points."""
    return FitQuality(
        points=fit.points,
        r_squared=fit.r_squared,
        worst_error=max(abs(fit.curve.rate(count) / rate - 1) for count, rate in points),
        lines=fit.curve.knots,
        slope=fit.curve.slope,
        most=max(count for count, _ in points),
    )


@dataclass(frozen=True)
class _Made:
    """Decisions for one job; ``prepared_per_s`` and ``network_per_s`` in samples/s."""

    job: TrainingJob
    want: Job
    given: JobWorkers
    fetch: Fetch
    prepared_per_s: float
    network_per_s: float
    kept: Kept
    decoded: KeptDecoded

    @property
    def rate_per_s(self) -> float:
        """The lowest rate; exactly the step's if they are equal within `CLOSE`."""
        return self._rate_per_s(self.job.step_per_s, self.prepared_per_s)

    @property
    def ends_per_s(self) -> tuple[float, float]:
        """The rate at the slow and at the fast end of the measured intervals, with the same workers."""
        # Storage, disks and the network are stated without an interval.
        job = self.job
        slow, fast = (
            self._rate_per_s(job.step_per_s * step, self.prepared_per_s * prep)
            for step, prep in zip(job.step_spread, job.blended_spread(self.decoded.share), strict=True)
        )
        return slow, fast

    def _rate_per_s(self, full_per_s: float, prepared_per_s: float) -> float:
        loaded_per_s = min(self.fetch.per_s, prepared_per_s, self.network_per_s)
        return full_per_s if loaded_per_s >= full_per_s * (1 - CLOSE) else loaded_per_s


def _demand(job: TrainingJob, curve: ThroughputCurve, pool: int) -> float:
    return min(job.step_per_s, curve.peak(most=pool).rate_per_s)


def _epochs_per_s(jobs: Sequence[TrainingJob], demands: Mapping[str, float]) -> dict[str, float]:
    found = dict.fromkeys((job.dataset.name for job in jobs), 0.0)
    for job in jobs:
        found[job.dataset.name] += demands[job.name] / job.dataset.samples
    return found


def _kept(
    jobs: Sequence[TrainingJob], demands: Mapping[str, float], *, nodes: int, memory_bytes: int, disk_bytes: int
) -> dict[str, Kept]:
    epochs_per_s = _epochs_per_s(jobs, demands)
    ranked = [(dataset, epochs_per_s[name]) for name, dataset in {j.dataset.name: j.dataset for j in jobs}.items()]
    return fill_caches(ranked, nodes=nodes, memory_bytes=memory_bytes, disk_bytes=disk_bytes)


def _caches(
    jobs: Sequence[TrainingJob],
    kept: Mapping[str, Kept],
    decoded: Mapping[str, KeptDecoded],
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
            epochs_per_h=3600 * epochs_per_s[name],
        )
        for name, dataset in {job.dataset.name: job.dataset for job in jobs}.items()
    )


def _threads(made: Sequence[_Made], cluster: Cluster, nodes: int) -> list[Split]:
    """Split a node's threads for each job. Each has a reading thread; reading time decides on the others."""
    reader_per_s = cluster.storage_fit.curve.rate(1)
    reading = [m.rate_per_s * m.fetch.stored_bytes / reader_per_s for m in made]
    more = divide_threads(max(0, cluster.node.read_threads - len(made)), lengths=reading)
    splits = []
    for each, readers in zip(made, more, strict=True):
        workers = max(1, math.ceil(each.given.workers / nodes))  # on the node with the most, which sets the pace
        splits.append(
            split_threads(
                workers + 1 + readers,
                # More threads than workers cannot prepare, so the rest reads.
                prep=each.job.blended_curve(cluster.node.cores, each.decoded.share).flat_beyond(workers),
                samples=each.job.batch_size / nodes,
                tiers=bytes_by_tier(each.job, cluster, nodes, each.kept, each.decoded.share),
                step_s=each.job.batch_size / each.job.step_per_s,
            )
        )
    return splits


def _job_plan(made: _Made, split: Split, *, pool: int, decoding: str, per_h: float | None) -> JobPlan:
    job, (limit, reason) = made.job, _limit(made, pool=pool)
    # A worker that never waits for bytes keeps one core busy, in a feed or in a DataLoader. But a DataLoader decodes in
    # every epoch.
    alone_cpu_h = job.dataset.samples / job.worker_per_s() / HOUR_S
    cpu_h = job.dataset.samples / job.worker_per_s(made.decoded.share) / HOUR_S / job.trials
    return JobPlan(
        job=job.name,
        dataset=job.dataset.name,
        trials=job.trials,
        workers=made.given.workers,
        scaler_workers=_scaler_workers(made, pool=pool),
        needed=made.want.needed,
        step_per_s=job.step_per_s,
        prep_per_s=made.prepared_per_s,
        fetch_per_s=made.fetch.per_s,
        network_per_s=made.network_per_s,
        trial_per_s=made.rate_per_s,
        trial_low_per_s=made.ends_per_s[0],
        trial_high_per_s=made.ends_per_s[1],
        epoch_s=job.dataset.samples / made.rate_per_s,
        limit=limit,
        reason=reason,
        decoded_share=made.decoded.share,
        decoding=decoding,
        threads=split,
        fit=quality(job.prep_fit, job.prep),
        cpu_h=cpu_h,
        alone_cpu_h=alone_cpu_h,
        price=None if per_h is None else cpu_h * per_h,
        alone_price=None if per_h is None else alone_cpu_h * per_h,
    )


def _limit(made: _Made, *, pool: int) -> tuple[Limit, str]:
    full_per_s, fetch = made.job.step_per_s, made.fetch
    workers, verb = units.counted(made.given.workers, "worker"), "prepares" if made.given.workers == 1 else "prepare"
    prepared = f"{workers} {verb} {_rate(made.prepared_per_s)}"
    fetched = f"caches and storage bring {_rate(fetch.per_s)}"
    could = f"training could take {_rate(full_per_s)}"
    rate = min(full_per_s, made.prepared_per_s, fetch.per_s, made.network_per_s)
    # Training comes first in a tie: a job that trains at full speed lacks nothing.
    if rate >= full_per_s * (1 - CLOSE):
        return "training", f"trains at full speed, {_rate(rate)} in each trial: {prepared}, {fetched}"
    if rate >= made.network_per_s * (1 - CLOSE):
        return "network", f"the network brings each node {_rate(made.network_per_s)} of finished pixels; {could}"
    if rate >= fetch.per_s * (1 - CLOSE):
        # Tiers are read in turn, so the slowest one is the one to make faster.
        seconds: dict[Limit, float] = {"storage": fetch.storage_s, "disk": fetch.disk_s, "memory": fetch.memory_s}
        slowest = max(seconds, key=seconds.__getitem__)
        stored = f", {units.percent(fetch.stored_share)} of its samples from storage" if slowest == "storage" else ""
        return slowest, f"{fetched}{stored}; {prepared}, {could}"
    # Only prep is left: either other jobs needed the workers, or more of them would contend for the same cores.
    if made.given.limit == "pool":
        return "pool", f"{prepared}; {could}, but the pool of {pool} has no more workers for it"
    return "prep", f"{prepared}, and more would not be faster; {could}"


def _rate(per_s: float) -> str:
    return "any number of samples/s" if math.isinf(per_s) else f"{units.number(per_s)} samples/s"


def _scaler_workers(made: _Made, *, pool: int) -> int:
    # Uses the scaler's own class, so that plan and feed agree. Stalls and idleness do not affect `needed`.
    seen = Observation(
        prep_stall=0.0,
        fetch_stall=0.0,
        demand_per_s=made.job.step_per_s,
        worker_per_s=made.job.worker_per_s(made.decoded.share),
        fetch_per_s=made.fetch.per_s,
        workers=made.given.workers,
        idle=0.0,
        reserved=min(made.job.reserved_workers, pool),
        most=pool,
    )
    return seen.needed or 1  # a feed always keeps one


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
