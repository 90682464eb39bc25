"""Inputs of a plan: a cluster, datasets, and the searches and jobs that train on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import Field

from mbaas.base.units import Bytes, BytesPerS, exact
from mbaas.base.validation import options
from mbaas.errors import ConfigError
from mbaas.model.curves import MeasuredCurve, ThroughputCurve
from mbaas.model.quantity import Quantity, check_fields

RAY_STORE_SHARE = 0.3
"""Share of a node's memory that Ray's object store takes by default."""

RAY_STORE_MOST_BYTES = 200 * 10**9
"""Largest default size of Ray's object store."""

AtLeast1 = Annotated[int, Field(ge=1)]
Above0 = Annotated[BytesPerS, Field(gt=0)]


@options()
class Node:
    """One of the cluster's equal nodes.

    Attributes:
        cores, gpus: cores for trials and prep workers; GPUs for trials.
        object_store_bytes: size of Ray's object store; None for Ray's default, 30 % of memory, at most 200 GB.
        memory_bytes_per_s, disk_bytes_per_s: read rates of cached samples.
        disk_bytes: room on the local disk for samples that do not fit into memory.
        network_bytes_per_s: rate of the network in each direction.
        read_threads: reading threads of the cache node; they mostly wait, so they take no cores.
        cpu_price_per_h: price of a core (of a node without GPUs) for an hour, in any currency; None if unknown.
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
        if self.object_store_bytes is not None:
            return self.object_store_bytes
        return min(RAY_STORE_MOST_BYTES, int(RAY_STORE_SHARE * self.memory_bytes))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, within the autoscaler's bounds, and their storage.

    ``storage`` is bytes/s against readers, of all nodes if shared; a single point applies to any number of readers.
    """

    node: Node
    least_nodes: int
    most_nodes: int
    storage: MeasuredCurve
    storage_shared: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.least_nodes <= self.most_nodes:
            bounds = f"least {self.least_nodes}, most {self.most_nodes}"
            # named as in the file, so that the file reader can add the line
            raise ConfigError(f"nodes must be 1 <= least <= most, got {bounds}", option="nodes")

    @cached_property
    def storage_curve(self) -> ThroughputCurve:
        """Bytes/s against readers, flat beyond the measured numbers."""
        if len(self.storage.points) == 1:  # a fit would be a line that grows without end
            return ThroughputCurve.flat(self.storage.points[0][1].value)
        return self.storage.fit.curve.flat_beyond(self.storage.most)

    def storage_bytes_per_s(self, nodes: int) -> float:
        """Return the highest total rate of storage for ``nodes`` nodes, with the best number of readers."""
        per_s = self.storage.best_rate(self.storage.most)
        return per_s if self.storage_shared else nodes * per_s


@options()
class Samples:
    """A dataset: its name in jobs, which share its cache, its number of samples and their total raw size."""

    name: str
    samples: AtLeast1
    dataset_bytes: Annotated[Bytes, Field(ge=1)]

    @property
    def sample_bytes(self) -> float:
        return self.dataset_bytes / self.samples


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A search or a single training job: trials that share one feed.

    Attributes:
        step: samples/s of each trial if it never waits.
        prep, decoded_prep: samples/s against workers, with the data in memory, for encoded and decoded samples; one
            point is a line.
        prep_cores: cores of the machine where `prep` was measured; None for as many as a node has.
        cores_per_trial, gpus_per_trial: reservation of each trial.
        data_parallel: each trial has a rank on every node, which first takes the samples prepared there. Otherwise a
            trial trains on one node.
        reserved_workers: prep workers that it keeps when other jobs need some too.
        staging_bytes: staging budget of its feed on each node; None for the default of `mbaas.serve`.
    """

    name: str
    dataset: Samples
    step: Quantity
    prep: MeasuredCurve
    batch_size: int
    pixel_bytes: int
    trials: int = 1
    cores_per_trial: float = 1.0
    gpus_per_trial: float = 0.0
    data_parallel: bool = False
    reserved_workers: int = 1
    staging_bytes: int | None = None
    prep_cores: int | None = None
    decoded_prep: MeasuredCurve | None = None
    decoded_bytes: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "at least 1", "batch_size", "pixel_bytes", "trials", "reserved_workers")
        check_fields(self, "0 or more and finite", "cores_per_trial", "gpus_per_trial")
        check_fields(self, "above 0", "staging_bytes", "prep_cores", "decoded_bytes")
        if not self.step.low > 0:
            raise ConfigError(f"step_per_s must be above 0, got {exact(self.step.low)}", option="step_per_s")
        if (self.decoded_prep is None) != (self.decoded_bytes is None):
            raise ConfigError("decoded_prep and decoded_bytes must both be given, or neither", option="decoded_prep")

    @property
    def step_per_s(self) -> float:
        return self.step.value

    def prep_curve(self, cores: int, decoded: float = 0.0) -> ThroughputCurve:
        """Return samples/s against workers of one node if the share ``decoded`` of the samples is cached decoded.

        Workers contend for cores. On n times the measured cores, n times the workers are each as fast as measured, as
        in `mbaas.model.supply`.
        """
        curve = self.prep.fit.curve
        if self.decoded_prep is not None:
            curve = curve.blended(self.decoded_prep.fit.curve, decoded)
        return curve.over(cores / (self.prep_cores or cores))

    def spread(self, decoded: float = 0.0) -> tuple[float, float]:
        """Return the ends of `prep_curve`'s interval relative to it: both forms, weighted by their seconds."""
        if not decoded or self.decoded_prep is None:
            return self.prep.spread
        whole_s = 1 / self.worker_per_s(decoded)
        decoded_s = decoded / self.worker_per_s(1.0)
        ends = zip(self.prep.spread, self.decoded_prep.spread, strict=True)
        low, high = (whole_s / ((whole_s - decoded_s) / prep + decoded_s / kept) for prep, kept in ends)
        return low, high

    def worker_per_s(self, decoded: float = 0.0) -> float:
        return self.prep_curve(self.prep_cores or 1, decoded).rate(1)
