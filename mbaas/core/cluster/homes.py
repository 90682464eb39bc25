"""Home nodes of samples: which nodes, with which weights, and when to change them.

A sample is fetched and prepared on its home node. Homes are on the nodes with both a worker and a cache, in proportion
to the speed of their workers. Moving a home sends a sample over the network. A change that would soon be followed by
another is therefore delayed: while caches start, and while a missing worker may come back on its node.

A node's share of the samples should match its part of the total prep rate. Otherwise the slowest home sets the pace,
and samples that idle workers take over from it cross the network in every epoch. A share that is moved crosses once.

A node whose object store cannot hold the staging budget gets no homes while another node with a worker can. Prepared
parts are stored on their home node, where Ray would otherwise spill them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence

from msgspec import Struct

from mbaas.base import units
from mbaas.core.cluster.supervised import (
    CACHE_START_S,
    RETRY_S,
    CachePhase,
    SupervisedCache,
    SupervisedWorker,
    WorkerPhase,
)

CACHE_PATIENCE_S = 5.0
"""A placement does not wait longer than this for a starting cache; the node is added when its cache is up."""

MOVE_S = 150.0
"""Longest time to compute and distribute a new placement; the shell that does it gives up earlier."""

KEEP_HOME_S = 60.0
"""Time that a node without workers keeps its homes while a worker is starting. If the worker comes up there again, the
move would have been wasted.
"""

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


class HomeWeights(Struct, frozen=True):
    """Nodes with homes and their weights: the inputs of a `mbaas.samples.placement.Placement`.

    Attributes:
        workers: workers that get it together with the caches.
        reason: log line if samples move because of speeds; otherwise "".
    """

    version: int
    weights: Mapping[str, float] = {}
    workers: frozenset[str] = frozenset()
    reason: str = ""


class Homes:
    """See the module docstring.

    Args:
        workers, caches: tables of the supervisor, read-only here.
        staging_bytes: largest staged size of the feed; each home node should have that much room.
        draining: nodes that will be gone soon.

    Attributes:
        current: placement in use; version 0 before the first.
        move: placement being computed and distributed, at most one; otherwise None.
        version: version of the newest requested placement.
    """

    def __init__(
        self,
        workers: Mapping[str, SupervisedWorker],
        caches: Mapping[str, SupervisedCache],
        staging_bytes: int = 0,
        draining: Container[str] = (),
    ) -> None:
        self._workers, self._caches, self._staging_bytes, self._draining = workers, caches, staging_bytes, draining
        self.current = HomeWeights(0)
        self.move: HomeWeights | None = None
        self.version = 0
        self._speeds = SpeedWeights()
        self._work: Mapping[str, tuple[float, float]] = {}
        self._imbalance: str | None = None
        self._move_deadline = self._move_after = -math.inf
        self._without_workers: dict[str, float] = {}  # node with homes -> time when it lost its last worker

    # ---- moves ----

    def next_move(self, now: float) -> HomeWeights | None:
        """Return the next placement to compute and distribute, or None."""
        if self.move is not None or now < self._move_after:
            return None
        nodes = self._wanted(now)
        as_is = nodes == self.current.weights.keys() and self._imbalance is None
        if not nodes or as_is or self._awaits_caches(now):
            return None
        weights = dict(self._speeds.rebalance(self._work_on(nodes), now, because_off=self._imbalance is not None))
        for node in nodes - weights.keys():  # a worker is expected there
            weights[node] = self.current.weights[node]
        # Failed moves also use up a version: a cache that received one must not confuse it with the next.
        self.version += 1
        stay = frozenset(worker.name for worker in self._workers.values() if worker.stays)
        self.move, self._move_deadline = HomeWeights(self.version, weights, stay, self._imbalance or ""), now + MOVE_S
        self._imbalance = None
        return self.move

    def is_moving(self, version: int) -> bool:
        """Return whether this version is being distributed."""
        return self.move is not None and self.move.version == version

    def is_overdue(self, now: float) -> bool:
        """Return whether the current move takes too long."""
        return self.move is not None and now >= self._move_deadline

    def use(self, version: int) -> bool:
        """Use the distributed placement; return False if it was given up before."""
        if self.move is None or self.move.version != version:
            return False
        self.current, self.move = self.move, None
        return True

    def give_up(self, now: float) -> None:
        """Discard the failed move; another may follow after a pause."""
        self.move, self._move_after = None, now + RETRY_S

    # ---- nodes ----

    @property
    def used(self) -> set[str]:
        """Nodes that have homes, or are about to get them."""
        return {*self.current.weights, *(self.move.weights if self.move is not None else ())}

    def _wanted(self, now: float) -> set[str]:
        # Empty while no node has a worker and a cache: homes then stay where they are.
        with_cache = {cache.node for cache in self._caches.values() if cache.answers}
        with_worker = {worker.node for worker in self._workers.values() if worker.stays} & with_cache
        if not with_worker:
            return set()
        workerless = self.current.weights.keys() & with_cache - with_worker
        self._without_workers = {node: self._without_workers.get(node, now) for node in workerless}
        is_awaited = any(worker.phase is WorkerPhase.STARTING for worker in self._workers.values())
        kept = {node for node, since in self._without_workers.items() if is_awaited and now - since < KEEP_HOME_S}
        # Prefer a node that may spill, or that is draining, to a feed that stalls.
        nodes = with_worker | kept
        for suits in (self._will_stay, self.has_room):
            nodes = {node for node in nodes if suits(node)} if any(map(suits, with_worker & nodes)) else nodes
        return nodes

    def _will_stay(self, node: str) -> bool:
        return node not in self._draining

    def has_room(self, node: str) -> bool:
        """Return whether all staged blocks fit the node's object store; True if its size is unknown."""
        cache = self._caches.get(node)
        return cache is None or cache.room_bytes >= self._staging_bytes

    def lacks_homes(self) -> bool:
        """Return whether a node with a worker, a cache and room has no homes."""
        ready = {worker.node for worker in self._workers.values() if worker.stays}
        ready = {node for node in ready if node in self._caches and self._caches[node].answers}
        return not {node for node in ready if self.has_room(node)} <= self.current.weights.keys()

    def _awaits_caches(self, now: float) -> bool:
        # Waiting for starting caches combines several moves into one.
        patience_s = CACHE_PATIENCE_S if self.current.weights else CACHE_START_S
        starting = [cache for cache in self._caches.values() if cache.phase is CachePhase.STARTING]
        return any(now - cache.since < patience_s for cache in starting)

    # ---- speeds ----

    def measured(self, work: Mapping[str, tuple[float, float]], now: float) -> None:
        """Update the work of each worker: worker -> (samples, seconds)."""
        self._work = work
        self._imbalance = self._speeds.observe(self._work_on(self.current.weights), now) or self._imbalance

    def _work_on(self, nodes: Iterable[str]) -> list[Work]:
        return [
            Work(worker.name, worker.node, *self._work.get(worker.name, (0.0, 0.0)))
            for worker in self._workers.values()
            if worker.stays and worker.node in nodes
        ]


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
