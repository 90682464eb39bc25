"""Inputs of a plan and their file: a cluster, datasets, and the searches and jobs on them (docs/plan.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, Tag

from mbaas.base import files, validation
from mbaas.base.units import Bytes, BytesPerS, exact
from mbaas.base.validation import options
from mbaas.errors import ConfigError
from mbaas.model.curves import MeasuredCurve, ThroughputCurve
from mbaas.model.quantity import Quantity, check_fields, stated
from mbaas.model.rates import Rates

RAY_STORE_SHARE = 0.3
"""Share of a node's memory that Ray's object store takes by default."""

RAY_STORE_MOST_BYTES = 200 * 10**9
"""Largest default size of Ray's object store."""

MEASURED = ("step_per_s", "prep", "batch_size", "pixel_bytes")
"""Required keys of a job, unless a file of measured rates contains them."""

AtLeast1 = Annotated[int, Field(ge=1)]
Above0 = Annotated[BytesPerS, Field(gt=0)]
Finite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FiniteRate = Annotated[BytesPerS, Field(gt=0, allow_inf_nan=False)]


def _curve(said: float | tuple[tuple[float, float], ...], *, unit: str) -> MeasuredCurve:
    return MeasuredCurve.of(said if isinstance(said, tuple) else ((1.0, said),), unit=unit)


def _points(rate: Any, *, unit: str) -> Any:
    """Return the type of a curve that a file gives as pairs of a count and a rate, or as one rate."""
    return Annotated[
        Annotated[rate, Tag("value")] | Annotated[tuple[tuple[Finite, rate], ...], Tag("list")],
        Discriminator(files.shape),
        AfterValidator(partial(_curve, unit=unit)),
    ]


if TYPE_CHECKING:
    PrepRates = MeasuredCurve
    StorageRates = MeasuredCurve
else:
    PrepRates = _points(Finite, unit="samples/s")  # one rate is that of each worker
    StorageRates = _points(FiniteRate, unit="bytes/s")  # one rate is that of any number of readers


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


class Bounds(files.Section):
    """The autoscaler's smallest and largest number of nodes."""

    least: int
    most: int


if TYPE_CHECKING:
    Nodes = Bounds
else:
    Nodes = Annotated[
        Annotated[int, AfterValidator(lambda nodes: Bounds(least=nodes, most=nodes)), Tag("value")]
        | Annotated[Bounds, Tag("mapping")],
        Discriminator(lambda said: "mapping" if isinstance(said, dict) else "value"),
    ]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes, within the autoscaler's bounds, and their storage.

    ``storage`` is bytes/s against readers, of all nodes if shared; a single point applies to any number of readers.
    """

    nodes: Nodes
    node: Node
    storage: Annotated[StorageRates, Field(alias="storage_bytes_per_s")]
    storage_shared: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.nodes.least <= self.nodes.most:
            bounds = f"least {self.nodes.least}, most {self.nodes.most}"
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
class JobOptions:
    """Optional keys of a job.

    Attributes:
        cores_per_trial, gpus_per_trial: reservation of each trial.
        data_parallel: each trial has a rank on every node, which first takes the samples prepared there. Otherwise a
            trial trains on one node.
        reserved_workers: prep workers that it keeps when other jobs need some too.
        staging_bytes: staging budget of its feed on each node; None for the default of `mbaas.serve`.
        prep_cores: cores of the machine where prep was measured; None for as many as a node has.
        decoded_prep: samples/s against workers, for decoded samples in memory; one point is a line.
    """

    trials: int = 1
    cores_per_trial: float = 1.0
    gpus_per_trial: float = 0.0
    data_parallel: bool = False
    reserved_workers: int = 1
    staging_bytes: Bytes | None = None
    prep_cores: int | None = None
    decoded_prep: PrepRates | None = None
    decoded_bytes: Bytes | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingJob(JobOptions):
    """A search or a single training job: trials that share one feed.

    Attributes:
        step: samples/s of each trial if it never waits.
        prep: samples/s against workers, with the encoded data in memory; one point is a line.
    """

    name: str
    dataset: Samples
    step: Quantity
    prep: MeasuredCurve
    batch_size: int
    pixel_bytes: int

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


@options()
class JobSection(JobOptions):
    """A job of the file. Missing rates come from the file named by ``rates``."""

    dataset: str
    rates: str | None = None
    step_per_s: float | None = None
    prep: PrepRates | None = None
    batch_size: int | None = None
    pixel_bytes: Bytes | None = None

    def job(self, name: str, datasets: Mapping[str, Samples], *, folder: Path) -> TrainingJob:
        """Return the planner's form; ``folder`` is the base for ``rates``. Raises ConfigError."""
        if self.dataset not in datasets:
            hint = validation.instead(self.dataset, datasets)
            raise ConfigError(f"unknown dataset {self.dataset!r}; {hint}", option="dataset")
        said = {key: value for key, value in vars(self).items() if value is not None}
        del said["dataset"]
        rates = _measured(folder / Path(said.pop("rates")).expanduser()) if self.rates is not None else {}
        if missing := [key for key in MEASURED if key not in {**rates, **said}]:
            raise ConfigError(f"{' and '.join(map(repr, missing))} must be given, or 'rates', a file that holds them")
        if "prep" in said:
            rates.pop("prep_cores", None)  # they belong to the measured curve
        given = {**rates, **said}
        step_per_s = given.pop("step_per_s")
        if not isinstance(step_per_s, Quantity):  # a rate stated in the job is exact
            step_per_s = stated(step_per_s, unit="samples/s")
        return TrainingJob(name=name, dataset=datasets[self.dataset], step=step_per_s, **given)


def _measured(path: Path) -> dict[str, Any]:
    """Read measured rates from a file of `mbaas.analysis.Rates.to_json`, alone or under ``rates``."""
    try:
        plain = files.read_json(path)
    except ConfigError as error:
        raise ConfigError(str(error), option="rates") from None
    try:
        rates = Rates.from_json(plain.get("rates", plain))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path} does not hold measured rates: {error}", option="rates") from None
    found = {
        "step_per_s": rates.step,
        "prep": rates.served(rates.prep),
        "prep_cores": rates.cores,
        "batch_size": rates.batch_size,
        "pixel_bytes": round(rates.pixel_bytes),
    }
    if rates.decoded_prep is not None and rates.decoded_bytes is not None:
        found |= {"decoded_prep": rates.served(rates.decoded_prep), "decoded_bytes": round(rates.decoded_bytes)}
    return found


class PlanFile(files.Section):
    """The whole file; datasets and jobs are read one by one, because their names are part of their values."""

    cluster: Cluster
    datasets: dict[str, dict[str, Any]]
    jobs: dict[str, dict[str, Any]]


def load(file: Path) -> tuple[list[TrainingJob], Cluster]:
    """Read and check a YAML file. Raises ConfigError, with file, line, value and the expected value."""
    top = files.read(file)
    described = top.to(PlanFile)
    datasets = {name: entry.to(Samples, name=name) for name, entry in top.fields["datasets"].fields.items()}
    folder = file.resolve().parent
    jobs = [
        entry.made(partial(entry.to(JobSection).job, name, datasets, folder=folder))
        for name, entry in top.fields["jobs"].fields.items()
    ]
    return jobs, described.cluster
