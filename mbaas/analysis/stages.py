"""The seconds that each resource needs for one sample of every trial: the arithmetic of every prediction.

All trials advance together: each receives one sample in the time in which every resource has met that sample's demand,
demand / capacity. The slowest resource sets the pace (an asymptotic bound). With T trials, n nodes, K = ceil(T / n)
trials on a node, and shared feeds:

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
``memory``       x b / (n C), x cached encoded in memory                     fetch
``disk``         y b / (n disk), y cached on disk                            fetch
``storage``      z / S, z = 1 - x - y; / n if each node has its own storage  fetch
===============  ==========================================================  =========

The parts of fetch add up (T_fetch = D x / C + D (1 - x) / S, DS-Analyzer, VLDB 2021). The parts of prep overlap, and so
do the parts of compute. Free cores exclude ``background_cores``. Reading needs cores too: fetch takes at least the time
of ``cores`` plus (y + z) read_cpu / (n free cores).

Without sharing, a node prepares and fetches K times, no samples travel between nodes, and each trial has its part of
the node's cache. With decoded samples (`mbaas.analysis.kept`), 1 / P, prep_cpu, and b on disk are sums over both forms,
weighted by their shares.
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
    """The seconds for one sample of every trial, by resource.

    Attributes:
        compute, prep, fetch: seconds by resource, as in the table above. The parts of ``compute`` and ``prep`` overlap;
            those of ``fetch`` add up.
        cores_s: seconds of all cores including the work of reading, 0 without reads. The rest of fetch overlaps with
            it.
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
        """Return the seconds of preparing and delivering, with all data in memory."""
        return max(self.prep.values())

    @property
    def fetch_s(self) -> float:
        """Return the seconds of fetching, 1 / F."""
        return max(sum(self.fetch.values()), self.cores_s)

    @property
    def limit(self) -> str:
        """Return the resource that sets the pace; if that is fetch, its slowest part."""
        # Ties go to compute, then to prep: data that arrives exactly as fast as needed is not a bottleneck.
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
    """Compute the seconds of each resource.

    Args:
        steady: whether the epoch is later than the first, in which nothing is cached yet.
        step: end of the measured interval to use for training; "low" is slow.
        prep: the same for prep and the work of cores.
        supply: the same for memory, disk and storage.

    Raises:
        ConfigError: the setup uses a disk whose rate was not measured.
    """
    reads = stored_share(rates, setup, steady=steady)
    prepared_s, reading_s = _prep_s(rates, setup, reads, prep), _reading_s(rates, setup, reads, prep)
    # Without reads the cores only prepare; counting them in fetch would give a fetch stall without a fetch.
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
        # K trials on a node need K times the CPU time of a step there, regardless of the number of accelerators
        "steps' cores": setup.node_trials * _step_cpu_s(rates, setup, bound) / _free_cores(rates, setup, bound),
    }
    if setup.accelerators is not None:  # trials take turns if there are fewer
        seconds["accelerators"] = setup.node_trials * step_s / setup.accelerators
    return seconds


def _prep_s(rates: Rates, setup: Setup, reads: Reads, bound: Bound) -> dict[str, float]:
    cores, nodes = _free_cores(rates, setup, bound), setup.nodes
    made, cost = made_on_a_node(setup), OPPOSITE[bound]
    # Prep, serving, delivery and steps compete for the node's cores. P was measured without training, so it does not
    # include waits for a core: the work of cores is a resource in addition to the workers.
    made_cpu_s = rates.cpu_s(reads.decoded).at(cost) + rates.staging_cpu_s.at(cost)
    taken_cpu_s = rates.delivery_cpu_s.at(cost) + _step_cpu_s(rates, setup, bound)
    # home nodes are spread evenly, so each node makes 1 / n of the samples of its trials; only pixels travel
    elsewhere = (nodes - 1) / nodes if setup.sharing else 0.0
    return {
        "prep": made / node_prep_rate(rates, setup, bound, decoded=reads.decoded),
        "cores": (made * made_cpu_s + setup.node_trials * taken_cpu_s) / cores,
        "network": rates.pixel_bytes * elsewhere / setup.network_bytes_per_s,
    }


def _fetch_s(rates: Rates, setup: Setup, reads: Reads, bound: Bound) -> dict[str, float]:
    made = made_on_a_node(setup)
    # `Stages.fetch_s` adds up the seconds of the tiers, because a reader takes one sample at a time from any tier.
    # Decoded samples in memory take no fetch time: prep reads them there, as it did when its rate was measured.
    in_memory = (reads.memory - reads.decoded_memory) * rates.sample_bytes
    seconds = {"memory": made * in_memory / rates.cache.at(bound)}
    if rates.disk is not None:
        seconds["disk"] = made * _disk_bytes(rates, reads) / rates.disk.at(bound)
    elif setup.disk_bytes:
        raise ConfigError(f"disk_bytes of {size(setup.disk_bytes)} needs the rate of the disk, and rates have none")
    return {**seconds, "storage": reads.storage * storage_s(rates, setup, bound)}


def _reading_s(rates: Rates, setup: Setup, reads: Reads, bound: Bound) -> float:
    # Reading from disk costs as much CPU time per byte as reading from storage, and a decoded sample has more bytes
    # than an encoded one.
    read = made_on_a_node(setup) * (reads.storage + _disk_bytes(rates, reads) / rates.sample_bytes)
    return read * rates.read_cpu_s.at(OPPOSITE[bound]) / _free_cores(rates, setup, bound)


def _free_cores(rates: Rates, setup: Setup, bound: Bound) -> float:
    return rates.free_cores(setup.cores_of(rates.cores), bound)


def _disk_bytes(rates: Rates, reads: Reads) -> float:
    """Return the mean bytes of a sample that are read from disk."""
    encoded = (reads.disk - reads.decoded_disk) * rates.sample_bytes
    return encoded + reads.decoded_disk * (rates.decoded_bytes or 0.0)


def _step_cpu_s(rates: Rates, setup: Setup, bound: Bound) -> float:
    # a step at twice the speed is assumed to need half the CPU time, which is exact for steps on a CPU
    return rates.step_cpu_s.at(OPPOSITE[bound]) / setup.accelerator_factor
