"""How a workload is run: what a what-if question may change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from mbaas.analysis.quantity import plain_fields
from mbaas.errors import ConfigError
from mbaas.units import BYTES, BytesPerS


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Nodes, memory and trials, beside what `Rates` measured; by default one trial on the measured machine, no cache.

    Attributes:
        nodes: number of machines like the measured one; their caches and prep workers add up.
        cores: cores of each node; None: as many as the measured machine has.
        prep_workers: prep workers on each node; None: one for each core.
        readers: threads of each node that read storage; None: as many as were measured to be fastest.
        cache_bytes: memory of each node that keeps samples for good (MinIO).
        disk_bytes: room on each node's local disk for samples that memory has no room for.
        decoded: samples may be kept decoded where that makes epochs shorter; otherwise all are kept as they were read.
        dram_bytes: memory of each node that the operating system may use for files that were read (its page cache); 0
            where storage is not a file system.
        storage_factor: how many times as fast as the measured storage.
        storage_shared: all nodes read one storage of the measured rate; otherwise each node has its own.
        network_bytes_per_s: rate of each node's network in each direction.
        accelerator_factor: how many times as fast as the measured step.
        accelerators: accelerators of each node; None: each trial has its own.
        trials: number of trials, spread evenly over the nodes.
        sharing: all trials share one feed: a sample is fetched and prepared once an epoch for all. Otherwise each
            trial fetches and prepares by itself on its own node, with an equal part of the cache there.
        batch_size: samples in a trial's minibatch; None: as measured.
        cpu_price_per_h: price of a CPU for an hour, in any currency; None: nobody said.

    Raises:
        ConfigError: a number that is out of its bounds.
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
            number = getattr(self, name)  # None is a default that depends on what was measured
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
        if not self.network_bytes_per_s > 0:  # no upper bound: infinite is a network that nothing was said about
            raise ConfigError(f"network_bytes_per_s must be above 0, got {self.network_bytes_per_s}")

    @property
    def node_trials(self) -> int:
        """Return the number of trials on the node that has most: it sets the pace of all."""
        return math.ceil(self.trials / self.nodes)

    def cores_of(self, measured: int) -> int:
        """Return the cores of each node, if the measured machine has ``measured``."""
        return measured if self.cores is None else self.cores

    def workers_of(self, measured: int) -> int:
        """Return the prep workers on each node, if the measured machine has ``measured`` cores."""
        return self.cores_of(measured) if self.prep_workers is None else self.prep_workers

    def read_bytes(self, dataset_bytes: float) -> float:
        """Return the bytes that the busiest node reads in an epoch if nothing is cached, of a dataset of that size."""
        return dataset_bytes / self.nodes if self.sharing else dataset_bytes * self.node_trials

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; None is what has no limit, or its default."""
        return plain_fields(self)
