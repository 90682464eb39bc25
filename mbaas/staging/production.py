"""Who makes the blocks: prep workers and cache nodes, hired, watched, replaced, and adopted by a new coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import ray

from mbaas.allocation.weights import Scales, Work
from mbaas.dataset import Dataset
from mbaas.errors import FeedFailedError
from mbaas.staging import events as ev
from mbaas.staging import keepsake, neighbours
from mbaas.staging.books import Books
from mbaas.staging.layout import Layout, credit, lay_out
from mbaas.staging.loans import Loans
from mbaas.staging.settings import FeedSettings
from mbaas.staging.territory import Territory
from mbaas.staging.workforce import Hired, Workforce

NODE_ANSWER_S = 5.0
"""When a worker dies and its node's cache does not answer within so long, the node counts as dead."""

HAND_OVER_S = 120.0
"""A node without workers gives its cached samples to the others; what they did not fetch in so long is let go."""

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

    territory: Territory
    layout: Layout
    dataset: Dataset

    def __init__(
        self,
        settings: FeedSettings,
        pipeline: Any,
        engine: str,
        *,
        books: Books,
        send: Callable[[ev.Event], Any],
        spawn: Callable[[Any], None],
    ) -> None:
        self._settings, self._books, self._send, self._spawn = settings, books, send, spawn
        self.workforce = Workforce(settings, pipeline, engine)
        self.ended = False
        self.wanted = settings.prep_workers
        self.scales = Scales()
        self.loans = Loans(settings.name, self, books)
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
        hired = await self.workforce.hire_all()
        probe = await self.workforce.probe(hired[0])
        self.layout = lay_out(self._settings, dataset, probe, (worker.node for worker in hired))
        keepsake.remember(self._settings.name, self.layout)
        self.territory = Territory(self._settings, dataset, self.workforce.dataset_ref, self.layout)
        await asyncio.gather(*(self.workforce.configure(w, self.layout.sweep, probe.spec) for w in hired))
        await self._settle()

    async def adopt(self) -> None:
        """Go on with the workers and cache nodes that an earlier coordinator left, and hire those that are missing.

        Raises:
            FeedFailedError: it left nothing to go on with.
        """
        layout = await asyncio.get_running_loop().run_in_executor(None, keepsake.recall, self._settings.name)
        found = await Territory.survivors(self._settings.name)
        if layout is None or not found:
            raise FeedFailedError(
                f"feed {self._settings.name!r} cannot go on: its coordinator died, and no cache node is left that "
                "knows its dataset; serve it again"
            )
        dataset = await next(iter(found.values())).dataset.remote()
        self._take_in(dataset)
        self.layout = layout
        self.territory = Territory(self._settings, dataset, self.workforce.dataset_ref, layout)
        self.territory.caches.update(found)
        workers, self.loans.lent = await self.workforce.survivors()
        await asyncio.gather(*(self.workforce.configure(w, layout.sweep, layout.spec) for w in workers))
        await self._settle()
        lent = sum(map(len, self.loans.lent.values()))
        self.wanted = max(len(workers), self._settings.prep_workers - lent)
        for slot in range(len(workers), self.wanted):
            self._spawn(self._hire(slot))
        self._books.note(
            f"the coordinator was restarted; {len(workers)} prep workers and {len(found)} cache nodes go on"
        )

    def begin(self) -> None:
        """Put all workers to work, once the staging core is there, and watch over the nodes."""
        for worker in self.workforce.workers.values():
            self._send(ev.WorkerUp(worker.name, credit(self._settings.lanes), worker.node))
        self._spawn(self._watch_nodes())

    def _take_in(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.workforce.dataset_ref = ray.put(dataset)

    async def end(self) -> None:
        """Workers and caches are gone when this returns, and borrowed workers at home."""
        self.ended = True
        await self.loans.end()
        self.workforce.dismiss_all()
        if hasattr(self, "territory"):
            self.territory.close_all()
        keepsake.forget(self._settings.name)

    # ---- who works, and who does not any more ----

    def worker(self, name: str) -> Hired | None:
        """A worker that is up, or None."""
        return self.workforce.workers.get(name)

    async def lost(self, name: str, reason: str) -> None:
        """A worker is gone, or its part ended in an error that is not the data's: replace it."""
        worker = self.workforce.workers.get(name)
        if worker is None or self.ended:
            return
        self._end(worker)
        if await self.territory.answers(worker.node, NODE_ANSWER_S):
            self._send(ev.WorkerDown(name, reason))
        else:
            await self._node_down(worker.node, f"{name} died and its cache does not answer")
        await self._replace(worker)

    def retire(self, name: str) -> None:
        """A worker is stuck: end it, and hire another."""
        worker = self.workforce.workers.get(name)
        if worker is not None:
            self._end(worker)
            self._spawn(self._replace(worker))

    def _end(self, worker: Hired) -> None:
        """A worker is gone, or is to be; one that was about to work elsewhere is missed here, a borrowed one is not."""
        leaves, target = worker.name in self.leaving, self.leaving.pop(worker.name, None)
        if worker.owner is None:
            self.wanted += target is not None
        else:
            self.wanted -= not leaves
        self.workforce.dismiss(worker.name)

    async def _replace(self, worker: Hired) -> None:
        """Hire a worker in the place of one that is gone, if it is still wanted; a borrowed one its owner replaces."""
        if worker.owner is None:
            await self._hire(int(worker.name.removeprefix("prep-").split(".")[0]))
        else:
            await neighbours.report_lost(worker.owner, worker.actor)

    async def _hire(self, slot: int) -> None:
        self._awaited += 1
        try:
            hired = await self.workforce.hire_at_last(slot, give_up=self._is_enough)
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
        return len(self.workforce.workers.keys() - self.leaving)

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

    def dispensable(self) -> list[Hired]:
        """Workers that stay so far, those first whose node has the fewest, so that nodes become free."""
        per_node = self.workforce.per_node()
        staying = [worker for name, worker in self.workforce.workers.items() if name not in self.leaving]
        return sorted(staying, key=lambda worker: (per_node[worker.node], worker.node))

    def lend(self, worker: Hired, target: str) -> None:
        """Have one worker less, which will work for another feed."""
        self.wanted -= 1
        self._let_go(worker, target)

    def _let_go(self, worker: Hired, target: str | None) -> None:
        """Give a worker nothing more to do; when it has finished, it works for the feed ``target``, or ends."""
        self.leaving[worker.name] = target
        self._send(ev.WorkerLeaves(worker.name))

    def dismiss(self, name: str) -> None:
        """A worker that was to leave has finished."""
        target = self.leaving.pop(name)
        worker = self.workforce.release(name)
        assert worker is not None
        if target is None:
            ray.kill(worker.actor)
        else:
            self._spawn(self.loans.hand_over(worker, target))
        if worker.node not in self.workforce.per_node():
            self._spawn(self._vacate(worker.node))

    async def _vacate(self, node: str) -> None:
        """The last worker of a node is gone: its samples move to the others, then it is free to go."""
        await self._settle()
        await self.territory.move_out(node, HAND_OVER_S)
        if node not in self.workforce.per_node():  # else somebody was hired there again
            self.territory.close(node)
            self._books.note(f"node {node[:8]} is not needed any more")

    async def employ(self, hired: Hired) -> None:
        """Put a worker that is up to work."""
        await self.workforce.configure(hired, self.layout.sweep, self.layout.spec)
        if self.territory.is_settled_on(self.workforce.per_node()):
            await self.territory.tell(hired.actor)
        else:
            await self._settle()
        self._send(ev.WorkerUp(hired.name, credit(self._settings.lanes), hired.node))

    # ---- nodes ----

    async def _settle(self, *, because_off: bool = False) -> None:
        """Give the samples homes on the nodes that have workers now; ``because_off``: see `Scales.settle`."""
        weights = self.scales.settle(self._work(), time.monotonic(), because_off=because_off)
        if weights:
            await self.territory.settle(weights, [worker.actor for worker in self.workforce.workers.values()])
            self._books.note(f"samples have homes on {len(weights)} node{'s' * (len(weights) > 1)}: {self._shares()}")

    async def weigh(self) -> None:
        """Move samples if nodes prepare at other speeds than those by which samples were shared out."""
        reason = self.scales.observe(self._work(), time.monotonic())
        if reason is not None and not self.ended:
            self._books.note(reason)
            await self._settle(because_off=True)

    def _work(self) -> list[Work]:
        """What the workers have done."""
        books = self._books
        return [
            Work(worker.name, worker.node, books.worker_samples[worker.name], books.worker_prep_s[worker.name])
            for worker in self.workforce.workers.values()
        ]

    def _shares(self) -> str:
        """How the workers and the samples are spread, for the log."""
        counts, weights = self.workforce.per_node(), self.scales.weights
        return ", ".join(
            f"{node[:8]} ({counts[node]} prep worker{'s' * (counts[node] > 1)}, {weight / sum(weights.values()):.0%})"
            for node, weight in sorted(weights.items())
        )

    async def _watch_nodes(self) -> None:
        """Notice nodes that Ray has given up."""
        here = ray.get_runtime_context().get_node_id()
        while not self.ended:
            await asyncio.sleep(NODES_PERIOD_S)
            if set(self.territory.caches) <= {here}:
                continue
            nodes = await asyncio.get_running_loop().run_in_executor(None, ray.nodes)
            alive = {node["NodeID"] for node in nodes if node["Alive"]}
            for node in set(self.territory.caches) - alive:
                await self._node_down(node, "Ray says that it is dead")

    async def _node_down(self, node: str, reason: str) -> None:
        """A node is gone: make again what lay there, hire other workers, give its samples new homes."""
        if node not in self.territory.caches or self.ended:
            return
        self.territory.close(node)
        workers = [worker for worker in self.workforce.workers.values() if worker.node == node]
        for worker in workers:
            self._end(worker)
        self._send(ev.NodeDown(node, reason))
        for worker in workers:
            self._spawn(self._replace(worker))
        await self._settle()
