"""Load curves, and a model of a service that follows a scaler's decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from mbaas.model.scaling import Decision, Observation, Scaler

PERIOD_S = 5.0
"""Time between two observations."""

WORKER_PER_S = 100.0

Load = Sequence[float]
"""Samples/s that trials could consume, every `PERIOD_S`."""


def sampled(curve: Callable[[float], float], *, seconds: float) -> list[float]:
    return [curve(PERIOD_S * i) for i in range(int(seconds / PERIOD_S))]


def step(*, seconds: float = 3600) -> Load:
    """100 samples/s, 750 in the middle third."""
    return sampled(lambda t: 750 if seconds / 3 <= t < 2 * seconds / 3 else 100, seconds=seconds)


def sawtooth(period_s: float, *, seconds: float = 7200) -> Load:
    """Rises from 0 to 800 samples/s within a period, then drops to 0."""
    return sampled(lambda t: 800 * (t % period_s) / period_s, seconds=seconds)


def noisy(level: float, *, scatter: float, seconds: float = 7200, seed: int = 0) -> Load:
    """``level`` samples/s with normally distributed noise of this relative deviation."""
    noise = np.random.default_rng(seed).standard_normal(int(seconds / PERIOD_S))
    return np.maximum(0, level * (1 + scatter * noise)).tolist()


def on_and_off(period_s: float, *, seconds: float = 7200) -> Load:
    """600 samples/s and 0 in turn."""
    return sampled(lambda t: 600 if t % period_s < period_s / 2 else 0, seconds=seconds)


def spikes(*, every_s: float = 300, length_s: float = 10, seconds: float = 7200) -> Load:
    """200 samples/s, with short periodic spikes of 1,600."""
    return sampled(lambda t: 1600 if t % every_s < length_s else 200, seconds=seconds)


def diurnal(*, days: int = 3, scatter: float = 0.05) -> Load:
    """A sine between 50 and 950 samples/s each day, with noise."""
    day = 86_400.0
    smooth = sampled(lambda t: 500 - 450 * math.cos(2 * math.pi * t / day), seconds=days * day)
    noise = np.random.default_rng(1).standard_normal(len(smooth))
    return (np.array(smooth) * (1 + scatter * noise)).tolist()


@dataclass
class Recording:
    """Observations and decisions, every `PERIOD_S`."""

    observations: list[Observation] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def changes(self) -> list[tuple[float, int]]:
        """(seconds, workers more or fewer)."""
        return [(PERIOD_S * i, decision.change) for i, decision in enumerate(self.decisions) if decision.change]

    @property
    def reversals(self) -> int:
        """Number of changes from growing to shrinking or back."""
        signs = [change > 0 for _, change in self.changes]
        return sum(a != b for a, b in pairwise(signs))

    def workers(self, at_s: float) -> int:
        return self.observations[int(at_s / PERIOD_S)].workers


def play(
    scaler: Scaler,
    load: Load,
    *,
    fetch_per_s: float = math.inf,
    boot_s: float = 60.0,
    workers: int = 1,
    reserved: int = 1,
    most: int = 16,
    worker_per_s: Callable[[float], float] = lambda now: WORKER_PER_S,
) -> Recording:
    """Simulate a service under ``load``: new workers start after ``boot_s``, retired ones stop immediately.

    Trials get the minimum of their demand, the prep rate and the fetch rate. They stall for the rest of their time on
    the slower of prep and fetch. ``worker_per_s`` is the prep rate of each worker at a given time.
    """
    recording = Recording()
    coming: list[float] = []  # start time of each pending worker
    for i, demand in enumerate(load):
        now = i * PERIOD_S
        up = [time for time in coming if time <= now]
        coming = [time for time in coming if time > now]
        workers += len(up)
        prepared = workers * worker_per_s(now)
        served = min(demand, prepared, fetch_per_s)
        stall = 1 - served / demand if demand else 0.0
        on_fetch = fetch_per_s < prepared
        seen = Observation(
            prep_stall=0.0 if on_fetch else stall,
            fetch_stall=stall if on_fetch else 0.0,
            demand_per_s=demand,
            worker_per_s=worker_per_s(now),
            fetch_per_s=fetch_per_s,
            workers=workers,
            pending=len(coming),
            idle=1 - served / prepared if prepared else 0.0,
            reserved=reserved,
            most=most,
        )
        decision = scaler.observe(seen, now)
        recording.observations.append(seen)
        recording.decisions.append(decision)
        lacking = decision.workers - workers - len(coming)
        coming += [now + boot_s] * lacking
        if lacking < 0:
            kept = max(0, len(coming) + lacking)
            workers -= max(0, -lacking - len(coming))
            coming = coming[:kept]
    return recording
