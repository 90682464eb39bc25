"""Weighs nodes by their speed: how samples are shared out between them, and when new shares are worth moving samples.

A node's share should be its part of all that is prepared: the slowest home sets the pace, and what idle workers take
over from it crosses the network in every epoch. A share that is moved crosses once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from msgspec import Struct

from mbaas import units

TOLERANCE = 0.25
"""A node's share may be off by this part of what its speed calls for."""

WINDOW_S = 30.0
"""The time over which speeds are means."""

LEAST_BUSY_S = 2.0
"""A worker that prepared for less time is not measured."""

HOLD_S = 20.0
"""How long shares must be off before samples move."""

LONGEST_REST_S = 1200.0
"""The pause between two changes begins at `HOLD_S` and doubles after each of them, up to this."""


class Work(Struct, frozen=True):
    """What a worker has done so far.

    Attributes:
        worker: its name.
        node: where it runs.
        samples, prep_s: how many samples it prepared, and the seconds it took for them.
    """

    worker: str
    node: str
    samples: float
    prep_s: float


class SpeedWeights:
    """The speeds of the nodes of one feed, and the shares that follow from them. Pure: times come in.

    Attributes:
        weights: node -> the weight by which it has its share of the samples now.
    """

    def __init__(self) -> None:
        self.weights: Mapping[str, float] = {}
        self._looks: deque[tuple[float, Sequence[Work]]] = deque()
        self._off_since: float | None = None
        self._rest_s, self._rests_until = HOLD_S, -math.inf

    def observe(self, work: Sequence[Work], now: float) -> str | None:
        """Take in what all workers have done; return why samples should be shared out anew, or None."""
        self._looks.append((now, work))
        # the oldest look stays until the next one is a whole window back: a mean over less would be of less work
        while len(self._looks) > 2 and now - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()
        found = self._off()
        if found is None:
            self._off_since = None
            return None
        self._off_since = now if self._off_since is None else self._off_since
        return found if now - self._off_since >= HOLD_S and now >= self._rests_until else None

    def rebalance(self, work: Sequence[Work], now: float, *, because_off: bool) -> Mapping[str, float]:
        """Set new weights for the nodes of these workers; samples are shared out by them from now on."""
        rates = self._rates()
        known = [rates[w.worker] for w in work if w.worker in rates]
        # a worker that was not measured yet is taken to be like the others, so that a new node gets samples at all
        usual = sum(known) / len(known) if known else 1.0
        weights = _by_node(work, {w.worker: rates.get(w.worker, usual) for w in work})
        self.weights, self._off_since = weights, None
        # Samples that move cost a crossing of the network. Where speeds keep changing, following them pays less and
        # less; a change of the nodes themselves has to be followed at once and does not count.
        if because_off:
            self._rests_until, self._rest_s = now + self._rest_s, min(2 * self._rest_s, LONGEST_REST_S)
        return weights

    def _off(self) -> str | None:
        """Say how far the shares are off; None if they are not, or if that is not known."""
        rates, (_, work) = self._rates(), self._looks[-1]
        # a node came or went, or a worker is too new: shares are about to be set anew anyway, or nothing is known
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
        """Return the samples/s of each worker that is measured, while it prepares."""
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
    """Return the samples/s of each node's workers together."""
    speeds = dict.fromkeys((w.node for w in work), 0.0)
    for w in work:
        speeds[w.node] += rates[w.worker]
    return speeds
