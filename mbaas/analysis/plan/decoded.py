"""Decoded samples in the caches of a plan, and the benefit of more memory for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbaas import units
from mbaas.analysis.plan.jobs import Cluster, TrainingJob
from mbaas.analysis.plan.supply import Kept
from mbaas.model import words
from mbaas.model.forms import WORTHWHILE
from mbaas.model.quantity import spanning


@dataclass(frozen=True)
class KeptDecoded:
    """Decoded ``share`` of a job's samples over all nodes, and the memory of each node beyond their encoded size."""

    share: float = 0.0
    more_bytes: int = 0


NOTHING = KeptDecoded()


def fill_with_decoded(
    jobs: Sequence[TrainingJob],
    *,
    nodes: int,
    kept: Mapping[str, Kept],
    spare_bytes: int,
    epochs_per_s: Mapping[str, float],
) -> dict[str, KeptDecoded]:
    """Give each node's spare cache memory to decoded samples, first where a byte saves the most prep time.

    Jobs are assumed to have different pipelines, so that none can use another's decoded samples. A job has decoded
    samples only if all of its samples are in memory. With less memory, a real feed weighs the cost of storage and may
    do better than this plan.

    Args:
        kept: encoded cache contents by name of the dataset.
        epochs_per_s: by name of the job, like the result.
    """
    found = {job.name: NOTHING for job in jobs}
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
        found[job.name] = KeptDecoded(given / whole_bytes if whole_bytes else 1.0, given)
        spare_bytes -= given
    return found


def _saved_s(job: TrainingJob) -> float:
    """Return the CPU seconds that a decoded sample saves; 0 if that is not worthwhile."""
    encoded_s, decoded_s = 1 / job.worker_per_s(), 1 / job.worker_per_s(1.0)
    return encoded_s - decoded_s if encoded_s - decoded_s >= WORTHWHILE * encoded_s else 0.0


def about_decoding(
    job: TrainingJob, cluster: Cluster, nodes: int, *, workers: int, kept: KeptDecoded, room_bytes: int
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
    encoded, decoded = job.prep_curve(cores).rate(each), job.decoded_curve(cores).rate(each)
    share = 1 - encoded / decoded
    if share < WORTHWHILE:
        return words.none_decoded(share)
    if kept.share >= 1:
        return f"decoding is {units.percent(share)} of prep, and all samples are kept decoded"
    # Measured independently, so their errors may be opposite.
    (low, high), (decoded_low, decoded_high) = job.blended_spread(kept.share), job.decoded_spread
    times = decoded / job.blended_curve(cores, kept.share).rate(each)
    speedup = spanning(times, times * decoded_low / high, times * decoded_high / low, unit="times")
    more_bytes = math.ceil(job.dataset.samples * job.decoded_bytes / nodes) - room_bytes
    memory = f"{units.size(more_bytes)} more memory for caches" if more_bytes > 0 else "the memory that caches may use"
    keeps = "would keep" if more_bytes > 0 else "can keep"
    some = f", and {units.percent(kept.share)} of the samples are kept decoded" if kept.share else ""
    return (
        f"decoding is {units.percent(share)} of prep{some}; {memory} on each node {keeps} all samples decoded: prep "
        f"{words.with_interval(speedup)} times as fast"
    )
