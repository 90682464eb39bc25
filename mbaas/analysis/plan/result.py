"""A plan: resources of each job and dataset, bottlenecks, and the JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mbaas.model.quantity import plain_fields
from mbaas.model.threads import Split

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
    threads: Split
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
class Plan:
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

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; an infinite rate is null."""
        return plain_fields(self)
