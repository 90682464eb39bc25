"""The configuration under which a workload runs: the parameters that a what-if question can change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from mbaas.analysis.quantity import plain_fields
from mbaas.errors import ConfigError
from mbaas.units import BYTES, BytesPerS


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Nodes, caches and trials. The default is one trial on the measured machine, without a cache.

    Attributes:
        nodes: number of machines like the measured one; their caches and prep workers add up.
        cores: cores of each node; None: as many as the measured machine.
        prep_workers: prep workers on each node; None: one per core.
        readers: threads of each node that read storage; None: the fastest measured number.
        cache_bytes: memory of each node that caches samples permanently (MinIO).
        disk_bytes: capacity of each node's local disk for samples that do not fit in memory.
        decoded: cache samples decoded where this shortens epochs; otherwise all are cached encoded.
        dram_bytes: memory of each node available to the operating system's page cache; 0 if storage is not a file
            system.
        storage_factor: speed of storage relative to the measured one.
        storage_shared: all nodes read one storage of the measured rate; otherwise each node has a separate one.
        network_bytes_per_s: rate of each node's network in each direction.
        accelerator_factor: speed of the training step relative to the measured one.
        accelerators: accelerators of each node; None: one for each trial.
        trials: number of trials, spread evenly over the nodes.
        sharing: all trials share one feed, which fetches and prepares a sample once per epoch. Otherwise each trial
            fetches and prepares on its node, with an equal part of the cache there.
        batch_size: samples in a trial's minibatch; None: as measured.
        cpu_price_per_h: price of one CPU for an hour, in any currency; None: unknown.

    Raises:
        ConfigError: a number is out of range.
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
    sharing: bool = True
    batch_size: int | None = None
    cpu_price_per_h: float | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "cores", "prep_workers", "readers", "accelerators", "trials", "batch_size"):
            number = getattr(self, name)  # None: the default depends on the measured machine
            if number is not None and number < 1:
                raise ConfigError(f"{name} must be at least 1, got {number}")
        for name in ("cache_bytes", "disk_bytes", "dram_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or more and finite, got {getattr(self, name)}")
        for name in ("storage_factor", "accelerator_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if self.cpu_price_per_h is not None and not 0 <= self.cpu_price_per_h < math.inf:
            raise ConfigError(f"cpu_price_per_h must be 0 or more and finite, got {self.cpu_price_per_h}")
        if not self.network_bytes_per_s > 0:  # infinite: unspecified
            raise ConfigError(f"network_bytes_per_s must be above 0, got {self.network_bytes_per_s}")

    @property
    def node_trials(self) -> int:
        """Return the number of trials on the node with the most; that node sets the pace."""
        return math.ceil(self.trials / self.nodes)

    def cores_of(self, measured: int) -> int:
        """Return the cores of each node, given the ``measured`` machine's cores."""
        return measured if self.cores is None else self.cores

    def workers_of(self, measured: int) -> int:
        """Return the prep workers on each node, given the ``measured`` machine's cores."""
        return self.cores_of(measured) if self.prep_workers is None else self.prep_workers

    def read_bytes(self, dataset_bytes: float) -> float:
        """Return the bytes that the busiest node reads in an epoch of ``dataset_bytes`` without a cache."""
        return dataset_bytes / self.nodes if self.sharing else dataset_bytes * self.node_trials

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; None is unlimited or a default."""
        return plain_fields(self)
