"""Supply of a cluster to jobs: room for workers and caches, and the rates of caches, storage and the network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mbaas.base import units
from mbaas.core.layout import wanted_staging
from mbaas.memory.budgets import STORE_SHARE, default_staging
from mbaas.model import words
from mbaas.model.curves import ROUNDING, ThroughputCurve
from mbaas.model.forms import WORTHWHILE
from mbaas.model.lending import Job, fair_shares
from mbaas.model.quantity import spanning
from mbaas.model.threads import TierBytes
from mbaas.tools.plan.jobs import Cluster, Samples, TrainingJob


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
class CachedPart:
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
) -> dict[str, CachedPart]:
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
        kept[dataset.name] = CachedPart(in_memory, on_disk, memory_share, disk_share)
    return kept


def fair_split(needs: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Split a capacity by `fair_shares`; if all needs are met, divide the surplus in proportion to them."""
    total = sum(needs.values())
    # No capacity stays idle: storage with little demand serves each job faster than it needs.
    if 0 < total <= capacity:
        return {name: need * (capacity / total) for name, need in needs.items()}
    return dict(zip(needs, fair_shares(list(needs.values()), capacity), strict=True))


@dataclass(frozen=True)
class Fetch:
    """Seconds of one sample on each tier, over all nodes together; tiers are read in turn.

    ``stored_share`` is the share of the samples that come from storage, ``stored_bytes`` their average bytes per
    sample.
    """

    seconds: dict[str, float]
    stored_share: float
    stored_bytes: float

    @property
    def per_s(self) -> float:
        """Samples/s of fetch: F of DS-Analyzer."""
        return 1 / sum(self.seconds.values())


def fetches(
    jobs: Sequence[TrainingJob],
    cluster: Cluster,
    nodes: int,
    *,
    kept: Mapping[str, CachedPart],
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
        name: replace(fetch, seconds={**fetch.seconds, "storage": fetch.stored_bytes / parts[name]})
        if fetch.stored_bytes
        else fetch
        for name, fetch in alone.items()
    }


def _unshared(job: TrainingJob, cluster: Cluster, nodes: int, kept: CachedPart, decoded: float) -> Fetch:
    """Return a job's fetch times without storage time."""
    node, nbytes = cluster.node, job.dataset.sample_bytes
    disk_per_s = math.inf if node.disk_bytes_per_s is None else node.disk_bytes_per_s
    return Fetch(
        {
            "memory": _memory_bytes(job, kept, decoded) / (nodes * node.memory_bytes_per_s),
            "disk": kept.disk_share * nbytes / (nodes * disk_per_s),
            "storage": 0.0,
        },
        stored_share=kept.stored_share,
        stored_bytes=kept.stored_share * nbytes,
    )


def _memory_bytes(job: TrainingJob, kept: CachedPart, decoded: float) -> float:
    """Return the average bytes of a sample that come from memory."""
    return (kept.memory_share - decoded) * job.dataset.sample_bytes + decoded * (job.decoded_bytes or 0)


def _needs_per_s(fetch: Fetch, demand_per_s: float) -> float:
    """Return the storage bytes/s that a job needs for ``demand_per_s``; infinite if the caches alone are slower."""
    if not fetch.stored_bytes:
        return 0.0
    left_s = 1 / demand_per_s - sum(fetch.seconds.values())
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


def bytes_by_tier(job: TrainingJob, cluster: Cluster, nodes: int, kept: CachedPart, decoded: float) -> list[TierBytes]:
    """Return the bytes of one node's part of a minibatch by tier: memory, disk, storage."""
    node = cluster.node
    samples = job.batch_size / nodes
    part_bytes = samples * job.dataset.sample_bytes
    # Memory and disk are assumed to be as fast for one thread as for many; only storage was measured against readers.
    found = [TierBytes(samples * _memory_bytes(job, kept, decoded), ThroughputCurve.flat(node.memory_bytes_per_s))]
    if node.disk_bytes_per_s is not None:
        found.append(TierBytes(kept.disk_share * part_bytes, ThroughputCurve.flat(node.disk_bytes_per_s)))
    # the rate of one node with a number of readers, while all nodes read with as many
    storage = cluster.storage_curve.shared_by(nodes if cluster.storage_shared else 1)
    return [*found, TierBytes(kept.stored_share * part_bytes, storage)]


@dataclass(frozen=True)
class DecodedPart:
    """Decoded ``share`` of a job's samples over all nodes, and the memory of each node beyond their encoded size."""

    share: float = 0.0
    more_bytes: int = 0


def fill_with_decoded(
    jobs: Sequence[TrainingJob],
    *,
    nodes: int,
    kept: Mapping[str, CachedPart],
    spare_bytes: int,
    epochs_per_s: Mapping[str, float],
) -> dict[str, DecodedPart]:
    """Give each node's spare cache memory to decoded samples, first where a byte saves the most prep time.

    Jobs are assumed to have different pipelines, so that none can use another's decoded samples. A job has decoded
    samples only if all of its samples are in memory. With less memory, a real feed weighs the cost of storage and may
    do better than this plan.

    Args:
        kept: encoded cache contents by name of the dataset.
        epochs_per_s: by name of the job, like the result.
    """
    found = {job.name: DecodedPart() for job in jobs}
    users = Counter(job.dataset.name for job in jobs)
    gains = []
    for job in jobs:
        saved_s = _saved_s(job) * epochs_per_s[job.name]
        if saved_s and kept[job.dataset.name].memory_share >= 1:
            # in place of the encoded sample, unless other jobs need that
            more_bytes = (job.decoded_bytes or 0) - (job.dataset.sample_bytes if users[job.dataset.name] == 1 else 0)
            gains.append((saved_s / more_bytes if more_bytes > 0 else math.inf, max(0.0, more_bytes), job))
    for _, more_bytes, job in sorted(gains, key=lambda gain: -gain[0]):
        whole_bytes = math.ceil(job.dataset.samples * more_bytes / nodes)
        given = min(spare_bytes, whole_bytes)
        found[job.name] = DecodedPart(given / whole_bytes if whole_bytes else 1.0, given)
        spare_bytes -= given
    return found


def _saved_s(job: TrainingJob) -> float:
    """Return the CPU seconds that a decoded sample saves; 0 if that is not worthwhile."""
    encoded_s, decoded_s = 1 / job.worker_per_s(), 1 / job.worker_per_s(1.0)
    return encoded_s - decoded_s if encoded_s - decoded_s >= WORTHWHILE * encoded_s else 0.0


def decoding_clause(
    job: TrainingJob, cluster: Cluster, nodes: int, *, workers: int, kept: DecodedPart, room_bytes: int
) -> str:
    """Return a clause on decoding's share of prep and the effect of memory for decoded samples; "" if not measured.

    Args:
        workers: workers of the job, on all nodes.
        kept: its decoded samples.
        room_bytes: memory of each node that caches may use and that no other dataset or job has.
    """
    if job.decoded_bytes is None or job.decoded_prep is None:
        return ""
    cores, each = cluster.node.cores, workers / nodes
    encoded, decoded = job.prep_curve(cores).rate(each), job.prep_curve(cores, 1.0).rate(each)
    share = 1 - encoded / decoded
    if share < WORTHWHILE:
        return words.none_decoded(share)
    if kept.share >= 1:
        return f"decoding is {units.percent(share)} of prep, and all samples are kept decoded"
    # Measured independently, so their errors may be opposite.
    (low, high), (decoded_low, decoded_high) = job.spread(kept.share), job.decoded_prep.spread
    times = decoded / job.prep_curve(cores, kept.share).rate(each)
    speedup = spanning(times, times * decoded_low / high, times * decoded_high / low, unit="times")
    more_bytes = math.ceil(job.dataset.samples * job.decoded_bytes / nodes) - room_bytes
    memory = f"{units.size(more_bytes)} more memory for caches" if more_bytes > 0 else "the memory that caches may use"
    keeps = "would keep" if more_bytes > 0 else "can keep"
    some = f", and {units.percent(kept.share)} of the samples are kept decoded" if kept.share else ""
    return (
        f"decoding is {units.percent(share)} of prep{some}; {memory} on each node {keeps} all samples decoded: prep "
        f"{words.with_interval(speedup)} times as fast"
    )
