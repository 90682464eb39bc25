"""Named parameters of a system, and a policy simulated over any two of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.analysis.simulator.simulation import policies_of, simulate
from mbaas.analysis.simulator.system import System
from mbaas.analysis.simulator.world import Orders
from mbaas.errors import ConfigError
from mbaas.units import WANTED_BYTES, WANTED_BYTES_PER_S, parse_bytes, parse_bytes_per_s


@dataclass(frozen=True)
class Parameter:
    """A named parameter: a description of valid values, a parser (None if invalid), and a setter."""

    wanted: str
    parse: Callable[[object], float | None]
    change: Callable[[System, float], System]


def changed(system: System, name: str, value: float) -> System:
    """Return the system with another value of a parameter.

    Raises:
        ConfigError: unknown parameter, or an invalid value.
    """
    return parameter(system, name).change(system, value)


def parameter(system: System, name: str) -> Parameter:
    """Return a parameter: one of `PARAMETERS`, ``<class>_bytes`` for a storage class's capacity, or ``cores``.

    Raises:
        ConfigError: unknown parameter.
    """
    own = {f"{each.name}_bytes": each.name for each in system.machine.classes}
    if name in own:
        return _size(lambda given, value: _with_capacity(given, own[name], value))
    has_cores = system.machine.cores is not None  # a number of cores is meaningless without the cost of a sample
    if name == "cores" and has_cores:
        return _count(_to("machine", "cores", "count"))
    if name not in PARAMETERS:
        known = [*PARAMETERS, *own, *(["cores"] if has_cores else [])]
        raise ConfigError(f"a parameter must be one of {', '.join(known)}, got {name!r}")
    return PARAMETERS[name]


def parse(system: System, name: str, text: str) -> float:
    """Parse a user's value of a parameter: "16", "50 GB", "400 MB/s".

    Raises:
        ConfigError: unknown parameter, or an invalid value.
    """
    known = parameter(system, name)
    value = known.parse(text)
    if value is None:
        raise ConfigError(f"{name} must be {known.wanted}, got {text!r}")
    return value


def _parse_count(text: object) -> float | None:
    written = str(text).strip().replace("_", "")  # as Python writes large numbers: 1_281_167
    # Hundreds of digits become infinity as a float, which is not a count.
    return number if written.isdecimal() and math.isfinite(number := float(written)) else None


def _count(change: Callable[[System, int], System]) -> Parameter:
    return Parameter("a whole number", _parse_count, lambda system, value: change(system, int(value)))


def _size(change: Callable[[System, float], System]) -> Parameter:
    return Parameter(WANTED_BYTES, parse_bytes, change)


def _rate(change: Callable[[System, float], System]) -> Parameter:
    return Parameter(WANTED_BYTES_PER_S, parse_bytes_per_s, change)


def _to(*path: str) -> Callable[[System, Any], System]:
    """Return a setter of the attribute at the end of a path: ``_to("machine", "staging", "threads")``."""

    def put(thing: Any, names: Sequence[str], value: object) -> Any:
        name, *rest = names
        return replace(thing, **{name: put(getattr(thing, name), rest, value) if rest else value})

    return lambda system, value: put(system, path, value)


def _with_capacity(system: System, name: str, capacity_bytes: float) -> System:
    classes = tuple(
        replace(each, capacity_bytes=capacity_bytes) if each.name == name else each for each in system.machine.classes
    )
    return _to("machine", "classes")(system, classes)


def _with_cache(system: System, capacity_bytes: float) -> System:
    """Leave only the fastest class, with this capacity: it then holds everything cached."""
    if not system.machine.classes:
        raise ConfigError(f"cache_bytes needs a storage class to change, and {system.name} has none")
    return _to("machine", "classes")(system, (replace(system.machine.classes[0], capacity_bytes=capacity_bytes),))


def _with_pfs(system: System, bytes_per_s: float) -> System:
    """Scale the curve so that it saturates at another rate, with as many readers as before."""
    curve = system.machine.storage
    return _to("machine", "storage")(system, curve.scaled(bytes_per_s / curve.peak().rate_per_s))


PARAMETERS: dict[str, Parameter] = {
    "cache_bytes": _size(_with_cache),
    "workers": _count(_to("training", "workers")),
    "trials": _count(_to("training", "trials")),
    "batch": _count(_to("training", "batch")),
    "epochs": _count(_to("training", "epochs")),
    "threads": _count(_to("machine", "staging", "threads")),
    "staging_bytes": _size(_to("machine", "staging", "capacity_bytes")),
    "compute_bytes_per_s": _rate(_to("machine", "compute_bytes_per_s")),
    "prep_bytes_per_s": _rate(_to("machine", "prep_bytes_per_s")),
    "network_bytes_per_s": _rate(_to("machine", "network_bytes_per_s")),
    "pfs_bytes_per_s": _rate(_with_pfs),
    "samples": _count(_to("dataset", "samples")),
    "sample_bytes": _size(_to("dataset", "sample_bytes")),
    "pixel_bytes": _size(_to("dataset", "pixel_bytes")),
}
"""Parameters of every system. Each class also has ``<class>_bytes``, and there may be ``cores``."""


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
    """Seconds of a policy at each pair of values, float64[y, x], with or without another policy to compare with."""

    policy: str
    versus: str | None
    x: Axis
    y: Axis
    total_s: NDArray[np.float64]
    versus_s: NDArray[np.float64] | None

    @property
    def speedup(self) -> NDArray[np.float64] | None:
        """Speedup of the policy over the other one: float64[y, x]."""
        return None if self.versus_s is None else self.versus_s / self.total_s


def sweep(system: System, *, policy: str, x: Axis, y: Axis, versus: str | None = None) -> Sweep:
    """Simulate a policy, and another to compare with, at each pair of values.

    Raises:
        ConfigError: unknown policy or parameter, or an invalid value.
    """
    if x.name == y.name:
        raise ConfigError(f"x and y must be two parameters, got {x.name!r} twice")
    names = [policy] if versus is None else [policy, versus]
    # Check everything first: a sweep takes minutes, and an invalid name or value should fail immediately.
    policies_of(system, names)
    systems = [[changed(changed(system, x.name, at), y.name, up) for at in x.values] for up in y.values]
    kept: dict[int, Orders] = {}
    seconds = np.array([[_seconds(each, names, kept) for each in row] for row in systems])
    return Sweep(policy, versus, x, y, seconds[..., 0], seconds[..., 1] if versus is not None else None)


def _seconds(system: System, names: Sequence[str], kept: dict[int, Orders]) -> list[float]:
    """Simulate policies, reusing the orders of the last number of samples, which are slow to make."""
    samples = system.dataset.samples
    if samples not in kept:
        kept.clear()  # up to `KEPT_BYTES` each, so keep only the last ones
        kept[samples] = Orders(samples, seed=system.training.seed)
    found = {each.policy: each.total_s for each in simulate(system, names, orders=kept[samples])}
    return [found[name] for name in names]
