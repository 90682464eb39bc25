"""Inputs of a simulation: dataset, machines and training (NoPFS, SC 2021, section 4). Aliases are keys in files.

Shared storage is called the PFS here, as in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo

from mbaas.base import files
from mbaas.base.units import BYTES, BytesPerS, Seconds
from mbaas.errors import ConfigError
from mbaas.model.curves import ThroughputCurve
from mbaas.model.quantity import check_fields, check_numbers
from mbaas.model.rates import Rates, Setup
from mbaas.model.supply import node_prep_rate
from mbaas.samples.order import check_seed

Sizes = NDArray[np.float32]

Size = Annotated[int | float, BYTES]

RESERVED = ("compute", "staging", "remote", "pfs")
"""Names reserved for other entries of results."""


class RatesByReaders(files.Section):
    """Total rates of shared storage for several numbers of readers."""

    readers: tuple[int, ...]
    rates: tuple[BytesPerS, ...]


class RatesByThreads(files.Section):
    """Total rates for several numbers of threads that read or write."""

    threads: tuple[int, ...]
    rates: tuple[BytesPerS, ...]


def _curve(said: float | RatesByReaders | RatesByThreads, info: ValidationInfo) -> ThroughputCurve:
    """Return a curve; a single rate is that of all threads of a class, or of any number of readers."""
    if not isinstance(said, files.Section):
        # 0 threads are rejected by the class, with a better message than the curve's.
        return ThroughputCurve.through({max(info.data.get("threads", 1), 1): said})
    (counted, counts), (_, rates) = said
    if len(counts) != len(rates):
        raise ConfigError(f"needs a rate for each number, got {len(counts)} {counted} and {len(rates)} rates")
    return ThroughputCurve.through(dict(zip(counts, rates, strict=True)))


def _rates(several: Any) -> Any:
    # The discriminator picks the variant by shape first. For a plain union, pydantic would report the errors of both.
    return Annotated[
        Annotated[BytesPerS, Tag("value")] | Annotated[several, Tag("mapping")],
        Discriminator(files.shape),
        AfterValidator(_curve),
    ]


if TYPE_CHECKING:
    ByReaders = ThroughputCurve
    ByThreads = ThroughputCurve
else:
    ByReaders, ByThreads = _rates(RatesByReaders), _rates(RatesByThreads)


@dataclass(frozen=True, kw_only=True)
class DatasetShape:
    """Number (F) and sizes of the samples, normally distributed around the mean raw size with ``sigma_bytes``.

    Only some policies use the sizes of prepared samples (default: raw) and of decoded ones, and the speed of prep from
    decoded samples relative to raw ones.
    """

    samples: int
    sample_bytes: Annotated[Size, Field(alias="sample")]
    sigma_bytes: Annotated[Size, Field(alias="sigma")] = 0.0
    pixel_bytes: Annotated[Size | None, Field(alias="pixels")] = None
    decoded_bytes: Annotated[Size | None, Field(alias="decoded")] = None
    decoded_speedup: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.samples < 2**31:  # ids are int32: the orders of all epochs take half the memory of int64
            raise ConfigError(f"samples must be in [1, 2**31), got {self.samples}")
        check_fields(self, "above 0", "sample_bytes", "decoded_bytes")
        check_fields(self, "0 or more", "sigma_bytes")
        check_fields(self, "above 0 and finite", "decoded_speedup")

    @property
    def nbytes(self) -> float:
        return self.samples * self.sample_bytes

    @property
    def staged_bytes(self) -> float:
        return self.sample_bytes if self.pixel_bytes is None else self.pixel_bytes

    def sizes(self, seed: int) -> Sizes:
        """Draw the bytes of each sample: float32[F], deterministic for a seed.

        Sizes are normally distributed, floored at a hundredth of the mean, then scaled back to the mean. The floor
        alone would enlarge a dataset with widely varying sizes.
        """
        if not self.sigma_bytes:
            return np.full(self.samples, self.sample_bytes, dtype=np.float32)
        # float32 and in place: a dataset has up to 2**31 samples, and sizes need no more digits
        drawn = np.random.default_rng(seed).standard_normal(self.samples, dtype=np.float32)
        drawn *= np.float32(self.sigma_bytes)
        drawn += np.float32(self.sample_bytes)
        np.maximum(drawn, np.float32(self.sample_bytes / 100), out=drawn)
        drawn *= np.float32(self.sample_bytes / drawn.mean(dtype=np.float64))
        return drawn


@dataclass(frozen=True, kw_only=True)
class Training:
    """Data-parallel training by ``trials`` concurrent trials, each on the same dataset and on all N ``workers``.

    A worker is a machine with an accelerator for each trial. ``batch`` is the minibatch of one worker. The seed
    determines the sizes and the order of each epoch. With ``locality``, workers that share a feed of mbaas first take
    the samples that their own node prepared.
    """

    workers: int = 1
    batch: int = 1
    epochs: int = 1
    trials: int = 1
    seed: int = 0
    locality: bool = True

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_fields(self, "at least 1", "workers", "batch", "epochs", "trials")


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Cores shared by prep, reading and training, ``background`` ones always busy, and CPU seconds of a mean sample.

    Staging is once for a prepared sample, delivery for each trial that takes it. A decoded sample without a cost takes
    ``prep_cpu_s / decoded_speedup``.
    """

    count: int
    prep_cpu_s: Annotated[Seconds, Field(alias="prep")] = 0.0
    staging_cpu_s: Annotated[Seconds, Field(alias="staging")] = 0.0
    delivery_cpu_s: Annotated[Seconds, Field(alias="delivery")] = 0.0
    step_cpu_s: Annotated[Seconds, Field(alias="step")] = 0.0
    read_cpu_s: Annotated[Seconds, Field(alias="read")] = 0.0
    decoded_cpu_s: Annotated[Seconds | None, Field(alias="decoded")] = None
    background: float = 0.0

    def __post_init__(self) -> None:
        if not self.count >= 1:
            raise ConfigError(f"count of cores must be at least 1, got {self.count}")
        if not 0 <= self.background < self.count:
            raise ConfigError(f"background must be 0 or more and below {self.count} cores, got {self.background}")
        check_fields(self, "0 or more and finite", *CORE_COSTS)


CORE_COSTS = ("prep_cpu_s", "staging_cpu_s", "delivery_cpu_s", "step_cpu_s", "read_cpu_s", "decoded_cpu_s")
"""Fields of `Cores` with the cost of a sample."""


@dataclass(frozen=True, kw_only=True)
class StorageClass:
    """Memory or disk of a node that caches samples (class j, from 1).

    ``capacity_bytes`` is d_j, ``threads`` p_j; ``read`` are total bytes/s against the number of threads (r_j).
    """

    name: str
    capacity_bytes: Annotated[Size, Field(alias="capacity")]
    threads: int = 1
    read: ByThreads

    def __post_init__(self) -> None:
        if self.name in RESERVED:
            raise ConfigError(f"a storage class may not be called {', '.join(RESERVED)}, got {self.name!r}")
        check_numbers("0 or more", **{f"capacity_bytes of {self.name}": self.capacity_bytes})
        check_numbers("at least 1", **{f"threads of {self.name}": self.threads})

    @property
    def thread_bytes_per_s(self) -> float:
        return self.read.rate_of_each(self.threads)


@dataclass(frozen=True, kw_only=True)
class StagingClass:
    """The staging buffer (class 0): minibatches that are ready or in preparation.

    ``capacity_bytes`` is d_0. ``threads`` (p_0) each fetch a sample, prepare it and write it here; ``write`` are their
    total bytes/s (w_0), None if the measured prep rate includes writing.
    """

    capacity_bytes: Annotated[Size, Field(alias="capacity")]
    threads: int = 1
    write: ByThreads | None = None

    def __post_init__(self) -> None:
        check_numbers("0 or more", **{"capacity_bytes of staging": self.capacity_bytes})
        check_numbers("at least 1", **{"threads of staging": self.threads})

    @property
    def thread_bytes_per_s(self) -> float:
        return math.inf if self.write is None else self.write.rate_of_each(self.threads)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A worker's machine; all workers have the same.

    Attributes:
        compute_bytes_per_s: c, raw bytes/s of the samples that a worker trains on.
        prep_bytes_per_s: raw bytes/s that one thread prepares on the way into staging (beta).
        network_bytes_per_s: rate between two machines (b_c).
        storage: total rate of shared storage against the number of reading threads of all machines (t).
        classes: storage classes, from level 0.
        cores: cores shared by prep, reading and training; None for enough.
    """

    compute_bytes_per_s: Annotated[BytesPerS, Field(alias="compute")]
    prep_bytes_per_s: Annotated[BytesPerS, Field(alias="prep")]
    network_bytes_per_s: Annotated[BytesPerS, Field(alias="network")]
    storage: Annotated[ByReaders, Field(alias="pfs")]
    staging: StagingClass
    classes: tuple[StorageClass, ...] = ()
    cores: Cores | None = None

    def __post_init__(self) -> None:
        check_fields(self, "above 0", "compute_bytes_per_s", "prep_bytes_per_s", "network_bytes_per_s")
        names = [each.name for each in self.classes]  # results are by name
        if len(set(names)) < len(names):
            raise ConfigError(f"storage classes must have different names, got {', '.join(names)}")

    def write_s_per_byte(self, *, speedup: float = 1.0) -> float:
        """Return the seconds of one staging thread per byte: write(k) / s_k = max(1 / beta, p_0 / w_0(p_0)).

        ``speedup`` is that of prep for samples that are cached decoded.
        """
        return 1 / min(self.prep_bytes_per_s * speedup, self.staging.thread_bytes_per_s)

    def pfs_s_per_byte(self, readers: int) -> float:
        """Return the seconds per byte of one of ``readers`` readers: 1 / (t(gamma) / gamma)."""
        return 1 / self.storage.rate_of_each(readers)

    def idle_pfs_s_per_byte(self, most: int) -> float:
        """Return the seconds per byte of one reader at its best: the minimum of gamma / t(gamma) up to ``most``."""
        # Not simply the rate of one: some storage gives each of a few readers more than a single one.
        counts = np.arange(1.0, most + 1)
        return float((counts / self.storage.rates(counts)).min())


Model = Literal["extended", "published"]
"""Rules of the simulation.

``extended`` is the default. ``published`` has the assumptions that give figures 8 and 9 of the NoPFS paper, which does
not state them. Each of the N p_0 threads always gets 1 / (N p_0) of the PFS, even if the others read elsewhere. The
policy ``naive``, which has no staging buffer, takes no time for ``write(k)``.
"""


@dataclass(frozen=True, kw_only=True)
class System:
    """All inputs of a simulation; ``name`` is for titles, and no ``policies`` means all."""

    name: str
    machine: Machine
    dataset: DatasetShape
    training: Training
    policies: tuple[str, ...] = ()
    model: Model = "extended"

    @property
    def steps(self) -> int:
        return -(-self.dataset.samples // (self.training.workers * self.training.batch))


EPOCHS = 3
"""The first epoch fills caches; the others are the same."""

MOST_SAMPLES = 200_000
"""Maximum number of simulated samples. Larger datasets and their caches are scaled down; times are proportional."""

MEMORY_BYTES_PER_S = 1e12
"""Limit of a cache's rate."""


def system_of(
    rates: Rates, setup: Setup, *, name: str = "measured", epochs: int = EPOCHS, policies: tuple[str, ...] = ()
) -> System:
    """Return the simulator's system for measured rates and a setup; each node is one of its workers.

    The simulator spreads a trial's samples over all workers, while here a trial trains on one node at G, unless it is
    data-parallel. Each simulated worker therefore trains at G / nodes, which gives the same epoch time.

    With several pipelines, a sample is simulated as taking as long and having as many pixels as all of its prepared
    forms together. Copies in the cache that pipelines share are not simulated.
    """
    times, forms = setup.times_made, setup.forms_received
    part, nbytes = min(1.0, MOST_SAMPLES / rates.samples), rates.sample_bytes
    workers, cores = setup.workers_of(rates.cores), setup.cores_of(rates.cores)
    made_per_s = node_prep_rate(rates, setup)
    # Simulated storage reaches its full rate, here the fastest measured one, with a number of readers. A node has at
    # most as many reading threads as workers, so a larger number would never be reached.
    readers, storage = rates.storage.fastest
    storage_per_s = storage.value * setup.storage_factor * (1 if setup.storage_shared else setup.nodes)
    # The simulator's rates are of a number of threads together. A measured rate is one point of such a curve.
    cached = {"ram": (setup.cache_bytes * part, min(rates.cache.value, MEMORY_BYTES_PER_S))}
    if rates.disk is not None and setup.disk_bytes:
        cached["disk"] = (setup.disk_bytes * part, rates.disk.value)
    return System(
        name=name,
        machine=Machine(
            compute_bytes_per_s=rates.step.value * setup.accelerator_factor / setup.nodes * nbytes,
            prep_bytes_per_s=made_per_s / times * nbytes / workers,
            network_bytes_per_s=setup.network_bytes_per_s,
            storage=ThroughputCurve.through({min(round(readers), workers): storage_per_s * nbytes}),
            staging=StagingClass(capacity_bytes=math.inf, threads=workers),
            classes=tuple(
                StorageClass(
                    name=tier,
                    capacity_bytes=capacity_bytes,
                    threads=workers,
                    read=ThroughputCurve.through({workers: bytes_per_s}),
                )
                for tier, (capacity_bytes, bytes_per_s) in cached.items()
            ),
            cores=Cores(
                count=cores,
                background=cores - rates.free_cores(cores),
                prep_cpu_s=times * rates.prepared_cpu_s.value,
                staging_cpu_s=times * rates.staging_cpu_s.value,
                delivery_cpu_s=rates.delivery_cpu_s.value,
                step_cpu_s=rates.step_cpu_s.value / setup.accelerator_factor,
                read_cpu_s=rates.read_cpu_s.value,
                decoded_cpu_s=times * rates.cpu_s(1.0).value,
            ),
        ),
        dataset=DatasetShape(
            samples=round(rates.samples * part),
            sample_bytes=nbytes,
            pixel_bytes=forms * rates.pixel_bytes,
            decoded_bytes=rates.decoded_bytes if setup.decoded else None,
            decoded_speedup=node_prep_rate(rates, setup, decoded=1.0) / made_per_s,
        ),
        training=Training(
            workers=setup.nodes,
            batch=math.ceil(setup.batch_of(rates.batch_size) / (setup.nodes if setup.data_parallel else 1)),
            epochs=epochs,
            trials=setup.trials,
            locality=setup.data_parallel,
        ),
        policies=policies,
    )
