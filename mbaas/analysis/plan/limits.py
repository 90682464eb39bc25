"""What keeps a job from going faster, in a word and in a sentence."""

from __future__ import annotations

import math

from mbaas.allocation.workers import Share
from mbaas.analysis import words
from mbaas.analysis.plan.jobs import TrainingJob
from mbaas.analysis.plan.result import Limit
from mbaas.analysis.plan.supply import Fetch

CLOSE = 1e-6
"""Relative; rates that are equal on paper differ by less."""


def limit_of(
    job: TrainingJob, share: Share, fetch: Fetch, *, prepared_per_s: float, network_per_s: float, pool: int
) -> tuple[Limit, str]:
    """What the least of a job's rates comes from."""
    rate = min(job.step_per_s, prepared_per_s, fetch.per_s, network_per_s)
    workers = words.counted(share.workers, "worker")
    prepared = f"{workers} prepare{'s' if share.workers == 1 else ''} {_rate(prepared_per_s)}"
    fetched = f"caches and storage bring {_rate(fetch.per_s)}"
    could = f"training could take {_rate(job.step_per_s)}"
    if rate >= job.step_per_s * (1 - CLOSE):
        return "training", f"trains at full speed, {_rate(rate)} in each trial: {prepared}, {fetched}"
    if rate >= network_per_s * (1 - CLOSE):
        return "network", f"the network brings each node {_rate(network_per_s)} of finished pixels; {could}"
    if rate >= fetch.per_s * (1 - CLOSE):
        place = _slowest(fetch)
        stored = f", {words.share(fetch.stored_share)} of its samples from storage" if place == "storage" else ""
        return place, f"{fetched}{stored}; {prepared}, {could}"
    if share.limit == "pool":
        return "pool", f"{prepared}; {could}, but the pool of {pool} has no more workers for it"
    return "prep", f"{prepared}, and more would be no faster; {could}"


def _slowest(fetch: Fetch) -> Limit:
    places: list[tuple[float, Limit]] = [
        (fetch.storage_s, "storage"),
        (fetch.disk_s, "disk"),
        (fetch.memory_s, "memory"),
    ]
    return max(places, key=lambda pair: pair[0])[1]


def _rate(per_s: float) -> str:
    return "any number of samples/s" if math.isinf(per_s) else f"{words.number(per_s)} samples/s"
