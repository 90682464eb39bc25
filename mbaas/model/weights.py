"""Weights of nodes by speed: their shares of the samples, and the time to rebalance them.

A node's share should match its part of the total prep rate. Otherwise the slowest home sets the pace, and samples that
idle workers take over from it cross the network in every epoch. A share that is moved crosses once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from msgspec import Struct

from mbaas.base import units

TOLERANCE = 0.25
"""Largest relative deviation of a node's share from the share that its speed calls for."""

WINDOW_S = 30.0
"""Window over which speeds are averaged."""

LEAST_BUSY_S = 2.0
"""Minimum prep time for a worker to count as measured."""

HOLD_S = 20.0
"""Time for which shares must be off before samples move."""

LONGEST_REST_S = 1200.0
"""Limit of the pause between two changes, which starts at `HOLD_S` and doubles with each change."""


class Work(Struct, frozen=True):
    worker: str
    node: str
    samples: float
    prep_s: float


class SpeedWeights:
    """``weights`` of nodes: their shares of one feed's samples."""

    def __init__(self) -> None:
        self.weights: Mapping[str, float] = {}
        self._looks: deque[tuple[float, Sequence[Work]]] = deque()
        self._off_since: float | None = None
        self._rest_s, self._rests_until = HOLD_S, -math.inf

    def observe(self, work: Sequence[Work], now: float) -> str | None:
        """Record the work of all workers; return why samples should move, or None."""
        self._looks.append((now, work))
        # Keep the oldest observation until the next one is a whole window back, so that the mean covers at least a
        # window.
        while len(self._looks) > 2 and now - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()
        found = self._off()
        if found is None:
            self._off_since = None
            return None
        self._off_since = now if self._off_since is None else self._off_since
        return found if now - self._off_since >= HOLD_S and now >= self._rests_until else None

    def rebalance(self, work: Sequence[Work], now: float, *, because_off: bool) -> Mapping[str, float]:
        rates = self._rates()
        known = [rates[w.worker] for w in work if w.worker in rates]
        # A worker without a measurement counts as average, so that a new node gets samples at all.
        usual = sum(known) / len(known) if known else 1.0
        weights = _by_node(work, {w.worker: rates.get(w.worker, usual) for w in work})
        self.weights, self._off_since = weights, None
        # Moving samples crosses the network. The more speeds fluctuate, the less it pays to follow them. A change of
        # the nodes themselves must be followed immediately and does not extend the pause.
        if because_off:
            self._rests_until, self._rest_s = now + self._rest_s, min(2 * self._rest_s, LONGEST_REST_S)
        return weights

    def _off(self) -> str | None:
        """Return how far the shares are off; None if they are not, or not known."""
        rates, (_, work) = self._rates(), self._looks[-1]
        # After a node came or went, new shares are set anyway. With a new worker, its speed is unknown.
        if not work or {w.node for w in work} != self.weights.keys() or any(w.worker not in rates for w in work):
            return None
        speeds = _by_node(work, rates)
        all_speed, all_weight = sum(speeds.values()), sum(self.weights.values())
        parts = {node: speeds[node] / all_speed for node in speeds}
        shares = {node: weight / all_weight for node, weight in self.weights.items()}
        worst = max(parts, key=lambda node: abs(shares[node] / parts[node] - 1))
        if abs(shares[worst] / parts[worst] - 1) <= TOLERANCE:
            return None
        share, part = units.percent(shares[worst]), units.percent(parts[worst])
        return f"node {worst[:8]} has {share} of the samples and {part} of the speed"

    def _rates(self) -> dict[str, float]:
        if not self._looks:
            return {}
        before = {w.worker: w for w in self._looks[0][1]}
        rates = {}
        for w in self._looks[-1][1]:
            old = before.get(w.worker, Work(w.worker, w.node, 0.0, 0.0))
            if w.prep_s - old.prep_s >= LEAST_BUSY_S and w.samples > old.samples:
                rates[w.worker] = (w.samples - old.samples) / (w.prep_s - old.prep_s)
        return rates


def _by_node(work: Sequence[Work], rates: Mapping[str, float]) -> dict[str, float]:
    speeds = dict.fromkeys((w.node for w in work), 0.0)
    for w in work:
        speeds[w.node] += rates[w.worker]
    return speeds
