"""The seconds that each resource needs for one sample of every trial: the arithmetic of every prediction.

All trials advance together: each receives one sample in the time in which every resource has met that sample's demand,
demand / capacity. The slowest resource sets the pace (an asymptotic bound). With T trials that have p different
pipelines, n nodes, K = ceil(T / n) trials on a node, a share v = (n - 1) / n of samples from other nodes, and shared
feeds:

===============  ==========================================================  =========
resource         seconds for a sample of every trial                         part of
===============  ==========================================================  =========
``step``         1 / G                                                       compute
``accelerators`` K / (accelerators G)                                        compute
``steps' cores`` K step_cpu / free cores                                     compute
``prep``         p (1 / P(workers) + serving / workers) / n                  prep
``cores``        (p (prep_cpu + staging_cpu) / n                             prep
                 + K (delivery_cpu + step_cpu)) / free cores
``network``      pixel_bytes v min(p, K) / network                           prep
``memory``       x b / (n C), x cached encoded in memory                     fetch
``disk``         y b / (n disk), y cached on disk                            fetch
``storage``      z / S, z = 1 - x - y; if each node has its own storage,     fetch
                 (z + h) / (n S)
===============  ==========================================================  =========

With several pipelines, some samples that are not cached are read more than once (`times_read`). The parts of fetch add
up (T_fetch = D x / C + D (1 - x) / S, DS-Analyzer, VLDB 2021). The fullest home node has 1 + h even shares of the
samples (`mbaas.model.balance.largest_home_share`). Caches are equal, so it reads h more than an even share. The parts
of prep overlap, and so do the parts of compute. Free cores exclude ``background_cores``. Reading needs cores too: fetch
takes at least the time of ``cores`` plus (y + z) read_cpu / (n free cores).

A data-parallel trial has a rank on every node, which takes 1 / n of the trial's samples and first those of its node.
Then K = T / n, except that all T ranks share a node's accelerators. Only the imbalance between nodes travels, beta of
`mbaas.model.balance.travelling_share`: v = beta / n, for each of the p pipelines.

Without sharing, a node prepares and fetches K times, no samples travel between nodes, and each trial has its part of
the node's cache. With decoded samples, 1 / P, prep_cpu, and b on disk are sums over both forms, weighted by their
shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mbaas.base.units import size
from mbaas.errors import ConfigError
from mbaas.model.balance import largest_home_share, travelling_share
from mbaas.model.curves import ROUNDING
from mbaas.model.forms import FormPlan, SampleCosts, plan_forms
from mbaas.model.page_cache import first_epoch_hits, page_cache_hits
from mbaas.model.quantity import OPPOSITE, Bound
from mbaas.model.rates import Rates, Setup
from mbaas.model.tiers import COPIES


@dataclass(frozen=True)
class ResourceTimes:
    """The seconds for one sample of every trial, by resource.

    ``cores_s`` are seconds of all cores including the work of reading, 0 without reads; the rest of fetch overlaps with
    it.
    """

    compute: Mapping[str, float]
    prep: Mapping[str, float]
    fetch: Mapping[str, float] = field(default_factory=dict)
    cores_s: float = 0.0

    @property
    def compute_s(self) -> float:
        return max(self.compute.values())

    @property
    def prep_s(self) -> float:
        return max(self.prep.values())

    @property
    def fetch_s(self) -> float:
        """Seconds of fetching, 1 / F."""
        return max(sum(self.fetch.values()), self.cores_s)

    @property
    def pace_s(self) -> float:
        return max(self.compute_s, self.prep_s, self.fetch_s)

    @property
    def limit(self) -> str:
        """The resource that sets the pace; if that is fetch, its slowest part."""
        # Ties go to compute, then to prep: data that arrives exactly as fast as needed is not a bottleneck.
        if self.compute_s >= (1 - ROUNDING) * self.pace_s:
            return max(self.compute, key=self.compute.__getitem__)
        if self.prep_s >= (1 - ROUNDING) * self.pace_s:
            return max(self.prep, key=self.prep.__getitem__)
        return "cores" if self.cores_s >= self.fetch_s else max(self.fetch, key=self.fetch.__getitem__)

    def without(self, resource: str) -> ResourceTimes:
        compute, prep, fetch = (
            {name: 0.0 if name == resource else s for name, s in part.items()}
            for part in (self.compute, self.prep, self.fetch)
        )
        # With reads, cores are part of fetch too.
        return ResourceTimes(compute, prep, fetch, 0.0 if resource == "cores" else self.cores_s)


def resource_times(
    rates: Rates,
    setup: Setup,
    *,
    steady: bool,
    step: Bound = "value",
    prep: Bound = "value",
    supply: Bound = "value",
) -> ResourceTimes:
    """Compute the seconds of each resource in the table above.

    ``steady`` is later than the first epoch, in which nothing is cached yet. The ends of the measured intervals are
    those of ``step`` for training, ``prep`` for prep and cores, ``supply`` for memory, disk and storage; "low" is slow.
    """
    shares, cost = read_shares(rates, setup, steady=steady), OPPOSITE[prep]
    fetched_once, made, taken = setup.fetched_on_node, setup.made_on_node, setup.taken_on_node
    free_cores = rates.free_cores(setup.cores_of(rates.cores), prep)
    # P was measured without training, so it includes no waits for a core: the work of cores is a resource in addition
    # to the workers. Prep, serving, delivery and steps compete for it.
    made_cpu_s = rates.cpu_s(shares.decoded).at(cost) + rates.staging_cpu_s.at(cost)
    taken_cpu_s = rates.delivery_cpu_s.at(cost) + _step_cpu_s(rates, setup, prep)
    prepared = {
        "prep": made / node_prep_rate(rates, setup, prep, decoded=shares.decoded),
        "cores": (made * made_cpu_s + taken * taken_cpu_s) / free_cores,
        "network": rates.pixel_bytes * _received_share(rates, setup) / setup.network_bytes_per_s,
    }
    encoded_on_disk = (shares.disk - shares.decoded_disk) * rates.sample_bytes
    disk_bytes = encoded_on_disk + shares.decoded_disk * (rates.decoded_bytes or 0.0)
    stored = shares.storage * (times_read(rates, setup) if steady else 1.0)
    # Reading from disk costs as much CPU time per byte as reading from storage.
    read_cpu_s = fetched_once * (stored + disk_bytes / rates.sample_bytes) * rates.read_cpu_s.at(cost)
    # Decoded samples in memory take no fetch time: prep reads them there, as it did when its rate was measured.
    memory_bytes = (shares.memory - shares.decoded_memory) * rates.sample_bytes
    fetched = {"memory": fetched_once * memory_bytes / rates.cache.at(supply)}
    if rates.disk is not None:
        fetched["disk"] = fetched_once * disk_bytes / rates.disk.at(supply)
    elif setup.disk_bytes:
        raise ConfigError(f"disk_bytes of {size(setup.disk_bytes)} needs the rate of the disk, and rates have none")
    if setup.sharing and not setup.storage_shared:
        # All samples that are not cached may have the same home, but no more than these.
        excess = largest_home_share(setup.nodes, samples=rates.samples) - 1
        stored = min(stored * setup.nodes, stored + excess)
    fetched["storage"] = stored * storage_s(rates, setup, supply)
    # Without reads the cores only prepare; counting them in fetch would give a fetch stall without a fetch.
    cores_s = prepared["cores"] + read_cpu_s / free_cores if read_cpu_s else 0.0
    return ResourceTimes(_compute(rates, setup, step), prepared, fetched, cores_s)


def _received_share(rates: Rates, setup: Setup) -> float:
    """Return the samples that a node receives from other nodes for one sample of every trial."""
    if not setup.sharing:
        return 0.0
    # Home nodes are spread evenly, so each node makes 1 / n of the samples; only pixels travel.
    share = travelling_share(
        setup.nodes, local_batch=setup.batch_of(rates.batch_size) / setup.nodes, locality=setup.data_parallel
    )
    return setup.forms_received * (share / setup.nodes if setup.data_parallel else share)


def _compute(rates: Rates, setup: Setup, bound: Bound) -> dict[str, float]:
    step_s = rates.step_s(setup.batch_of(rates.batch_size), bound) / setup.accelerator_factor
    free_cores = rates.free_cores(setup.cores_of(rates.cores), bound)
    seconds = {
        "step": step_s,
        # K trials on a node need K times the CPU time of a step there, regardless of the number of accelerators.
        "steps' cores": setup.taken_on_node * _step_cpu_s(rates, setup, bound) / free_cores,
    }
    if setup.accelerators is not None:  # trials take turns if there are fewer
        seconds["accelerators"] = setup.node_trials * step_s / setup.accelerators
    return seconds


def _step_cpu_s(rates: Rates, setup: Setup, bound: Bound) -> float:
    # A step at twice the speed is assumed to need half the CPU time, which is exact for steps on a CPU.
    return rates.step_cpu_s.at(OPPOSITE[bound]) / setup.accelerator_factor


def node_prep_rate(rates: Rates, setup: Setup, bound: Bound = "value", *, decoded: float = 0.0) -> float:
    """Return the samples/s that a node's workers prepare if the share ``decoded`` of samples is cached decoded."""
    # Contention depends on workers per core, so the curve is read at the same number of workers per core.
    ratio = setup.cores_of(rates.cores) / rates.cores
    return ratio * rates.feed_rate(setup.workers_of(rates.cores) / ratio, bound, decoded=decoded)


def storage_s(rates: Rates, setup: Setup, bound: Bound = "value") -> float:
    fetched, readers = setup.fetched_on_node, rates.storage.most if setup.readers is None else setup.readers
    if setup.storage_shared:  # one storage serves the reads and readers of all nodes
        fetched, readers = (1 if setup.sharing else setup.trials), readers * setup.nodes
    # More readers than measured are not assumed to be faster, because the spare capacity of the storage is unknown. If
    # many readers are slower than few, only few read (`Setup.readers`), so this is the best rate up to that number.
    return fetched / (rates.storage.best_rate(min(readers, rates.storage.most), bound) * setup.storage_factor)


def times_read(rates: Rates, setup: Setup) -> float:
    """Return how often a sample that is not cached is read in a later epoch, for all pipelines together.

    The copies that pipelines share take a part of the cache (`mbaas.cache.shared_reads`). In measurements pipelines
    were about one block apart, so there are copies of one block for each pipeline, and of one more. If memory has no
    room for them, each pipeline reads alone.
    """
    alone = float(setup.times_made)
    fits = (setup.cache_bytes + setup.dram_bytes) * setup.nodes / rates.dataset_bytes
    spread = COPIES * (alone + 1) * setup.batch_of(rates.batch_size) / rates.samples
    return alone if alone == 1 or spread >= min(1.0, fits) else min(alone, 1 / (1 - spread))


@dataclass(frozen=True)
class ReadShares:
    """Shares of samples by source, adding up to 1; ``memory`` and ``disk`` include their decoded parts."""

    memory: float
    disk: float
    storage: float
    decoded_memory: float = 0.0
    decoded_disk: float = 0.0

    @property
    def decoded(self) -> float:
        return self.decoded_memory + self.decoded_disk


def read_shares(rates: Rates, setup: Setup, *, steady: bool) -> ReadShares:
    """Return the shares of samples that come from memory, disk and storage.

    Shared caches add up over the nodes; private ones split their node's memory. Other samples are read once per epoch,
    in a new random order, through the page cache (`page_cache_hits`). In the first epoch all caches are empty.
    Without sharing, trials still find samples in the page cache that another trial on their node has just read.
    """
    copies = 1 if setup.sharing else setup.node_trials
    nodes = setup.nodes if setup.sharing else 1
    page_share = setup.dram_bytes * nodes / rates.dataset_bytes
    readers = 1.0 if setup.sharing else max(1.0, setup.taken_on_node)  # trials with a random order each, on a node
    if not steady:
        read_by_others = first_epoch_hits(page_share, trials=readers)
        return ReadShares(read_by_others, 0.0, 1 - read_by_others)
    plan = form_plan(rates, setup)
    if plan is None:
        memory = min(1.0, setup.cache_bytes * nodes / copies / rates.dataset_bytes)
        disk, decoded_memory, decoded_disk = setup.disk_bytes * nodes / copies / rates.dataset_bytes, 0.0, 0.0
    else:
        memory, disk = plan.memory_encoded + plan.memory_decoded, plan.disk_encoded + plan.disk_decoded
        decoded_memory, decoded_disk = plan.memory_decoded, plan.disk_decoded
    disk = min(1 - memory, disk)
    # Samples cached in memory are not read again, so the page cache only holds the rest.
    missed = 1 - page_cache_hits(page_share / (1 - memory), trials=readers) if memory < 1 else 0.0
    stored = max(0.0, 1 - memory - disk) * missed
    # Page cache hits count as memory; rounding must not make a share negative.
    return ReadShares(
        max(0.0, 1 - disk * missed - stored), disk * missed, stored, decoded_memory, decoded_disk * missed
    )


def form_plan(rates: Rates, setup: Setup) -> FormPlan | None:
    """Plan the form and tier of cached samples as a cache node does, by the medians of the rates.

    Without sharing, the shares are of the whole dataset in each trial's cache, otherwise of a node's samples. None if
    samples are not to be cached decoded, or if the decoded tier was not measured.
    """
    if not setup.decoded or rates.decoded_prep is None or rates.decoded_bytes is None:
        return None
    # Without sharing, each trial has a part of its node's resources.
    copies, nodes = (1, setup.nodes) if setup.sharing else (setup.node_trials, 1)
    workers = setup.workers_of(rates.cores) / copies
    costs = SampleCosts(
        encoded_bytes=rates.sample_bytes,
        decoded_bytes=rates.decoded_bytes,
        # For a fetched sample, which is prepared once for each pipeline.
        encoded_s=setup.times_made * workers * copies / node_prep_rate(rates, setup),
        decoded_s=setup.times_made * workers * copies / node_prep_rate(rates, setup, decoded=1.0),
        storage_s=storage_s(rates, setup) / setup.fetched_on_node * times_read(rates, setup),
        disk_bytes_per_s=rates.disk.value / copies if rates.disk is not None else None,
    )
    return plan_forms(
        costs,
        samples=rates.samples / nodes,
        threads=workers,
        memory_bytes=setup.cache_bytes / copies,
        disk_bytes=setup.disk_bytes / copies,
    )
