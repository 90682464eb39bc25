"""The machines of a simulation: what they can move, train on and compute (NoPFS, SC 2021, section 4).

What they can move is `mbaas.allocation.bandwidth`; shared storage is called the PFS here, as in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mbaas.allocation.bandwidth import STORAGE, Bandwidths
from mbaas.errors import ConfigError


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
        if not self.count >= 1:
            raise ConfigError(f"count of cores must be at least 1, got {self.count}")
        for name in CORE_COSTS:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or more and finite, got {getattr(self, name)}")


CORE_COSTS = ("prep_cpu_s", "staging_cpu_s", "delivery_cpu_s", "step_cpu_s", "read_cpu_s")
"""What a sample costs `Cores`."""


@dataclass(frozen=True, kw_only=True)
class Machine(Bandwidths):
    """A worker's machine; all workers have the same.

    Attributes:
        compute_bytes_per_s: c, raw bytes whose samples a worker trains on.
        cores: that prep, reading and training share; None: there are enough.

    Raises:
        ConfigError: a rate is not above 0, or two classes have the same name.
    """

    compute_bytes_per_s: float
    cores: Cores | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.compute_bytes_per_s > 0:
            raise ConfigError(f"compute_bytes_per_s must be above 0, got {self.compute_bytes_per_s}")
        names = [each.name for each in self.classes]
        if len(set(names)) < len(names):
            raise ConfigError(f"storage classes must have different names, got {', '.join(names)}")

    @property
    def write_s_per_byte(self) -> float:
        """Seconds of one staging thread: write(k) / s_k = max(1 / beta, p_0 / w_0(p_0))."""
        return 1 / self.write_bytes_per_s

    def pfs_s_per_byte(self, readers: int) -> float:
        """Seconds of one reader among so many: 1 / (t(gamma) / gamma)."""
        return 1 / self.fetch_bytes_per_s(STORAGE, readers=readers)

    def idle_pfs_s_per_byte(self, most: int) -> float:
        """Seconds of one reader when it gets the most: the least 1 / (t(gamma) / gamma) for gamma in [1, most]."""
        counts = np.arange(1.0, most + 1)
        return float((counts / self.storage.rates(counts)).min())
