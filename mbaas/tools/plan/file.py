"""The file of ``mbaas plan``: a cluster, datasets, and the searches and jobs on them, as described in docs/plan.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from mbaas.base import files, validation
from mbaas.base.units import Bytes, BytesPerS
from mbaas.errors import ConfigError
from mbaas.model.curves import MeasuredCurve
from mbaas.model.quantity import Quantity, stated
from mbaas.model.rates import Rates
from mbaas.tools.plan.jobs import Cluster, Node, Samples, TrainingJob

MEASURED = ("step_per_s", "prep", "batch_size", "pixel_bytes")
"""Required keys of a job, unless a file of measured rates contains them."""


def load(file: Path) -> tuple[list[TrainingJob], Cluster]:
    """Read and check a YAML file. Raises ConfigError, with file, line, value and the expected value."""
    top = files.read(file)
    described = top.to(PlanFile)
    cluster = top.fields["cluster"].made(described.cluster.cluster)
    datasets = {name: entry.to(Samples, name=name) for name, entry in top.fields["datasets"].fields.items()}
    jobs = [_job(name, entry, datasets) for name, entry in top.fields["jobs"].fields.items()]
    return jobs, cluster


def _job(name: str, entry: files.Located, datasets: Mapping[str, Samples]) -> TrainingJob:
    described = entry.to(JobSection)
    folder = entry.file.resolve().parent
    return entry.made(lambda: described.job(name, datasets, folder=folder))


Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Points = Annotated[
    Annotated[Above0, Tag("value")] | Annotated[tuple[tuple[Above0, Above0], ...], Tag("list")],
    Discriminator(files.shape),
]
"""Pairs of workers and their samples/s; or the samples/s of one worker."""

StorageRate = Annotated[BytesPerS, Field(gt=0, allow_inf_nan=False)]
StoragePoints = Annotated[
    Annotated[StorageRate, Tag("value")] | Annotated[tuple[tuple[Above0, StorageRate], ...], Tag("list")],
    Discriminator(files.shape),
]
"""Pairs of readers and their bytes/s; or the bytes/s of any number of readers."""


def _curve(said: float | tuple[tuple[float, float], ...], *, unit: str) -> MeasuredCurve:
    return MeasuredCurve.of(said if isinstance(said, tuple) else ((1.0, said),), unit=unit)


class Bounds(files.Section):
    """The autoscaler's smallest and largest number of nodes."""

    least: int
    most: int


class ClusterSection(files.Section):
    """The cluster of the file: equal nodes, and their storage."""

    nodes: Annotated[
        Annotated[int, Tag("value")] | Annotated[Bounds, Tag("mapping")],
        Discriminator(lambda said: "mapping" if isinstance(said, dict) else "value"),
    ]
    node: Node
    storage_bytes_per_s: StoragePoints
    storage_shared: bool = True

    def cluster(self) -> Cluster:
        nodes = Bounds(least=self.nodes, most=self.nodes) if isinstance(self.nodes, int) else self.nodes
        return Cluster(
            node=self.node,
            least_nodes=nodes.least,
            most_nodes=nodes.most,
            storage=_curve(self.storage_bytes_per_s, unit="bytes/s"),
            storage_shared=self.storage_shared,
        )


class JobSection(files.Section):
    """A job of the file. Missing rates come from the file named by ``rates``."""

    dataset: str
    rates: str | None = None
    step_per_s: float | None = None
    prep: Points | None = None
    batch_size: int | None = None
    pixel_bytes: Bytes | None = None
    trials: int = 1
    cores_per_trial: float = 1.0
    gpus_per_trial: float = 0.0
    data_parallel: bool = False
    reserved_workers: int = 1
    staging_bytes: Bytes | None = None
    prep_cores: int | None = None
    decoded_prep: Points | None = None
    decoded_bytes: Bytes | None = None

    def job(self, name: str, datasets: Mapping[str, Samples], *, folder: Path) -> TrainingJob:
        """Return the planner's form; ``folder`` is the base for ``rates``. Raises ConfigError."""
        if self.dataset not in datasets:
            hint = validation.instead(self.dataset, datasets)
            raise ConfigError(f"unknown dataset {self.dataset!r}; {hint}", option="dataset")
        said = {name: getattr(self, name) for name in self.model_fields_set - {"dataset", "rates"}}
        rates = _measured(folder / Path(self.rates).expanduser()) if self.rates is not None else {}
        if missing := [name for name in MEASURED if name not in {**rates, **said}]:
            raise ConfigError(f"{' and '.join(map(repr, missing))} must be given, or 'rates', a file that holds them")
        for curve in {"prep", "decoded_prep"} & said.keys():
            said[curve] = _curve(said[curve], unit="samples/s")
        if "prep" in said:
            rates.pop("prep_cores", None)  # they belong to the measured curve
        given = {**rates, **said}
        step_per_s = given.pop("step_per_s")
        if not isinstance(step_per_s, Quantity):  # a rate stated in the job is exact
            step_per_s = stated(step_per_s, unit="samples/s")
        return TrainingJob(name=name, dataset=datasets[self.dataset], step=step_per_s, **given)


class PlanFile(files.Section):
    """The whole file; datasets and jobs are read one by one, because their names are part of their values."""

    cluster: ClusterSection
    datasets: dict[str, dict[str, Any]]
    jobs: dict[str, dict[str, Any]]


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
    return {
        "step_per_s": rates.step,
        "prep": rates.served(rates.prep),
        "prep_cores": rates.cores,
        "batch_size": rates.batch_size,
        "pixel_bytes": round(rates.pixel_bytes),
        **(
            {"decoded_prep": rates.served(rates.decoded_prep), "decoded_bytes": round(rates.decoded_bytes)}
            if rates.decoded_prep is not None and rates.decoded_bytes is not None
            else {}
        ),
    }
