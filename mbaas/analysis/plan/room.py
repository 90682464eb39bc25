"""What a cluster has room for: trials, prep workers, caches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mbaas.allocation.throughput import ROUNDING
from mbaas.analysis import words
from mbaas.analysis.plan.jobs import Cluster, TrainingJob
from mbaas.runtime import DEFAULT_STAGING_BYTES, DEFAULT_STAGING_SHARE, STORE_SHARE


def pool_of(jobs: Sequence[TrainingJob], cluster: Cluster, nodes: int) -> int:
    """Prep workers of a core each that fit beside the trials; negative if the trials alone need more cores."""
    trials = sum(job.trials * job.cores_per_trial for job in jobs)
    return math.floor((nodes * cluster.node.cores - trials) * (1 + ROUNDING))


def staging_bytes(job: TrainingJob, cluster: Cluster) -> int:
    """Of a job's feed on each node: as it says, or as `mbaas.serve` sets it."""
    if job.staging_bytes is not None:
        return job.staging_bytes
    return min(DEFAULT_STAGING_BYTES, int(DEFAULT_STAGING_SHARE * cluster.node.store_bytes))


def cache_bytes(jobs: Sequence[TrainingJob], cluster: Cluster) -> int:
    """Memory of a node that all caches together may use: 70 % of the object store, less what is staged there."""
    return int(STORE_SHARE * cluster.node.store_bytes) - sum(staging_bytes(job, cluster) for job in jobs)


def misfit(jobs: Sequence[TrainingJob], cluster: Cluster, nodes: int) -> str:
    """Why the jobs do not fit so many nodes; empty if they do."""
    these, verb = words.counted(nodes, "node"), "has" if nodes == 1 else "have"
    gpus, cores = nodes * cluster.node.gpus, nodes * cluster.node.cores
    wanted_gpus = sum(job.trials * job.gpus_per_trial for job in jobs)
    if wanted_gpus > gpus * (1 + ROUNDING):
        return f"trials need {wanted_gpus:g} GPUs, {these} {verb} {gpus:g}"
    wanted_cores = sum(job.trials * job.cores_per_trial for job in jobs)
    if pool_of(jobs, cluster, nodes) < len(jobs):
        wanted = f"trials need {wanted_cores:g} cores and every job one more for a prep worker"
        return f"{wanted}, {wanted_cores + len(jobs):g} in all, {these} {verb} {cores}"
    if cache_bytes(jobs, cluster) < 0:
        staged = sum(staging_bytes(job, cluster) for job in jobs)
        usable = int(STORE_SHARE * cluster.node.store_bytes)
        return (
            f"staging of all jobs needs {words.size(staged)} on each node, which may use {words.size(usable)}, "
            f"{STORE_SHARE:.0%} of its object store"
        )
    return ""
