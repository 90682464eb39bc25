"""Supply of a cluster to jobs: room for workers and caches, and the rates of caches, storage and the network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from mbaas.base import units
from mbaas.core.layout import wanted_staging
from mbaas.memory.budgets import STORE_SHARE, default_staging
from mbaas.model.balance import travelling_share
from mbaas.model.curves import ROUNDING, ThroughputCurve
from mbaas.model.forms import WORTHWHILE
from mbaas.model.lending import Job, fair_shares
from mbaas.model.sharing import HOUR_S
from mbaas.model.threads import TierBytes
from mbaas.tools.plan.jobs import Cluster, Samples, TrainingJob


@dataclass(frozen=True)
class Fleet:
    """The jobs on a number of the cluster's nodes."""

    jobs: Sequence[TrainingJob]
    cluster: Cluster
    nodes: int

    @cached_property
    def pool(self) -> int:
        """Single-core prep workers that fit next to the trials; negative if even the trials do not."""
        # Fractional core reservations may sum to slightly more than an integer.
        return math.floor((self.nodes * self.cluster.node.cores - self._trial_cores) * (1 + ROUNDING))

    @property
    def _trial_cores(self) -> float:
        return sum(job.trials * job.cores_per_trial for job in self.jobs)

    def prep_curve(self, job: TrainingJob, decoded: float = 0.0) -> ThroughputCurve:
        """Return samples/s against workers on all nodes, which contend only within their own node."""
        return job.prep_curve(self.cluster.node.cores, decoded).over(self.nodes)

    def demand_per_s(self, job: TrainingJob, decoded: float = 0.0) -> float:
        """Return the samples/s that a job would use if fetch were unlimited."""
        return min(job.step_per_s, self.prep_curve(job, decoded).peak(most=self.pool).rate_per_s)

    @cached_property
    def staging_bytes(self) -> int:
        """Staging budgets of all feeds on each node: their own settings, or the default of `mbaas.serve`."""
        total = sum(job.staging_bytes or 0 for job in self.jobs)
        for job in self.jobs:
            if job.staging_bytes is None:
                prep = Job(name=job.name, demand_per_s=job.step_per_s, prep=self.prep_curve(job))
                total += default_staging(self.cluster.node.store_bytes, wanted_staging(min(prep.useful, self.pool)))
        return total

    @property
    def usable_bytes(self) -> int:
        """Memory of a node for staging and caches: 70 % of the object store."""
        return int(STORE_SHARE * self.cluster.node.store_bytes)

    @property
    def cache_bytes(self) -> int:
        return self.usable_bytes - self.staging_bytes

    @property
    def misfit(self) -> str:
        """Reason why the jobs do not fit the nodes, or ""."""
        these, verb = units.counted(self.nodes, "node"), "has" if self.nodes == 1 else "have"
        gpus, cores = self.nodes * self.cluster.node.gpus, self.nodes * self.cluster.node.cores
        wanted_gpus = sum(job.trials * job.gpus_per_trial for job in self.jobs)
        if wanted_gpus > gpus * (1 + ROUNDING):
            return f"trials need {units.exact(wanted_gpus)} GPUs, {these} {verb} {units.exact(gpus)}"
        # Ray starts no trial without free cores, and a feed needs a worker.
        if self.pool < len(self.jobs):
            wanted = f"trials need {units.exact(self._trial_cores)} cores and every job one more for a prep worker"
            in_all = units.exact(self._trial_cores + len(self.jobs))
            return f"{wanted}, {in_all} in all, {these} {verb} {cores}"
        if self.cache_bytes < 0:
            return (
                f"staging of all jobs needs {units.size(self.staging_bytes)} on each node, which may use "
                f"{units.size(self.usable_bytes)}, {units.percent(STORE_SHARE)} of its object store"
            )
        return ""


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

    @property
    def stored_share(self) -> float:
        """Share of the dataset read from storage in every epoch."""
        return max(0.0, 1 - self.memory_share - self.disk_share)


def fill_caches(
    datasets: Sequence[tuple[Samples, float]], *, nodes: int, memory_bytes: int, disk_bytes: int
) -> dict[str, CachePlan]:
    """Fill memory, then disks, with the most frequently read datasets; return the contents by name.

    A cached byte saves one byte from storage per epoch of each job. Its value is the epochs per second of all jobs on
    its dataset, which share the cache. Bytes of one dataset have equal value and can be cached in part, so the greedy
    choice is optimal. Each node caches its part of a dataset, 1 / ``nodes``.

    Args:
        datasets: pairs (dataset, epochs per second that its jobs would make if fetch were unlimited).
        memory_bytes, disk_bytes: capacity of a node.
    """
    kept = {}
    for dataset, epochs_per_s in sorted(datasets, key=lambda pair: -pair[1]):
        part_bytes = math.ceil(dataset.dataset_bytes / nodes)  # homes divide a dataset evenly
        in_memory = min(part_bytes, memory_bytes)
        on_disk = min(part_bytes - in_memory, disk_bytes)
        memory_bytes, disk_bytes = memory_bytes - in_memory, disk_bytes - on_disk
        # Parts are rounded up, so all nodes together may exceed the dataset by a few bytes.
        memory_share = min(1.0, in_memory * nodes / dataset.dataset_bytes)
        kept[dataset.name] = CachePlan(
            dataset=dataset.name,
            dataset_bytes=dataset.dataset_bytes,
            memory_bytes=in_memory,
            disk_bytes=on_disk,
            memory_share=memory_share,
            disk_share=min(1 - memory_share, on_disk * nodes / dataset.dataset_bytes),
            epochs_per_h=HOUR_S * epochs_per_s,
        )
    return kept


class DecodedPart(NamedTuple):
    """Decoded ``share`` of a job's samples over all nodes, and the memory of each node beyond their encoded size."""

    share: float = 0.0
    more_bytes: int = 0


def fill_with_decoded(
    fleet: Fleet, *, kept: Mapping[str, CachePlan], spare_bytes: int, demands: Mapping[str, float]
) -> dict[str, DecodedPart]:
    """Give each node's spare cache memory to decoded samples, first where a byte saves the most prep time.

    Jobs are assumed to have different pipelines, so that none can use another's decoded samples. A job has decoded
    samples only if all of its samples are in memory. With less memory, a real feed weighs the cost of storage and may
    do better than this plan. ``demands`` are samples/s by job, like the result; ``kept`` is by dataset.
    """
    found = {job.name: DecodedPart() for job in fleet.jobs}
    users = Counter(job.dataset.name for job in fleet.jobs)
    gains = []
    for job in fleet.jobs:
        encoded_s, decoded_s = 1 / job.worker_per_s(), 1 / job.worker_per_s(1.0)
        is_worthwhile = encoded_s - decoded_s >= WORTHWHILE * encoded_s
        saved_s = (encoded_s - decoded_s) * (demands[job.name] / job.dataset.samples) if is_worthwhile else 0.0
        if saved_s and kept[job.dataset.name].memory_share >= 1:
            # in place of the encoded sample, unless other jobs need that
            more_bytes = (job.decoded_bytes or 0) - (job.dataset.sample_bytes if users[job.dataset.name] == 1 else 0)
            gains.append((saved_s / more_bytes if more_bytes > 0 else math.inf, max(0.0, more_bytes), job))
    for _, more_bytes, job in sorted(gains, key=lambda gain: -gain[0]):
        whole_bytes = math.ceil(job.dataset.samples * more_bytes / fleet.nodes)
        given = min(spare_bytes, whole_bytes)
        found[job.name] = DecodedPart(given / whole_bytes if whole_bytes else 1.0, given)
        spare_bytes -= given
    return found


@dataclass(frozen=True)
class Fetch:
    """A job's fetching: average bytes of a sample by tier, and the seconds that all nodes together take for them.

    Tiers are read in turn. ``stored_share`` is the share of the samples that come from storage.
    """

    nbytes: dict[str, float]
    seconds: dict[str, float]
    stored_share: float

    @property
    def per_s(self) -> float:
        """Samples/s of fetch: F of DS-Analyzer."""
        return 1 / sum(self.seconds.values())

    @property
    def slowest(self) -> str:
        return max(self.seconds, key=self.seconds.__getitem__)


def fetches(
    fleet: Fleet, *, kept: Mapping[str, CachePlan], decoded: Mapping[str, float], demands: Mapping[str, float]
) -> dict[str, Fetch]:
    """Return each job's fetch times, with its share of the storage bandwidth.

    The rate that a job could use (``demands``, samples/s) limits the time of a sample on memory, disk and storage
    together. The time that memory and disk leave determines the storage bandwidth that the job needs. Caches are
    assumed to be fast enough for all jobs at once. ``decoded`` is the share of each job's samples that is cached
    decoded, in memory.
    """
    node, needs, found = fleet.cluster.node, {}, {}
    capacity = fleet.cluster.storage_bytes_per_s(fleet.nodes)
    disk_per_s = math.inf if node.disk_bytes_per_s is None else node.disk_bytes_per_s
    for job in fleet.jobs:
        name, cache, sample_bytes = job.name, kept[job.dataset.name], job.dataset.sample_bytes
        in_memory = (cache.memory_share - decoded[name]) * sample_bytes + decoded[name] * (job.decoded_bytes or 0)
        nbytes = {
            "memory": in_memory,
            "disk": cache.disk_share * sample_bytes,
            "storage": cache.stored_share * sample_bytes,
        }
        seconds = {
            "memory": in_memory / (fleet.nodes * node.memory_bytes_per_s),
            "disk": nbytes["disk"] / (fleet.nodes * disk_per_s),
            "storage": 0.0,
        }
        left_s = 1 / demands[name] - sum(seconds.values())
        # A need is at most the capacity, even if the caches alone are too slow.
        needed = nbytes["storage"] / left_s if left_s > 0 else math.inf
        needs[name] = min(capacity, needed) if nbytes["storage"] else 0.0
        found[name] = Fetch(nbytes, seconds, cache.stored_share)
    parts = fair_split(needs, capacity)
    return {
        name: replace(fetch, seconds={**fetch.seconds, "storage": fetch.nbytes["storage"] / parts[name]})
        if fetch.nbytes["storage"]
        else fetch
        for name, fetch in found.items()
    }


def fair_split(needs: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Split a capacity by `fair_shares`; if all needs are met, divide the surplus in proportion to them."""
    total = sum(needs.values())
    # No capacity stays idle: storage with little demand serves each job faster than it needs.
    if 0 < total <= capacity:
        return {name: need * (capacity / total) for name, need in needs.items()}
    return dict(zip(needs, fair_shares(list(needs.values()), capacity), strict=True))


def network_rates(fleet: Fleet, *, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the samples/s that the network delivers to each job, if the jobs could use ``rates``.

    A node receives the pixels of samples that were prepared on others, as in `mbaas.model.supply`: of (nodes - 1) /
    nodes of a job's samples, or with data-parallel trials of 1 / nodes of the imbalance. Raw bytes do not travel.
    """
    nodes, per_s = fleet.nodes, fleet.cluster.node.network_bytes_per_s
    if nodes == 1 or math.isinf(per_s):
        return dict.fromkeys(rates, math.inf)
    travels = {
        job.name: job.pixel_bytes
        * travelling_share(nodes, local_batch=job.batch_size / nodes, locality=job.data_parallel)
        / (nodes if job.data_parallel else 1)
        for job in fleet.jobs
    }
    parts = fair_split({name: rates[name] * nbytes for name, nbytes in travels.items()}, per_s)
    return {name: parts[name] / nbytes for name, nbytes in travels.items()}


def bytes_by_tier(fleet: Fleet, job: TrainingJob, fetch: Fetch) -> list[TierBytes]:
    """Return the bytes of one node's part of a minibatch by tier: memory, disk, storage."""
    node, samples = fleet.cluster.node, job.batch_size / fleet.nodes
    curves = {
        # Memory and disk are assumed to be as fast for one thread as for many; only storage was measured against
        # readers.
        "memory": ThroughputCurve.flat(node.memory_bytes_per_s),
        "disk": None if node.disk_bytes_per_s is None else ThroughputCurve.flat(node.disk_bytes_per_s),
        # the rate of one node with a number of readers, while all nodes read with as many
        "storage": fleet.cluster.storage_curve.over(1 / fleet.nodes if fleet.cluster.storage_shared else 1),
    }
    return [TierBytes(samples * fetch.nbytes[tier], curve) for tier, curve in curves.items() if curve is not None]
