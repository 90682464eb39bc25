"""What caches, storage and the network give each job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mbaas.allocation.threads import Source
from mbaas.allocation.throughput import ThroughputCurve
from mbaas.analysis.plan.caches import Kept, even_shares
from mbaas.analysis.plan.jobs import Cluster, TrainingJob


@dataclass(frozen=True)
class Fetch:
    """Seconds for one sample from each place, of all nodes together; they take turns.

    Attributes:
        memory_s, disk_s, storage_s: for the share of a sample that comes from there.
        stored_share: of the samples that come from storage.
        stored_bytes: of a sample that come from storage, on average.
    """

    memory_s: float
    disk_s: float
    storage_s: float
    stored_share: float
    stored_bytes: float

    @property
    def per_s(self) -> float:
        """samples/s: F of DS-Analyzer."""
        return 1 / (self.memory_s + self.disk_s + self.storage_s)


def fetches(
    jobs: Sequence[TrainingJob], cluster: Cluster, nodes: int, *, kept: Mapping[str, Kept], demands: Mapping[str, float]
) -> dict[str, Fetch]:
    """Each job's share of what storage gives, and what it makes of it.

    A job needs so much of storage that a sample from memory, disk and storage takes no longer than it may at the rate
    that it could use: storage has what memory and disk leave of that time. Caches are taken to be fast enough for all
    jobs at once.

    Args:
        demands: samples/s that each job could use.
    """
    capacity = cluster.storage_bytes_per_s(nodes)
    alone = {job.name: _unshared(job, cluster, nodes, kept[job.dataset.name]) for job in jobs}
    needs = {name: min(capacity, _needs_per_s(fetch, demands[name])) for name, fetch in alone.items()}
    shares = even_shares(needs, capacity)
    return {
        name: replace(fetch, storage_s=fetch.stored_bytes / shares[name] if fetch.stored_bytes else 0.0)
        for name, fetch in alone.items()
    }


def _unshared(job: TrainingJob, cluster: Cluster, nodes: int, kept: Kept) -> Fetch:
    """A job's fetch if storage took no time."""
    node, nbytes = cluster.node, job.dataset.sample_bytes
    disk_per_s = math.inf if node.disk_bytes_per_s is None else node.disk_bytes_per_s
    return Fetch(
        memory_s=kept.memory_share * nbytes / (nodes * node.memory_bytes_per_s),
        disk_s=kept.disk_share * nbytes / (nodes * disk_per_s),
        storage_s=0.0,
        stored_share=kept.stored_share,
        stored_bytes=kept.stored_share * nbytes,
    )


def _needs_per_s(fetch: Fetch, demand_per_s: float) -> float:
    """bytes/s of storage with which a job is fetched for at ``demand_per_s``; infinite if caches alone are slower."""
    if not fetch.stored_bytes:
        return 0.0
    left_s = 1 / demand_per_s - fetch.memory_s - fetch.disk_s
    return fetch.stored_bytes / left_s if left_s > 0 else math.inf


def network_rates(
    jobs: Sequence[TrainingJob], cluster: Cluster, nodes: int, *, rates: Mapping[str, float]
) -> dict[str, float]:
    """samples/s that the network brings each job, if it could use ``rates``.

    Every node gets the finished pixels of the samples that were made on others, (nodes - 1) / nodes of them; raw bytes
    stay where they are.
    """
    if nodes == 1 or math.isinf(cluster.node.network_bytes_per_s):
        return {job.name: math.inf for job in jobs}
    travels = {job.name: job.pixel_bytes * (nodes - 1) / nodes for job in jobs}
    needs = {name: rates[name] * nbytes for name, nbytes in travels.items()}
    shares = even_shares(needs, cluster.node.network_bytes_per_s)
    return {name: shares[name] / nbytes for name, nbytes in travels.items()}


def sources(job: TrainingJob, cluster: Cluster, nodes: int, kept: Kept) -> list[Source]:
    """Where one node reads its part of a job's minibatch: memory, disk, storage."""
    node = cluster.node
    part_bytes = job.batch_size / nodes * job.dataset.sample_bytes
    found = [Source(kept.memory_share * part_bytes, ThroughputCurve.flat(node.memory_bytes_per_s))]
    if node.disk_bytes_per_s is not None:
        found.append(Source(kept.disk_share * part_bytes, ThroughputCurve.flat(node.disk_bytes_per_s)))
    return [*found, Source(kept.stored_share * part_bytes, _node_storage(cluster, nodes))]


def _node_storage(cluster: Cluster, nodes: int) -> ThroughputCurve:
    """bytes/s that one node gets with so many readers, while all nodes read with as many."""
    curve = cluster.storage_fit.curve
    return curve.shared_by(nodes) if cluster.storage_shared else curve
