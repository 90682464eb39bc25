"""Simulation of policies on a system: their seconds, broken down by location."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mbaas.analysis.simulator.model import Floats, Pace, Steps, Tiers
from mbaas.analysis.simulator.policies import POLICIES, Policy
from mbaas.analysis.simulator.system import System
from mbaas.analysis.simulator.world import Orders, World
from mbaas.errors import ConfigError

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
        remark: a limitation of the model, or None.
    """

    policy: str
    total_s: float
    seconds: Mapping[str, float]
    samples: Mapping[str, int]
    epoch_s: tuple[float, ...]
    remark: str | None = None


def locations_of(system: System) -> tuple[str, ...]:
    """Return the locations of results, in display order."""
    return ("compute", "staging", *(each.name for each in system.machine.classes), "remote", "pfs")


def policies_of(system: System, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the policies to simulate: the given ones, or the system's own, or all.

    Raises:
        ConfigError: unknown policy.
    """
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

    Raises:
        ConfigError: unknown policy.
    """
    # Eagerly, not in the generator: a wrong name raises here.
    names = policies_of(system, policies)
    world = World(system, orders=orders)
    return (_simulated(world, POLICIES[name]) for name in names)


def _simulated(world: World, policy: Policy) -> Outcome:
    system = world.system
    preload_s = policy.preload_s(world)  # of the slowest worker, because all workers share the steps
    pace = Pace(workers=world.workers, ahead=policy.ahead(world), start_s=preload_s)
    step_bytes_per_s = world.workers * system.machine.compute_bytes_per_s
    compute_s, waits_s, ends = 0.0, np.zeros(world.tiers.count), [0.0]
    waits_s[world.tiers.pfs] = preload_s  # reading before training counts as waiting
    samples = np.zeros(world.tiers.count, dtype=np.int64)
    # Epoch by epoch: the bytes of one epoch's steps fit into memory, but a whole training may not.
    for traffic in policy.traffic(world):
        # By the mean bytes of a worker's minibatch, so that `perfect` takes as long in every order, and no policy beats
        # it.
        training_s = traffic.nbytes.sum(axis=(1, 2)) / step_bytes_per_s
        reads_s = policy.read_s(world, traffic)
        if world.load is not None:
            training_s = np.maximum(training_s, world.load.training_s(traffic.nbytes))
            _wait_for_cores(reads_s, policy.cores_s(world, world.load, traffic), world.tiers, policy)
        steps = (
            _steps(policy, pace, reads_s, training_s, world.tiers)
            if policy.prefetches
            else (_one_after_the_other(reads_s.sum(axis=2), training_s, ends[-1]))
        )
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
        remark=policy.remark(world),
    )


def _wait_for_cores(reads_s: Floats, cores_s: Floats, tiers: Tiers, policy: Policy) -> None:
    """Extend prep to the time that cores need for the step, [H, N]; fetching by other threads overlaps."""
    # Only the excess over the threads' time, which overlaps with it.
    alone_s = reads_s[..., tiers.pixels :] if policy.overlaps else reads_s
    reads_s[..., tiers.staged] += np.maximum(0.0, cores_s - alone_s.sum(axis=2))


def _steps(policy: Policy, pace: Pace, reads_s: Floats, training_s: Floats, tiers: Tiers) -> Steps:
    if not policy.overlaps:
        return pace.run(reads_s.sum(axis=2), training_s)
    # Pixels of other workers, and staging, come after fetching.
    fetch_s, prep_s = np.split(reads_s, [tiers.pixels], axis=2)
    return pace.run(fetch_s.sum(axis=2), training_s, prep_s=prep_s.sum(axis=2))


def _one_after_the_other(reads_s: Floats, training_s: Floats, start_s: float) -> Steps:
    waits_s = reads_s.max(axis=1)  # the slowest worker's, because gradients are summed at the end of each step
    end_s = start_s + float(waits_s.sum() + training_s.sum())
    return Steps(waits_s, reads_s.argmax(axis=1), np.ones(len(reads_s), dtype=bool), end_s)


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
