"""The seconds that each resource needs for one sample of every trial: the arithmetic under every prediction.

All trials advance together, so each of them takes one sample in the time in which every resource has done what that
sample demands of it: demand / capacity. The slowest resource sets the pace (an asymptotic bound). With T trials, n
nodes, K = ceil(T / n) trials on a node, and shared feeds:

===============  ==========================================================  =========
resource         seconds for a sample of every trial                         part of
===============  ==========================================================  =========
``step``         1 / G                                                       compute
``accelerators`` K / (accelerators G)                                        compute
``steps' cores`` K step_cpu / free cores                                     compute
``prep``         (1 / P(workers) + serving / workers) / n                    prep
``cores``        ((prep_cpu + staging_cpu) / n                               prep
                 + K (delivery_cpu + step_cpu)) / free cores
``network``      pixel_bytes (n - 1) / n / network                           prep
``memory``       x b / (n C), x kept encoded in memory                       fetch
``disk``         y b / (n disk), y kept on disk                              fetch
``storage``      z / S, z = 1 - x - y; / n if each node has its own storage  fetch
===============  ==========================================================  =========

Parts of fetch add up (T_fetch = D x / C + D (1 - x) / S, DS-Analyzer, VLDB 2021); those of prep, and of compute, go on
at the same time. Free cores are those beside what runs all the time (``background_cores``). Reading takes cores, too:
fetch takes no less than ``cores`` and (y + z) read_cpu / (n free cores). Without
sharing a node prepares and fetches K times, nothing travels between nodes, and each trial has its own part of its
node's cache. Where samples are kept decoded (`mbaas.analysis.kept`), 1 / P and prep_cpu are sums over both forms, each
with its share of the samples, and so is b on disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from mbaas.analysis.kept import Reads, made_on_a_node, node_prep_rate, storage_s, stored_share
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
    reads = stored_share(rates, setup, steady=steady)
    prepared_s, reading_s = _prep_s(rates, setup, reads, prep), _reading_s(rates, setup, reads, prep)
    # Where nothing is read, cores are prep's alone: a fetch that took as long would be a fetch stall without a fetch.
    return Stages(
        _compute_s(rates, setup, step),
        prepared_s,
        _fetch_s(rates, setup, reads, supply),
        prepared_s["cores"] + reading_s if reading_s else 0.0,
    )


def _compute_s(rates: Rates, setup: Setup, bound: Bound) -> dict[str, float]:
    batch_size = rates.batch_size if setup.batch_size is None else setup.batch_size
    step_s = rates.step_s(batch_size, bound) / setup.accelerator_factor
    seconds = {
        "step": step_s,
        # K trials on one node need K times the CPU time of a step there, however many accelerators they have
        "steps' cores": setup.node_trials * _step_cpu_s(rates, setup, bound) / _free_cores(rates, setup, bound),
    }
    if setup.accelerators is not None:  # fewer than trials: they take turns
        seconds["accelerators"] = setup.node_trials * step_s / setup.accelerators
    return seconds


def _prep_s(rates: Rates, setup: Setup, reads: Reads, bound: Bound) -> dict[str, float]:
    cores, nodes = _free_cores(rates, setup, bound), setup.nodes
    made, cost = made_on_a_node(setup), OPPOSITE[bound]
    # Prep, serving, delivery and steps all want the node's cores. A worker that waits for its core is not seen by P,
    # which was measured while nobody trained, so the cores' work is a resource of its own beside the workers'.
    made_cpu_s = rates.cpu_s(reads.decoded).at(cost) + rates.staging_cpu_s.at(cost)
    taken_cpu_s = rates.delivery_cpu_s.at(cost) + _step_cpu_s(rates, setup, bound)
    # homes are spread evenly, so each node makes 1 / n of the samples that its trials take; only pixels travel
    elsewhere = (nodes - 1) / nodes if setup.sharing else 0.0
    return {
        "prep": made / node_prep_rate(rates, setup, bound, decoded=reads.decoded),
        "cores": (made * made_cpu_s + setup.node_trials * taken_cpu_s) / cores,
        "network": rates.pixel_bytes * elsewhere / setup.network_bytes_per_s,
    }


def _fetch_s(rates: Rates, setup: Setup, reads: Reads, bound: Bound) -> dict[str, float]:
    made = made_on_a_node(setup)
    # Each tier's seconds are added up by `Stages.fetch_s`: a reader takes one sample after the other, wherever it lies.
    # Prep reads decoded samples where they lie in memory, as it did when its rate was measured.
    in_memory = (reads.memory - reads.decoded_memory) * rates.sample_bytes
    seconds = {"memory": made * in_memory / rates.cache.at(bound)}
    if rates.disk is not None:
        seconds["disk"] = made * _disk_bytes(rates, reads) / rates.disk.at(bound)
    elif setup.disk_bytes:
        raise ConfigError(f"disk_bytes of {size(setup.disk_bytes)} needs the rate of the disk, and rates have none")
    return {**seconds, "storage": reads.storage * storage_s(rates, setup, bound)}


def _reading_s(rates: Rates, setup: Setup, reads: Reads, bound: Bound) -> float:
    """Return the seconds of all cores of a node for reading from storage, or from its disk, which costs as much."""
    # a decoded sample has more bytes to move than the one that was measured
    read = made_on_a_node(setup) * (reads.storage + _disk_bytes(rates, reads) / rates.sample_bytes)
    return read * rates.read_cpu_s.at(OPPOSITE[bound]) / _free_cores(rates, setup, bound)


def _free_cores(rates: Rates, setup: Setup, bound: Bound) -> float:
    return rates.free_cores(setup.cores_of(rates.cores), bound)


def _disk_bytes(rates: Rates, reads: Reads) -> float:
    """Return the bytes of a sample that come from the disk, on average."""
    encoded = (reads.disk - reads.decoded_disk) * rates.sample_bytes
    return encoded + reads.decoded_disk * (rates.decoded_bytes or 0.0)


def _step_cpu_s(rates: Rates, setup: Setup, bound: Bound) -> float:
    # a step that is twice as fast is taken to need half the CPU time: on a CPU the one is the other
    return rates.step_cpu_s.at(OPPOSITE[bound]) / setup.accelerator_factor
