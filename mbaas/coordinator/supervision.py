"""The shell around the supervisor: turns its instructions into actor calls, and their outcomes into events.

Nothing is decided here. `mbaas.core.cluster.supervisor` decides which workers and cache nodes run, and where.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

import ray

from mbaas.base import units
from mbaas.coordinator import lending
from mbaas.coordinator.background import Driver, InternalErrors
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.opening import Opening
from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.core.cluster import events as ev
from mbaas.core.cluster.supervised import MACHINE_S
from mbaas.core.cluster.supervisor import Supervisor
from mbaas.core.layout import CREDIT
from mbaas.core.staging import events as staging
from mbaas.errors import ResourceError, last_line
from mbaas.ray_cluster import actor_names, resources

NODES_PERIOD_S = 1.0
"""Period in seconds at which Ray is polled for dead and draining nodes, if the feed uses more than one node."""

ALONE_PERIODS = 5
"""A feed that uses only its coordinator's node polls once in this many periods.

Only that node's drain notice matters to it, which arrives half a minute ahead. Each poll costs the
cluster's head a little.
"""

BRIEFING_CALL_S = 25.0
"""Timeout to send a worker the placement, in seconds; less than the supervisor waits."""

OPEN_S = 60.0
"""Longest time from the start of a new feed's workers until one is ready, in seconds."""


class Supervision:
    """The workers and cache nodes of one open feed.

    Attributes:
        state: the supervisor, which makes all decisions.
        handle: passes an event to it, carries out its instructions, and returns them.
        workers, caches, layout: the running prep workers, the cache nodes, and the feed's layout.
    """

    def __init__(
        self,
        opening: Opening,
        *,
        counters: Counters,
        errors: InternalErrors,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        settings = self._settings = opening.settings
        self._counters, self._errors, self._spawn = counters, errors, spawn
        self.workers, self.caches, self.layout = opening.workers, opening.caches, opening.layout
        self.state = Supervisor(
            own=settings.prep_workers,
            credit=CREDIT,
            staging_bytes=settings.staging_bytes,
            needs=self.workers.needs,
        )
        self.handle = Driver(self.state, self._carry_out, errors).send
        self._begin = opening.begin
        self._forward: Callable[[staging.Event], Any]  # to the staging core; set by `begin`
        self._works = asyncio.Event()
        self._elsewhere = dict(opening.lent)  # key -> worker that is lent, or offered to this feed
        # key of an offered worker -> the answer, True if it arrived, and the Unix time of the decision to move it
        self._offers: dict[Hashable, tuple[asyncio.Future[bool], float]] = {}
        self._leaving: set[asyncio.Task[None]] = set()  # workers moving to other feeds

    # ---- start and end ----

    def begin(self, forward: Callable[[staging.Event], Any], consumer_nodes: Callable[[], frozenset[str]]) -> None:
        """Start supervision, and watch the nodes of workers, caches and consumers.

        ``forward`` gets all events about workers and nodes that the staging core needs.
        """
        self._forward = forward
        self.handle(self._begin)
        self._spawn(self._watch_nodes(consumer_nodes))

    async def until_at_work(self) -> None:
        """Wait until a worker of a new feed is ready.

        Raises:
            ResourceError: no worker is ready within `OPEN_S` seconds.
        """
        try:
            await asyncio.wait_for(self._works.wait(), OPEN_S)
        except asyncio.TimeoutError:
            why = "; ".join(list(self._counters.notes)[-3:]) or "its cache nodes do not answer"
            raise ResourceError(
                f"feed {self._settings.name!r} has {units.counted(len(self.workers.workers), 'prep worker')}, "
                f"and none could start within {units.seconds(OPEN_S)}: {why}"
            ) from None

    async def end(self, reason: str) -> None:
        """End all workers and caches, and hand back borrowed workers. Returns when both are done."""
        self.handle(ev.Stop(reason))
        if self._leaving:
            await asyncio.wait(self._leaving)
        self.workers.end_all()

    # ---- instructions ----

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.StartWorker():
                self._spawn(self._start_worker(instruction.worker))
            case ev.TakeIn():
                self._spawn(self._take_in(instruction))
            case ev.RefuseOffer():
                self._refuse_offer(instruction.key)
            case ev.EndWorker():
                self.workers.end(instruction.worker)
            case ev.BriefWorker():
                self._spawn(self._brief(instruction))
            case ev.HandOver():
                task = self._spawn(self._hand_over(instruction))
                self._leaving.add(task)  # `end` waits for these so that borrowed workers are returned
                task.add_done_callback(self._leaving.discard)
            case ev.ReportLentGone():
                worker = self.workers.workers.get(instruction.worker)
                if worker is not None:
                    self._spawn(lending.report_lent_gone(instruction.owner, worker.actor))
            case ev.EndLent():
                if (lent := self._elsewhere.pop(instruction.key, None)) is not None:
                    ray.kill(lent)
            case ev.StartCache():
                self._spawn(self._start_cache(instruction))
            case ev.ProbeCache():
                self._spawn(self._probe_cache(instruction))
            case ev.EndCache():
                self.caches.end(instruction.node, instruction.generation)
            case ev.MovePlacement():
                self._spawn(self._move_placement(instruction))
            case ev.UsePlacement():
                self.caches.use_placement(instruction.version)
            case ev.VacateNode():
                self._spawn(self._vacate(instruction.node))
            case ev.Forward():
                self._forward(instruction.event)
                if isinstance(instruction.event, staging.WorkerUp):
                    self._works.set()
            case ev.Note():
                self._counters.note(instruction.text)

    def waits_for(self) -> tuple[str, ...]:
        """Return the pending waits as sentences, each with its duration so far."""
        return self.state.told_waits(time.monotonic())

    # ---- workers ----

    def worker(self, name: str) -> WorkerHandle | None:
        """Return a running worker, or None."""
        return self.workers.workers.get(name)

    async def _start_worker(self, name: str) -> None:
        try:
            # enough time for the cluster to add a node
            worker = await self.workers.start(name, MACHINE_S, give_up=lambda: name not in self.state.workers)
        except (ResourceError, ray.exceptions.RayError, ValueError) as error:  # ValueError: the name is still taken
            self.handle(ev.StartFailed(name, last_line(error)))
        else:
            self.handle(ev.WorkerStarted(name, worker.node))

    async def _brief(self, instruction: ev.BriefWorker) -> None:
        name = instruction.worker
        reason = await self._tell_placement(name)
        if reason is None:
            self.handle(ev.WorkerBriefed(name, instruction.version))
        else:
            self.handle(ev.BriefingFailed(name, reason))

    async def _tell_placement(self, name: str) -> str | None:
        """Send a worker the order and all placements that may cut blocks. Return the reason of a failure, or None."""
        worker = self.workers.workers.get(name)
        if worker is None:
            return "it is gone"
        told = self.workers.brief(worker, self.caches.dataset_ref, self.layout, self.caches.told, self.caches.actors)
        try:
            await asyncio.wait_for(told, BRIEFING_CALL_S)
        except asyncio.TimeoutError:
            return f"it did not answer within {units.seconds(BRIEFING_CALL_S)}"
        except ray.exceptions.RayError as error:
            self._errors.report_bug(error, f"in {name}, while sending the placement")
            return last_line(error)
        return None

    # ---- workers of other feeds ----

    async def take_on(self, offer: lending.Offer) -> bool:
        """Take on another feed's worker, or a returning one. Return whether it was accepted."""
        key = self._key_of(offer.actor)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._elsewhere[key], self._offers[key] = offer.actor, (answer, offer.decided_at)
        self.handle(ev.Offered(key, None if offer.owner == self._settings.name else offer.owner))
        return await answer

    def lent_gone(self, actor: Any) -> None:
        """Record that a lent worker is gone."""
        key = self._key_of(actor)
        self._elsewhere.pop(key, None)
        self.handle(ev.LentGone(key))

    def shared_with(self, feed: str) -> lending.Shared:
        """Return the workers lent to another feed, and that feed's workers lent to this one."""
        lent = (self._elsewhere.get(key) for key in self.state.lent.get(feed, ()))
        here = (self.worker(name) for name, worker in self.state.workers.items() if worker.owner == feed)
        return lending.Shared(
            tuple(actor for actor in lent if actor is not None),
            tuple(handle.actor for handle in here if handle is not None),
        )

    def _key_of(self, actor: Any) -> Hashable:
        """Return the supervisor's key of a worker that is elsewhere: its name when it left, or its actor id."""
        return next((key for key, other in self._elsewhere.items() if other == actor), actor_names.id_of(actor))

    async def _take_in(self, instruction: ev.TakeIn) -> None:
        actor, offered = self._elsewhere.pop(instruction.key, None), self._offers.pop(instruction.key, None)
        try:
            if actor is None:
                raise ResourceError(f"worker {instruction.key} is gone")
            if offered is not None:
                self._counters.moved_in(instruction.worker, offered[1])
            worker = await self.workers.take_in(instruction.worker, actor, instruction.owner)
        except (ResourceError, ray.exceptions.RayError, asyncio.TimeoutError) as error:
            self.handle(ev.StartFailed(instruction.worker, last_line(error)))
        else:
            self.handle(ev.WorkerStarted(instruction.worker, worker.node))
        if offered is not None and not offered[0].done():
            offered[0].set_result(instruction.worker in self.workers.workers)

    def _refuse_offer(self, key: Hashable) -> None:
        self._elsewhere.pop(key, None)
        offered = self._offers.pop(key, None)
        if offered is not None and not offered[0].done():
            offered[0].set_result(False)

    async def _hand_over(self, instruction: ev.HandOver) -> None:
        worker = self.workers.workers.get(instruction.worker)
        taken = False
        if worker is not None:
            leaving = self.state.workers.get(instruction.worker)  # None if the feed ends
            waited_s = 0.0 if leaving is None or leaving.left_s is None else time.monotonic() - leaving.left_s
            offer = lending.Offer(worker.actor, worker.owner or self._settings.name, time.time() - waited_s)
            taken = await lending.offer(instruction.target, offer)
            if worker.owner is None:
                # also if it was refused: the supervisor takes it in again under this key
                self._elsewhere[instruction.worker] = worker.actor
            if taken or worker.owner is None:
                self.workers.release(instruction.worker)
        self.handle(ev.HandedOver(instruction.worker, taken))

    # ---- cache nodes, placement and nodes ----

    async def _start_cache(self, instruction: ev.StartCache) -> None:
        node, generation = instruction.node, instruction.generation
        try:
            await self.caches.start(node, generation)
        except (asyncio.TimeoutError, ray.exceptions.RayError, ValueError) as error:
            self.handle(ev.CacheFailed(node, generation, last_line(error)))
        else:
            self.handle(ev.CacheStarted(node, generation, self.caches.rooms.get(node, 0)))

    async def _probe_cache(self, instruction: ev.ProbeCache) -> None:
        answers = await self.caches.answers(instruction.node, instruction.generation)
        self.handle(ev.CacheProbed(instruction.node, instruction.generation, answers))

    async def _move_placement(self, instruction: ev.MovePlacement) -> None:
        try:
            await self.caches.move_placement(instruction.version, instruction.weights)
            names = sorted(instruction.workers)
            reasons = await asyncio.gather(*map(self._tell_placement, names))
        except (asyncio.TimeoutError, ray.exceptions.RayError) as error:
            self.handle(ev.PlacementFailed(instruction.version, last_line(error)))
            return
        told = frozenset(name for name, reason in zip(names, reasons, strict=True) if reason is None)
        self.handle(ev.PlacementMoved(instruction.version, told))

    async def _vacate(self, node: str) -> None:
        moved = await self.caches.move_out(node)
        self.handle(ev.NodeVacated(node, moved.samples, moved.left))

    async def _watch_nodes(self, consumer_nodes: Callable[[], frozenset[str]]) -> None:
        here = ray.get_runtime_context().get_node_id()
        for period in itertools.count():
            await asyncio.sleep(NODES_PERIOD_S)
            if self.state.ended is not None:
                return
            with self._errors.reported():
                await self._look_at_nodes(here, consumer_nodes(), asks_alone=period % ALONE_PERIODS == 0)

    async def _look_at_nodes(self, here: str, consumer_nodes: frozenset[str], *, asks_alone: bool) -> None:
        workers = {worker.node for worker in self.state.workers.values() if worker.node}
        used = workers.union(self.state.caches, consumer_nodes)
        is_alone = used <= {here}
        if is_alone and not asks_alone:
            return
        if not is_alone:  # this actor's own node lives as long as it does
            nodes = await asyncio.to_thread(ray.nodes)
            dead = frozenset(node["NodeID"] for node in nodes if not node["Alive"])
            if dead & used:
                self.handle(ev.NodesDead(dead & used))
        draining = await asyncio.to_thread(resources.draining_nodes)
        if draining or self.state.draining:
            self.handle(ev.NodesDraining(draining))
