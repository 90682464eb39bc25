"""A plan: what each job and each dataset gets, what keeps a job from going faster, and its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mbaas.allocation.threads import Split
from mbaas.analysis.quantity import plain_fields

Limit = Literal["training", "prep", "pool", "memory", "disk", "storage", "network"]
"""What keeps a job from going faster: its step; its own prep at its peak; too few prep workers; where bytes come from;
the network between nodes."""


@dataclass(frozen=True)
class FitQuality:
    """How well lines agree with the points that they were fitted to.

    Attributes:
        points: how many.
        r_squared: share of the variance that is explained; 1 is perfect.
        worst_error: largest difference from a point, as a share of it.
        lines: (count, rate) where they bend, from the origin.
        slope: rate that one more adds beyond the last bend.
        most: largest count of a point; beyond it the lines are a guess.
    """

    points: int
    r_squared: float
    worst_error: float
    lines: tuple[tuple[float, float], ...]
    slope: float
    most: float


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What one job gets, and what it makes of it.

    Attributes:
        job, dataset: names.
        trials: how many run at a time.
        workers: prep workers on all nodes: set ``prep_workers`` to this.
        scaler_workers: how many the running feed would ask for from one worker's rate: a fit for ``max_prep_workers``.
        needed: prep workers, with a fraction of the last one, that make loading as fast as it can get.
        step_per_s: samples/s that a trial could train on.
        prep_per_s: samples/s that its workers prepare.
        fetch_per_s: samples/s that caches and storage give it.
        network_per_s: samples/s that the network would bring each node; infinite with one node.
        trial_per_s: samples/s that each trial is predicted to train on, the least of these.
        trial_low_per_s, trial_high_per_s: its interval, from what measurements of its step and its prep leave open.
        epoch_s: seconds of an epoch at that rate.
        limit, reason: what keeps it from going faster, in a word and in a sentence.
        decoded_share: share of its samples that its feed keeps decoded, from 0 to 1; with that all rates are.
        decoding: how much of prep decoding is, and what memory for decoded samples would bring: a clause, empty if
            nobody has measured that.
        threads: how one node's threads for this job are split between preparing and reading.
        fit: how well the curve of its prep agrees with the points.
        cpu_h: CPU-hours of preparing for an epoch of each trial: its part of what is prepared once for all of them.
        alone_cpu_h: the same if each trial has a DataLoader of its own.
        price, alone_price: what these hours cost; None where the price of a core is not known.
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
    """What is kept of one dataset.

    Attributes:
        dataset: its name.
        dataset_bytes: size of all of it.
        memory_bytes, disk_bytes: kept on each node: of the feeds on it together, for ``cache_bytes`` and
            ``disk_bytes``. Decoded samples are in it.
        memory_share, disk_share: of the dataset, on all nodes together.
        epochs_per_h: in which all jobs together would read it if fetch were no limit; caches are given out by it.
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
        nodes: how many to ask the autoscaler for.
        least_nodes, most_nodes: the autoscaler's bounds.
        why_nodes: one sentence that says why no fewer and no more.
        pool: prep workers that fit beside the trials.
        idle_workers: how many of these no job can use.
        cache_memory_bytes: memory of a node that caches may use.
        jobs, caches: in the order in which they were given.
        storage: the fit of the storage's rate, in bytes/s.
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
