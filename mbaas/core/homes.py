"""Where samples have their homes: on which machines, in proportion to which weights, and when that should change.

A sample is fetched and prepared where its home is. Homes follow the workers: they are on the machines that have both a
worker and a cache, and a machine has as large a part of them as its workers have of the speed. Moving a home costs a
crossing of the network, so changes that would soon be followed by another are put off: while caches start, and while a
worker is awaited that may come up where the last one died.

A machine whose object store has no room for the blocks that may be staged gets no homes while another one has both a
worker and the room: what is made lies where its home is, and Ray would spill it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping

from msgspec import Struct

from mbaas.allocation.weights import SpeedWeights, Work
from mbaas.core.supervised import CACHE_START_S, RETRY_S, CachePhase, SupervisedCache, SupervisedWorker, WorkerPhase

CACHE_PATIENCE_S = 5.0
"""Homes move without a machine whose cache takes longer than this to start; it is included when it is there."""

MOVE_S = 150.0
"""How long a new placement may take to be found and told; the shell that does so gives up sooner."""

KEEP_HOME_S = 60.0
"""How long a machine without workers keeps its samples while a worker is awaited. If the worker comes up there again,
moving them would have sent them over the network for nothing.
"""


class HomeWeights(Struct, frozen=True):
    """On which machines samples have their homes, with which weights: what a `mbaas.placement.Placement` is made of.

    Attributes:
        workers: that are told of it when caches are.
        reason: why samples move, if speeds are why.
    """

    version: int
    weights: Mapping[str, float] = {}
    workers: frozenset[str] = frozenset()
    reason: str = ""


class Homes:
    """See the module's docstring.

    Args:
        workers, caches: the supervisor's, which are only looked at here.
        staging_bytes: the most that may be staged of the feed, for which each machine with homes is to have room.
        draining: the supervisor's: machines that will be gone soon.

    Attributes:
        current: the one in use; its version is 0 before the first.
        move: the one that is being found and told, if any. There is one at a time.
        version: of the newest placement that was asked for.
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
        self._without_workers: dict[str, float] = {}  # machine with homes -> since when no worker is up there

    # ---- one move after the other ----

    def next_move(self, now: float) -> HomeWeights | None:
        """Return the placement that should be found and told now; None if none should."""
        if self.move is not None or now < self._move_after:
            return None
        nodes = self._wanted(now)
        as_is = nodes == self.current.weights.keys() and self._imbalance is None
        if not nodes or as_is or self._awaits_caches(now):
            return None
        weights = dict(self._speeds.rebalance(self._work_on(nodes), now, because_off=self._imbalance is not None))
        for node in nodes - weights.keys():  # a worker is awaited there
            weights[node] = self.current.weights[node]
        # Counted up also for a move that fails: a cache that heard of it must not take the next one for the same.
        self.version += 1
        stay = frozenset(worker.name for worker in self._workers.values() if worker.stays)
        self.move, self._move_deadline = HomeWeights(self.version, weights, stay, self._imbalance or ""), now + MOVE_S
        self._imbalance = None
        return self.move

    def is_moving(self, version: int) -> bool:
        """Whether this placement is the one that is awaited."""
        return self.move is not None and self.move.version == version

    def is_overdue(self, now: float) -> bool:
        """Whether a move has been awaited for too long."""
        return self.move is not None and now >= self._move_deadline

    def use(self, version: int) -> bool:
        """Use the placement that was told, and return whether it was still awaited."""
        if self.move is None or self.move.version != version:
            return False
        self.current, self.move = self.move, None
        return True

    def give_up(self, now: float) -> None:
        """Forget the move, which failed; another may follow after a pause."""
        self.move, self._move_after = None, now + RETRY_S

    # ---- which machines ----

    @property
    def used(self) -> set[str]:
        """The machines that have homes, or are about to."""
        return {*self.current.weights, *(self.move.weights if self.move is not None else ())}

    def _wanted(self, now: float) -> set[str]:
        """Find the machines that should have homes; none while no machine has a worker and a cache: homes stay then."""
        with_cache = {cache.node for cache in self._caches.values() if cache.answers}
        with_worker = {worker.node for worker in self._workers.values() if worker.stays} & with_cache
        if not with_worker:
            return set()
        workerless = self.current.weights.keys() & with_cache - with_worker
        self._without_workers = {node: self._without_workers.get(node, now) for node in workerless}
        is_awaited = any(worker.phase is WorkerPhase.STARTING for worker in self._workers.values())
        kept = {node for node, since in self._without_workers.items() if is_awaited and now - since < KEEP_HOME_S}
        # Better a machine that may spill, or will be gone soon, than a feed that stands still.
        nodes = with_worker | kept
        for suits in (self._will_stay, self.has_room):
            nodes = {node for node in nodes if suits(node)} if any(map(suits, with_worker & nodes)) else nodes
        return nodes

    def _will_stay(self, node: str) -> bool:
        return node not in self._draining

    def has_room(self, node: str) -> bool:
        """Whether all that may be staged would fit the machine's object store, as far as is known."""
        cache = self._caches.get(node)
        return cache is None or cache.room_bytes >= self._staging_bytes

    def lacks_homes(self) -> bool:
        """Whether a machine with a worker and a cache has no homes, and should have."""
        ready = {worker.node for worker in self._workers.values() if worker.stays}
        ready = {node for node in ready if node in self._caches and self._caches[node].answers}
        return not {node for node in ready if self.has_room(node)} <= self.current.weights.keys()

    def _awaits_caches(self, now: float) -> bool:
        """Whether caches are starting: waiting for them makes one move of several."""
        patience_s = CACHE_PATIENCE_S if self.current.weights else CACHE_START_S
        starting = [cache for cache in self._caches.values() if cache.phase is CachePhase.STARTING]
        return any(now - cache.since < patience_s for cache in starting)

    # ---- speeds ----

    def measured(self, work: Mapping[str, tuple[float, float]], now: float) -> None:
        """Take in what each worker has done: worker -> (samples, seconds)."""
        self._work = work
        self._imbalance = self._speeds.observe(self._work_on(self.current.weights), now) or self._imbalance

    def _work_on(self, nodes: Iterable[str]) -> list[Work]:
        return [
            Work(worker.name, worker.node, *self._work.get(worker.name, (0.0, 0.0)))
            for worker in self._workers.values()
            if worker.stays and worker.node in nodes
        ]
