"""Which machines to rent for a job, from a price list that the user gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mbaas.analysis.quantity import Quantity
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.whatif import predict
from mbaas.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MachineType:
    """A machine on a price list.

    Attributes:
        name: for the answer.
        price_per_h: of one machine, in any currency.
        cores: taken to be as fast as those of the measured machine.
        prep_workers: None: as many as cores.
        cache_bytes: memory that may keep raw samples.
        disk_bytes, dram_bytes, network_bytes_per_s, storage_factor, accelerator_factor, accelerators: see `Setup`.
        most: so many can be rented.

    Raises:
        ConfigError: a negative price, or a number below 1.
    """

    name: str
    price_per_h: float
    cores: int
    prep_workers: int | None = None
    cache_bytes: float = 0.0
    disk_bytes: float = 0.0
    dram_bytes: float = 0.0
    network_bytes_per_s: float = math.inf
    storage_factor: float = 1.0
    accelerator_factor: float = 1.0
    accelerators: int | None = None
    most: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.price_per_h < math.inf:
            raise ConfigError(f"price_per_h of {self.name} must be 0 or more and finite, got {self.price_per_h}")
        if self.most < 1:
            raise ConfigError(f"most of {self.name} must be at least 1, got {self.most}")

    def setup(self, base: Setup, *, nodes: int) -> Setup:
        """So many of these, with the trials, the sharing and the batch size of ``base``."""
        return replace(
            base,
            nodes=nodes,
            cores=self.cores,
            prep_workers=self.prep_workers,
            cache_bytes=self.cache_bytes,
            disk_bytes=self.disk_bytes,
            dram_bytes=self.dram_bytes,
            network_bytes_per_s=self.network_bytes_per_s,
            storage_factor=self.storage_factor,
            accelerator_factor=self.accelerator_factor,
            accelerators=self.accelerators,
        )


@dataclass(frozen=True, kw_only=True)
class Offer:
    """So many machines of a type, and what a job takes on them.

    Attributes:
        machine: name of the type.
        nodes: how many.
        job_s: seconds.
        cost: in the currency of the price list.
        limit: what sets the pace of steady epochs, by its name in `mbaas.analysis.stages`.
        in_time: whether the job is predicted to end before the deadline; without one, all do.
    """

    machine: str
    nodes: int
    job_s: Quantity
    cost: Quantity
    limit: str
    in_time: bool

    def to_json(self) -> dict[str, Any]:
        """The fields; quantities as `Quantity.to_json`."""
        return {**vars(self), "job_s": self.job_s.to_json(), "cost": self.cost.to_json()}


def offers(
    rates: Rates, setup: Setup, machines: Sequence[MachineType], *, epochs: int, deadline_s: float = math.inf
) -> list[Offer]:
    """Every number of every type, the best first: in time, then the lowest cost, then the shortest.

    Args:
        setup: says trials, sharing, batch size and readers; the rest is the machine's.
        epochs: of the job, the first with empty caches.

    Raises:
        ConfigError: no machines.
    """
    if not machines:
        raise ConfigError("a price list needs at least 1 machine, got 0")
    found = []
    for machine in machines:
        for nodes in range(1, machine.most + 1):
            prediction = predict(rates, machine.setup(setup, nodes=nodes))
            job_s = prediction.run_s(epochs)
            found.append(
                Offer(
                    machine=machine.name,
                    nodes=nodes,
                    job_s=job_s,
                    cost=job_s.scaled(nodes * machine.price_per_h / 3600, unit="price"),
                    limit=prediction.steady.limit,
                    in_time=job_s.value <= deadline_s,
                )
            )
    return sorted(found, key=lambda offer: (not offer.in_time, offer.cost.value, offer.job_s.value))


def cheapest(
    rates: Rates, setup: Setup, machines: Sequence[MachineType], *, epochs: int, deadline_s: float = math.inf
) -> Offer:
    """The first of `offers`."""
    return offers(rates, setup, machines, epochs=epochs, deadline_s=deadline_s)[0]
