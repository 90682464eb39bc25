"""Simulation of policies on a system: their seconds by location, alone or over any two parameters of the system."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mbaas.base import files
from mbaas.base.units import Bytes, BytesPerS
from mbaas.errors import ConfigError
from mbaas.model.rates import Rates, Setup
from mbaas.model.supply import form_plan
from mbaas.tools.simulator.policies import POLICIES, Policy
from mbaas.tools.simulator.system import System, system_of
from mbaas.tools.simulator.world import Floats, Orders, Steps, StepTimeline, Tiers, Traffic, World, orders_of

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a policy on a system.

    Attributes:
        total_s: time from the first read to the end of the last step, over all epochs.
        seconds: seconds by location, adding up to ``total_s``. ``compute`` is training. All others are waits: for
            samples from a storage class, from other workers (``remote``) or from shared storage (``pfs``), or for
            samples to be prepared and written (``staging``).
        samples: samples that one trial read, by the tier of their bytes; they add up to F E.
        epoch_s: seconds of each epoch; reads before training count in the first.
        loading_s: seconds of each epoch if training took no time, without reads before training.
        remark: a limitation of the model, or None.
    """

    policy: str
    total_s: float
    seconds: Mapping[str, float]
    samples: Mapping[str, int]
    epoch_s: tuple[float, ...]
    loading_s: tuple[float, ...]
    remark: str | None = None


def locations_of(system: System) -> tuple[str, ...]:
    return ("compute", "staging", *(each.name for each in system.machine.classes), "remote", "pfs")


def policies_of(system: System, names: Sequence[str] | None = None) -> tuple[str, ...]:
    chosen = tuple(names or system.policies or POLICIES)
    unknown = [name for name in chosen if name not in POLICIES]
    if unknown:
        raise ConfigError(f"a policy must be one of {', '.join(POLICIES)}, got {unknown[0]!r}")
    return tuple(dict.fromkeys(chosen))


def simulate(
    system: System, policies: Sequence[str] | None = None, *, orders: Orders | None = None
) -> Iterator[Outcome]:
    """Simulate policies one after the other.

    ``policies`` defaults to the system's own, or all. Pass ``orders`` of the same samples and seed to avoid recomputing
    them.
    """
    # Eagerly, not in the generator: a wrong name raises here.
    names = policies_of(system, policies)
    world = World(system, orders=orders)
    return (_simulated(world, POLICIES[name]) for name in names)


def _simulated(world: World, policy: Policy) -> Outcome:
    system = world.system
    preload_s = policy.preload_s(world)  # of the slowest worker, because all workers share the steps
    timeline, loading = (
        StepTimeline(workers=world.workers, ahead=policy.ahead(world), start_s=preload_s) for _ in range(2)
    )
    step_bytes_per_s = world.workers * system.machine.compute_bytes_per_s
    compute_s, waits_s, ends, loading_ends = 0.0, np.zeros(world.tiers.count), [0.0], [preload_s]
    waits_s[world.tiers.pfs] = preload_s  # reading before training counts as waiting
    samples = np.zeros(world.tiers.count, dtype=np.int64)
    fast = World(changed(system, "compute_bytes_per_s", math.inf), orders=world.orders) if policy.adapts else world
    # Epoch by epoch: the bytes of one epoch's steps fit into memory, but a whole training may not.
    for traffic in policy.traffic(world):
        # By the mean bytes of a worker's minibatch, so that `perfect` takes as long in every order, and no policy beats
        # it.
        training_s = traffic.nbytes.sum(axis=(1, 2)) / step_bytes_per_s
        reads_s = _reads_s(world, policy, traffic)
        if (cores := system.machine.cores) is not None:
            training_s = np.maximum(training_s, world.taken_per_core(traffic) * cores.step_cpu_s)
        if not policy.prefetches:  # the slowest worker's wait, because gradients are summed at the end of each step
            read_s = reads_s.sum(axis=2)
            end_s = ends[-1] + float(read_s.max(axis=1).sum() + training_s.sum())
            steps = Steps(read_s.max(axis=1), read_s.argmax(axis=1), np.ones(len(read_s), dtype=bool), end_s)
            loading_ends.append(loading_ends[-1] + float(read_s.max(axis=1).sum()))
        else:
            steps = _run(timeline, policy, world.tiers, reads_s, training_s)
            alone_s = _reads_s(fast, policy, traffic) if policy.adapts else reads_s
            loading_ends.append(_run(loading, policy, world.tiers, alone_s, np.zeros_like(training_s)).end_s)
        waits_s += _by_tier(steps, reads_s, world.tiers, overlaps=policy.overlaps)
        compute_s += float(training_s.sum())
        samples += traffic.samples
        ends.append(steps.end_s)
    names = world.tiers.names
    return Outcome(
        policy=policy.name,
        total_s=ends[-1],
        seconds={"compute": compute_s} | _merged(system, names, waits_s.tolist()),
        samples=_merged(system, names, samples.tolist()),
        epoch_s=tuple(np.diff(ends).tolist()),
        loading_s=tuple(np.diff(loading_ends).tolist()),
        remark=policy.remark(world),
    )


def _reads_s(world: World, policy: Policy, traffic: Traffic) -> Floats:
    """Return `Policy.read_s`; prep takes at least the time that the machine's cores need for all work of a step."""
    reads_s = policy.read_s(world, traffic)
    if (cores := world.system.machine.cores) is not None:
        # Fetching by other threads overlaps.
        alone_s = reads_s[..., world.tiers.pixels :] if policy.overlaps else reads_s
        lacking_s = policy.cores_s(world, cores, traffic) - alone_s.sum(axis=2)
        reads_s[..., world.tiers.staged] += np.maximum(0.0, lacking_s)
    return reads_s


def _run(timeline: StepTimeline, policy: Policy, tiers: Tiers, reads_s: Floats, training_s: Floats) -> Steps:
    if not policy.overlaps:
        return timeline.run(reads_s.sum(axis=2), training_s)
    # Pixels of other workers, and staging, come after fetching.
    fetch_s, prep_s = np.split(reads_s, [tiers.pixels], axis=2)
    return timeline.run(fetch_s.sum(axis=2), training_s, prep_s=prep_s.sum(axis=2))


def _by_tier(steps: Steps, reads_s: Floats, tiers: Tiers, *, overlaps: bool) -> Floats:
    """Divide the wait before each step in proportion to the slowest worker's reading: float64[tiers]."""
    parts = reads_s[np.arange(len(reads_s)), steps.slowest]
    if overlaps:
        parts[steps.late_fetch, tiers.pixels :] = 0
        parts[~steps.late_fetch, : tiers.pixels] = 0
    sums = parts.sum(axis=1)
    parts[sums == 0, tiers.staged] = 1  # a wait without reading is for prep
    fractions = parts / np.where(sums == 0, 1, sums)[:, None]
    by_tier: Floats = steps.waits_s @ fractions
    return by_tier


def _merged(system: System, names: Sequence[str], values: Sequence[Number]) -> dict[str, Number]:
    # Several tiers are one location: classes of other workers, and pixels from them, are all "remote".
    totals: dict[str, Number] = {}
    for name, value in zip(names, values, strict=True):
        totals[name] = totals[name] + value if name in totals else value
    return {location: totals[location] for location in locations_of(system)[1:]}  # in the order of all results


Change = Callable[[System, float], System]


def changed(system: System, name: str, value: float) -> System:
    return _change_of(system, name)(system, value)


def parse(system: System, name: str, text: str) -> float:
    """Parse a user's value of a parameter: "16", "50 GB", "400 MB/s"."""
    _change_of(system, name)
    kind = next(kind for ending, kind in KINDS.items() if name.endswith(ending))
    value: float = files.read_value(kind, text, name=name)
    return value


KINDS: dict[str, Any] = {"_bytes_per_s": BytesPerS, "_bytes": Bytes, "": int}
"""Ending of a parameter's name -> type of its values."""


def _change_of(system: System, name: str) -> Change:
    changes = dict(PARAMETERS)
    for index, each in enumerate(system.machine.classes):
        changes[f"{each.name}_bytes"] = _to("machine", "classes", index, "capacity_bytes")
    if system.machine.cores is not None:  # a number of cores is meaningless without the cost of a sample
        changes["cores"] = _to("machine", "cores", "count", kind=int)
    if name not in changes:
        raise ConfigError(f"a parameter must be one of {', '.join(changes)}, got {name!r}")
    return changes[name]


def _to(*path: str | int, kind: Callable[[float], float] = lambda value: value) -> Change:
    """Return a setter of the value at the end of a path: ``_to("machine", "staging", "threads")``."""

    def put(thing: Any, names: Sequence[str | int], value: float) -> Any:
        if not names:
            return kind(value)
        name, *rest = names
        if isinstance(name, int):
            return (*thing[:name], put(thing[name], rest, value), *thing[name + 1 :])
        return replace(thing, **{name: put(getattr(thing, name), rest, value)})

    return lambda system, value: put(system, path, value)


def _with_cache(system: System, capacity_bytes: float) -> System:
    """Leave only the fastest class, with this capacity: it then holds everything cached."""
    if not system.machine.classes:
        raise ConfigError(f"cache_bytes needs a storage class to change, and {system.name} has none")
    fastest = replace(system.machine.classes[0], capacity_bytes=capacity_bytes)
    return replace(system, machine=replace(system.machine, classes=(fastest,)))


def _with_pfs(system: System, bytes_per_s: float) -> System:
    """Scale the curve so that it saturates at another rate, with as many readers as before."""
    curve = system.machine.storage
    storage = curve.scaled(bytes_per_s / curve.peak().rate_per_s)
    return replace(system, machine=replace(system.machine, storage=storage))


PARAMETERS: dict[str, Change] = {
    "cache_bytes": _with_cache,
    **{name: _to("training", name, kind=int) for name in ("workers", "trials", "batch", "epochs")},
    "threads": _to("machine", "staging", "threads", kind=int),
    "staging_bytes": _to("machine", "staging", "capacity_bytes"),
    **{name: _to("machine", name) for name in ("compute_bytes_per_s", "prep_bytes_per_s", "network_bytes_per_s")},
    "pfs_bytes_per_s": _with_pfs,
    "samples": _to("dataset", "samples", kind=int),
    **{name: _to("dataset", name) for name in ("sample_bytes", "pixel_bytes")},
}
"""Parameters of every system. Each class also has ``<class>_bytes``, and there may be ``cores``."""


@dataclass(frozen=True)
class Axis:
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
        return None if self.versus_s is None else self.versus_s / self.total_s


def sweep(system: System, *, policy: str, x: Axis, y: Axis, versus: str | None = None) -> Sweep:
    if x.name == y.name:
        raise ConfigError(f"x and y must be two parameters, got {x.name!r} twice")
    names = [policy] if versus is None else [policy, versus]
    # Check everything first: a sweep takes minutes, and an invalid name or value should fail immediately.
    policies_of(system, names)
    systems = [[changed(changed(system, x.name, at), y.name, up) for at in x.values] for up in y.values]

    @lru_cache(1)  # up to `KEPT_BYTES` each, so keep only the last ones
    def orders(samples: int) -> Orders:
        return orders_of(samples, seed=system.training.seed)

    def seconds(changed_system: System) -> list[float]:
        kept = orders(changed_system.dataset.samples)
        return [next(simulate(changed_system, [name], orders=kept)).total_s for name in names]

    total_s = np.array([[seconds(each) for each in row] for row in systems])
    return Sweep(policy, versus, x, y, total_s[..., 0], total_s[..., 1] if versus is not None else None)


def simulated_epoch_s(rates: Rates, setup: Setup) -> float:
    """Return the simulated seconds of a steady epoch.

    With a shared feed, the policy is mbaas; otherwise each trial has a private MinIO cache of encoded samples.
    """
    kept = "mbaas_decoded" if form_plan(rates, setup) is not None else "mbaas"
    policy = kept if setup.sharing else "minio"
    system = system_of(rates, setup, policies=(policy,))
    (outcome,) = simulate(system)
    return mean(outcome.epoch_s[1:]) * rates.samples / system.dataset.samples  # the dataset may be scaled down
