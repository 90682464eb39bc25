"""The shell around one staging core, which serves consumers; the same in every coordinator of a feed.

`ConsumerApi` has the calls that consumers make. `ConsumerService` turns calls and completions into events of the core,
and its instructions into calls. In Ray the caller of a method owns its result: the coordinator calls ``prepare``, so it
owns the staged blocks, and they outlive the workers that made them.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from msgspec.structs import replace

from mbaas import slots
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
from mbaas.placement import PartRequest, PlacementHistory
from mbaas.slots import HeldSlot
from mbaas.uncounted import Uncounted

MOVE_S = 40.0
"""How long the copy of a part to another node may take; the cache node that makes it gives up sooner."""

ANSWER_S = 1.0
"""The second answer of a task that failed comes with the first, so this is not waited for."""


@dataclass
class _Call:
    """A consumer's call that waits for blocks."""

    session: int
    answer: asyncio.Future[Delivery]


class ConsumerService:
    """Serves the blocks of one lane.

    Args:
        info: of the feed.
        layout: of the feed.
        lane: whose blocks these are.
        placements: by which blocks are cut.
        worker_of: finds a worker that is up by its name; None if it is gone.
        report: takes to the supervisor what is to be said of a worker.
        waits_for: tells which workers and cache nodes the feed waits for.
        counters: where what was made is entered.
        errors: where bugs of workers and cache nodes are reported.
        spawn: runs a coroutine in the background.
        written: as for `StagingState`.
        cache_of: finds the cache node of a node, which copies parts to it; None if there is none.

    Attributes:
        core: the state.
        lane: see above; consumers and the core count the lane's own blocks.
        detached: consumer -> how often it was moved out of step here, because it kept others waiting; of the last ones.
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
        self._staged: dict[int, dict[int, DeliveredPart]] = {}
        self._copies: dict[int, Any] = {}  # number of a move -> reference of the copy, until it is used
        self._calls: dict[str, _Call] = {}
        self._sessions = time.time_ns() // 1_000_000  # above those of an earlier coordinator of this lane
        self._progress = 0
        block_bytes = info.order.block_samples * info.spec.nbytes
        self._slot_use = SlotUse(ray.get_runtime_context().get_node_id(), info.settings.staging_bytes // block_bytes)

    # ---- what consumers want ----

    def join(self, request: JoinRequest) -> Admission:
        """Open a session; see `ConsumerApi.join`."""
        leads, order = self.core.consumers.leads, self._info.order if self.lane.lanes == 1 else None
        event = calls.join(request, self._sessions + 1, leads=leads, order=order, out_of_reach=self.core.out_of_reach)
        self._sessions, consumer = self._sessions + 1, event.consumer
        # A call that still waits under this name belongs to the session that ends now, perhaps of another program.
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
        # A consumer whose call was lost on the way asks again; only the newest call gets blocks.
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
        """Have a part made again that a consumer could not read."""
        part = self._staged.get(self.core.window.staged_as(event.block), {}).get(event.part)
        held = part.refs[0] if part is not None and part.refs and part.task == event.task else None
        # Of a worker that died, or by a consumer on another node, that was to be expected.
        if isinstance(held, HeldSlot) and held.is_there and self._most_slots() and self._slot_use.give_up():
            self._note_slots("a consumer cannot read what was made in a worker's memory")
        self.send(event)

    def explain_wait(self, consumer: str) -> str:
        """Say in one clause what a waiting consumer waits for."""
        return self._named(self.core.explain_wait(consumer, self._waits_for()))

    def _named(self, text: str) -> str:
        """Mark a sentence of the core with the lane, whose own blocks the core counts."""
        return text if self.lane.lanes == 1 else f"lane {self.lane.number}: {text}"

    # ---- instructions ----

    def send(self, event: ev.Event) -> list[ev.Instruction]:
        """Give an event to the core and do what it says."""
        done = decide(self.core, event, self._errors)
        for instruction in done:
            # Each by itself: the core counts on all of them.
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
                parts = self._staged[instruction.block]
                copy, node = self._copies[instruction.move]
                parts[instruction.part] = replace(
                    parts[instruction.part], refs=[copy], task=instruction.task, node=node
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
        parts, error = self._staged.get(staged_as, {}), self.core.window.blocks[staged_as].error
        shuffle = self.core.epochs.shuffle_of(number)
        if error is None:
            return DeliveredBlock(number, shuffle, tuple(_lent(part) for _, part in sorted(parts.items())))
        # A part that ended in a bad sample has no arrays, and says which; else workers died over the block.
        bad = tuple(part for _, part in sorted(parts.items()) if not part.refs)
        first, end = self._info.order.span(self.lane.feed_block(number))
        where = f"samples {first} to {end - 1} in the order of an epoch"
        failure = None if bad else PrepFailedError(f"{where} could not be prepared: {error}")
        return DeliveredBlock(number, shuffle, bad, failure)

    def _answer(self, consumer: str, delivery: Delivery) -> None:
        call = self._calls.pop(consumer, None)
        if call is not None and not call.answer.done():
            call.answer.set_result(delivery)

    def _why_expelled(self, instruction: ev.RemoveConsumer | ev.Refuse) -> MbaasError:
        """Return the error for a consumer whose call is refused.

        It is a `ConsumerRemovedError`, after which the consumer joins again, unless its name is another's by now. In a
        feed that cannot go on it is the error that all other consumers get.
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
        """Write down nothing of epochs any more."""
        await self._writer.end()

    def fail(self, reason: str) -> None:
        """Serve nothing any more, and tell those who wait why."""
        self.send(ev.Stop(reason))
        # A call may still be there of which the core thinks that nobody waits: one that was overtaken by another.
        for consumer in list(self._calls):
            self._answer(consumer, Delivery(error=FeedFailedError(reason)))

    # ---- work ----

    async def _make(self, order: ev.Prepare, *, in_slots: bool = True) -> None:
        """Have one part of a block made, in a slot if that may be, and turn the outcome into an event."""
        worker = self._worker_of(order.worker)
        if worker is None:
            return  # the core hears of its death in a moment, and gives the part to another
        block = self.lane.feed_block(order.block)
        # With "raise" no consumer had the block without its bad samples: it is tried as if for the first time.
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
        except ray.exceptions.RayTaskError as error:  # before the next: it is also of the kind of its cause
            # Ray writes an error to the log that nobody asked for; there is one for each of the two returns.
            await answer_or_none(arrays_ref, ANSWER_S, is_reported=True)
            self._failed(order, worker, error)
        except ray.exceptions.RayActorError:
            self._tell_of(worker, cluster.WorkerDied(order.worker, f"process {worker.pid} died"))
        except ray.exceptions.RayError as error:
            self._tell_of(worker, cluster.WorkerDied(order.worker, in_short(error)))
        else:
            self._finished(order, meta, arrays_ref)

    def _most_slots(self) -> int:
        """See `SlotUse.most`."""
        return self._slot_use.most(
            (worker.node for worker in self.core.tasks.workers.values()), self.core.consumers.nodes
        )

    def _note_slots(self, why: str) -> None:
        self._counters.note(self._named(f"blocks go through the object store from now on: {why}"))

    async def _move(self, order: ev.MovePart) -> None:
        """Have a part copied to another node, in an object that this coordinator owns like those of workers."""
        part, cache = self._staged.get(order.block, {}).get(order.part), self._cache_of(order.node)
        if part is None or cache is None or not part.refs or isinstance(part.refs[0], HeldSlot):
            self.send(ev.PartStays(order.move))
            return
        done_ref, copy_ref = cache.adopt.remote(part.refs)
        if await answer_or_none(done_ref, MOVE_S) is None:
            self.send(ev.PartStays(order.move))
            return
        self._copies[order.move] = copy_ref, order.node
        self.send(ev.PartMoved(order.move))
        del self._copies[order.move]

    def _tell_of(self, worker: WorkerHandle, event: WorkerEvent) -> None:
        """Report what was met with a worker, unless another process has its name by now.

        A main coordinator that was restarted gives the name of one that died meanwhile to the next one; the calls of a
        further lane may end later than that.
        """
        newest = self._worker_of(worker.name)
        if newest is None or newest.pid == worker.pid:
            self._report(event)

    def _failed(self, order: ev.Prepare, worker: WorkerHandle, error: ray.exceptions.RayTaskError) -> None:
        """Report that a worker which lives made nothing of a part."""
        if is_bug(error):
            self._errors.report(error, f"in {order.worker}")
            self.send(ev.TaskFailed(order.task, in_short(error)))
        else:  # it is idle, or works for another feed, or its cache node is away for good: it is of no use here
            self._tell_of(worker, cluster.WorkerDied(order.worker, in_short(error)))

    def _finished(self, order: ev.Prepare, meta: BlockMeta, arrays_ref: Any) -> None:
        if not self.core.tasks.has(order.task):
            return  # the task was given to another worker meanwhile, or nobody wants the block any more
        if (away := meta.away) is not None:
            self.send(ev.PutOff(order.task, f"storage does not give {away.uri}: {away.reason}"))
            return
        held = None
        if meta.slot is not None and (held := slots.hold(meta.slot)) is None:
            if self._slot_use.lost():
                self._note_slots(f"the coordinator cannot read what {order.worker} made in memory of its own")
            self._spawn(self._make(order, in_slots=False))
            return
        if held is not None:
            self._slot_use.held()
        self._progress += 1
        self._counters.finished(order.worker, meta, self._info.order)
        fatal = self._info.settings.on_bad_sample == "raise" and meta.bad
        node = self.core.tasks.workers[order.worker].node
        refs = [] if fatal else [arrays_ref if held is None else held]
        told = replace(meta, slot=None, fetched=FetchCounts())  # these are for the coordinator alone
        part = DeliveredPart(told, refs, order.part, order.task, node, order.block_part)
        self._staged.setdefault(order.block, {})[order.part] = part
        error = str(BadSampleError(meta.bad[0].uri, meta.bad[0].reason)) if fatal else None
        self.send(ev.TaskEnded(order.task, error, lacks=bool(meta.bad) and not fatal))
        floor = min((blocks.start for blocks in self.core.consumers.wanted()), default=0)
        self._counters.forget_below(self.lane.feed_block(floor))


def _lent(part: DeliveredPart) -> DeliveredPart:
    """Return a part as consumers get it: the service keeps its references until they have let go of it."""
    return replace(part, refs=[ref.slot if isinstance(ref, HeldSlot) else Uncounted(ref) for ref in part.refs])


class ConsumerApi(abc.ABC):
    """The calls of consumers, which every coordinator of a feed takes.

    What they bring is checked first (`mbaas.core.calls`): each raises ConfigError for a value that cannot be.

    Args:
        spawn: runs a coroutine in the background.
    """

    def __init__(self, spawn: Spawn) -> None:
        self._node = ray.get_runtime_context().get_node_id()
        ask = partial(self.ask, over_socket=True)
        self._local_calls = LocalCalls(ask, spawn)
        self._relayed_calls = RelayedCalls(ask, spawn, self.relaying)

    @abc.abstractmethod
    async def _until_open(self) -> ConsumerService:
        """Wait until blocks are served here, and return the service.

        Raises:
            FeedFailedError: that is not so in time, or will never be.
        """

    async def join(self, request: JoinRequest) -> Admission:
        """Open a session.

        Raises:
            FeedFailedError: the feed cannot go on.
            StateError: the trial goes on with another number of ranks.
        """
        return (await self._until_open()).join(request)

    async def ask(self, call: list[Any], *, over_socket: bool = False) -> Delivery:
        """Wait until at least one block from a consumer's cursor on is there.

        Args:
            call: a `BlockCall.plain`.
            over_socket: whether it came over a socket; else the answer may tell of one.
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
        """Return where so many consumers of a node may call instead of through Ray."""
        return await self._local_calls.address() if node == self._node else self._relayed_calls.offer(node, consumers)

    @abc.abstractmethod
    async def relaying(self, node: str, may_start: bool) -> Any | None:
        """Find the actor that relays calls on a node, or start one if that may be; None if there is none."""

    async def exchange(self, relay: str, number: int, requests: dict[int, bytes]) -> dict[int, bytes]:
        """Take in calls that consumers of another machine made, and return answers; see `RelayedCalls.exchange`."""
        return await self._relayed_calls.exchange(relay, number, requests)

    async def hand_back(self, consumer: str, session: int, cursor: int, released: int, number: int = 0) -> None:
        """Take back what a consumer was given from ``cursor`` on, until it asks again."""
        event = calls.hand_back(consumer, session, cursor, released, number)
        service = await self._until_open()
        calls.within_reach("cursor", event.cursor, service.core.out_of_reach)
        service.send(event)

    async def is_given_up(self, block: int, parts: list[tuple[int, int]]) -> bool:
        """Whether one of the parts, given as (number, task that made it), is not what the block is made of any more."""
        block, parts = calls.made_parts(block, parts)
        service = await self._until_open()
        return not all(service.core.window.has(block, part, task) for part, task in parts)

    async def heartbeat(self, consumer: str, session: int, released: int, done: int, report: ConsumerReport) -> bool:
        """Renew a consumer's lease; return False if its session is not open any more."""
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
        """End a consumer's session; its place may be held for one of so many ``successors``."""
        event, report = calls.leave(consumer, session, successors), None if report is None else calls.report(report)
        service = await self._until_open()
        if report is not None:
            self._take_report(consumer, report)
        service.send(event)
        if report is not None:
            await self._until_kept(report)

    async def lane_story(self, thing: str) -> LaneStory:
        """Return what this lane knows of a block, a consumer or a prep worker."""
        thing = calls.thing(thing)
        service = await self._until_open()
        return told_by(service.core, service.lane, thing)

    @abc.abstractmethod
    def _take_report(self, consumer: str, report: ConsumerReport) -> None:
        """Enter what a consumer says of itself; only the first lane has a use for it."""

    @abc.abstractmethod
    async def _until_kept(self, report: ConsumerReport) -> None:
        """Wait until the ledgers of a report are kept. A loader that gets no answer sends them again."""
