"""What the caches of nodes keep, in which form, and so where samples come from and what preparing them takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from mbaas.allocation.forms import FormPlan, SampleCosts, plan_forms
from mbaas.analysis.quantity import Bound
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup

PLANS = 4096
"""Plans that are kept: the answer to one question needs each of them several times."""


@dataclass(frozen=True)
class Reads:
    """The shares of samples, adding up to 1, that are fetched from memory, from a local disk and from storage.

    Attributes:
        memory, disk, storage: all that come from there.
        decoded_memory, decoded_disk: the parts of ``memory`` and ``disk`` that are kept decoded.
    """

    memory: float
    disk: float
    storage: float
    decoded_memory: float = 0.0
    decoded_disk: float = 0.0

    @property
    def decoded(self) -> float:
        """Return the share of samples that need not be decoded."""
        return self.decoded_memory + self.decoded_disk


def stored_share(rates: Rates, setup: Setup, *, steady: bool) -> Reads:
    """Find the shares of samples that come from memory, disk and storage.

    Shared caches add up over the nodes; private ones split their node's memory. What memory does not keep, on disk or
    in storage, is read once an epoch, in a new order each time, through the operating system's page cache, which drops
    what was least recently used (`lru_hits`). In the first epoch nothing is there; but trials that read by themselves
    find in the page cache what another one on their node has just read.
    """
    copies = 1 if setup.sharing else setup.node_trials
    nodes = setup.nodes if setup.sharing else 1
    page_share = setup.dram_bytes * nodes / rates.dataset_bytes
    if not steady:
        # K trials read the same in orders of their own: a sample is new to one of them, the others may still find it
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
    # Samples kept in memory are not read again, so the page cache has to hold only the rest.
    missed = 1 - lru_hits(page_share / (1 - memory)) if memory < 1 else 0.0
    stored = max(0.0, 1 - memory - disk) * missed
    # what the page cache has is memory too; rounding must not make a share negative
    return Reads(max(0.0, 1 - disk * missed - stored), disk * missed, stored, decoded_memory, decoded_disk * missed)


def form_plan(rates: Rates, setup: Setup) -> FormPlan | None:
    """Decide what each node keeps in which form, as its cache node does; by the medians of the rates.

    Returns:
        Shares of the samples of a node, or of the whole dataset in the cache of each trial if trials do not share.
        None: samples are not to be kept decoded, or it was not measured what that brings.
    """
    if not setup.decoded or rates.decoded_prep is None or rates.decoded_bytes is None:
        return None
    # trials that do not share have a part of everything on their node
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
    """Return the samples/s that the workers of a node prepare for feeds, if this share of samples is kept decoded.

    On n times the measured cores, n times the workers are each as fast as they were on the measured ones.
    """
    # Contention belongs to workers per core, so the curve is read at as many workers for as many cores as were
    # measured.
    ratio = setup.cores_of(rates.cores) / rates.cores
    return ratio * rates.feed_rate(setup.workers_of(rates.cores) / ratio, bound, decoded=decoded)


def storage_s(rates: Rates, setup: Setup, bound: Bound = "value") -> float:
    """Return the seconds of storage for a sample of every trial, if nothing were kept."""
    made, readers = made_on_a_node(setup), rates.storage.most if setup.readers is None else setup.readers
    if setup.storage_shared:  # one storage sees the reads, and the readers, of all nodes
        made, readers = (1 if setup.sharing else setup.trials), readers * setup.nodes
    # More readers than were measured are not taken to be faster: nobody knows what the storage has left. And where
    # many are slower than few, few read (`Setup.readers`), so it is the best rate up to that number.
    return made / (rates.storage.best_rate(min(readers, rates.storage.most), bound) * setup.storage_factor)


def made_on_a_node(setup: Setup) -> float:
    """Return how many samples a node prepares for one sample of every trial."""
    return 1 / setup.nodes if setup.sharing else setup.node_trials


def lru_hits(share: float) -> float:
    """Return the hits of an LRU cache that holds this share of what is read once an epoch in a fresh random order.

    A sample at position u of one epoch (as a share of it) and v of the next is still there if fewer than ``share``
    different samples were read between: 1 - u, and v of the next epoch, of which (1 - u) v are the same ones, so
    1 - u (1 - v). With U and V uniform, P(U (1 - V) > 1 - x) = x + (1 - x) ln(1 - x): 15 % where half would fit.
    """
    if share >= 1:
        return 1.0
    return share + (1 - share) * math.log1p(-share)  # log1p: precise for the tiniest caches, too
