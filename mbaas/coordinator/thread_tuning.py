"""Moves threads of each node between fetch and prep while the feed runs, based on measurements.

A thin shell around one `mbaas.model.threads.ThreadTuner` per node. It also sends each cache node the rate at which
prep could take raw samples, which sets the depth of read-ahead, and logs the cache node's decisions.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from mbaas.cache.disk.tier import DISK_THREADS
from mbaas.cache.stats import Flow
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.supervision import Supervision
from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.model.curves import ThroughputCurve
from mbaas.model.threads import NodeLoad, ThreadTuner, TierBytes, Tuned
from mbaas.settings import FeedSettings, Threads

NODES_A_LOOK = 16
"""Nodes polled per call of `look`. With more nodes each is polled less often, so that a call costs no more."""

LONG = 5
"""Windows for figures that do not depend on threads.

Samples are counted by whole blocks, so over one window a block more or less would matter.
"""


class NodeSums(Struct, frozen=True):
    """Cumulative counters of one node at one moment.

    Attributes:
        now: time in seconds.
        flow: measurements of its cache.
        samples, prep_s: worker -> samples that it prepared, and the seconds taken.
        prepared: samples prepared by all nodes together.
    """

    now: float
    flow: Flow
    samples: Mapping[str, float]
    prep_s: Mapping[str, float]
    prepared: float


class Span(Struct, frozen=True):
    """Counters of one node at three moments.

    Attributes:
        before: a time long enough ago that a few blocks more or less do not matter.
        first: start of the measurement window.
        last: now. The workers are the same since ``before``, and their threads since ``first``.
    """

    before: NodeSums
    first: NodeSums
    last: NodeSums


class NodeLooks:
    """Measurements of one node, and its tuner.

    Attributes:
        threads: worker -> engine threads assigned to it.
        told: number of its cache's log sentences recorded so far.
        incarnation: incarnation of its cache.
        share: fraction of all samples that are prepared here; 0 while unknown.
    """

    def __init__(self, settings: Threads) -> None:
        self.threads: dict[str, int] = {}
        self.told = self.incarnation = 0
        self.share = 0.0
        self.tuner = ThreadTuner(settings)
        self._window_s = settings.window_s
        self._same_work: deque[NodeSums] = deque()  # with the same workers and cache
        self._same_threads: deque[NodeSums] = deque()

    def forget_rates(self) -> None:
        """Forget rates that were measured with other threads."""
        self._same_threads.clear()

    def add(self, sums: NodeSums) -> Span | None:
        """Add the newest counters. Return the span that ends with them, or None while it is too short."""
        # Counters of a new worker or cache start at 0, so differences across such a change are meaningless.
        if self._same_work and _differ(self._same_work[-1], sums):
            self._same_work.clear()
            self._same_threads.clear()
        if self._same_threads and self._same_threads[-1].flow.threads != sums.flow.threads:
            self._same_threads.clear()
        _keep(self._same_work, sums, LONG * self._window_s)
        _keep(self._same_threads, sums, self._window_s)
        first = self._same_threads[0]
        return Span(self._same_work[0], first, sums) if sums.now - first.now >= self._window_s else None


def _differ(before: NodeSums, now: NodeSums) -> bool:
    return before.flow.incarnation != now.flow.incarnation or before.samples.keys() != now.samples.keys()


def _keep(sums: deque[NodeSums], newest: NodeSums, within_s: float) -> None:
    sums.append(newest)
    while len(sums) > 2 and newest.now - sums[1].now >= within_s:
        sums.popleft()


class ThreadTuning:
    """The threads of one feed's nodes."""

    def __init__(self, settings: FeedSettings, *, supervision: Supervision, counters: Counters) -> None:
        self._settings, self._supervision, self._counters = settings, supervision, counters
        self._nodes: dict[str, NodeLooks] = {}
        self._turn = itertools.count()
        self._looks = False

    async def look(self, demand_per_s: float) -> None:
        """Poll nodes, and change their threads if due.

        ``demand_per_s`` is the rate in samples/s that prep must reach so that no trial waits; 0 if unknown.
        """
        if self._looks:
            return  # do not poll again while late nodes answer
        self._looks = True
        try:
            nodes = sorted(self._supervision.workers.per_node())
            turns = range(0, len(nodes), NODES_A_LOOK)
            first = turns[next(self._turn) % len(turns)] if turns else 0
            await asyncio.gather(*(self._look_at(node, demand_per_s) for node in nodes[first : first + NODES_A_LOOK]))
            self._nodes = {node: looks for node, looks in self._nodes.items() if node in nodes}
        finally:
            self._looks = False

    async def _look_at(self, node: str, demand_per_s: float) -> None:
        looks = self._nodes.setdefault(node, NodeLooks(self._settings.threads))
        workers = [worker for worker in self._supervision.workers.workers.values() if worker.node == node]
        await self._acquaint(looks, workers)
        counters = self._counters
        samples = {worker.name: float(counters.worker_samples[worker.name]) for worker in workers}
        prep_s = {worker.name: float(counters.worker_prep_s[worker.name]) for worker in workers}
        capacity_per_s = sum(samples[name] / prep_s[name] for name in samples if prep_s[name])
        flow = await self._supervision.caches.flow(node, min(capacity_per_s, demand_per_s * looks.share))
        if flow is None:
            return
        self._note(node, looks, flow)
        counters.caches_cpu_s.enter((node, flow.incarnation), flow.cpu_s)
        span = looks.add(NodeSums(time.monotonic(), flow, samples, prep_s, float(counters.samples)))
        load = self._load(looks, span, demand_per_s) if span is not None else None
        if load is None or not self._settings.threads.tuned:
            return
        tuned = looks.tuner.observe(load, time.monotonic())
        if tuned is not None:
            self._counters.note(f"node {node[:8]}: {tuned.reason}")
            await self._change(node, looks, workers, tuned, flow.threads)

    async def _acquaint(self, looks: NodeLooks, workers: list[WorkerHandle]) -> None:
        looks.threads = {w.name: looks.threads[w.name] for w in workers if w.name in looks.threads}
        for worker in workers:
            if worker.name not in looks.threads:
                # The configured number, whatever another coordinator set before.
                looks.threads[worker.name] = self._settings.threads.prep
                if self._settings.threads.prep > 1:
                    await self._supervision.workers.set_threads(worker, self._settings.threads.prep)

    def _note(self, node: str, looks: NodeLooks, flow: Flow) -> None:
        if flow.incarnation != looks.incarnation:
            looks.incarnation, looks.told = flow.incarnation, 0
        new = min(flow.logged - looks.told, len(flow.log))
        for sentence in flow.log[len(flow.log) - new :]:
            self._counters.note(f"node {node[:8]}: {sentence}")
        looks.told = flow.logged

    def _load(self, looks: NodeLooks, span: Span, demand_per_s: float) -> NodeLoad | None:
        settings, before, first, last = self._settings, span.before, span.first, span.last
        here = sum(last.samples.values()) - sum(before.samples.values())
        everywhere = last.prepared - before.prepared
        if not here or not everywhere:
            return None
        took_s = {name: last.prep_s[name] - first.prep_s[name] for name in last.samples}
        rates = [(last.samples[name] - first.samples[name]) / s for name, s in took_s.items() if s > 0]
        read = last.flow.storage - first.flow.storage
        looks.share = here / everywhere
        batch_samples, workers = settings.batch_size * looks.share, len(last.samples)
        return NodeLoad(
            workers=workers,
            prep_threads=sum(looks.threads.values()),
            fetch_threads=last.flow.threads,
            most_prep=workers * settings.threads.prep,
            most=workers * settings.threads.prep + settings.threads.fetch,
            demand_per_s=demand_per_s * looks.share,
            batch_samples=batch_samples,
            prep_per_s=sum(rates) / len(rates) * workers if rates else 0.0,
            sample_bytes=(last.flow.storage - before.flow.storage).nbytes / here,
            storage_bytes=read.nbytes,
            storage_s=read.busy_s,
            read_s=read.thread_s,
            others=_others(before.flow, last.flow, batch_samples / here),
        )

    async def _change(
        self, node: str, looks: NodeLooks, workers: list[WorkerHandle], tuned: Tuned, fetch_threads: int
    ) -> None:
        # First reduce the side that gives threads, so that there are never too many.
        if tuned.fetch_threads < fetch_threads:
            await self._supervision.caches.set_threads(node, tuned.fetch_threads)
        base, more = divmod(tuned.prep_threads, len(workers))
        wanted = {worker.name: base + (index < more) for index, worker in enumerate(workers)}
        for worker in workers:
            if wanted[worker.name] != looks.threads[worker.name]:
                await self._supervision.workers.set_threads(worker, wanted[worker.name])
        looks.threads = wanted
        if tuned.fetch_threads > fetch_threads:
            await self._supervision.caches.set_threads(node, tuned.fetch_threads)
        looks.forget_rates()


def _others(first: Flow, last: Flow, share: float) -> tuple[TierBytes, ...]:
    """Return a minibatch's bytes from disk and from other nodes, with the rates of both sources.

    ``share`` is the ratio of a minibatch to the samples prepared meanwhile.
    """
    tiers = (
        (last.disk - first.disk, (last.speeds.disk or 0.0) * DISK_THREADS),
        (last.remote - first.remote, last.speeds.remote or 0.0),
    )
    return tuple(TierBytes(use.nbytes * share, ThroughputCurve.flat(rate)) for use, rate in tiers if rate)
