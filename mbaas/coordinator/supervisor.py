"""Who makes the blocks: prep workers and cache nodes, hired, watched, replaced, and adopted by a new coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from mbaas.allocation.weights import SpeedWeights, Work
from mbaas.coordinator import peer_feeds, recovery
from mbaas.coordinator.cache_pool import CachePool
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.loans import Loans
from mbaas.coordinator.worker_pool import WorkerHandle, WorkerPool
from mbaas.core import events as ev
from mbaas.core.layout import Layout, credit, lay_out
from mbaas.dataset import Dataset
from mbaas.errors import FeedFailedError
from mbaas.messages import EngineName
from mbaas.settings import FeedSettings

NODE_ANSWER_S = 5.0
"""When a worker dies and its node's cache does not answer within so long, the node counts as dead."""

HAND_OVER_S = 120.0
"""A node without workers gives its cached samples to the others; what they did not fetch in so long is let go."""

LOOKED_AT = 1000
"""The mean length of raw samples is estimated from so many."""

NODES_PERIOD_S = 1.0
"""Period at which Ray is asked which nodes are alive, where a feed has workers on more than one."""


class Production:
    """Workers and cache nodes of one feed.

    Args:
        settings: of the feed.
        pipeline: what to do to samples.
        engine: "cpu" or "dali".
        books: where decisions are noted.
        send: takes events to the staging core.
        spawn: runs a coroutine in the background.

    Attributes:
        workforce: the prep workers.
        territory: the cache nodes; there from `open` or `adopt` on.
        layout: the same.
        dataset: the same.
        ended: whether nobody is replaced any more.
        wanted: workers that should be up and stay, borrowed ones included.
        scales: by which samples are shared out between the nodes.
        loans: workers that work for another feed than the one that hired them.
        leaving: worker that finishes what it has in hand -> the feed for which it will work; None: it will end.
    """

    cache_pool: CachePool
    layout: Layout
    dataset: Dataset

    def __init__(
        self,
        settings: FeedSettings,
        pipeline: Any,
        engine: EngineName,
        *,
        counters: Counters,
        send: Callable[[ev.Event], Any],
        spawn: Callable[[Any], None],
    ) -> None:
        self._settings, self._counters, self._send, self._spawn = settings, counters, send, spawn
        self.worker_pool = WorkerPool(settings, pipeline, engine)
        self.ended = False
        self.wanted = settings.prep_workers
        self.scales = SpeedWeights()
        self.loans = Loans(settings.name, self, counters)
        self.leaving: dict[str, str | None] = {}
        self._awaited = 0

    # ---- beginning and end ----

    async def open(self, dataset: Dataset) -> None:
        """Hire all workers, learn what a prepared sample is, and settle.

        Raises:
            ResourceError: workers did not get their CPUs.
            BadSampleError: no sample can be prepared.
            ConfigError: the staging budget is too small.
        """
        self._take_in(dataset)
        hired = await self.worker_pool.hire_all()
        probe = await self.worker_pool.probe(hired[0])
        self.layout = lay_out(
            self._settings,
            probe,
            (worker.node for worker in hired),
            num_samples=len(dataset),
            mean_raw_bytes=float(np.mean(dataset.lengths(np.arange(min(LOOKED_AT, len(dataset)))))),
        )
        recovery.remember(self._settings.name, self.layout)
        self.cache_pool = CachePool(self._settings, dataset, self.worker_pool.dataset_ref, self.layout)
        await asyncio.gather(*(self.worker_pool.configure(w, self.layout.order, probe.spec) for w in hired))
        await self._move_homes()

    async def adopt(self) -> None:
        """Go on with the workers and cache nodes that an earlier coordinator left, and hire those that are missing.

        Raises:
            FeedFailedError: it left nothing to go on with.
        """
        layout = await asyncio.get_running_loop().run_in_executor(None, recovery.recall, self._settings.name)
        found = await CachePool.survivors(self._settings.name)
        if layout is None or not found:
            raise FeedFailedError(
                f"feed {self._settings.name!r} cannot go on: its coordinator died, and no cache node is left that "
                "knows its dataset; serve it again"
            )
        dataset = await next(iter(found.values())).dataset.remote()
        self._take_in(dataset)
        self.layout = layout
        self.cache_pool = CachePool(self._settings, dataset, self.worker_pool.dataset_ref, layout)
        self.cache_pool.caches.update(found)
        workers, self.loans.lent = await self.worker_pool.survivors()
        await asyncio.gather(*(self.worker_pool.configure(w, layout.order, layout.spec) for w in workers))
        await self._move_homes()
        lent = sum(map(len, self.loans.lent.values()))
        self.wanted = max(len(workers), self._settings.prep_workers - lent)
        for slot in range(len(workers), self.wanted):
            self._spawn(self._hire(slot))
        self._counters.note(
            f"the coordinator was restarted; {len(workers)} prep workers and {len(found)} cache nodes go on"
        )

    def begin(self) -> None:
        """Put all workers to work, once the staging core is there, and watch over the nodes."""
        for worker in self.worker_pool.workers.values():
            self._send(ev.WorkerUp(worker.name, credit(self._settings.staging.lanes), worker.node))
        self._spawn(self._watch_nodes())

    def _take_in(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.worker_pool.dataset_ref = ray.put(dataset)

    async def end(self) -> None:
        """Workers and caches are gone when this returns, and borrowed workers at home."""
        self.ended = True
        await self.loans.end()
        self.worker_pool.dismiss_all()
        if hasattr(self, "cache_pool"):
            self.cache_pool.close_all()
        recovery.forget(self._settings.name)

    # ---- who works, and who does not any more ----

    def worker(self, name: str) -> WorkerHandle | None:
        """A worker that is up, or None."""
        return self.worker_pool.workers.get(name)

    async def lost(self, name: str, reason: str) -> None:
        """A worker is gone, or its part ended in an error that is not the data's: replace it."""
        worker = self.worker_pool.workers.get(name)
        if worker is None or self.ended:
            return
        self._end(worker)
        if await self.cache_pool.answers(worker.node, NODE_ANSWER_S):
            self._send(ev.WorkerDown(name, reason))
        else:
            await self._node_down(worker.node, f"{name} died and its cache does not answer")
        await self._replace(worker)

    def retire(self, name: str) -> None:
        """A worker is stuck: end it, and hire another."""
        worker = self.worker_pool.workers.get(name)
        if worker is not None:
            self._end(worker)
            self._spawn(self._replace(worker))

    def _end(self, worker: WorkerHandle) -> None:
        """A worker is gone, or is to be; one that was about to work elsewhere is missed here, a borrowed one is not."""
        leaves, target = worker.name in self.leaving, self.leaving.pop(worker.name, None)
        if worker.owner is None:
            self.wanted += target is not None
        else:
            self.wanted -= not leaves
        self.worker_pool.dismiss(worker.name)

    async def _replace(self, worker: WorkerHandle) -> None:
        """Hire a worker in the place of one that is gone, if it is still wanted; a borrowed one its owner replaces."""
        if worker.owner is None:
            await self._hire(int(worker.name.removeprefix("prep-").split(".")[0]))
        else:
            await peer_feeds.report_lost(worker.owner, worker.actor)

    async def _hire(self, slot: int) -> None:
        self._awaited += 1
        try:
            hired = await self.worker_pool.hire_at_last(slot, give_up=self._is_enough)
        finally:
            self._awaited -= 1
        if hired is not None:
            await self.employ(hired)

    def _is_enough(self) -> bool:
        return self.ended or self.staying + self._awaited > self.wanted

    # ---- more and fewer ----

    @property
    def staying(self) -> int:
        """Workers that are up and not leaving."""
        return len(self.worker_pool.workers.keys() - self.leaving)

    @property
    def awaited(self) -> int:
        """Workers that were asked for and are not up yet."""
        return self._awaited

    def scale(self, wanted: int) -> None:
        """Have so many workers from now on: ask the cluster for them, or let some finish and go."""
        self.wanted = wanted
        for slot in range(self.staying + self._awaited, wanted):
            self._spawn(self._hire(slot))
        for worker in self.dispensable()[: max(0, self.staying - wanted)]:  # those awaited give up by themselves
            self._let_go(worker, worker.owner)

    def hire_more(self, workers: int) -> None:
        """Have so many workers more."""
        self.scale(self.wanted + workers)

    def dispensable(self) -> list[WorkerHandle]:
        """Workers that stay so far, those first whose node has the fewest, so that nodes become free."""
        per_node = self.worker_pool.per_node()
        staying = [worker for name, worker in self.worker_pool.workers.items() if name not in self.leaving]
        return sorted(staying, key=lambda worker: (per_node[worker.node], worker.node))

    def lend(self, worker: WorkerHandle, target: str) -> None:
        """Have one worker less, which will work for another feed."""
        self.wanted -= 1
        self._let_go(worker, target)

    def _let_go(self, worker: WorkerHandle, target: str | None) -> None:
        """Give a worker nothing more to do; when it has finished, it works for the feed ``target``, or ends."""
        self.leaving[worker.name] = target
        self._send(ev.WorkerLeaves(worker.name))

    def dismiss(self, name: str) -> None:
        """A worker that was to leave has finished."""
        target = self.leaving.pop(name)
        worker = self.worker_pool.release(name)
        assert worker is not None
        if target is None:
            ray.kill(worker.actor)
        else:
            self._spawn(self.loans.hand_over(worker, target))
        if worker.node not in self.worker_pool.per_node():
            self._spawn(self._vacate(worker.node))

    async def _vacate(self, node: str) -> None:
        """The last worker of a node is gone: its samples move to the others, then it is free to go."""
        await self._move_homes()
        await self.cache_pool.move_out(node, HAND_OVER_S)
        if node not in self.worker_pool.per_node():  # else somebody was hired there again
            self.cache_pool.close(node)
            self._counters.note(f"node {node[:8]} is not needed any more")

    async def employ(self, hired: WorkerHandle) -> None:
        """Put a worker that is up to work."""
        await self.worker_pool.configure(hired, self.layout.order, self.layout.spec)
        if self.cache_pool.is_placed_on(self.worker_pool.per_node()):
            await self.cache_pool.tell(hired.actor)
        else:
            await self._move_homes()
        self._send(ev.WorkerUp(hired.name, credit(self._settings.staging.lanes), hired.node))

    # ---- nodes ----

    async def _move_homes(self, *, because_off: bool = False) -> None:
        """Give the samples homes on the nodes that have workers now; ``because_off``: see `SpeedWeights.rebalance`."""
        weights = self.scales.rebalance(self._work(), time.monotonic(), because_off=because_off)
        if weights:
            await self.cache_pool.move_homes(weights, [worker.actor for worker in self.worker_pool.workers.values()])
            self._counters.note(
                f"samples have homes on {len(weights)} node{'s' * (len(weights) > 1)}: {self._shares()}"
            )

    async def weigh(self) -> None:
        """Move samples if nodes prepare at other speeds than those by which samples were shared out."""
        reason = self.scales.observe(self._work(), time.monotonic())
        if reason is not None and not self.ended:
            self._counters.note(reason)
            await self._move_homes(because_off=True)

    def _work(self) -> list[Work]:
        """What the workers have done."""
        counters = self._counters
        return [
            Work(worker.name, worker.node, counters.worker_samples[worker.name], counters.worker_prep_s[worker.name])
            for worker in self.worker_pool.workers.values()
        ]

    def _shares(self) -> str:
        """How the workers and the samples are spread, for the log."""
        counts, weights = self.worker_pool.per_node(), self.scales.weights
        return ", ".join(
            f"{node[:8]} ({counts[node]} prep worker{'s' * (counts[node] > 1)}, {weight / sum(weights.values()):.0%})"
            for node, weight in sorted(weights.items())
        )

    async def _watch_nodes(self) -> None:
        """Notice nodes that Ray has given up."""
        here = ray.get_runtime_context().get_node_id()
        while not self.ended:
            await asyncio.sleep(NODES_PERIOD_S)
            if set(self.cache_pool.caches) <= {here}:
                continue
            nodes = await asyncio.get_running_loop().run_in_executor(None, ray.nodes)
            alive = {node["NodeID"] for node in nodes if node["Alive"]}
            for node in set(self.cache_pool.caches) - alive:
                await self._node_down(node, "Ray says that it is dead")

    async def _node_down(self, node: str, reason: str) -> None:
        """A node is gone: make again what lay there, hire other workers, give its samples new homes."""
        if node not in self.cache_pool.caches or self.ended:
            return
        self.cache_pool.close(node)
        workers = [worker for worker in self.worker_pool.workers.values() if worker.node == node]
        for worker in workers:
            self._end(worker)
        self._send(ev.NodeDown(node, reason))
        for worker in workers:
            self._spawn(self._replace(worker))
        await self._move_homes()
