"""Measured rates of a dataset, pipeline, training step and machine: G, P, S and C of DS-Analyzer (VLDB 2021).

All rates were measured on one otherwise idle machine. `Setup` holds the other inputs of a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Any

from annotated_types import Ge, Gt

from mbaas.base.units import BYTES, Bytes, BytesPerS, Seconds
from mbaas.base.validation import options
from mbaas.errors import ConfigError
from mbaas.model.curves import MeasuredCurve, blended_rate
from mbaas.model.quantity import BOUNDS, OPPOSITE, AsJson, Bound, Quantity, check_fields, spanning, stated

FREE = stated(0.0, unit="CPU-s")

INSTANT = stated(0.0, unit="s")

NO_CORES = stated(0.0, unit="cores")

LEAST_FREE = 0.5
"""Minimum share of a node's cores left by background processes; a node may have fewer cores than the measured machine.
"""


@dataclass(frozen=True, kw_only=True)
class Rates(AsJson):
    """G, P, S, C and the costs of a sample, measured on one machine. Raises ConfigError for a number out of range.

    Attributes:
        samples: number of samples in the dataset (D).
        sample_bytes, pixel_bytes: mean size of an encoded sample; size of a prepared one.
        batch_size: minibatch size at which ``step`` was measured.
        step: G, samples/s of a single trial that never waits for data.
        prep: P, samples/s against workers, with all data in memory and no training.
        storage: S, samples/s against readers, with nothing cached.
        cache: C, bytes/s at which cached samples are read from memory.
        disk: bytes/s of the local disk that caches the samples that do not fit in memory; None: no disk.
        decoded_bytes, decoded_prep: size and P of cached decoded samples, after the deterministic prefix of the
            pipeline; None: not measured.
        prep_cpu_s, decoded_cpu_s: CPU-seconds of a prep worker per encoded and per decoded sample while all cores are
            busy; None: 1 / P(1).
        serving_s: additional seconds per sample of a prep worker in a feed, compared with a worker that prepares alone
            (P). A feed's worker also hands its samples over, while their consumers run on the same node.
        read_cpu_s: additional CPU-seconds per sample that is read from storage and moved to a worker instead of cached.
        step_cpu_s: CPU-seconds per sample of a trial's step on the cores that also prepare; 0 on an accelerator.
        staging_cpu_s: CPU-seconds per prepared sample of all processes but prep workers, once for all trials.
        delivery_cpu_s: CPU-seconds per prepared sample for each trial that receives it.
        background_cores: cores of a node kept busy by Ray and idle feed processes, independent of the load.
        step_overhead_s: seconds of a step that do not depend on the batch size (see `step_overhead`).
        on_gpu: rates of preparing on a GPU; None: not measured.
        overlap: degree to which steps, prep and fetch overlap, from 0 (one after the other) to 1 (perfectly).
    """

    samples: int
    sample_bytes: float
    pixel_bytes: float
    cores: int
    batch_size: int
    step: Quantity
    prep: MeasuredCurve
    storage: MeasuredCurve
    cache: Quantity
    disk: Quantity | None = None
    decoded_bytes: float | None = None
    decoded_prep: MeasuredCurve | None = None
    decoded_cpu_s: Quantity | None = None
    prep_cpu_s: Quantity | None = None
    serving_s: Quantity = INSTANT
    read_cpu_s: Quantity = FREE
    step_cpu_s: Quantity = FREE
    staging_cpu_s: Quantity = FREE
    delivery_cpu_s: Quantity = FREE
    background_cores: Quantity = NO_CORES
    step_overhead_s: Quantity = INSTANT
    overlap: float = 1.0
    on_gpu: GpuRates | None = None

    def __post_init__(self) -> None:
        check_fields(self, "at least 1", "samples", "cores", "batch_size")
        check_fields(self, "above 0 and finite", "sample_bytes", "pixel_bytes", "decoded_bytes")
        if (self.decoded_bytes is None) != (self.decoded_prep is None):
            raise ConfigError("decoded_bytes and decoded_prep must both be given, or neither")
        check_fields(self, "above 0", "step", "cache", "disk")
        check_fields(self, "0 or more", *COSTS, "background_cores")
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap must be in [0, 1], got {self.overlap}")

    def free_cores(self, cores: int, bound: Bound = "value") -> float:
        """Return the cores that `background_cores` leaves; ``bound`` refers to speed ("low": fewest)."""
        return max(cores * LEAST_FREE, cores - self.background_cores.at(OPPOSITE[bound]))

    @property
    def dataset_bytes(self) -> float:
        return self.samples * self.sample_bytes

    @property
    def prepared_cpu_s(self) -> Quantity:
        """CPU-seconds to prepare an encoded sample, as measured or as 1 / P(1)."""
        # prep only computes, so a worker that never waits for bytes keeps one core busy
        return self.prep_cpu_s if self.prep_cpu_s is not None else self.prep.quantity(1).inverse(unit="CPU-s")

    def cpu_s(self, decoded: float) -> Quantity:
        """Return the mean CPU-seconds to prepare a sample if the share ``decoded`` of samples is cached decoded."""
        if not decoded or self.decoded_prep is None:
            return self.prepared_cpu_s
        cost = self.decoded_cpu_s
        cost = self.decoded_prep.quantity(1).inverse(unit="CPU-s") if cost is None else cost
        return self.prepared_cpu_s.scaled(1 - decoded).plus(cost.scaled(decoded))

    def feed_rate(self, workers: float, bound: Bound = "value", *, decoded: float = 0.0) -> float:
        """Return the samples/s of w workers in a feed: one worker takes w / P(w) + `serving_s` seconds per sample.

        For cached decoded samples, the seconds of both forms are averaged, not their rates.
        """
        serving_s = self.serving_s.at(OPPOSITE[bound])
        encoded = _served(self.prep.rate(workers, bound), workers, serving_s)
        if not decoded or self.decoded_prep is None:
            return encoded
        return blended_rate(encoded, _served(self.decoded_prep.rate(workers, bound), workers, serving_s), decoded)

    def feed_quantity(self, workers: float) -> Quantity:
        return spanning(*(self.feed_rate(workers, bound) for bound in BOUNDS), unit="samples/s")

    def served(self, curve: MeasuredCurve) -> MeasuredCurve:
        """Return a curve of prep with the median of `serving_s` at each measured count, and its relative interval."""
        return MeasuredCurve(
            tuple((n, rate.scaled(1 / (1 + rate.value * self.serving_s.value / n))) for n, rate in curve.points)
        )

    def step_s(self, batch_size: int, bound: Bound = "value") -> float:
        """Return the seconds of a trial's step per sample at another batch size; ``bound`` refers to speed.

        A step of b samples takes o + b s seconds, with overhead o = `step_overhead_s`, or s + o / b per sample. G,
        measured at b0, gives s = 1/G - o / b0.
        """
        # G is fixed at b0, so a larger o means a smaller s: smaller minibatches become slower and larger ones faster.
        # Which end of o is the slow one therefore depends on the batch size.
        smaller = batch_size < self.batch_size
        overhead_s = self.step_overhead_s.at(OPPOSITE[bound] if smaller else bound)
        # not below 0: o and G were measured independently, each with its error
        return max(0.0, 1 / self.step.at(bound) - overhead_s / self.batch_size) + overhead_s / batch_size

    def at_pace(self, pace: float) -> Rates:
        """Return the rates with cores ``pace`` times as fast; storage, disk and non-CPU step time do not change."""
        waited_s = max(0.0, 1 / self.step.value - self.step_cpu_s.value)
        step_s = waited_s + (1 / self.step.value - waited_s) / pace
        costs = {name: getattr(self, name) for name in COSTS if name != "step_overhead_s"}
        return replace(
            self,
            step=self.step.scaled(1 / step_s / self.step.value),
            prep=self.prep.scaled(pace),
            decoded_prep=None if self.decoded_prep is None else self.decoded_prep.scaled(pace),
            cache=self.cache.scaled(pace),
            background_cores=self.background_cores.scaled(1 / pace),
            **{name: cost.scaled(1 / pace) for name, cost in costs.items() if cost is not None},
        )

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Rates:
        """Read the output of `to_json`. A missing field gets its default; without one, ConfigError is raised."""
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        if lacking := [repr(name) for name in needed if name not in plain]:
            raise ConfigError(f"rates lack {' and '.join(lacking)}")
        return cls(**{name: _read(value) for name, value in plain.items()})


COSTS = (
    "prep_cpu_s",
    "decoded_cpu_s",
    "serving_s",
    "read_cpu_s",
    "step_cpu_s",
    "staging_cpu_s",
    "delivery_cpu_s",
    "step_overhead_s",
)
"""Fields of `Rates` that are times."""


def step_overhead(points: Sequence[tuple[int, Quantity]]) -> Quantity:
    """Estimate the seconds of a step that do not depend on its batch size, from (batch size, G) pairs.

    Fits the line o + b s through the step times b / G by least squares. A negative o becomes 0.
    """
    sizes = [size for size, _ in points]
    if len(set(sizes)) < 2:
        raise ConfigError(f"an overhead needs G at 2 batch sizes at least, got {sorted(set(sizes))}")
    mean = sum(sizes) / len(sizes)
    square = sum((size - mean) ** 2 for size in sizes)
    # o is a weighted sum of the step times, so its extremes take each time at the end given by the sign of its weight
    weights = [1 / len(sizes) - mean * (size - mean) / square for size in sizes]

    def height_s(sign: int) -> float:
        ends: list[Bound] = ["value" if not sign else "low" if sign * weight > 0 else "high" for weight in weights]
        seconds = [size / g.at(end) for (size, g), end in zip(points, ends, strict=True)]
        return max(0.0, sum(w * s for w, s in zip(weights, seconds, strict=True)))

    return Quantity(height_s(0), low=height_s(-1), high=height_s(1), unit="s")


def _served(alone_per_s: float, workers: float, serving_s: float) -> float:
    return alone_per_s / (1 + alone_per_s * serving_s / workers)


def _read(value: Any) -> Any:
    # only `GpuRates` contain "gpus"; all other mappings are quantities, and all lists are curves
    if isinstance(value, Mapping):
        return GpuRates.from_json(value) if "gpus" in value else Quantity.from_json(value)
    return MeasuredCurve.from_json(value) if isinstance(value, Sequence) else value


PerS = Annotated[float, Gt(0)]


@options()
class OnGpu:
    """Rates of preparing on a GPU that also trains.

    ``per_s`` are samples/s of one prep worker, ``step_per_s`` of the training step on that GPU at the same time.
    ``cpu_s`` are the worker's CPU-seconds per sample, ``memory_bytes`` those of all of a feed's workers on that GPU.
    """

    per_s: PerS
    step_per_s: Annotated[float, Ge(0)]
    cpu_s: Annotated[Seconds, Ge(0)]
    memory_bytes: Bytes = 0


@options()
class GpuRates:
    """The GPUs of a node and their rates.

    Attributes:
        memory_bytes: memory of each GPU left by training; None: enough.
        link_bytes_per_s: rate between the host and each GPU, in each direction; None: unlimited.
        decode, resize: workers that start from encoded, and from cached decoded samples; None: not measured.
        cpu_s, decoded_cpu_s: CPU-seconds of the CPU engine per sample, and per cached decoded one; None: as given by
            the prep rates, and as ``cpu_s``.
    """

    gpus: Annotated[int, Ge(1)]
    memory_bytes: Bytes | None = None
    link_bytes_per_s: Annotated[BytesPerS, Gt(0)] | None = None
    decode: OnGpu | None = None
    resize: OnGpu | None = None
    cpu_s: Annotated[Seconds, Ge(0)] | None = None
    decoded_cpu_s: Annotated[Seconds, Ge(0)] | None = None

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> GpuRates:
        ways = {name: OnGpu(**plain[name]) for name in ("decode", "resize") if plain[name] is not None}
        return cls(**{**plain, **ways})


@dataclass(frozen=True, kw_only=True)
class Setup(AsJson):
    """Nodes, caches and trials. The default is one trial on the measured machine, without a cache.

    Raises ConfigError for a number out of range.

    Attributes:
        nodes: number of machines like the measured one; their caches and prep workers add up.
        cores, prep_workers: of each node; None: as many cores as the measured machine, and one worker per core.
        readers: threads of each node that read storage; None: the fastest measured number.
        cache_bytes: memory of each node that caches samples permanently (MinIO).
        disk_bytes: capacity of each node's local disk for samples that do not fit in memory.
        decoded: cache samples decoded where this shortens epochs; otherwise all are cached encoded.
        dram_bytes: memory of each node for the operating system's page cache; 0 if storage is not a file system.
        storage_factor, accelerator_factor: speed of storage and of the step relative to the measured one.
        storage_shared: all nodes read one storage of the measured rate; otherwise each node has a separate one.
        network_bytes_per_s: rate of each node's network in each direction.
        accelerators: accelerators of each node; None: one for each trial.
        trials: number of trials, spread evenly over the nodes.
        pipelines: number of different pipelines among the trials of a shared feed. Samples are fetched once for all
            and prepared once for each pipeline. More pipelines than trials count as one for each trial.
        data_parallel: each trial has a rank on every node, which first takes the samples prepared there. The step's
            rate is then that of all its ranks together. Otherwise a trial trains on one node.
        sharing: all trials share one feed, which fetches and prepares a sample once per epoch. Otherwise each trial
            fetches and prepares on its node, with an equal part of the cache there.
        batch_size: samples in a trial's minibatch; None: as measured.
        cpu_price_per_h: price of one CPU for an hour, in any currency; None: unknown.
    """

    nodes: int = 1
    cores: int | None = None
    prep_workers: int | None = None
    readers: int | None = None
    cache_bytes: Annotated[float, BYTES] = 0.0
    disk_bytes: Annotated[float, BYTES] = 0.0
    decoded: bool = True
    dram_bytes: Annotated[float, BYTES] = 0.0
    storage_factor: float = 1.0
    storage_shared: bool = True
    network_bytes_per_s: BytesPerS = math.inf
    accelerator_factor: float = 1.0
    accelerators: int | None = None
    trials: int = 1
    pipelines: int = 1
    data_parallel: bool = False
    sharing: bool = True
    batch_size: int | None = None
    cpu_price_per_h: float | None = None

    def __post_init__(self) -> None:
        counts = ("nodes", "cores", "prep_workers", "readers", "accelerators", "trials", "pipelines", "batch_size")
        check_fields(self, "at least 1", *counts)
        check_fields(self, "0 or more and finite", "cache_bytes", "disk_bytes", "dram_bytes", "cpu_price_per_h")
        check_fields(self, "above 0 and finite", "storage_factor", "accelerator_factor")
        check_fields(self, "above 0", "network_bytes_per_s")  # infinite: unspecified

    @property
    def node_trials(self) -> int:
        """Trials, or ranks of different trials, on the node with the most; that node sets the pace."""
        return self.trials if self.data_parallel else math.ceil(self.trials / self.nodes)

    @property
    def taken_on_node(self) -> float:
        """Samples that are delivered on a node for one sample of every trial."""
        return self.node_trials / self.nodes if self.data_parallel else self.node_trials

    @property
    def times_made(self) -> int:
        """Times that a fetched sample is prepared."""
        return min(self.pipelines, self.trials) if self.sharing else 1

    @property
    def forms_received(self) -> int:
        """Prepared forms of a sample that a node receives: one for each pipeline of its trials."""
        return self.times_made if self.data_parallel else min(self.times_made, self.node_trials)

    @property
    def fetched_on_node(self) -> float:
        """Samples that a node fetches for one sample of every trial."""
        return 1 / self.nodes if self.sharing else self.taken_on_node

    @property
    def made_on_node(self) -> float:
        """Samples that a node prepares for one sample of every trial."""
        return self.fetched_on_node * self.times_made

    def cores_of(self, measured: int) -> int:
        return measured if self.cores is None else self.cores

    def workers_of(self, measured: int) -> int:
        return self.cores_of(measured) if self.prep_workers is None else self.prep_workers

    def batch_of(self, measured: int) -> int:
        return measured if self.batch_size is None else self.batch_size

    def read_bytes(self, dataset_bytes: float) -> float:
        """Return the bytes that the trials of the busiest node read without a cache, over all epochs but each once."""
        return dataset_bytes / self.nodes if self.sharing else dataset_bytes * self.node_trials
