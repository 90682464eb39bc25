"""Parameters of a system by name, and one policy over any two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.allocation.bandwidth import StorageClass
from mbaas.analysis.simulator.simulation import policies_of, simulate
from mbaas.analysis.simulator.system import Cores, System
from mbaas.analysis.simulator.world import Orders
from mbaas.errors import ConfigError
from mbaas.units import WANTED_BYTES, WANTED_BYTES_PER_S, parse_bytes, parse_bytes_per_s


@dataclass(frozen=True)
class Parameter:
    """What a name stands for.

    Attributes:
        about: what changes, in a few words.
        wanted: what a value looks like.
        parse: a value of a text, or None.
        change: a system with this value instead.
    """

    about: str
    wanted: str
    parse: Callable[[object], float | None]
    change: Callable[[System, float], System]


def changed(system: System, name: str, value: float) -> System:
    """The same system with another value of a parameter.

    Raises:
        ConfigError: there is no such parameter, or the value cannot be.
    """
    return parameter(system, name).change(system, value)


def parameter(system: System, name: str) -> Parameter:
    """A parameter of `PARAMETERS`, or ``<class>_bytes``, the capacity of one storage class, or ``cores`` of a machine
    of which it is known what a sample costs them.

    Raises:
        ConfigError: there is no such parameter.
    """
    own = {f"{each.name}_bytes": each.name for each in system.machine.classes}
    if name in own:
        return _size(f"capacity of {own[name]}", lambda given, value: _with_capacity(given, own[name], value))
    cores = system.machine.cores
    if name == "cores" and cores is not None:
        return _count("cores of a machine", lambda given, value: _with_cores(given, replace(cores, count=value)))
    if name not in PARAMETERS:
        known = [*PARAMETERS, *own, *(["cores"] if cores is not None else [])]
        raise ConfigError(f"a parameter must be one of {', '.join(known)}, got {name!r}")
    return PARAMETERS[name]


def parse(system: System, name: str, text: str) -> float:
    """A value of a parameter as people write it: "16", "50 GB", "400 MB/s".

    Raises:
        ConfigError: there is no such parameter, or the text is no value of it.
    """
    known = parameter(system, name)
    value = known.parse(text)
    if value is None:
        raise ConfigError(f"{name} must be {known.wanted}, got {text!r}")
    return value


def _parse_count(text: object) -> float | None:
    written = str(text).strip().replace("_", "")
    return float(written) if written.isdecimal() else None


def _count(about: str, change: Callable[[System, int], System]) -> Parameter:
    return Parameter(about, "a whole number", _parse_count, lambda system, value: change(system, int(value)))


def _size(about: str, change: Callable[[System, float], System]) -> Parameter:
    return Parameter(about, WANTED_BYTES, parse_bytes, change)


def _rate(about: str, change: Callable[[System, float], System]) -> Parameter:
    return Parameter(about, WANTED_BYTES_PER_S, parse_bytes_per_s, change)


def _training(name: str, about: str) -> Parameter:
    return _count(about, lambda system, value: replace(system, training=replace(system.training, **{name: value})))


def _machine_rate(name: str, about: str) -> Parameter:
    def change(system: System, value: float) -> System:
        values: dict[str, Any] = {name: value}
        return replace(system, machine=replace(system.machine, **values))

    return _rate(about, change)


def _with_capacity(system: System, name: str, capacity_bytes: float) -> System:
    classes = tuple(
        replace(each, capacity_bytes=capacity_bytes) if each.name == name else each for each in system.machine.classes
    )
    return replace(system, machine=replace(system.machine, classes=classes))


def _with_cores(system: System, cores: Cores) -> System:
    return replace(system, machine=replace(system.machine, cores=cores))


def _with_cache(system: System, capacity_bytes: float) -> System:
    """One class, the fastest, of this size."""
    if not system.machine.classes:
        raise ConfigError(f"cache_bytes needs a storage class to change, and {system.name} has none")
    cache: StorageClass = replace(system.machine.classes[0], capacity_bytes=capacity_bytes)
    return replace(system, machine=replace(system.machine, classes=(cache,)))


def _with_pfs(system: System, bytes_per_s: float) -> System:
    """The same curve, scaled so that it saturates at another rate."""
    curve = system.machine.storage
    scaled = curve.scaled(bytes_per_s / curve.peak().rate_per_s)
    return replace(system, machine=replace(system.machine, storage=scaled))


def _with_samples(system: System, value: int) -> System:
    return replace(system, dataset=replace(system.dataset, samples=value))


def _with_pixels(system: System, value: float) -> System:
    return replace(system, dataset=replace(system.dataset, pixel_bytes=value))


def _with_sample(system: System, value: float) -> System:
    return replace(system, dataset=replace(system.dataset, sample_bytes=value))


def _with_staging(system: System, value: float) -> System:
    machine = system.machine
    return replace(system, machine=replace(machine, staging=replace(machine.staging, capacity_bytes=value)))


def _with_threads(system: System, value: int) -> System:
    machine = system.machine
    return replace(system, machine=replace(machine, staging=replace(machine.staging, threads=value)))


PARAMETERS: dict[str, Parameter] = {
    "cache_bytes": _size("one cache of this size on each worker, as fast as its first class", _with_cache),
    "workers": _training("workers", "machines"),
    "trials": _training("trials", "trials at a time"),
    "batch": _training("batch", "samples of a minibatch on a worker"),
    "epochs": _training("epochs", "epochs"),
    "threads": _count("threads of a worker that fetch and prepare", _with_threads),
    "staging_bytes": _size("staging buffer of a worker", _with_staging),
    "compute_bytes_per_s": _machine_rate("compute_bytes_per_s", "training of a trial on a worker"),
    "prep_bytes_per_s": _machine_rate("prep_bytes_per_s", "prep of a thread"),
    "network_bytes_per_s": _machine_rate("network_bytes_per_s", "between two workers"),
    "pfs_bytes_per_s": _rate("shared storage, where it saturates", _with_pfs),
    "samples": _count("samples of the dataset", _with_samples),
    "sample_bytes": _size("mean size of a raw sample", _with_sample),
    "pixel_bytes": _size("size of a prepared sample", _with_pixels),
}
"""What can be changed in any system; a class's own capacity is ``<class>_bytes``, and there may be ``cores``."""


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
    """Simulates a policy, and another to compare it with, at each pair of values.

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
