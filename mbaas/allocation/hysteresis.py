"""What the scaler sees, its settings, and a signal with two thresholds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from mbaas.allocation.throughput import ROUNDING
from mbaas.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """When the number of prep workers changes.

    Attributes:
        stall_high, stall_low: trials stall on prep from the first share of their time on, until it falls below the
            second.
        idle_high, idle_low: workers are idle from the first share of the time of all that are wanted on, until it falls
            below the second.
        grow_hold_s: how long trials must stall before workers are asked for.
        idle_hold_s: how long workers must idle before they are retired; longer than a load that comes and goes.
        cooldown_s: pause after every change; as long as a new worker needs to show in the stalls.

    Raises:
        ConfigError: thresholds that are not 0 < low < high <= 1, or negative seconds.
    """

    stall_high: float = 0.10
    stall_low: float = 0.03
    idle_high: float = 0.30
    idle_low: float = 0.15
    grow_hold_s: float = 15.0
    idle_hold_s: float = 300.0
    cooldown_s: float = 60.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("stall", self.stall_low, self.stall_high),
            ("idle", self.idle_low, self.idle_high),
        ):
            if not 0 < low < high <= 1:
                raise ConfigError(f"0 < {name}_low < {name}_high <= 1 must hold, got {low} and {high}")
        for name in ("grow_hold_s", "idle_hold_s", "cooldown_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 seconds or more and finite, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A feed, or the service, over the last seconds.

    Attributes:
        prep_stall, fetch_stall: shares of the trials' time, in [0, 1], that they waited for data while prep was
            computing, and while prep waited for bytes.
        demand_per_s: samples/s that prep would have to make for no trial to wait, from the trials' step times; 0
            without trials.
        worker_per_s: samples/s that one worker prepares from memory; 0 when not known yet.
        fetch_per_s: samples/s that caches and storage can deliver; infinite when not known.
        workers, pending: workers that are up, and that were asked for and are not up yet.
        idle: share of the time, in [0, 1], of workers that are up in which they had nothing to prepare.
        reserved, most: bounds on the number of workers.

    Raises:
        ConfigError: a share outside [0, 1], a negative number, or reserved above most.
    """

    prep_stall: float
    fetch_stall: float
    demand_per_s: float
    worker_per_s: float
    fetch_per_s: float = math.inf
    workers: int
    pending: int = 0
    idle: float
    reserved: int
    most: int

    def __post_init__(self) -> None:
        for name in ("prep_stall", "fetch_stall", "idle"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be a share in [0, 1], got {getattr(self, name)}")
        for name in ("demand_per_s", "worker_per_s", "fetch_per_s", "workers", "pending", "reserved"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.reserved > self.most:
            raise ConfigError(f"reserved must be at most the maximum of {self.most}, got {self.reserved}")
        if math.isinf(min(self.demand_per_s, self.fetch_per_s)) or math.isinf(self.worker_per_s):
            raise ConfigError(
                f"demand_per_s and worker_per_s must be finite, got {self.demand_per_s}, {self.worker_per_s}"
            )

    @cached_property
    def needed(self) -> int | None:
        """Workers beyond which another bottleneck, training or fetch, decides; within the bounds.

        None while the rate of a worker is not known.
        """
        useful_per_s = min(self.demand_per_s, self.fetch_per_s)
        if useful_per_s and not self.worker_per_s:
            return None
        # More workers than fetch can feed would wait for bytes: the slower of training and fetch is what prep serves.
        count = math.ceil(useful_per_s / self.worker_per_s * (1 - ROUNDING)) if useful_per_s else 0
        return min(max(count, self.reserved), self.most)

    def spare(self, wanted: int) -> float:
        """The share of ``wanted`` workers that had nothing to prepare, or is not even up."""
        return max(0.0, 1 - self.workers * (1 - self.idle) / wanted) if wanted else 0.0

    @property
    def limit(self) -> str:
        """What `needed` follows from, for a sentence."""
        if self.fetch_per_s < self.demand_per_s:
            rate = f"fetch, at {self.fetch_per_s:.6g} samples/s,"
        else:
            rate = f"training, at {self.demand_per_s:.6g} samples/s,"
        return f"{rate} within [{self.reserved}, {self.most}]"

    @property
    def stalls(self) -> str:
        """Both stalls, for a sentence."""
        return f"trials stall {self.prep_stall:.0%} on prep and {self.fetch_stall:.0%} on fetch"


@dataclass
class Hold:
    """A signal that begins when a share reaches ``high`` and ends when it falls below ``low``.

    Attributes:
        since: when it began; None while it is off.
    """

    high: float
    low: float
    since: float | None = field(default=None, init=False)

    def watch(self, share: float, now: float) -> None:
        """Takes in the share at ``now``."""
        # Between the two thresholds the signal stays as it is, so that a share that scatters around one of them does
        # not begin and end again and again.
        if share < self.low:
            self.since = None
        elif self.since is None and share >= self.high:
            self.since = now

    def held_s(self, now: float) -> float:
        """How long the signal has lasted; 0 while it is off."""
        return 0.0 if self.since is None else now - self.since
