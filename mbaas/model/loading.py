"""The three-stage curve of a running feed, from its measurements: loading rate against the number of workers.

A-Dloader ("A Data-Loader Tunable Knob to Shorten GPU Idleness", 2022) fits the rates of CPU and storage before jobs
run, one job at a time. A feed measures both rates while it runs. A window with a constant number of workers gives one
point of the curve of prep. If workers wait for bytes in much of their time, storage or the network is the limit.

`mbaas.model.curves.fit_curve`, which also fits the curves of `mbaas plan`, is used where it describes the points well.
Otherwise the slope at the present number of workers decides, and the reasons of decisions say so.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from msgspec import Struct

from mbaas.base import units
from mbaas.model.curves import Fit, ThroughputCurve, fit_curve

LEAST_COUNTS = 3
"""Smallest number of different worker counts for a fit. Two counts show a bend only if one lies beyond it."""

LEAST_R_SQUARED = 0.8
"""Explained share of the variance below which a fit is hardly better than the mean rate."""

LARGEST_ERROR = 0.05
"""Largest error of a good fit, as a share of the highest rate. Flat points have a low R^2 however good the fit is."""

BUSY = 0.7
"""Share of a window that workers must prepare for a point. Idle workers do not contend, so each would seem faster."""

WAITS_FOR_BYTES = 0.1
"""Fetch is the limit if busy workers wait for bytes for at least this share of their time."""

CHANGED = 0.25
"""Two windows that both differ by this share from the first one with as many workers show that the work has changed.

Then all points are dropped, for example those from the time before samples were cached decoded.
"""

KEPT_RATES = 5
"""Rates of one number of workers that are kept, the newest ones."""

KEPT_COUNTS = 32
"""Numbers of workers whose rates are kept, the most recent ones."""


class PrepCurve(Struct, frozen=True):
    """Samples/s of prep against the feed's workers, if all bytes are at hand.

    Attributes:
        curve: flat where workers are saturated.
        counts: different numbers of workers that were measured.
        r_squared: explained share of the variance; None if the curve is not a fit.
    """

    curve: ThroughputCurve
    counts: int = 0
    r_squared: float | None = None

    @classmethod
    def of_one(cls, worker_per_s: float) -> PrepCurve:
        """Return the line through the rate of one worker, for a feed without other measurements."""
        return cls(ThroughputCurve.linear(worker_per_s))

    @property
    def basis(self) -> str:
        """The measurement behind the curve, as a clause."""
        if self.r_squared is not None:
            return f"by a fit to {self.counts} numbers of workers, R² {units.number(self.r_squared)}"
        if self.counts > 1:
            why = "too few for a fit" if self.counts < LEAST_COUNTS else "no fit is good"
            return f"by the slope at this number of workers: {self.counts} were measured, {why}"
        return "by the rate of one worker"


class LoadingWindow(Struct, frozen=True, kw_only=True):
    """Work of a feed's workers in the last seconds.

    Attributes:
        elapsed_s: length of the window.
        workers, machines: prep workers that are up now, and the number of machines that they run on.
        samples: samples prepared.
        prep_s, fetch_s: worker-seconds of preparing, and of waiting for the bytes of an assigned task.
    """

    elapsed_s: float
    workers: int
    machines: int
    samples: float
    prep_s: float
    fetch_s: float

    @property
    def busy(self) -> float:
        """Preparing, as a share of the workers' time."""
        return self.prep_s / (self.workers * self.elapsed_s)

    @property
    def waits(self) -> float:
        """Waiting for bytes, as a share of the workers' time with tasks."""
        return self.fetch_s / (self.prep_s + self.fetch_s)

    @property
    def prep_per_s(self) -> float:
        """Samples/s of all workers if none waits."""
        return self.workers * self.samples / self.prep_s

    @property
    def loaded_per_s(self) -> float:
        """Samples/s of all workers if each has a task: d / (1/R + 1/U), A-Dloader's loading rate of d workers."""
        return self.workers * self.samples / (self.prep_s + self.fetch_s)


@dataclass
class _Rates:
    """Samples/s of a machine with one number of workers: the first rate, and the newest ones."""

    first: float
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_RATES))

    @property
    def usual(self) -> float:
        return median(self.newest)

    @property
    def has_changed(self) -> bool:
        # Compared with the first rate, so that a slow change is seen too. One disturbed window is not a change.
        if len(self.newest) < 2:
            return False
        one, other = [*self.newest][-2:]
        return min(one, other) > (1 + CHANGED) * self.first or max(one, other) < (1 - CHANGED) * self.first


class LoadingHistory:
    """Recent windows of one feed.

    Attributes:
        fetch_per_s: samples/s that storage and network deliver; infinite if they are not the limit.
    """

    def __init__(self) -> None:
        self.fetch_per_s = math.inf
        self._rates: dict[float, _Rates] = {}  # by workers of a machine, the number that was measured last at the end
        self._same: tuple[int, int] = (0, 0)  # workers and machines since `_since`
        self._since = self._added = -math.inf  # time of the last change, and of the last point
        self._fit: Fit | None = None  # of the present points; None until it is needed

    def observe(self, window: LoadingWindow, now: float) -> None:
        """Record the window that ends at ``now`` (seconds). Windows may overlap, and may cover a change of workers."""
        if (window.workers, window.machines) != self._same:
            self._same, self._since = (window.workers, window.machines), now
        begin = now - window.elapsed_s
        # A window with two numbers of workers is a point of neither.
        if begin < self._since or not window.workers or not window.samples or not window.prep_s:
            return
        self.fetch_per_s = window.loaded_per_s if window.waits >= WAITS_FOR_BYTES else math.inf
        if begin >= self._added and window.busy >= BUSY:  # points do not share samples
            self._add(window.workers / window.machines, window.prep_per_s / window.machines)
            self._added = now

    def _add(self, count: float, per_s: float) -> None:
        rates = self._rates.pop(count, None) or _Rates(per_s)
        rates.newest.append(per_s)
        if rates.has_changed:
            self._rates.clear()
            rates = _Rates(per_s, deque([per_s], maxlen=KEPT_RATES))
        self._rates[count], self._fit = rates, None
        while len(self._rates) > KEPT_COUNTS:
            del self._rates[next(iter(self._rates))]

    def curve(self, *, workers: int, machines: int, worker_per_s: float) -> PrepCurve:
        """Return the curve of a feed with so many workers, by the fit if it is good.

        Workers contend only within a machine, and all machines are assumed to be equally fast.

        Args:
            worker_per_s: current rate of one worker, above 0; used until other numbers of workers are measured.
        """
        counts = len(self._rates)
        if counts >= LEAST_COUNTS and self._is_good(fit := self._fitted()):
            return PrepCurve(fit.curve.over(machines).to_saturation(), counts, fit.r_squared)
        count = workers / machines
        medians = {n: rates.usual for n, rates in self._rates.items()}
        here = medians.get(count, worker_per_s * count)
        others = [n for n in medians if n != count]
        if not others or not count:
            return PrepCurve.of_one(worker_per_s)
        nearest = min(others, key=lambda n: (abs(n - count), n))
        # At most the slope of the line from the origin, because workers do not help each other.
        slope = min(max((here - medians[nearest]) / (count - nearest), 0.0), here / count)
        curve = ThroughputCurve(((count, here),), slope).over(machines).to_saturation()
        return PrepCurve(curve, len(medians.keys() | {count}))

    def _fitted(self) -> Fit:
        if self._fit is None:
            self._fit = fit_curve([(count, rate) for count, rates in self._rates.items() for rate in rates.newest])
        return self._fit

    def _is_good(self, fit: Fit) -> bool:
        if fit.r_squared >= LEAST_R_SQUARED:
            return True
        errors = [abs(fit.curve.rate(count) - rates.usual) for count, rates in self._rates.items()]
        return max(errors) <= LARGEST_ERROR * max(rates.usual for rates in self._rates.values())
