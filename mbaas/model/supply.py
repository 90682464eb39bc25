"""Contents of the nodes' caches by tier and form, and the resulting sources of samples and rates of prep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from mbaas.model.forms import FormPlan, SampleCosts, plan_forms
from mbaas.model.quantity import Bound
from mbaas.model.rates import Rates, Setup

PLANS = 4096
"""Number of memoized plans: answering one question needs each plan several times."""


@dataclass(frozen=True)
class Reads:
    """Shares of samples by source, adding up to 1; ``memory`` and ``disk`` include their decoded parts."""

    memory: float
    disk: float
    storage: float
    decoded_memory: float = 0.0
    decoded_disk: float = 0.0

    @property
    def decoded(self) -> float:
        """Return the share of samples that are cached decoded."""
        return self.decoded_memory + self.decoded_disk


def stored_share(rates: Rates, setup: Setup, *, steady: bool) -> Reads:
    """Return the shares of samples that come from memory, disk and storage.

    Shared caches add up over the nodes; private ones split their node's memory. Samples that are not cached in memory
    are read once per epoch, in a new random order, through the operating system's page cache (LRU, see `lru_hits`). In
    the first epoch all caches are empty. Without sharing, trials still find samples in the page cache that another
    trial on their node has just read.
    """
    copies = 1 if setup.sharing else setup.node_trials
    nodes = setup.nodes if setup.sharing else 1
    page_share = setup.dram_bytes * nodes / rates.dataset_bytes
    if not steady:
        # K trials read the same samples in different orders: one reads a sample first, the others may find it cached
        read_by_others = lru_hits(page_share) * (copies - 1) / copies
        return Reads(read_by_others, 0.0, 1 - read_by_others)
    plan = form_plan(rates, setup)
    if plan is None:
        memory = min(1.0, setup.cache_bytes * nodes / copies / rates.dataset_bytes)
        disk, decoded_memory, decoded_disk = setup.disk_bytes * nodes / copies / rates.dataset_bytes, 0.0, 0.0
    else:
        memory, disk = plan.memory_encoded + plan.memory_decoded, plan.disk_encoded + plan.disk_decoded
        decoded_memory, decoded_disk = plan.memory_decoded, plan.disk_decoded
    disk = min(1 - memory, disk)
    # Samples cached in memory are not read again, so the page cache only holds the rest.
    missed = 1 - lru_hits(page_share / (1 - memory)) if memory < 1 else 0.0
    stored = max(0.0, 1 - memory - disk) * missed
    # page cache hits count as memory; rounding must not make a share negative
    return Reads(max(0.0, 1 - disk * missed - stored), disk * missed, stored, decoded_memory, decoded_disk * missed)


def form_plan(rates: Rates, setup: Setup) -> FormPlan | None:
    """Plan the form and tier of cached samples as a cache node does, by the medians of the rates.

    Without sharing, the result is shares of the whole dataset in each trial's cache, otherwise shares of a node's
    samples. It is None if samples are not to be cached decoded, or if the decoded tier was not measured.
    """
    if not setup.decoded or rates.decoded_prep is None or rates.decoded_bytes is None:
        return None
    # without sharing, each trial has a part of its node's resources
    copies, nodes = (1, setup.nodes) if setup.sharing else (setup.node_trials, 1)
    workers = setup.workers_of(rates.cores) / copies
    costs = SampleCosts(
        encoded_bytes=rates.sample_bytes,
        decoded_bytes=rates.decoded_bytes,
        encoded_s=workers * copies / node_prep_rate(rates, setup),
        decoded_s=workers * copies / node_prep_rate(rates, setup, decoded=1.0),
        storage_s=storage_s(rates, setup) / made_on_a_node(setup),
        disk_bytes_per_s=rates.disk.value / copies if rates.disk is not None else None,
    )
    return _planned(costs, rates.samples / nodes, workers, setup.cache_bytes / copies, setup.disk_bytes / copies)


@lru_cache(PLANS)
def _planned(costs: SampleCosts, samples: float, threads: float, memory_bytes: float, disk_bytes: float) -> FormPlan:
    return plan_forms(costs, samples=samples, threads=threads, memory_bytes=memory_bytes, disk_bytes=disk_bytes)


def node_prep_rate(rates: Rates, setup: Setup, bound: Bound = "value", *, decoded: float = 0.0) -> float:
    """Return the samples/s that a node's workers prepare if the share ``decoded`` of samples is cached decoded.

    With n times the measured cores, n times the workers are each as fast as on the measured cores.
    """
    # Contention depends on workers per core, so the curve is read at the same number of workers per core.
    ratio = setup.cores_of(rates.cores) / rates.cores
    return ratio * rates.feed_rate(setup.workers_of(rates.cores) / ratio, bound, decoded=decoded)


def storage_s(rates: Rates, setup: Setup, bound: Bound = "value") -> float:
    """Return the seconds of storage for a sample of every trial, without any cache."""
    made, readers = made_on_a_node(setup), rates.storage.most if setup.readers is None else setup.readers
    if setup.storage_shared:  # one storage serves the reads and readers of all nodes
        made, readers = (1 if setup.sharing else setup.trials), readers * setup.nodes
    # More readers than measured are not assumed to be faster, because the spare capacity of the storage is unknown. If
    # many readers are slower than few, only few read (`Setup.readers`), so this is the best rate up to that number.
    return made / (rates.storage.best_rate(min(readers, rates.storage.most), bound) * setup.storage_factor)


def made_on_a_node(setup: Setup) -> float:
    """Return the number of samples that a node prepares for one sample of every trial."""
    return 1 / setup.nodes if setup.sharing else setup.node_trials


def lru_hits(share: float) -> float:
    """Return the hit rate of an LRU cache for reads in a fresh random order each epoch.

    ``share`` is the cache's share of the dataset. Take a sample at position u of one epoch and v of the next, as shares
    of an epoch. It is still cached if fewer than ``share`` distinct samples were read in between. In between are 1 - u
    of the first epoch and v of the next; (1 - u) v are in both, so 1 - u (1 - v) are distinct.

    With U and V uniform, P(U (1 - V) > 1 - x) = x + (1 - x) ln(1 - x). For half of the dataset this is 15 %.
    """
    if share >= 1:
        return 1.0
    return share + (1 - share) * math.log1p(-share)  # log1p: precise for tiny caches
