"""Moves threads of the nodes between fetch and prep while the feed runs, after what is measured.

The thin shell around `mbaas.allocation.tuning.ThreadTuner`, one for each node. It also tells the cache nodes how fast
prep could take raw samples, which determines the depth of their read-ahead, and notes what they decide.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from mbaas.allocation.threads import TierBytes
from mbaas.allocation.throughput import ThroughputCurve
from mbaas.allocation.tuning import NodeLoad, ThreadTuner, Tuned
from mbaas.cache.disk.tier import DISK_THREADS
from mbaas.cache.stats import Flow
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.supervision import Supervision
from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.settings import FeedSettings, Threads

NODES_A_LOOK = 16
"""Nodes that are asked at a time; if there are more, each is asked less often, so that a look costs no more."""

LONG = 5
"""Windows over which figures are taken that do not depend on threads. More than one, because samples are counted when a
whole block is made: over one window a block more or less would matter.
"""


class NodeSums(Struct, frozen=True):
    """Running sums of one node at one moment.

    Attributes:
        now: seconds.
        flow: of its cache.
        samples, prep_s: worker -> what it prepared, and the seconds it took.
        prepared: samples of all nodes together.
    """

    now: float
    flow: Flow
    samples: Mapping[str, float]
    prep_s: Mapping[str, float]
    prepared: float


class Span(Struct, frozen=True):
    """Sums of one node, at three moments.

    Attributes:
        before: some time ago; enough samples were made since then that a few blocks more or less do not matter.
        first: the window of the measurements begins.
        last: now; the same workers have worked since ``before``, with the same threads since ``first``.
    """

    before: NodeSums
    first: NodeSums
    last: NodeSums


class NodeLooks:
    """What was seen of one node, and its tuner.

    Attributes:
        threads: worker -> engine threads that it was told.
        told: sentences of its cache that were noted.
        incarnation: of its cache.
        share: of all samples that are prepared here; 0 while it is not known.
        tuner: what decides.
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
        """Add the newest sums, and return the span that they end; None while it is too short."""
        # Sums of a new worker or cache begin at 0: differences across such a change would be nonsense.
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
    """Append sums, and drop those that lie further back than ``within_s`` needs."""
    sums.append(newest)
    while len(sums) > 2 and newest.now - sums[1].now >= within_s:
        sums.popleft()


class ThreadTuning:
    """The threads of one feed's nodes.

    Args:
        settings: the feed's options.
        supervision: its workers and cache nodes.
        counters: where changes are noted.
    """

    def __init__(self, settings: FeedSettings, *, supervision: Supervision, counters: Counters) -> None:
        self._settings, self._supervision, self._counters = settings, supervision, counters
        self._nodes: dict[str, NodeLooks] = {}
        self._turn = itertools.count()
        self._looks = False

    async def look(self, demand_per_s: float) -> None:
        """Ask nodes what they did, and change their threads if it is due.

        Args:
            demand_per_s: samples/s that prep would have to make for no trial to wait; 0: not known.
        """
        if self._looks:
            return  # nodes that answer late are not asked again meanwhile
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
        """Give workers that are new here the threads of the settings, whatever another coordinator told them."""
        looks.threads = {w.name: looks.threads[w.name] for w in workers if w.name in looks.threads}
        for worker in workers:
            if worker.name not in looks.threads:
                looks.threads[worker.name] = self._settings.threads.prep
                if self._settings.threads.prep > 1:
                    await self._supervision.workers.set_threads(worker, self._settings.threads.prep)

    def _note(self, node: str, looks: NodeLooks, flow: Flow) -> None:
        if flow.incarnation != looks.incarnation:
            looks.incarnation, looks.told = flow.incarnation, 0
        new = min(flow.told - looks.told, len(flow.log))
        for sentence in flow.log[len(flow.log) - new :]:
            self._counters.note(f"node {node[:8]}: {sentence}")
        looks.told = flow.told

    def _load(self, looks: NodeLooks, span: Span, demand_per_s: float) -> NodeLoad | None:
        settings, before, first, last = self._settings, span.before, span.first, span.last
        here = sum(last.samples.values()) - sum(before.samples.values())
        everywhere = last.prepared - before.prepared
        if not here or not everywhere:
            return None
        took_s = {name: last.prep_s[name] - first.prep_s[name] for name in last.samples}
        rates = [(last.samples[name] - first.samples[name]) / s for name, s in took_s.items() if s > 0]
        read = last.flow.storage.since(first.flow.storage)
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
            sample_bytes=last.flow.storage.since(before.flow.storage).nbytes / here,
            storage_bytes=read.nbytes,
            storage_s=read.busy_s,
            read_s=read.thread_s,
            others=_others(before.flow, last.flow, batch_samples / here),
        )

    async def _change(
        self, node: str, looks: NodeLooks, workers: list[WorkerHandle], tuned: Tuned, fetch_threads: int
    ) -> None:
        """Change the threads of a node: first those that give some, so that there are never too many at a time."""
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
    """Return the bytes of a minibatch that came from disk and from other nodes, with the rates of these places.

    ``share`` is the part of a minibatch in what was prepared meanwhile.
    """
    tiers = (
        (last.disk.since(first.disk), (last.speeds.disk or 0.0) * DISK_THREADS),
        (last.remote.since(first.remote), last.speeds.remote or 0.0),
    )
    return tuple(TierBytes(use.nbytes * share, ThroughputCurve.flat(rate)) for use, rate in tiers if rate)
