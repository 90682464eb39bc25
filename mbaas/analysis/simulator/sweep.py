"""One policy over any two parameters of a system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.analysis.simulator.orders import Orders
from mbaas.analysis.simulator.parameters import changed
from mbaas.analysis.simulator.simulation import policies_of, simulate
from mbaas.analysis.simulator.system import System
from mbaas.errors import ConfigError


@dataclass(frozen=True)
class Axis:
    """Values of a parameter, in its units.

    Raises:
        ConfigError: there is no value.
    """

    name: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError(f"{self.name} must have at least one value, got none")


@dataclass(frozen=True)
class Sweep:
    """A policy at each pair of values.

    Attributes:
        policy: its name.
        versus: another policy that it is compared with, or None.
        x, y: the parameters.
        total_s: float64[y, x].
        versus_s: of the other policy, float64[y, x], or None.
    """

    policy: str
    versus: str | None
    x: Axis
    y: Axis
    total_s: NDArray[np.float64]
    versus_s: NDArray[np.float64] | None

    @property
    def speedup(self) -> NDArray[np.float64] | None:
        """How many times as fast the policy is as the other: float64[y, x]."""
        return None if self.versus_s is None else self.versus_s / self.total_s


def sweep(system: System, *, policy: str, x: Axis, y: Axis, versus: str | None = None) -> Sweep:
    """Simulate a policy, and another to compare it with, at each pair of values.

    Raises:
        ConfigError: a policy or parameter that there is not, or a value that cannot be.
    """
    if x.name == y.name:
        raise ConfigError(f"x and y must be two parameters, got {x.name!r} twice")
    names = [policy] if versus is None else [policy, versus]
    policies_of(system, names)
    systems = [[changed(changed(system, x.name, at), y.name, up) for at in x.values] for up in y.values]
    kept: dict[int, Orders] = {}
    seconds = np.array([[_seconds(each, names, kept) for each in row] for row in systems])
    return Sweep(policy, versus, x, y, seconds[..., 0], seconds[..., 1] if versus is not None else None)


def _seconds(system: System, names: Sequence[str], kept: dict[int, Orders]) -> list[float]:
    samples = system.dataset.samples
    if samples not in kept:
        kept.clear()
        kept[samples] = Orders(samples, seed=system.training.seed)
    found = {each.policy: each.total_s for each in simulate(system, names, orders=kept[samples])}
    return [found[name] for name in names]
