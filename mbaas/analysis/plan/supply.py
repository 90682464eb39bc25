"""Supply of a cluster to jobs: room for workers and caches, and the rates of caches, storage and the network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mbaas import units
from mbaas.allocation.threads import TierBytes
from mbaas.allocation.throughput import ROUNDING, ThroughputCurve
from mbaas.allocation.workers import Job
from mbaas.analysis.plan.jobs import Cluster, Samples, TrainingJob
from mbaas.core.layout import wanted_staging
from mbaas.memory.budgets import STORE_SHARE, default_staging


def pool_of(jobs: Sequence[TrainingJob], cluster: Cluster, nodes: int) -> int:
    """Return the number of single-core prep workers that fit next to the trials; negative if even the trials do not."""
    # Fractional core reservations may sum to slightly more than an integer.
    trials = sum(job.trials * job.cores_per_trial for job in jobs)
    return math.floor((nodes * cluster.node.cores - trials) * (1 + ROUNDING))


def staging_bytes(job: TrainingJob, cluster: Cluster, nodes: int, pool: int) -> int:
    """Return the staging budget of a job's feed on each node: its own setting, or the default of `mbaas.serve`."""
    if job.staging_bytes is not None:
        return job.staging_bytes
    prep = Job(name=job.name, demand_per_s=job.step_per_s, prep=job.prep_curve(cluster.node.cores).over(nodes))
    return default_staging(cluster.node.store_bytes, wanted_staging(min(prep.useful, pool)))


def all_staging_bytes(jobs: Sequence[TrainingJob], cluster: Cluster, nodes: int) -> int:
    """Return the total staging budget of all jobs' feeds on each node."""
    pool = pool_of(jobs, cluster, nodes)
    return sum(staging_bytes(job, cluster, nodes, pool) for job in jobs)


def cache_bytes(jobs: Sequence[TrainingJob], cluster: Cluster, nodes: int) -> int:
    """Return a node's memory for all caches: 70 % of the object store, minus staging."""
    return int(STORE_SHARE * cluster.node.store_bytes) - all_staging_bytes(jobs, cluster, nodes)


def misfit(jobs: Sequence[TrainingJob], cluster: Cluster, nodes: int) -> str:
    """Return why the jobs do not fit ``nodes`` nodes, or "" if they do."""
    these, verb = units.counted(nodes, "node"), "has" if nodes == 1 else "have"
    gpus, cores = nodes * cluster.node.gpus, nodes * cluster.node.cores
    wanted_gpus = sum(job.trials * job.gpus_per_trial for job in jobs)
    if wanted_gpus > gpus * (1 + ROUNDING):
        return f"trials need {units.exact(wanted_gpus)} GPUs, {these} {verb} {units.exact(gpus)}"
    # Ray starts no trial without free cores, and a feed needs a worker.
    wanted_cores = sum(job.trials * job.cores_per_trial for job in jobs)
    if pool_of(jobs, cluster, nodes) < len(jobs):
        wanted = f"trials need {units.exact(wanted_cores)} cores and every job one more for a prep worker"
        return f"{wanted}, {units.exact(wanted_cores + len(jobs))} in all, {these} {verb} {cores}"
    if cache_bytes(jobs, cluster, nodes) < 0:
        staged = all_staging_bytes(jobs, cluster, nodes)
        usable = int(STORE_SHARE * cluster.node.store_bytes)
        return (
            f"staging of all jobs needs {units.size(staged)} on each node, which may use {units.size(usable)}, "
            f"{units.percent(STORE_SHARE)} of its object store"
        )
    return ""


@dataclass(frozen=True)
class Kept:
    """Cached bytes of a dataset on each node, and its cached shares over all nodes."""

    memory_bytes: int
    disk_bytes: int
    memory_share: float
    disk_share: float

    @property
    def stored_share(self) -> float:
        """Share of the dataset read from storage in every epoch."""
        return max(0.0, 1 - self.memory_share - self.disk_share)


def fill_caches(
    datasets: Sequence[tuple[Samples, float]], *, nodes: int, memory_bytes: int, disk_bytes: int
) -> dict[str, Kept]:
    """Fill memory, then disks, with the most frequently read datasets; return the contents by name.

    A cached byte saves one byte from storage per epoch of each job. Its value is the epochs per second of all jobs on
    its dataset, which share the cache. Bytes of one dataset have equal value and can be cached in part, so the greedy
    choice is optimal. Each node caches its part of a dataset, 1 / ``nodes``.

    Args:
        datasets: pairs (dataset, epochs per second that its jobs would make if fetch were unlimited).
        memory_bytes, disk_bytes: capacity of a node.
    """
    kept = {}
    for dataset, _ in sorted(datasets, key=lambda pair: -pair[1]):
        part_bytes = math.ceil(dataset.dataset_bytes / nodes)  # homes divide a dataset evenly
        in_memory = min(part_bytes, memory_bytes)
        on_disk = min(part_bytes - in_memory, disk_bytes)
        memory_bytes, disk_bytes = memory_bytes - in_memory, disk_bytes - on_disk
        # Parts are rounded up, so all nodes together may exceed the dataset by a few bytes.
        memory_share = min(1.0, in_memory * nodes / dataset.dataset_bytes)
        disk_share = min(1 - memory_share, on_disk * nodes / dataset.dataset_bytes)
        kept[dataset.name] = Kept(in_memory, on_disk, memory_share, disk_share)
    return kept


def fair_split(needs: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Split a capacity: each need is met if all fit, and the surplus is divided in proportion to the needs.

    Otherwise small needs are met, and the others get equal shares (max-min fairness).
    """
    whole = sum(needs.values())
    # No capacity stays idle: storage with little demand serves each job faster than it needs.
    if 0 < whole <= capacity:
        return {name: need * (capacity / whole) for name, need in needs.items()}
    # Smallest need first: the unused rest of its even share goes to the others.
    parts: dict[str, float] = {}
    for left, (name, need) in zip(
        range(len(needs), 0, -1), sorted(needs.items(), key=lambda item: item[1]), strict=True
    ):
        parts[name] = min(need, capacity / left)
        capacity -= parts[name]
    return parts


@dataclass(frozen=True)
class Fetch:
    """Seconds of one sample on each tier, over all nodes together; tiers are read in turn.

    ``stored_share`` is the share of the samples that come from storage, ``stored_bytes`` their average bytes per
    sample.
    """

    memory_s: float
    disk_s: float
    storage_s: float
    stored_share: float
    stored_bytes: float

    @property
    def per_s(self) -> float:
        """Samples/s of fetch: F of DS-Analyzer."""
        return 1 / (self.memory_s + self.disk_s + self.storage_s)


def fetches(
    jobs: Sequence[TrainingJob],
    cluster: Cluster,
    nodes: int,
    *,
    kept: Mapping[str, Kept],
    decoded: Mapping[str, float],
    demands: Mapping[str, float],
) -> dict[str, Fetch]:
    """Return each job's fetch times, with its share of the storage bandwidth.

    The rate that a job could use (``demands``, samples/s) limits the time of a sample on memory, disk and storage
    together. The time that memory and disk leave determines the storage bandwidth that the job needs. Caches are
    assumed to be fast enough for all jobs at once. ``decoded`` is the share of each job's samples that is cached
    decoded, in memory.
    """
    capacity = cluster.storage_bytes_per_s(nodes)
    alone = {job.name: _unshared(job, cluster, nodes, kept[job.dataset.name], decoded[job.name]) for job in jobs}
    # A need is at most the capacity, even if the caches alone are too slow and the need is infinite.
    needs = {name: min(capacity, _needs_per_s(fetch, demands[name])) for name, fetch in alone.items()}
    parts = fair_split(needs, capacity)
    return {
        name: replace(fetch, storage_s=fetch.stored_bytes / parts[name] if fetch.stored_bytes else 0.0)
        for name, fetch in alone.items()
    }


def _unshared(job: TrainingJob, cluster: Cluster, nodes: int, kept: Kept, decoded: float) -> Fetch:
    """Return a job's fetch times without storage time."""
    node, nbytes = cluster.node, job.dataset.sample_bytes
    disk_per_s = math.inf if node.disk_bytes_per_s is None else node.disk_bytes_per_s
    return Fetch(
        memory_s=_memory_bytes(job, kept, decoded) / (nodes * node.memory_bytes_per_s),
        disk_s=kept.disk_share * nbytes / (nodes * disk_per_s),
        storage_s=0.0,
        stored_share=kept.stored_share,
        stored_bytes=kept.stored_share * nbytes,
    )


def _memory_bytes(job: TrainingJob, kept: Kept, decoded: float) -> float:
    """Return the average bytes of a sample that come from memory."""
    return (kept.memory_share - decoded) * job.dataset.sample_bytes + decoded * (job.decoded_bytes or 0)


def _needs_per_s(fetch: Fetch, demand_per_s: float) -> float:
    """Return the storage bytes/s that a job needs for ``demand_per_s``; infinite if the caches alone are slower."""
    if not fetch.stored_bytes:
        return 0.0
    left_s = 1 / demand_per_s - fetch.memory_s - fetch.disk_s
    return fetch.stored_bytes / left_s if left_s > 0 else math.inf


def network_rates(
    jobs: Sequence[TrainingJob], cluster: Cluster, nodes: int, *, rates: Mapping[str, float]
) -> dict[str, float]:
    """Return the samples/s that the network delivers to each job, if the jobs could use ``rates``.

    Every node receives the pixels of samples prepared on others, a share of (nodes - 1) / nodes. Raw bytes do not
    travel.
    """
    if nodes == 1 or math.isinf(cluster.node.network_bytes_per_s):
        return {job.name: math.inf for job in jobs}
    travels = {job.name: job.pixel_bytes * (nodes - 1) / nodes for job in jobs}
    needs = {name: rates[name] * nbytes for name, nbytes in travels.items()}
    parts = fair_split(needs, cluster.node.network_bytes_per_s)
    return {name: parts[name] / nbytes for name, nbytes in travels.items()}


def bytes_by_tier(job: TrainingJob, cluster: Cluster, nodes: int, kept: Kept, decoded: float) -> list[TierBytes]:
    """Return the bytes of one node's part of a minibatch by tier: memory, disk, storage."""
    node = cluster.node
    samples = job.batch_size / nodes
    part_bytes = samples * job.dataset.sample_bytes
    # Memory and disk are assumed to be as fast for one thread as for many; only storage was measured against readers.
    found = [TierBytes(samples * _memory_bytes(job, kept, decoded), ThroughputCurve.flat(node.memory_bytes_per_s))]
    if node.disk_bytes_per_s is not None:
        found.append(TierBytes(kept.disk_share * part_bytes, ThroughputCurve.flat(node.disk_bytes_per_s)))
    # the rate of one node with a number of readers, while all nodes read with as many
    storage = cluster.storage_fit.curve.shared_by(nodes if cluster.storage_shared else 1)
    return [*found, TierBytes(kept.stored_share * part_bytes, storage)]
