"""The planner: workers by A-Dloader, threads by Lobster, caches by savings, nodes by speed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from mbaas.base import units
from mbaas.errors import ConfigError
from mbaas.model import words
from mbaas.model.curves import MeasuredCurve, ThroughputCurve
from mbaas.model.forms import WORTHWHILE
from mbaas.model.lending import Job, JobWorkers, allocate
from mbaas.model.quantity import AsJson, spanning
from mbaas.model.scaling import bounded_workers
from mbaas.model.sharing import HOUR_S
from mbaas.model.supply import ResourceTimes
from mbaas.model.threads import ThreadSplit, divide_threads, split_threads
from mbaas.tools.plan.jobs import Cluster, Samples, TrainingJob
from mbaas.tools.plan.supply import (
    CachePlan,
    DecodedPart,
    Fetch,
    Fleet,
    bytes_by_tier,
    fetches,
    fill_caches,
    fill_with_decoded,
    network_rates,
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
        scaler_workers: number that the running feed would request, a good ``max_prep_workers``.
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
        cpu_s: CPU-seconds of prep per epoch and trial: a trial's part of the shared work.
        alone_cpu_s: the same if each trial has its own DataLoader.
        price, alone_price: price of this time; None without the price of a core.
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
    cpu_s: float
    alone_cpu_s: float
    price: float | None
    alone_price: float | None


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

    @property
    def speed(self) -> float:
        """Mean over jobs of predicted speed / full speed."""
        return sum(job.trial_per_s / job.step_per_s for job in self.jobs) / len(self.jobs)


def plan(jobs: Sequence[TrainingJob], cluster: Cluster) -> Plan:
    """Plan for the fewest nodes that are as good as any number within the bounds, by `Plan.speed`."""
    if not jobs:
        raise ConfigError("a plan needs at least 1 job, got 0")
    names = [job.name for job in jobs]  # results are by name
    if len(set(names)) < len(names):
        raise ConfigError(f"names of jobs must differ, got {', '.join(names)}")
    # Tries every number of nodes: one node more may move a dataset from disk to memory, so speed grows unevenly.
    fleets = [Fleet(jobs, cluster, nodes) for nodes in range(cluster.nodes.least, cluster.nodes.most + 1)]
    if why := fleets[-1].misfit:  # jobs that do not fit the most nodes fit no fewer
        raise ConfigError(why)
    plans = [plan_on(fleet) for fleet in fleets if not fleet.misfit]
    best = max(made.speed for made in plans)
    chosen = next(index for index, made in enumerate(plans) if made.speed >= AS_GOOD * best)
    # Only a comparison of all plans explains the number of nodes.
    return replace(plans[chosen], why_nodes=_why_nodes(fleets, plans, chosen))


def plan_on(fleet: Fleet) -> Plan:
    """Plan for a given number of nodes.

    1. Datasets get cache space by how often jobs would read them if fetch were unlimited. Decoded samples get the rest.
    2. Storage is divided between jobs by their demand beyond the caches.
    3. Prep workers go to jobs by A-Dloader's rule: as fast as training, or as fetch if that is slower.
    4. The network is divided by the resulting traffic, and each node's threads by Lobster's rule.
    """
    jobs, memory_bytes = fleet.jobs, fleet.cache_bytes
    # Demand of each job if fetch were unlimited. Caches and storage are divided by it before workers are. A job that
    # gets fewer workers leaves part of its share unused, so the plan promises the others too little, not too much.
    demands = {job.name: fleet.demand_per_s(job) for job in jobs}
    kept = fill_caches(
        [(dataset, _epochs_per_s(jobs, dataset.name, demands)) for dataset in _datasets(jobs)],
        nodes=fleet.nodes,
        memory_bytes=memory_bytes,
        disk_bytes=fleet.cluster.node.disk_bytes,
    )
    spare_bytes = memory_bytes - sum(each.memory_bytes for each in kept.values())
    decoded = fill_with_decoded(fleet, kept=kept, spare_bytes=spare_bytes, demands=demands)
    spare_bytes -= sum(each.more_bytes for each in decoded.values())
    shares = {name: each.share for name, each in decoded.items()}
    demands = {job.name: fleet.demand_per_s(job, shares[job.name]) for job in jobs}
    fetch = fetches(fleet, kept=kept, decoded=shares, demands=demands)
    wants = [
        Job(
            name=job.name,
            demand_per_s=min(job.step_per_s, fetch[job.name].per_s),
            prep=fleet.prep_curve(job, shares[job.name]),
            reserved=job.reserved_workers,
        )
        for job in jobs
    ]
    allocation = allocate(wants, pool=fleet.pool)
    given = allocation.workers
    # Last, because only samples that workers really prepare travel.
    travels = {want.name: min(want.demand_per_s, want.prep.rate(given[want.name])) for want in wants}
    network = network_rates(fleet, rates=travels)
    decided = [
        _Decision(fleet, job, want, workers, fetch[job.name], network[job.name], decoded[job.name])
        for job, want, workers in zip(jobs, wants, allocation.by_job, strict=True)
    ]
    # Each job has a reading thread on a node; reading time decides on the others.
    reader_per_s = fleet.cluster.storage_curve.rate(1)
    reading = [each.rate_per_s() * each.fetch.nbytes["storage"] / reader_per_s for each in decided]
    more = divide_threads(max(0, fleet.cluster.node.read_threads - len(jobs)), lengths=reading)
    room = {name: spare_bytes + each.memory_bytes for name, each in kept.items()}
    return Plan(
        nodes=fleet.nodes,
        least_nodes=fleet.cluster.nodes.least,
        most_nodes=fleet.cluster.nodes.most,
        why_nodes="",
        pool=fleet.pool,
        idle_workers=allocation.idle,
        cache_memory_bytes=memory_bytes,
        jobs=tuple(
            each.plan(readers=1 + readers, room_bytes=room[each.job.dataset.name] + each.decoded.more_bytes)
            for each, readers in zip(decided, more, strict=True)
        ),
        caches=tuple(
            replace(
                kept[dataset.name],
                memory_bytes=kept[dataset.name].memory_bytes
                + sum(decoded[job.name].more_bytes for job in jobs if job.dataset.name == dataset.name),
                epochs_per_h=HOUR_S * _epochs_per_s(jobs, dataset.name, demands),
            )
            for dataset in _datasets(jobs)
        ),
        storage=quality(fleet.cluster.storage, fleet.cluster.storage_curve),
    )


def _datasets(jobs: Sequence[TrainingJob]) -> Iterable[Samples]:
    return {job.dataset.name: job.dataset for job in jobs}.values()


def _epochs_per_s(jobs: Sequence[TrainingJob], dataset: str, demands: Mapping[str, float]) -> float:
    return sum(demands[job.name] / job.dataset.samples for job in jobs if job.dataset.name == dataset)


def quality(curve: MeasuredCurve, lines: ThroughputCurve) -> FitQuality:
    return FitQuality(
        points=len(curve.points),
        r_squared=curve.fit.r_squared,
        worst_error=curve.worst_error,
        lines=lines.knots,
        slope=lines.slope,
        most=curve.most,
    )


@dataclass(frozen=True)
class _Decision:
    """Resources of one job: ``given`` workers, and samples/s of the network."""

    fleet: Fleet
    job: TrainingJob
    want: Job
    given: JobWorkers
    fetch: Fetch
    network_per_s: float
    decoded: DecodedPart

    @property
    def prep_per_s(self) -> float:
        return self.want.prep.rate(self.given.workers)

    def times(self, *, full_per_s: float, prep: float = 1.0) -> ResourceTimes:
        """Return the seconds of a sample at a rate of the step, with prep that many times as fast."""
        return ResourceTimes(
            compute={"training": 1 / full_per_s},
            prep={"prep": 1 / (self.prep_per_s * prep), "network": 1 / self.network_per_s},
            fetch=self.fetch.seconds,
        )

    def rate_per_s(self, *, full_per_s: float | None = None, prep: float = 1.0) -> float:
        """Return the samples/s of each trial; exactly the step's if that is the limit."""
        full_per_s = self.job.step_per_s if full_per_s is None else full_per_s
        times = self.times(full_per_s=full_per_s, prep=prep)
        return full_per_s if times.limit == "training" else 1 / times.pace_s

    def plan(self, *, readers: int, room_bytes: int) -> JobPlan:
        """Return the job's part of the plan.

        Args:
            readers: threads of each node that read for this job.
            room_bytes: memory of each node that caches may use and that no other dataset or job has.
        """
        job, share, rate_per_s, (limit, reason) = self.job, self.decoded.share, self.rate_per_s(), self._limit()
        # Storage, disks and the network are stated without an interval.
        slow, fast = job.spread(share)
        # A worker that never waits for bytes keeps one core busy, in a feed or in a DataLoader. But a DataLoader
        # decodes in every epoch.
        alone_cpu_s = job.dataset.samples / job.worker_per_s()
        cpu_s = job.dataset.samples / job.worker_per_s(share) / job.trials
        per_h, pool = self.fleet.cluster.node.cpu_price_per_h, self.fleet.pool
        return JobPlan(
            job=job.name,
            dataset=job.dataset.name,
            trials=job.trials,
            workers=self.given.workers,
            # As the scaler of the running feed decides once it has measured its curve; a feed always keeps one.
            scaler_workers=bounded_workers(
                self.want.demand_per_s,
                self.want.prep.to_saturation(),
                reserved=min(job.reserved_workers, pool),
                most=pool,
            )
            or 1,
            needed=self.want.needed,
            step_per_s=job.step_per_s,
            prep_per_s=self.prep_per_s,
            fetch_per_s=self.fetch.per_s,
            network_per_s=self.network_per_s,
            trial_per_s=rate_per_s,
            trial_low_per_s=self.rate_per_s(full_per_s=job.step.low, prep=slow),
            trial_high_per_s=self.rate_per_s(full_per_s=job.step.high, prep=fast),
            epoch_s=job.dataset.samples / rate_per_s,
            limit=limit,
            reason=reason,
            decoded_share=share,
            decoding=self._decoding(room_bytes),
            threads=self._threads(readers),
            fit=quality(job.prep, job.prep.fit.curve),
            cpu_s=cpu_s,
            alone_cpu_s=alone_cpu_s,
            price=None if per_h is None else cpu_s / HOUR_S * per_h,
            alone_price=None if per_h is None else alone_cpu_s / HOUR_S * per_h,
        )

    def _threads(self, readers: int) -> ThreadSplit:
        job, nodes = self.job, self.fleet.nodes
        workers = max(1, math.ceil(self.given.workers / nodes))  # on the node with the most, which sets the pace
        return split_threads(
            workers + readers,
            # More threads than workers cannot prepare, so the rest reads.
            prep=job.prep_curve(self.fleet.cluster.node.cores, self.decoded.share).flat_beyond(workers),
            samples=job.batch_size / nodes,
            tiers=bytes_by_tier(self.fleet, job, self.fetch),
            step_s=job.batch_size / job.step_per_s,
        )

    def _limit(self) -> tuple[Limit, str]:
        full_per_s, fetch, workers = self.job.step_per_s, self.fetch, self.given.workers
        prepared = f"{units.counted(workers, 'worker')} {'prepares' if workers == 1 else 'prepare'}"
        prepared = f"{prepared} {_rate(self.prep_per_s)}"
        fetched = f"caches and storage bring {_rate(fetch.per_s)}"
        could = f"training could take {_rate(full_per_s)}"
        limit = self.times(full_per_s=full_per_s).limit
        if limit == "prep" and self.given.limit == "training":  # as many workers as fetch can use
            limit = fetch.slowest
        if limit == "training":
            return "training", f"trains at full speed, {_rate(full_per_s)} in each trial: {prepared}, {fetched}"
        if limit == "network":
            return "network", f"the network brings each node {_rate(self.network_per_s)} of finished pixels; {could}"
        if limit in fetch.seconds:
            # Tiers are read in turn, so the slowest one is the one to make faster.
            stored = f", {units.percent(fetch.stored_share)} of its samples from storage" if limit == "storage" else ""
            return cast(Limit, limit), f"{fetched}{stored}; {prepared}, {could}"
        # Only prep is left: either other jobs needed the workers, or more of them would contend for the same cores.
        if self.given.limit == "pool":
            return "pool", f"{prepared}; {could}, but the pool of {self.fleet.pool} has no more workers for it"
        return "prep", f"{prepared}, and more would not be faster; {could}"

    def _decoding(self, room_bytes: int) -> str:
        """Return decoding's share of prep and the effect of memory for decoded samples; "" if not measured."""
        job, kept = self.job, self.decoded
        if job.decoded_bytes is None or job.decoded_prep is None:
            return ""
        each, cores = self.given.workers / self.fleet.nodes, self.fleet.cluster.node.cores
        encoded, now, decoded = (job.prep_curve(cores, share).rate(each) for share in (0.0, kept.share, 1.0))
        share = 1 - encoded / decoded
        if share < WORTHWHILE:
            return words.none_decoded(share)
        if kept.share >= 1:
            return f"decoding is {units.percent(share)} of prep, and all samples are kept decoded"
        # Measured independently, so their errors may be opposite.
        (low, high), (decoded_low, decoded_high) = job.spread(kept.share), job.decoded_prep.spread
        times = decoded / now
        speedup = spanning(times, times * decoded_low / high, times * decoded_high / low, unit="times")
        more_bytes = math.ceil(job.dataset.samples * job.decoded_bytes / self.fleet.nodes) - room_bytes
        memory = "the memory that caches may use on each node can keep"
        if more_bytes > 0:
            memory = f"{units.size(more_bytes)} more memory for caches on each node would keep"
        some = f", and {units.percent(kept.share)} of the samples are kept decoded" if kept.share else ""
        return (
            f"decoding is {units.percent(share)} of prep{some}; {memory} all samples decoded: prep "
            f"{words.with_interval(speedup)} times as fast"
        )


def _rate(per_s: float) -> str:
    return "any number of samples/s" if math.isinf(per_s) else f"{units.number(per_s)} samples/s"


def _why_nodes(fleets: Sequence[Fleet], plans: Sequence[Plan], chosen: int) -> str:
    made, speed = plans[chosen], units.percent(plans[chosen].speed)
    nodes, least, most = made.nodes, made.least_nodes, made.most_nodes
    if least == most:
        return f"{units.counted(nodes, 'node')} given; jobs reach {speed} of full speed"
    if nodes == least:
        fewer = "the fewest there may be"
    elif why := fleets[nodes - 1 - least].misfit:
        fewer = f"{nodes - 1} would not do, because {why}"
    else:
        fewer = f"with {nodes - 1} jobs would reach only {units.percent(plans[chosen - 1].speed)}"
    more = "the most there may be" if nodes == most else f"up to {most} make them hardly any faster"
    return f"{units.counted(nodes, 'node')}: jobs reach {speed} of full speed; {fewer}; {more}"
