"""Polls the cache nodes of a feed for log lines, and sends each the rate at which its node's prep could take samples.

A cache node computes the depth of its read-ahead from this rate (`mbaas.cache.tuner`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque

from msgspec import Struct

from mbaas.cache.stats import Flow
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.supervision import Supervision

NODES_PER_POLL = 16
"""Nodes polled per call of `poll`. With more nodes each is polled less often, so that a call costs no more."""

SHARE_S = 20.0
"""Time over which the share of a node is measured. Samples are counted in whole blocks, so less would be too coarse."""


class _Prepared(Struct, frozen=True):
    at_s: float
    here: dict[str, int]  # worker -> samples that it prepared
    everywhere: int


class _NodePolls:
    """Recent polls of one node.

    Attributes:
        noted: number of its cache's log sentences noted so far.
        incarnation: incarnation of its cache.
    """

    def __init__(self) -> None:
        self.noted = self.incarnation = 0
        self._history: deque[_Prepared] = deque()

    def share(self, now: _Prepared) -> float:
        """Return the fraction of all samples that the node's workers prepared recently; 0 while unknown."""
        self._history.append(now)
        while len(self._history) > 2 and now.at_s - self._history[1].at_s >= SHARE_S:
            self._history.popleft()
        before = self._history[0]
        here = sum(samples - before.here.get(worker, 0) for worker, samples in now.here.items())
        everywhere = now.everywhere - before.everywhere
        return here / everywhere if everywhere else 0.0


class CacheMonitor:
    """Polls the cache nodes of one feed."""

    def __init__(self, *, supervision: Supervision, counters: Counters) -> None:
        self._supervision, self._counters = supervision, counters
        self._nodes: dict[str, _NodePolls] = {}
        self._turn = itertools.count()
        self._is_polling = False

    async def poll(self, demand_per_s: float) -> None:
        """Poll nodes.

        ``demand_per_s`` is the rate in samples/s that prep must reach so that no trial waits; 0 if unknown.
        """
        if self._is_polling:
            return  # do not poll again while late nodes answer
        self._is_polling = True
        try:
            nodes = sorted(self._supervision.workers.per_node())
            turns = range(0, len(nodes), NODES_PER_POLL)
            first = turns[next(self._turn) % len(turns)] if turns else 0
            await asyncio.gather(*(self._poll(node, demand_per_s) for node in nodes[first : first + NODES_PER_POLL]))
            self._nodes = {node: polls for node, polls in self._nodes.items() if node in nodes}
        finally:
            self._is_polling = False

    async def _poll(self, node: str, demand_per_s: float) -> None:
        polls, counters = self._nodes.setdefault(node, _NodePolls()), self._counters
        workers = [worker.name for worker in self._supervision.workers.workers.values() if worker.node == node]
        here = {worker: counters.worker_samples[worker] for worker in workers}
        took_s = {worker: counters.worker_prep_s[worker] for worker in workers}
        capacity_per_s = sum(here[worker] / took_s[worker] for worker in workers if took_s[worker])
        share = polls.share(_Prepared(time.monotonic(), here, counters.samples))
        noted = polls.incarnation, polls.noted
        flow = await self._supervision.caches.flow(node, min(capacity_per_s, demand_per_s * share), noted)
        if flow is not None:
            self._note(node, polls, flow)
            counters.caches_cpu_s.enter((node, flow.incarnation), flow.cpu_s)

    def _note(self, node: str, polls: _NodePolls, flow: Flow) -> None:
        if flow.incarnation != polls.incarnation:
            polls.incarnation, polls.noted = flow.incarnation, flow.noted
        new = min(flow.logged - polls.noted, len(flow.log))
        for sentence in flow.log[len(flow.log) - new :]:
            self._counters.note(f"node {node[:8]}: {sentence}")
        polls.noted = flow.logged
