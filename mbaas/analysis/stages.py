"""The seconds that each resource needs for one sample of every trial: the arithmetic under every prediction.

All trials advance together, so each of them takes one sample in the time in which every resource has done what that
sample demands of it: demand / capacity. The slowest resource sets the pace (an asymptotic bound). With T trials, n
nodes, K = ceil(T / n) trials on a node, and shared feeds:

===============  ==========================================================  =========
resource         seconds for a sample of every trial                         part of
===============  ==========================================================  =========
``step``         1 / G                                                       compute
``accelerators`` K / (accelerators G)                                        compute
``steps' cores`` K step_cpu / cores                                          compute
``prep``         (1 / P(workers) + serving / workers) / n                    prep
``cores``        ((prep_cpu + staging_cpu) / n                               prep
                 + K (delivery_cpu + step_cpu)) / cores
``network``      pixel_bytes (n - 1) / n / network                           prep
``memory``       x b / (n C), x cached in memory                             fetch
``disk``         y b / (n disk), y kept on disk                              fetch
``storage``      z / S, z = 1 - x - y; / n if each node has its own storage  fetch
===============  ==========================================================  =========

Parts of fetch add up (T_fetch = D x / C + D (1 - x) / S, DS-Analyzer, VLDB 2021); those of prep, and of compute, go on
at the same time. Reading takes cores, too: fetch takes no less than ``cores`` and (y + z) read_cpu / (n cores). Without
sharing a node prepares and fetches K times, nothing travels between nodes, and each trial has its own part of its
node's cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbaas.analysis.quantity import OPPOSITE, Bound
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.errors import ConfigError
from mbaas.units import size


@dataclass(frozen=True)
class Stages:
    """The seconds for one sample of every trial, by resource; parts of `prep` and `compute` overlap, `fetch` adds up.

    Attributes:
        compute, prep, fetch: seconds by resource, as in the table above.
        cores_s: what all cores need if they also have to read, 0 if nothing is read; the rest of fetch goes on
            meanwhile.
    """

    compute: dict[str, float]
    prep: dict[str, float]
    fetch: dict[str, float]
    cores_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Return the seconds of training on synthetic data."""
        return max(self.compute.values())

    @property
    def prep_s(self) -> float:
        """Return the seconds of preparing and handing over, everything in memory."""
        return max(self.prep.values())

    @property
    def fetch_s(self) -> float:
        """Return the seconds of fetching, 1 / F."""
        return max(sum(self.fetch.values()), self.cores_s)

    @property
    def limit(self) -> str:
        """Name the resource that sets the pace; of fetch, the one that takes longest."""
        # Compute first, then prep, among equals: data that comes exactly as fast as it is needed is no problem.
        if self.compute_s >= max(self.prep_s, self.fetch_s):
            return max(self.compute, key=self.compute.__getitem__)
        if self.prep_s >= self.fetch_s:
            return max(self.prep, key=self.prep.__getitem__)
        return "cores" if self.cores_s >= self.fetch_s else max(self.fetch, key=self.fetch.__getitem__)


@dataclass(frozen=True)
class Reads:
    """The shares of samples, adding up to 1, that are fetched from memory, from a local disk and from storage."""

    memory: float
    disk: float
    storage: float


def stages(
    rates: Rates,
    setup: Setup,
    *,
    steady: bool,
    step: Bound = "value",
    prep: Bound = "value",
    supply: Bound = "value",
) -> Stages:
    """Find the seconds of each resource.

    Args:
        steady: whether it is an epoch after the first; in the first nothing is cached yet.
        step: whether training is taken at the low, median or high end of what was measured; "low" is slow.
        prep: the same for prep and what cores have to do.
        supply: the same for memory, disk and storage.

    Raises:
        ConfigError: a disk is to be used whose rate is not known.
    """
    prepared_s, reading_s = _prep_s(rates, setup, prep), _reading_s(rates, setup, prep, steady=steady)
    # Where nothing is read, cores are prep's alone: a fetch that took as long would be a fetch stall without a fetch.
    return Stages(
        _compute_s(rates, setup, step),
        prepared_s,
        _fetch_s(rates, setup, supply, steady=steady),
        prepared_s["cores"] + reading_s if reading_s else 0.0,
    )


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
    memory = min(1.0, setup.cache_bytes * nodes / copies / rates.dataset_bytes)
    disk = min(1 - memory, setup.disk_bytes * nodes / copies / rates.dataset_bytes)
    # Samples kept in memory are not read again, so the page cache has to hold only the rest.
    missed = 1 - lru_hits(page_share / (1 - memory)) if memory < 1 else 0.0
    stored = (1 - memory - disk) * missed
    disk *= missed
    # what the page cache has is memory too; rounding must not make a share negative
    return Reads(max(0.0, 1 - disk - stored), disk, stored)


def node_prep_rate(rates: Rates, setup: Setup, bound: Bound = "value") -> float:
    """Return the samples/s that the workers of a node prepare for feeds.

    On n times the measured cores, n times the workers are each as fast as they were on the measured ones.
    """
    # Contention belongs to workers per core, so the curve is read at as many workers for as many cores as were
    # measured.
    ratio = setup.cores_of(rates.cores) / rates.cores
    return ratio * rates.feed_rate(setup.workers_of(rates.cores) / ratio, bound)


def lru_hits(share: float) -> float:
    """Return the hits of an LRU cache that holds this share of what is read once an epoch in a fresh random order.

    A sample at position u of one epoch (as a share of it) and v of the next is still there if fewer than ``share``
    different samples were read between: 1 - u, and v of the next epoch, of which (1 - u) v are the same ones, so
    1 - u (1 - v). With U and V uniform, P(U (1 - V) > 1 - x) = x + (1 - x) ln(1 - x): 15 % where half would fit.
    """
    if share >= 1:
        return 1.0
    return share + (1 - share) * math.log1p(-share)  # log1p: precise for the tiniest caches, too


def _compute_s(rates: Rates, setup: Setup, bound: Bound) -> dict[str, float]:
    batch_size = rates.batch_size if setup.batch_size is None else setup.batch_size
    step_s = rates.step_s(batch_size, bound) / setup.accelerator_factor
    seconds = {
        "step": step_s,
        # K trials on one node need K times the CPU time of a step there, however many accelerators they have
        "steps' cores": setup.node_trials * _step_cpu_s(rates, setup, bound) / setup.cores_of(rates.cores),
    }
    if setup.accelerators is not None:  # fewer than trials: they take turns
        seconds["accelerators"] = setup.node_trials * step_s / setup.accelerators
    return seconds


def _prep_s(rates: Rates, setup: Setup, bound: Bound) -> dict[str, float]:
    cores, nodes = setup.cores_of(rates.cores), setup.nodes
    made, cost = _made(setup), OPPOSITE[bound]
    # Prep, serving, delivery and steps all want the node's cores. A worker that waits for its core is not seen by P,
    # which was measured while nobody trained, so the cores' work is a resource of its own beside the workers'.
    made_cpu_s = rates.prepared_cpu_s.at(cost) + rates.staging_cpu_s.at(cost)
    taken_cpu_s = rates.delivery_cpu_s.at(cost) + _step_cpu_s(rates, setup, bound)
    # homes are spread evenly, so each node makes 1 / n of the samples that its trials take; only pixels travel
    elsewhere = (nodes - 1) / nodes if setup.sharing else 0.0
    return {
        "prep": made / node_prep_rate(rates, setup, bound),
        "cores": (made * made_cpu_s + setup.node_trials * taken_cpu_s) / cores,
        "network": rates.pixel_bytes * elsewhere / setup.network_bytes_per_s,
    }


def _fetch_s(rates: Rates, setup: Setup, bound: Bound, *, steady: bool) -> dict[str, float]:
    reads = stored_share(rates, setup, steady=steady)
    made = _made(setup)
    # each tier's seconds are added up by `Stages.fetch_s`: a reader takes one sample after the other, wherever it lies
    seconds = {"memory": made * reads.memory * rates.sample_bytes / rates.cache.at(bound)}
    if rates.disk is not None:
        seconds["disk"] = made * reads.disk * rates.sample_bytes / rates.disk.at(bound)
    elif setup.disk_bytes:
        raise ConfigError(f"disk_bytes of {size(setup.disk_bytes)} needs the rate of the disk, and rates have none")
    readers = rates.storage.most if setup.readers is None else setup.readers
    if setup.storage_shared:  # one storage sees the reads, and the readers, of all nodes
        made, readers = (1 if setup.sharing else setup.trials), readers * setup.nodes
    # More readers than were measured are not taken to be faster: nobody knows what the storage has left. And where
    # many are slower than few, few read (`Setup.readers`), so it is the best rate up to that number.
    storage_per_s = rates.storage.best_rate(min(readers, rates.storage.most), bound) * setup.storage_factor
    return {**seconds, "storage": made * reads.storage / storage_per_s}


def _reading_s(rates: Rates, setup: Setup, bound: Bound, *, steady: bool) -> float:
    """Return the seconds of all cores of a node for reading from storage, or from its disk, which costs as much."""
    reads = stored_share(rates, setup, steady=steady)
    read = _made(setup) * (reads.storage + reads.disk)
    return read * rates.read_cpu_s.at(OPPOSITE[bound]) / setup.cores_of(rates.cores)


def _made(setup: Setup) -> float:
    """Return how many samples a node prepares for one sample of every trial."""
    return 1 / setup.nodes if setup.sharing else setup.node_trials


def _step_cpu_s(rates: Rates, setup: Setup, bound: Bound) -> float:
    # a step that is twice as fast is taken to need half the CPU time: on a CPU the one is the other
    return rates.step_cpu_s.at(OPPOSITE[bound]) / setup.accelerator_factor
