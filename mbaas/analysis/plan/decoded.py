"""What keeping samples decoded would bring to a job of a plan, in a sentence."""

from __future__ import annotations

import math

from mbaas import units
from mbaas.allocation.forms import WORTHWHILE
from mbaas.analysis import words
from mbaas.analysis.plan.jobs import Cluster, TrainingJob
from mbaas.analysis.quantity import spanning


def about_decoding(job: TrainingJob, cluster: Cluster, nodes: int, *, workers: int, room_bytes: int) -> str:
    """Say how much of prep decoding is, and what memory for decoded samples would bring; nothing if nobody knows.

    Args:
        job: the job.
        cluster: where it runs.
        nodes: how many of them.
        workers: of the job, on all nodes.
        room_bytes: memory of each node that caches may use and that no other dataset has.
    """
    if job.decoded_bytes is None or job.decoded_prep is None:
        return ""
    cores, each = cluster.node.cores, workers / nodes
    encoded, decoded = job.prep_curve(cores).rate(each), job.decoded_curve(cores).rate(each)
    share = 1 - encoded / decoded
    if share < WORTHWHILE:
        return f"decoding is only {units.percent(max(0.0, share))} of prep, so no samples are kept decoded"
    # both were measured for themselves, so their ends may be off in opposite ways
    (low, high), (decoded_low, decoded_high) = job.prep_spread, job.decoded_spread
    times = decoded / encoded
    speedup = spanning(times, times * decoded_low / high, times * decoded_high / low, unit="times")
    more_bytes = math.ceil(job.dataset.samples * job.decoded_bytes / nodes) - room_bytes
    memory = f"{units.size(more_bytes)} more memory for caches" if more_bytes > 0 else "the memory that caches may use"
    keeps = "would keep" if more_bytes > 0 else "can keep"
    all_decoded = f"{memory} on each node {keeps} all samples decoded"
    return (
        f"decoding is {units.percent(share)} of prep; {all_decoded}: prep {words.with_interval(speedup)} times as fast"
    )
