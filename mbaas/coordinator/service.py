"""The shell around one lane's staging core, the same in every coordinator of a feed.

`ConsumerApi` defines the calls of consumers. `ConsumerService` translates calls and completions into events for the
core, and the core's instructions into calls. In Ray the caller of a method owns its result. The coordinator calls
``prepare``, so it owns the staged blocks, and they outlive the workers that made them.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from msgspec import Struct
from msgspec.structs import replace

from mbaas.bugs import in_short, is_bug
from mbaas.coordinator.asking import answer_or_none
from mbaas.coordinator.background import InternalErrors, decide
from mbaas.coordinator.counters import Counters, add
from mbaas.coordinator.local_calls import LocalCalls, Spawn
from mbaas.coordinator.relayed_calls import RelayedCalls
from mbaas.coordinator.stories import LaneStory, told_by
from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.coordinator.written_epochs import EpochWriter
from mbaas.core import calls
from mbaas.core import cluster_events as cluster
from mbaas.core import events as ev
from mbaas.core.lane_following import WorkerEvent
from mbaas.core.layout import Layout
from mbaas.core.slot_use import SlotUse
from mbaas.core.state import StagingState
from mbaas.errors import (
    BadSampleError,
    ConsumerRemovedError,
    FeedFailedError,
    MbaasError,
    PlacementUnknownError,
    PrepFailedError,
    StateError,
)
from mbaas.memory.part_memory import HeldObject, PartMemory
from mbaas.messages import (
    Admission,
    BlockMeta,
    ConsumerReport,
    DeliveredBlock,
    DeliveredPart,
    Delivery,
    FeedInfo,
    FetchCounts,
    JoinRequest,
    Lane,
)
from mbaas.order import Shuffle
from mbaas.placement import BlockPart, PartRequest, PlacementHistory

MOVE_S = 40.0
"""Longest time to copy a part to another node, in seconds. The cache node that copies it gives up sooner."""

ANSWER_S = 1.0
"""Timeout for the second result of a failed task, which arrives together with the first."""


class StagedPart(Struct, frozen=True):
    """A part of a staged block; all but ``memory`` is as in `DeliveredPart`."""

    meta: BlockMeta
    memory: PartMemory
    number: int
    task: int
    node: str
    block_part: BlockPart

    def delivered(self) -> DeliveredPart:
        """Return the part as it is sent to consumers, which may read it until they release its block."""
        return DeliveredPart(self.meta, self.memory.sent(), self.number, self.task, self.node, self.block_part)


@dataclass
class StagedBlock:
    """The prepared parts of a block, by number, and the errors of parts that failed."""

    parts: dict[int, StagedPart] = field(default_factory=dict)
    failures: dict[int, BadSampleError] = field(default_factory=dict)


@dataclass
class _Call:
    session: int
    answer: asyncio.Future[Delivery]


class ConsumerService:
    """Serves the blocks of one lane.

    Args:
        placements: history of the placements that cut blocks into parts.
        worker_of: returns the running worker of a name, or None if it is gone.
        report: passes events about workers to the supervisor.
        waits_for: lists the workers and cache nodes that the feed is waiting for.
        written: as for `StagingState`.
        cache_of: returns the cache node actor of a node, which copies parts there, or None.

    Attributes:
        core: the staging state.
        lane: the lane; consumers and the core use block numbers local to it.
        detached: recent consumers -> times that they were moved out of step here because they delayed others.
    """

    def __init__(
        self,
        info: FeedInfo,
        layout: Layout,
        lane: Lane,
        *,
        placements: PlacementHistory,
        worker_of: Callable[[str], WorkerHandle | None],
        report: Callable[[WorkerEvent], None],
        waits_for: Callable[[], Sequence[str]],
        counters: Counters,
        errors: InternalErrors,
        spawn: Spawn,
        written: Mapping[int, Shuffle] | None = None,
        cache_of: Callable[[str], Any] = lambda _node: None,
    ) -> None:
        self._info, self.lane, self._waits_for = info, lane, waits_for
        self._worker_of, self._report, self._counters, self._spawn = worker_of, report, counters, spawn
        self._errors, self._cache_of = errors, cache_of
        self.core = StagingState(
            layout.limits(info.settings),
            lane.blocks_per_epoch,
            lambda own: layout.block_bytes(lane.feed_block(own)),
            lambda own, shuffle: placements.parts(lane.feed_block(own), shuffle),
            lane.number,
            keeps_all=layout.keeps_all,
            block_samples=info.order.block_samples,
            is_shuffled=info.order.shuffled,
            lanes=lane.lanes,
            written=written,
        )
        self.detached: Counter[str] = Counter()
        self._writer = EpochWriter(info.settings.name, info.fingerprint, tell=self.send, errors=errors, spawn=spawn)
        self._staged: dict[int, StagedBlock] = {}
        self._copies: dict[int, tuple[PartMemory, str]] = {}  # move number -> the copy and its node, until it is used
        self._calls: dict[str, _Call] = {}
        self._sessions = time.time_ns() // 1_000_000  # above the sessions of an earlier coordinator of this lane
        self._progress = 0
        block_bytes = info.order.block_samples * info.spec.nbytes
        self._slot_use = SlotUse(ray.get_runtime_context().get_node_id(), info.settings.staging_bytes // block_bytes)

    # ---- requests of consumers ----

    def join(self, request: JoinRequest) -> Admission:
        """Open a session; see `ConsumerApi.join`."""
        leads, order = self.core.consumers.leads, self._info.order if self.lane.lanes == 1 else None
        event = calls.join(request, self._sessions + 1, leads=leads, order=order, out_of_reach=self.core.out_of_reach)
        self._sessions, consumer = self._sessions + 1, event.consumer
        # A pending call under this name belongs to the session that ends now, possibly in another program.
        self._answer(consumer, Delivery(error=StateError(f"consumer {consumer!r} joined again elsewhere")))
        for instruction in self.send(event):
            if isinstance(instruction, ev.Admitted):
                return Admission(instruction.session, instruction.cursor, instruction.own_epoch, self._info, self.lane)
            if isinstance(instruction, ev.Refuse) and self.core.failed is None:
                raise StateError(f"consumer {consumer!r} cannot join: {instruction.reason}")
        raise FeedFailedError(self.core.failed or f"consumer {consumer!r} was not admitted")

    async def ask(self, event: ev.Ask, poll_s: float) -> Delivery:
        """Wait for blocks; see `ConsumerApi.ask`."""
        consumer = event.consumer
        # A consumer calls again if its call was lost on the way; only the newest call gets blocks.
        self._answer(consumer, Delivery(waits_for="a newer call took its place"))
        call = _Call(event.session, asyncio.get_running_loop().create_future())
        self._calls[consumer] = call
        self.send(event)
        await asyncio.wait([call.answer], timeout=poll_s)
        if call.answer.done():
            return call.answer.result()
        del self._calls[consumer]
        return Delivery(waits_for=self.explain_wait(consumer), progress=self._progress)

    def part_unreadable(self, event: ev.UnreadablePart) -> None:
        """Have a part made again after a consumer could not read it."""
        part = self._staged_part(self.core.window.staged_as(event.block), event.part)
        is_in_slot = part is not None and part.task == event.task and part.memory.is_in_live_worker
        # Unreadable slots are expected after a worker died, or when the consumer is on another node.
        if is_in_slot and self._most_slots() and self._slot_use.give_up():
            self._note_slots("a consumer cannot read a worker's memory")
        self.send(event)

    def _staged_part(self, block: int, number: int) -> StagedPart | None:
        staged = self._staged.get(block)
        return None if staged is None else staged.parts.get(number)

    def explain_wait(self, consumer: str) -> str:
        """Return one clause that explains the wait of a consumer."""
        return self._named(self.core.explain_wait(consumer, self._waits_for()))

    def _named(self, text: str) -> str:
        """Prefix a sentence of the core with the lane, because its block numbers are local to the lane."""
        return text if self.lane.lanes == 1 else f"lane {self.lane.number}: {text}"

    # ---- instructions ----

    def send(self, event: ev.Event) -> list[ev.Instruction]:
        """Send an event to the core and carry out its instructions."""
        done = decide(self.core, event, self._errors)
        for instruction in done:
            # After a bug, carry out the remaining instructions, because the core's state already assumes them.
            with self._errors.reported():
                self._carry_out(instruction)
        return done

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Prepare():
                self._spawn(self._make(instruction))
            case ev.Deliver():
                delivered = tuple(
                    replace(self._delivered(block), is_new=block in instruction.new) for block in instruction.blocks
                )
                idle_s, as_copy = instruction.peer_idle_s, instruction.as_copy
                self._answer(instruction.consumer, Delivery(delivered, idle_s, as_copy, progress=self._progress))
            case ev.DropBlock():
                self._staged.pop(instruction.block, None)
                if instruction.anew:
                    self._counters.forget(self.lane.feed_block(instruction.block))
            case ev.WriteEpochs():
                self._writer.write(instruction)
            case ev.MovePart():
                self._spawn(self._move(instruction))
            case ev.UsePart():
                parts = self._staged[instruction.block].parts
                copy, node = self._copies[instruction.move]
                parts[instruction.part] = replace(
                    parts[instruction.part], memory=copy, task=instruction.task, node=node
                )
            case ev.ReplaceWorker():
                self._report(cluster.WorkerDied(instruction.worker, instruction.reason, instruction.blame))
            case ev.Detached():
                add(self.detached, instruction.consumer, 1)
            case ev.ReleaseWorker():
                self._report(cluster.WorkerDone(instruction.worker))
            case ev.RemoveConsumer() | ev.Refuse():
                self._expel(instruction.consumer, instruction.session, self._why_expelled(instruction))
            case ev.Note():
                self._counters.note(self._named(instruction.text))
        if isinstance(instruction, ev.RemoveConsumer):
            self._counters.note(self._named(f"{instruction.consumer} was removed: {instruction.reason}"))

    def _delivered(self, number: int) -> DeliveredBlock:
        staged_as = self.core.window.staged_as(number)
        staged, error = self._staged.get(staged_as, StagedBlock()), self.core.window.blocks[staged_as].error
        shuffle = self.core.epochs.shuffle_of(number)
        if error is None:
            parts = tuple(part.delivered() for _, part in sorted(staged.parts.items()))
            return DeliveredBlock(number, shuffle, parts)
        return DeliveredBlock(number, shuffle, (), self._failure_of(number, staged, error))

    def _failure_of(self, number: int, staged: StagedBlock, error: str) -> MbaasError:
        if staged.failures:
            return staged.failures[min(staged.failures)]
        first, end = self._info.order.span(self.lane.feed_block(number))
        where = f"samples {first} to {end - 1} in the order of an epoch"
        return PrepFailedError(f"{where} could not be prepared: {error}")

    def _answer(self, consumer: str, delivery: Delivery) -> None:
        call = self._calls.pop(consumer, None)
        if call is not None and not call.answer.done():
            call.answer.set_result(delivery)

    def _why_expelled(self, instruction: ev.RemoveConsumer | ev.Refuse) -> MbaasError:
        """Return the error for a consumer whose call is refused.

        Usually a `ConsumerRemovedError`, after which the consumer joins again. If a newer session has taken its name it
        is a `StateError`, and after the feed has failed the `FeedFailedError` that all consumers get.
        """
        if self.core.failed is not None:
            return FeedFailedError(self.core.failed)
        consumer = instruction.consumer
        member = self.core.consumers.by_name.get(consumer)
        if member is not None and member.session > instruction.session:
            return StateError(f"consumer {consumer!r} joined again elsewhere: {instruction.reason}")
        return ConsumerRemovedError(f"consumer {consumer!r}: {instruction.reason}")

    def _expel(self, consumer: str, session: int, error: MbaasError) -> None:
        call = self._calls.get(consumer)
        if call is not None and call.session == session:
            self._answer(consumer, Delivery(error=error, expelled=self.core.failed is None))

    async def end_writing(self) -> None:
        """Stop writing epoch records."""
        await self._writer.end()

    def fail(self, reason: str) -> None:
        """Stop serving, and answer all pending calls with the reason."""
        self.send(ev.Stop(reason))
        # The core does not track calls that a newer call has replaced.
        for consumer in list(self._calls):
            self._answer(consumer, Delivery(error=FeedFailedError(reason)))

    # ---- preparation ----

    async def _make(self, order: ev.Prepare, *, in_slots: bool = True) -> None:
        """Have a worker prepare one part, in a slot if possible, and send the outcome to the core."""
        worker = self._worker_of(order.worker)
        if worker is None:
            return  # the core will receive its death shortly and reassign the part
        block = self.lane.feed_block(order.block)
        # With "raise" no consumer ever got this block without its bad samples, so prepare every sample again.
        skips = self._info.settings.on_bad_sample == "skip"
        left_out = self._counters.left_out(block) if skips else ()
        meta_ref, arrays_ref = worker.actor.prepare.remote(
            self._info.settings.name,
            PartRequest(block, order.block_part, order.shuffle),
            left_out,
            self._most_slots() if in_slots else 0,
        )
        try:
            meta: BlockMeta = await meta_ref
        except PlacementUnknownError:
            self._tell_of(worker, cluster.WorkerBehind(order.worker))
        except ray.exceptions.RayTaskError as error:  # first, because Ray derives this error from its cause's class too
            # Fetch the second result as well: Ray logs an error for each return value that is never retrieved.
            await answer_or_none(arrays_ref, ANSWER_S, is_reported=True)
            self._failed(order, worker, error)
        except ray.exceptions.RayActorError:
            self._tell_of(worker, cluster.WorkerDied(order.worker, f"process {worker.pid} died"))
        except ray.exceptions.RayError as error:
            self._tell_of(worker, cluster.WorkerDied(order.worker, in_short(error)))
        else:
            self._finished(order, meta, arrays_ref)

    def _most_slots(self) -> int:
        return self._slot_use.most(
            (worker.node for worker in self.core.tasks.workers.values()), self.core.consumers.nodes
        )

    def _note_slots(self, why: str) -> None:
        self._counters.note(self._named(f"blocks go through the object store from now on: {why}"))

    async def _move(self, order: ev.MovePart) -> None:
        """Copy a part to another node, as an object that this coordinator owns."""
        part, cache = self._staged_part(order.block, order.part), self._cache_of(order.node)
        if part is None or cache is None or part.memory.ref is None:
            self.send(ev.PartStays(order.move))
            return
        # In a list, because Ray would replace a bare reference among a call's arguments by the object.
        done_ref, copy_ref = cache.adopt.remote([part.memory.ref])
        if await answer_or_none(done_ref, MOVE_S) is None:
            self.send(ev.PartStays(order.move))
            return
        self._copies[order.move] = HeldObject(copy_ref), order.node
        self.send(ev.PartMoved(order.move))
        del self._copies[order.move]

    def _tell_of(self, worker: WorkerHandle, event: WorkerEvent) -> None:
        # A restarted main coordinator reuses the names of dead workers. A further lane's call to the old worker may end
        # after that, and must not be reported for the new one.
        newest = self._worker_of(worker.name)
        if newest is None or newest.pid == worker.pid:
            self._report(event)

    def _failed(self, order: ev.Prepare, worker: WorkerHandle, error: ray.exceptions.RayTaskError) -> None:
        if is_bug(error):
            self._errors.report(error, f"in {order.worker}")
            self.send(ev.TaskFailed(order.task, in_short(error)))
        else:  # the worker is idle, works for another feed, or has lost its cache node: it is unusable here
            self._tell_of(worker, cluster.WorkerDied(order.worker, in_short(error)))

    def _finished(self, order: ev.Prepare, meta: BlockMeta, arrays_ref: Any) -> None:
        if not self.core.tasks.has(order.task):
            return  # reassigned to another worker, or the block is no longer needed
        if (away := meta.away) is not None:
            self.send(ev.PutOff(order.task, f"storage does not give {away.uri}: {away.reason}"))
            return
        memory: PartMemory | None = HeldObject(arrays_ref) if meta.slot is None else meta.slot.staged()
        if memory is None:
            if self._slot_use.lost():
                self._note_slots(f"the coordinator cannot read what {order.worker} made in memory of its own")
            self._spawn(self._make(order, in_slots=False))
            return
        if meta.slot is not None:
            self._slot_use.held()
        self._progress += 1
        self._counters.finished(order.worker, meta, self._info.order)
        staged, error = self._staged.setdefault(order.block, StagedBlock()), None
        if meta.bad and self._info.settings.on_bad_sample == "raise":
            staged.failures[order.part] = failure = BadSampleError(meta.bad[0].uri, meta.bad[0].reason)
            error = str(failure)
        else:
            node = self.core.tasks.workers[order.worker].node
            told = replace(meta, slot=None, fetched=FetchCounts())  # these two are for the coordinator only
            staged.parts[order.part] = StagedPart(told, memory, order.part, order.task, node, order.block_part)
        self.send(ev.TaskEnded(order.task, error, lacks=bool(meta.bad) and error is None))
        floor = min((blocks.start for blocks in self.core.consumers.wanted()), default=0)
        self._counters.forget_below(self.lane.feed_block(floor))


class ConsumerApi(abc.ABC):
    """The calls of consumers, accepted by every coordinator of a feed.

    Arguments are validated first (`mbaas.core.calls`): each call raises ConfigError for an invalid value.
    """

    def __init__(self, spawn: Spawn) -> None:
        self._node = ray.get_runtime_context().get_node_id()
        ask = partial(self.ask, over_socket=True)
        self._local_calls = LocalCalls(ask, spawn)
        self._relayed_calls = RelayedCalls(ask, spawn, self.relaying)

    @abc.abstractmethod
    async def _until_open(self) -> ConsumerService:
        """Wait until the feed is open, and return the service.

        Raises:
            FeedFailedError: the feed did not open in time, or never will.
        """

    async def join(self, request: JoinRequest) -> Admission:
        """Open a session.

        Raises:
            FeedFailedError: the feed cannot continue.
            StateError: the trial continues with a different number of ranks.
        """
        return (await self._until_open()).join(request)

    async def ask(self, call: list[Any], *, over_socket: bool = False) -> Delivery:
        """Wait until at least one block at or after a consumer's cursor is staged.

        Args:
            call: a `BlockCall.plain`.
            over_socket: True if the call arrived over a socket; otherwise the answer may offer one.
        """
        event, parts, poll_s = calls.block_call(call)
        service = await self._until_open()
        calls.within_reach("cursor", event.cursor, service.core.out_of_reach)
        for part in parts:
            service.part_unreadable(part)
        delivery = await service.ask(event, poll_s)
        consumer = service.core.consumers.session(event.consumer, event.session)
        if over_socket or consumer is None or not consumer.node:
            return delivery
        consumers = service.core.consumers.on_node(consumer.node)
        return replace(delivery, socket=await self._socket_on(consumer.node, consumers))

    async def _socket_on(self, node: str, consumers: int) -> str | None:
        """Return the socket address for that many consumers of a node, or None if they must call through Ray."""
        return await self._local_calls.address() if node == self._node else self._relayed_calls.offer(node, consumers)

    @abc.abstractmethod
    async def relaying(self, node: str, may_start: bool) -> Any | None:
        """Return the actor that relays calls on a node, starting it if allowed; otherwise None."""

    async def exchange(self, relay: str, number: int, requests: dict[int, bytes]) -> dict[int, bytes]:
        """Process relayed calls of consumers on another node and return answers; see `RelayedCalls.exchange`."""
        return await self._relayed_calls.exchange(relay, number, requests)

    async def hand_back(self, consumer: str, session: int, cursor: int, released: int, number: int = 0) -> None:
        """Take back the blocks that a consumer was given from ``cursor`` on, until it requests them again."""
        event = calls.hand_back(consumer, session, cursor, released, number)
        service = await self._until_open()
        calls.within_reach("cursor", event.cursor, service.core.out_of_reach)
        service.send(event)

    async def is_given_up(self, block: int, parts: list[tuple[int, int]]) -> bool:
        """Return whether any of the parts, as (number, task that made it), has been replaced in the block."""
        block, parts = calls.made_parts(block, parts)
        service = await self._until_open()
        return not all(service.core.window.has(block, part, task) for part, task in parts)

    async def heartbeat(self, consumer: str, session: int, released: int, done: int, report: ConsumerReport) -> bool:
        """Renew a consumer's lease. Return False if its session is no longer open."""
        event, report = calls.heartbeat(consumer, session, released, done), calls.report(report)
        service = await self._until_open()
        self._take_report(consumer, report)
        answer = service.send(event)
        await self._until_kept(report)
        return not any(isinstance(i, ev.Refuse) and i.consumer == consumer for i in answer)

    async def leave(
        self,
        consumer: str,
        session: int | None,
        successors: int = 0,
        report: ConsumerReport | None = None,
    ) -> None:
        """End a consumer's session; its place may be held for one of ``successors`` consumers."""
        event, report = calls.leave(consumer, session, successors), None if report is None else calls.report(report)
        service = await self._until_open()
        if report is not None:
            self._take_report(consumer, report)
        service.send(event)
        if report is not None:
            await self._until_kept(report)

    async def lane_story(self, thing: str) -> LaneStory:
        """Return this lane's history of a block, a consumer or a prep worker."""
        thing = calls.thing(thing)
        service = await self._until_open()
        return told_by(service.core, service.lane, thing)

    @abc.abstractmethod
    def _take_report(self, consumer: str, report: ConsumerReport) -> None:
        """Record a consumer's report; only the first lane uses it."""

    @abc.abstractmethod
    async def _until_kept(self, report: ConsumerReport) -> None:
        """Wait until the ledgers of a report are stored. A loader that gets no answer sends them again."""
