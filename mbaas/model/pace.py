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
the node's cache. With decoded samples (`mbaas.model.supply`), 1 / P, prep_cpu, and b on disk are sums over both forms,
weighted by their shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mbaas import units
from mbaas.errors import ConfigError
from mbaas.model.quantity import BOUNDS, OPPOSITE, Bound, Quantity, plain_fields, spanning
from mbaas.model.rates import Rates, Setup
from mbaas.model.supply import Reads, made_on_a_node, node_prep_rate, storage_s, stored_share
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


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Shares of a trial's time spent waiting for prep, for reads and for other trials, from 0 to 1.

    A source that cannot separate waits for other trials from ``prep`` includes them there and leaves ``peers`` at 0.
    """

    prep: float
    fetch: float
    peers: float = 0.0

    @property
    def all(self) -> float:
        """Return the total share."""
        return self.prep + self.fetch + self.peers


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """Prediction of one epoch of every trial.

    Attributes:
        trial_per_s: samples/s of each trial.
        total_per_s: samples/s of all trials together.
        compute_s, prep_stall_s, fetch_stall_s: the parts of ``epoch_s`` for one trial; their values add up to it.
        limit: the resource that sets the pace, by its name in `mbaas.model.pace`.
        limits: ``limit`` at the median, slow and fast ends of the rates, without duplicates; a single name is certain.
        bounds: samples/s of each trial that each resource alone would allow; unlimited resources are left out.
    """

    trial_per_s: Quantity
    total_per_s: Quantity
    epoch_s: Quantity
    compute_s: Quantity
    prep_stall_s: Quantity
    fetch_stall_s: Quantity
    limit: str
    limits: tuple[str, ...]
    bounds: dict[str, Quantity]
    reads: Reads

    @property
    def prep_stall(self) -> float:
        """Return the share of a trial's time spent waiting for prep."""
        return self.prep_stall_s.value / self.epoch_s.value

    @property
    def fetch_stall(self) -> float:
        """Return the share of a trial's time spent waiting for reads."""
        return self.fetch_stall_s.value / self.epoch_s.value

    @property
    def waits(self) -> Waits:
        """Return both shares."""
        return Waits(prep=self.prep_stall, fetch=self.fetch_stall)

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return plain_fields(self)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predictions of the first epoch, with empty caches, and of later ones; ``notes`` are reasons for doubt."""

    setup: Setup
    first: Epoch
    steady: Epoch
    notes: tuple[str, ...] = ()

    def run_s(self, epochs: int) -> Quantity:
        """Return the seconds of a job of ``epochs`` epochs."""
        if epochs < 1:
            raise ConfigError(f"epochs must be at least 1, got {epochs}")
        return self.first.epoch_s.plus(self.steady.epoch_s.scaled(epochs - 1))

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return plain_fields(self)


def predict(rates: Rates, setup: Setup) -> Prediction:
    """Predict epochs with ``setup``.

    Intervals are the model's results at the slow and fast ends of all measurements, so they assume that all rates are
    off in the same direction.

    Raises:
        ConfigError: the setup uses a disk whose rate was not measured.
    """
    return Prediction(
        setup=setup,
        first=_epoch(rates, setup, steady=False),
        steady=_epoch(rates, setup, steady=True),
        notes=tuple(_notes(rates, setup)),
    )


def speedup(now: Prediction, then: Prediction) -> Quantity:
    """Return the speedup of steady epochs.

    Both predictions use the same rates, so slow ends are compared with slow ends and fast with fast.
    """
    before, after = now.steady.epoch_s, then.steady.epoch_s
    return spanning(*(before.at(bound) / after.at(bound) for bound in BOUNDS), unit="times")


@dataclass(frozen=True)
class _Times:
    """Seconds per sample of the three runs: synthetic data, all data in memory, and the real workload."""

    synthetic_s: float
    prepared_s: float
    whole_s: float

    @classmethod
    def of(cls, found: Stages, overlap: float) -> _Times:
        # each run adds one part to the previous run; the added time is that part's stall, as in DS-Analyzer
        parts = (found.compute_s, found.prep_s, found.fetch_s)
        first, second, third = (overlap * max(parts[:n]) + (1 - overlap) * sum(parts[:n]) for n in (1, 2, 3))
        return cls(first, second, third)


def _epoch(rates: Rates, setup: Setup, *, steady: bool) -> Epoch:
    middle, slow, fast = (stages(rates, setup, steady=steady, step=b, prep=b, supply=b) for b in BOUNDS)
    at_middle, at_slow, at_fast = times = [_Times.of(found, rates.overlap) for found in (middle, slow, fast)]
    samples = rates.samples

    def stall_s(earlier: str, later: str) -> Quantity:
        # A difference is widest if one run was slow and the other fast. The runs are measured one after the other, and
        # the machine's load may change between them.
        least = getattr(at_fast, later) - getattr(at_slow, earlier)
        most = getattr(at_slow, later) - getattr(at_fast, earlier)
        value = getattr(at_middle, later) - getattr(at_middle, earlier)
        return spanning(*(samples * max(0.0, s) for s in (value, least, most)), unit="s")

    trial_per_s = spanning(*(1 / t.whole_s for t in times), unit="samples/s")
    # the limit at the median comes first; further names mean that the limit is uncertain
    limits = tuple(dict.fromkeys(found.limit for found in (middle, slow, fast)))
    return Epoch(
        trial_per_s=trial_per_s,
        total_per_s=trial_per_s.scaled(setup.trials),
        epoch_s=spanning(*(samples * t.whole_s for t in times), unit="s"),
        compute_s=spanning(*(samples * t.synthetic_s for t in times), unit="s"),
        prep_stall_s=stall_s("synthetic_s", "prepared_s"),
        fetch_stall_s=stall_s("prepared_s", "whole_s"),
        limit=middle.limit,
        limits=limits,
        bounds=_bounds(middle, slow, fast),
        reads=stored_share(rates, setup, steady=steady),
    )


def _bounds(middle: Stages, slow: Stages, fast: Stages) -> dict[str, Quantity]:
    """Return the samples/s that each resource allows; fetch counts as one because its parts add up."""
    middle_s, slow_s, fast_s = ({**s.compute, **s.prep, "fetch": s.fetch_s} for s in (middle, slow, fast))
    return {
        name: spanning(1 / seconds, 1 / slow_s[name], 1 / fast_s[name], unit="samples/s")
        for name, seconds in middle_s.items()
        if min(seconds, slow_s[name], fast_s[name]) > 0
    }


def _notes(rates: Rates, setup: Setup) -> list[str]:
    cores, workers = setup.cores_of(rates.cores), setup.workers_of(rates.cores)
    like = workers * rates.cores / cores  # workers at the same number per core on the measured machine
    notes = []
    if like > rates.prep.most:
        notes.append(
            f"prep was measured with up to {units.exact(rates.prep.most)} workers on {rates.cores} cores; "
            f"{workers} on {cores} is a guess"
        )
    elif cores > rates.cores:
        notes.append(
            f"prep was measured on {rates.cores} cores; {cores} are taken to be as fast each, with as many workers each"
        )
    if setup.readers is not None and setup.readers > rates.storage.most:
        most = f"{units.exact(rates.storage.most)} readers"
        notes.append(f"storage was measured with up to {most}; {setup.readers} are not taken to be faster")
    return notes
