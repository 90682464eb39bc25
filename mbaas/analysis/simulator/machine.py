"""What a worker's machine can do: the symbols of NoPFS's model ("Clairvoyant Prefetching for Distributed Machine
Learning I/O", SC 2021), in bytes and bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mbaas.allocation.rates import RateCurve, StageCurve
from mbaas.errors import ConfigError


def rate_table(points: Mapping[int, float]) -> StageCurve:
    """A total rate, bytes/s, of so many readers or threads: straight lines through the points and the origin.

    Beyond the last point the rate stays what it is there: more readers share it.

    Raises:
        ConfigError: there is no point, or a count or a rate is not above 0.
    """
    if not points or min(points.values()) <= 0:
        raise ConfigError(f"a table of rates must have points above 0, got {dict(points)}")
    return StageCurve(tuple(sorted((float(count), rate) for count, rate in points.items())), 0.0)


@dataclass(frozen=True, kw_only=True)
class StorageClass:
    """A place on a worker's own machine where samples are cached: class j of the model, from 1.

    Attributes:
        name: "ram", "ssd": how results call it.
        capacity_bytes: d_j.
        threads: p_j.
        read: r_j(p), bytes/s of p threads together.
    """

    name: str
    capacity_bytes: float
    threads: int = 1
    read: RateCurve

    def __post_init__(self) -> None:
        if self.name in RESERVED:
            raise ConfigError(f"a storage class may not be called {', '.join(RESERVED)}, got {self.name!r}")
        _check_least(f"capacity_bytes of {self.name}", self.capacity_bytes, 0)
        _check_least(f"threads of {self.name}", self.threads, 1)

    @property
    def thread_bytes_per_s(self) -> float:
        """r_j(p_j) / p_j: what one of its threads reads."""
        return self.read.rate(self.threads) / self.threads


@dataclass(frozen=True, kw_only=True)
class Staging:
    """The staging buffer, class 0 of the model: minibatches that are ready or being made.

    Attributes:
        capacity_bytes: d_0; prefetching runs ahead of training by as many minibatches as fit, and by one at least.
        threads: p_0; each fetches a sample, prepares it and writes it here.
        write: w_0(p), bytes/s; None where writing is part of the measured prep rate.
    """

    capacity_bytes: float
    threads: int = 1
    write: RateCurve | None = None

    def __post_init__(self) -> None:
        _check_least("capacity_bytes of staging", self.capacity_bytes, 0)
        _check_least("threads of staging", self.threads, 1)


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Cores that prep, reading and training share, and what a sample of mean size costs them.

    Attributes:
        count: of a machine.
        prep_cpu_s: CPU seconds to prepare a sample.
        staging_cpu_s: CPU seconds for a prepared sample, once for all trials that share it.
        delivery_cpu_s: CPU seconds for a prepared sample and each trial that takes it.
        step_cpu_s: CPU seconds of a trial's step for a sample; 0 on an accelerator.
        read_cpu_s: CPU seconds to read a sample from shared storage.

    Raises:
        ConfigError: fewer cores than one, or a cost that cannot be.
    """

    count: int
    prep_cpu_s: float = 0.0
    staging_cpu_s: float = 0.0
    delivery_cpu_s: float = 0.0
    step_cpu_s: float = 0.0
    read_cpu_s: float = 0.0

    def __post_init__(self) -> None:
        _check_least("count of cores", self.count, 1)
        for name in CORE_COSTS:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or more and finite, got {getattr(self, name)}")


CORE_COSTS = ("prep_cpu_s", "staging_cpu_s", "delivery_cpu_s", "step_cpu_s", "read_cpu_s")
"""What a sample costs `Cores`."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A worker's machine; all workers have the same.

    Attributes:
        compute_bytes_per_s: c, raw bytes whose samples a worker trains on.
        prep_bytes_per_s: beta, raw bytes that one thread prepares.
        network_bytes_per_s: b_c, between two workers.
        pfs: t(gamma), what shared storage gives gamma readers (threads of all workers) together.
        staging: class 0.
        classes: the other storage classes, fastest first.
        cores: that prep, reading and training share; None: there are enough.

    Raises:
        ConfigError: a rate is not above 0, or two classes have the same name.
    """

    compute_bytes_per_s: float
    prep_bytes_per_s: float
    network_bytes_per_s: float
    pfs: RateCurve
    staging: Staging
    classes: tuple[StorageClass, ...] = ()
    cores: Cores | None = None

    def __post_init__(self) -> None:
        for name in ("compute_bytes_per_s", "prep_bytes_per_s", "network_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        names = [each.name for each in self.classes]
        if len(set(names)) < len(names):
            raise ConfigError(f"storage classes must have different names, got {', '.join(names)}")

    @property
    def write_s_per_byte(self) -> float:
        """Of one staging thread: write(k) / s_k = max(1 / beta, p_0 / w_0(p_0))."""
        threads = self.staging.threads
        writing = self.staging.write.rate(threads) / threads if self.staging.write is not None else math.inf
        return max(1 / self.prep_bytes_per_s, 1 / writing)

    def pfs_s_per_byte(self, readers: int) -> float:
        """Of one reader among so many: 1 / (t(gamma) / gamma)."""
        return readers / self.pfs.rate(readers)

    def idle_pfs_s_per_byte(self, most: int) -> float:
        """Of one reader when it gets the most: the least 1 / (t(gamma) / gamma) for gamma in [1, most]."""
        counts = np.arange(1.0, most + 1)
        return float((counts / self.pfs.rates(counts)).min())

    def remote_s_per_byte(self, storage: StorageClass) -> float:
        """Of one thread that reads another worker's class: 1 / min(b_c, r_j(p_j) / p_j)."""
        return 1 / min(self.network_bytes_per_s, storage.thread_bytes_per_s)


RESERVED = ("compute", "staging", "remote", "pfs")
"""Other locations of a result."""


def _check_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
