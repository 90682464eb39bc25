"""Inputs of a plan: a cluster, datasets, and the searches and jobs that train on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from msgspec.structs import replace
from pydantic import Field

from mbaas.errors import ConfigError
from mbaas.model.curves import Fit, ThroughputCurve, fit_curve
from mbaas.units import Bytes, BytesPerS, exact
from mbaas.validation import options

Spread = tuple[float, float]
"""Ends of an interval as shares of the value: (0.9, 1.1) is plus or minus 10 %."""

EXACT: Spread = (1.0, 1.0)
"""Spread of a stated number."""

RAY_STORE_SHARE = 0.3
"""Share of a node's memory that Ray's object store takes by default."""

RAY_STORE_MOST_BYTES = 200 * 10**9
"""Largest default size of Ray's object store."""

AtLeast1 = Annotated[int, Field(ge=1)]
Above0 = Annotated[BytesPerS, Field(gt=0)]

Points = tuple[tuple[float, float], ...]
"""(workers or readers, rate), measured or stated."""


@options()
class Node:
    """One of the cluster's equal nodes.

    Attributes:
        cores, gpus: cores for trials and prep workers; GPUs for trials.
        object_store_bytes: size of Ray's object store; None for Ray's default, 30 % of memory, at most 200 GB.
        memory_bytes_per_s: read rate of samples cached in memory.
        disk_bytes: room on the local disk for samples that do not fit into memory.
        disk_bytes_per_s: read rate of the disk.
        network_bytes_per_s: rate of the network in each direction.
        read_threads: reading threads of the cache node; they mostly wait, so they take no cores.
        cpu_price_per_h: price of a core for an hour, in any currency; None if unknown. For a node with GPUs, it is the
            price of a core on a node without.

    Raises:
        ConfigError: an invalid number, or a disk without its rate.
    """

    cores: AtLeast1
    memory_bytes: Annotated[Bytes, Field(ge=1)]
    gpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    object_store_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    memory_bytes_per_s: Above0 = 10e9
    disk_bytes: Bytes = 0
    disk_bytes_per_s: Above0 | None = None
    network_bytes_per_s: Above0 = math.inf
    read_threads: AtLeast1 = 8
    cpu_price_per_h: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def __post_init__(self) -> None:
        if self.disk_bytes and self.disk_bytes_per_s is None:
            raise ConfigError(f"disk_bytes of {self.disk_bytes} needs disk_bytes_per_s, got none", option="disk_bytes")

    @property
    def store_bytes(self) -> int:
        """Size of the object store."""
        if self.object_store_bytes is not None:
            return self.object_store_bytes
        return min(RAY_STORE_MOST_BYTES, int(RAY_STORE_SHARE * self.memory_bytes))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, within the autoscaler's bounds, and their storage.

    Attributes:
        storage: (readers, bytes/s); a single point applies to any number of readers.
        storage_shared: whether all nodes share a storage with that rate; if False, each node has its own.

    Raises:
        ConfigError: bounds that are not 1 <= least_nodes <= most_nodes, or no storage.
    """

    node: Node
    least_nodes: int
    most_nodes: int
    storage: Points
    storage_shared: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.least_nodes <= self.most_nodes:
            bounds = f"least {self.least_nodes}, most {self.most_nodes}"
            # named as in the file, so that the file reader can add the line
            raise ConfigError(f"nodes must be 1 <= least <= most, got {bounds}", option="nodes")
        _check_points("storage", self.storage)

    @cached_property
    def storage_fit(self) -> Fit:
        """Fitted bytes/s against readers, flat beyond the measured numbers."""
        if len(self.storage) == 1:  # a fit would be a line that grows without end
            return Fit(ThroughputCurve.flat(self.storage[0][1]), 1.0, 1)
        fit = fit_curve(self.storage)
        return replace(fit, curve=fit.curve.flat_beyond(max(count for count, _ in self.storage)))

    def storage_bytes_per_s(self, nodes: int) -> float:
        """Return the highest total rate of storage for ``nodes`` nodes, with the best number of readers."""
        # Beyond the last point the fit is flat, so the peak is at that point or before.
        peak = self.storage_fit.curve.peak(most=max(1, math.ceil(max(count for count, _ in self.storage))))
        return peak.rate_per_s if self.storage_shared else nodes * peak.rate_per_s


@options()
class Samples:
    """A dataset: its name in jobs, which share its cache, its number of samples and their total raw size."""

    name: str
    samples: AtLeast1
    dataset_bytes: Annotated[Bytes, Field(ge=1)]

    @property
    def sample_bytes(self) -> float:
        """Mean bytes of a raw sample."""
        return self.dataset_bytes / self.samples


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A search or a single training job: trials that share one feed.

    Attributes:
        step_per_s: samples/s of each trial if it never waits.
        prep: (workers, samples/s), measured with the data in memory; one point is a line.
        prep_cores: cores of the machine where `prep` was measured; None for as many as a node has.
        decoded_prep: the same as `prep` for decoded samples; None if not measured.
        step_spread, prep_spread, decoded_spread: uncertainty of the measurements.
        decoded_bytes, pixel_bytes: bytes of a decoded and of a prepared sample.
        batch_size: samples in a minibatch.
        trials: concurrent trials.
        cores_per_trial, gpus_per_trial: reservation of each trial.
        reserved_workers: prep workers that it keeps when other jobs need some too.
        staging_bytes: staging budget of its feed on each node; None for the default of `mbaas.serve`.

    Raises:
        ConfigError: an invalid number.
    """

    name: str
    dataset: Samples
    step_per_s: float
    prep: Points
    batch_size: int
    pixel_bytes: int
    trials: int = 1
    cores_per_trial: float = 1.0
    gpus_per_trial: float = 0.0
    reserved_workers: int = 1
    staging_bytes: int | None = None
    prep_cores: int | None = None
    step_spread: Spread = EXACT
    prep_spread: Spread = EXACT
    decoded_prep: Points | None = None
    decoded_bytes: int | None = None
    decoded_spread: Spread = EXACT

    def __post_init__(self) -> None:
        _at_least(self, 1, "batch_size", "pixel_bytes", "trials", "reserved_workers")
        _at_least(self, 0, "cores_per_trial", "gpus_per_trial")
        _above_zero(self, "step_per_s", "staging_bytes", "prep_cores", "decoded_bytes")
        _check_points("prep", self.prep)
        if (self.decoded_prep is None) != (self.decoded_bytes is None):
            raise ConfigError("decoded_prep and decoded_bytes must both be given, or neither", option="decoded_prep")
        if self.decoded_prep is not None:
            _check_points("decoded_prep", self.decoded_prep)
        for name in ("step_spread", "prep_spread", "decoded_spread"):
            low, high = getattr(self, name)
            if not 0 < low <= 1 <= high < math.inf:
                reach = f"{exact(low)} to {exact(high)}"
                raise ConfigError(f"{name} must reach from above 0 over 1 to a finite number, got {reach}")

    @cached_property
    def prep_fit(self) -> Fit:
        """Fitted samples/s against workers."""
        return fit_curve(self.prep)

    def prep_curve(self, cores: int) -> ThroughputCurve:
        """Return samples/s against workers of one node with ``cores`` cores.

        Workers contend for cores. On n times the measured cores, n times the workers are each as fast as measured, as
        in `mbaas.model.pace`.
        """
        return self.prep_fit.curve.over(cores / (self.prep_cores or cores))

    @cached_property
    def decoded_fit(self) -> Fit:
        """The same fit for decoded samples; `prep_fit` if not measured."""
        return self.prep_fit if self.decoded_prep is None else fit_curve(self.decoded_prep)

    def decoded_curve(self, cores: int) -> ThroughputCurve:
        """Return samples/s against workers of one node, for decoded samples."""
        return self.decoded_fit.curve.over(cores / (self.prep_cores or cores))

    def blended_curve(self, cores: int, decoded: float) -> ThroughputCurve:
        """Return samples/s against workers of one node if the share ``decoded`` of the samples is cached decoded."""
        return self.prep_curve(cores).blended(self.decoded_curve(cores), decoded)

    def blended_spread(self, decoded: float) -> Spread:
        """Return the uncertainty of `blended_curve`: both ends of both kinds, weighted by their seconds."""
        if not decoded:
            return self.prep_spread
        whole_s = 1 / self.worker_per_s(decoded)
        decoded_s = decoded / self.worker_per_s(1.0)
        ends = zip(self.prep_spread, self.decoded_spread, strict=True)
        low, high = (whole_s / ((whole_s - decoded_s) / prep + decoded_s / kept) for prep, kept in ends)
        return low, high

    def worker_per_s(self, decoded: float = 0.0) -> float:
        """Return the samples/s of one worker if the share ``decoded`` of the samples is cached decoded."""
        return self.blended_curve(self.prep_cores or 1, decoded).rate(1)


def _at_least(thing: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(thing, name)
        if not least <= value < math.inf:
            raise ConfigError(f"{name} must be at least {least} and finite, got {exact(value)}", option=name)


def _above_zero(thing: object, *names: str) -> None:
    for name in names:
        value = getattr(thing, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be above 0, got {exact(value)}", option=name)


def _check_points(name: str, points: Points) -> None:
    if not points or any(not 0 < number < math.inf for point in points for number in point):
        raise ConfigError(f"{name} must be points (count, rate), all above 0 and finite, got {list(points)}")
