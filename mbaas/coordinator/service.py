"""The shell around the staging core of a feed.

`ConsumerService` translates calls and completions into events for the core, and the core's instructions into calls. In
Ray the caller of a method owns its result. The coordinator calls ``prepare``, so it owns the staged blocks, and they
outlive the workers that made them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from msgspec import Struct
from msgspec.structs import replace

from mbaas.calls.server import Spawn
from mbaas.coordinator.background import Driver, InternalErrors, answer_or_none
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.own_pipelines import OwnPipelines
from mbaas.coordinator.recovery import EpochWriter
from mbaas.coordinator.supervision import Supervision
from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.core.cluster import events as cluster
from mbaas.core.kept_form import FEED_PIPELINE, Forms
from mbaas.core.staging import calls, explain
from mbaas.core.staging import events as ev
from mbaas.core.staging.rooms import SlotUse
from mbaas.core.staging.state import StagingState
from mbaas.core.staging.streams import FEED_STREAM, Stream, in_core, stream_number
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
from mbaas.ray_cluster import store
from mbaas.ray_cluster.bugs import in_short, is_bug
from mbaas.samples.order import Shuffle
from mbaas.samples.placement import BlockPart, PartRequest
from mbaas.wire.blocks import BlockMeta, DeliveredBlock, DeliveredPart, PartMeta
from mbaas.wire.consumers import Admission, Delivery, FeedInfo, JoinRequest

SessionCallT = TypeVar("SessionCallT", ev.Ask, ev.HandBack, ev.Heartbeat)

MOVE_S = 40.0
"""Longest time to copy a part to another node, in seconds. The cache node that copies it gives up sooner."""

ANSWER_S = 1.0
"""Timeout for the second result of a failed task, which arrives together with the first."""

JOINED_ELSEWHERE = (
    "joined again elsewhere; trials that run at the same time need names of their own: call mbaas.get_loader in each "
    "trial, or mbaas.join with another name"
)

IF_BAD = 'serve the feed with on_bad_sample="skip" to leave out such samples, or list them all with mbaas check'


class StagedPart(Struct, frozen=True):
    """A part of a staged block; all but ``memory`` is as in `DeliveredPart`."""

    meta: PartMeta
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
    """Serves the blocks of a feed.

    Args:
        supervision: the feed's workers, cache nodes and placements.
        written: as for `StagingState`.

    Attributes:
        core: the staging state.
        pipelines: the pipelines that consumers brought.
        send: passes an event to it, carries out its instructions, and returns them.
    """

    def __init__(
        self,
        info: FeedInfo,
        supervision: Supervision,
        *,
        counters: Counters,
        errors: InternalErrors,
        spawn: Spawn,
        written: Mapping[int, Shuffle] | None,
    ) -> None:
        self._info, self._supervision = info, supervision
        self._counters, self._errors, self._spawn = counters, errors, spawn
        layout = supervision.layout
        self._forms = layout.forms
        self.pipelines = OwnPipelines(info, supervision, self._count_trials)
        self.core = StagingState(
            layout.limits(info.settings),
            info.order.blocks_per_epoch,
            layout.block_bytes,
            self._cut,
            keeps_all=layout.keeps_all,
            block_samples=info.order.block_samples,
            is_shuffled=info.order.shuffled,
            written=written,
        )
        self.send = Driver(self.core, self._carry_out, errors).send
        self._writer = EpochWriter(info.settings.name, info.fingerprint, tell=self.send, errors=errors, spawn=spawn)
        self._staged: dict[int, StagedBlock] = {}
        self._copies: dict[int, tuple[PartMemory, str]] = {}  # move number -> the copy and its node, until it is used
        self._calls: dict[str, _Call] = {}
        self._sessions = time.time_ns() // 1_000_000  # above the sessions of an earlier coordinator
        self._progress = 0
        self._slot_use = SlotUse(ray.get_runtime_context().get_node_id())

        for stream in self.pipelines.recall():
            self.send(ev.OpenStream(stream))

    def _count_trials(self) -> int:
        return len({each.trial for each in self.core.consumers.by_name.values()})

    def _cut(self, block: int, shuffle: Shuffle) -> Sequence[BlockPart]:
        stream = self.core.streams.of(block)
        placements = self._supervision.caches.placements
        return placements.parts(stream.local(block), shuffle, self._block_samples(stream.number))

    def _block_samples(self, stream: int) -> int:
        own = self.pipelines.own(stream)
        return 0 if own is None else own.block_samples

    # ---- requests of consumers ----

    async def add_pipeline(self, fingerprint: str, payload: bytes) -> FeedInfo:
        """Add a consumer's own pipeline; see `ConsumerApi.add_pipeline`."""
        stream = await self.pipelines.add(fingerprint, payload)
        if stream is not None:
            self.send(ev.OpenStream(stream))
            own = self.pipelines.info(stream.number)
            self._counters.note(f"pipeline {stream.number} is {own.pipeline[:8]}: {own.difference}")
        return self.pipelines.info(self.pipelines.number_of(fingerprint))

    def forms_in_use(self) -> dict[str, Forms]:
        """Return the decoded forms of each pipeline that consumers use now, by fingerprint; "" is the feed's own."""
        consumers = self.core.consumers.by_name.values()
        used = {stream_number(each.cursor) for each in consumers if each.session}
        found = {FEED_PIPELINE: self._forms} if FEED_STREAM in used else {}
        for own in filter(None, map(self.pipelines.own, sorted(used - {FEED_STREAM}))):
            found[own.fingerprint] = own.report.probe.decoded
        return found

    def join(self, request: JoinRequest) -> Admission:
        """Open a session; see `ConsumerApi.join`."""
        stream = self.core.streams[self.pipelines.number_of(request.pipeline)]
        info, reach = self.pipelines.info(stream.number), self.core.out_of_reach(stream.number)
        session = self._sessions + 1
        event = calls.join(request, session, order=info.order, out_of_reach=reach, stream=stream.number)
        self._sessions, consumer = session, event.consumer
        # A pending call under this name belongs to the session that ends now, possibly in another program.
        self._answer(consumer, Delivery(error=StateError(f"consumer {consumer!r} {JOINED_ELSEWHERE}")))
        for instruction in self.send(in_core(event, stream)):
            if isinstance(instruction, ev.Admitted):
                cursor, own_epoch = stream.local(instruction.cursor), instruction.own_epoch.moved(-stream.first)
                return Admission(instruction.session, cursor, own_epoch, info)
            if isinstance(instruction, ev.Refuse) and self.core.failed is None:
                raise StateError(f"consumer {consumer!r} cannot join: {instruction.reason}")
        raise FeedFailedError(self.core.failed or f"consumer {consumer!r} was not admitted")

    async def ask(self, event: ev.Ask, poll_s: float) -> Delivery:
        """Wait for blocks; see `ConsumerApi.ask`."""
        consumer, event = event.consumer, self.in_core(event)
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

    def stream_of(self, consumer: str, session: int) -> Stream:
        """Return the stream that a session reads; that of the feed's pipeline for an unknown session."""
        found = self.core.consumers.session(consumer, session)
        return self.core.streams[FEED_STREAM] if found is None else self.core.streams.of(found.cursor)

    def in_core(self, call: SessionCallT) -> SessionCallT:
        """Return a call of a session with the block numbers of the core."""
        return in_core(call, self.stream_of(call.consumer, call.session))

    def part_unreadable(self, event: ev.UnreadablePart) -> None:
        """Have a part made again after a consumer could not read it."""
        part = self._staged_part(self.core.window.staged_as(event.block), event.part)
        is_in_slot = part is not None and part.task == event.task and part.memory.is_in_live_worker
        # Unreadable slots are expected after a worker died, or when the consumer is on another node.
        stream = self.core.streams.of(event.block)
        if is_in_slot and self._most_slots(stream) and self._slot_use.give_up():
            self._note_slots("a consumer cannot read a worker's memory")
        self.send(event)

    def _staged_part(self, block: int, number: int) -> StagedPart | None:
        staged = self._staged.get(block)
        return None if staged is None else staged.parts.get(number)

    def explain_wait(self, consumer: str) -> str:
        """Return one clause that explains the wait of a consumer."""
        return explain.wait(self.core, consumer, self._supervision.waits_for())

    # ---- instructions ----

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
                self._counters.dropped(instruction.block, for_room=instruction.for_room)
                if instruction.anew:
                    self._counters.forget(instruction.block)
            case ev.CloseStream():
                name = self.pipelines.forget(instruction.stream)
                self._counters.forget_stream(instruction.stream)
                self._spawn(asyncio.to_thread(store.delete, self._info.settings.name, name))
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
                self._supervision.handle(cluster.WorkerDied(instruction.worker, instruction.reason, instruction.blame))
            case ev.ReleaseWorker():
                self._supervision.handle(cluster.WorkerDone(instruction.worker))
            case ev.RemoveConsumer() | ev.Refuse():
                self._expel(instruction.consumer, instruction.session, self._why_expelled(instruction))
            case ev.Note():
                self._counters.note(instruction.text)
        if isinstance(instruction, ev.RemoveConsumer):
            self._counters.note(f"{instruction.consumer} was removed: {instruction.reason}")

    def _delivered(self, number: int) -> DeliveredBlock:
        staged_as = self.core.window.staged_as(number)
        staged, error = self._staged.get(staged_as, StagedBlock()), self.core.window.blocks[staged_as].error
        shuffle = self.core.epochs.shuffle_of(number)
        local = self.core.streams.of(number).local(number)
        if error is None:
            parts = tuple(part.delivered() for _, part in sorted(staged.parts.items()))
            return DeliveredBlock(local, shuffle, parts)
        return DeliveredBlock(local, shuffle, (), self._failure_of(number, staged, error))

    def _failure_of(self, number: int, staged: StagedBlock, error: str) -> MbaasError:
        if staged.failures:
            return staged.failures[min(staged.failures)]
        stream = self.core.streams.of(number)
        first, end = self.pipelines.info(stream.number).order.span(stream.local(number))
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
            return StateError(f"consumer {consumer!r} {JOINED_ELSEWHERE}")
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
        worker = self._supervision.worker(order.worker)
        if worker is None:
            return  # the core will receive its death shortly and reassign the part
        block, stream = order.block, self.core.streams.of(order.block)
        own = self.pipelines.own(stream.number)
        forms = self._forms if own is None else own.report.probe.decoded if self._forms else ()
        request = PartRequest(
            stream.local(block),
            order.block_part,
            order.shuffle,
            self._block_samples(stream.number),
            tuple(each.form for each in forms),
        )
        # With "raise" no consumer ever got this block without its bad samples, so prepare every sample again.
        skips = self._info.settings.on_bad_sample == "skip"
        left_out = self._counters.left_out(block) if skips else ()
        meta_ref, arrays_ref = worker.actor.prepare.remote(
            self._info.settings.name,
            request,
            left_out,
            self._most_slots(stream) if in_slots else 0,
            None if own is None else own.fingerprint,
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

    def _most_slots(self, stream: Stream) -> int:
        workers = (worker.node for worker in self.core.tasks.workers.values())
        return self._slot_use.most(workers, self.core.consumers.nodes, self.core.room_blocks(stream))

    def _note_slots(self, why: str) -> None:
        self._counters.note(f"blocks go through the object store from now on: {why}")

    async def _move(self, order: ev.MovePart) -> None:
        """Copy a part to another node, as an object that this coordinator owns."""
        part, cache = self._staged_part(order.block, order.part), self._supervision.caches.actors.get(order.node)
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

    def _tell_of(self, worker: WorkerHandle, event: cluster.Event) -> None:
        # A late result of a call to an earlier worker of the same name must not be reported for the new one.
        newest = self._supervision.worker(worker.name)
        if newest is None or newest.pid == worker.pid:
            self._supervision.handle(event)

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
        info = self.pipelines.info(self.core.streams.of(order.block).number)
        self._counters.finished(order.worker, order.block, meta, info.order)
        staged, error = self._staged.setdefault(order.block, StagedBlock()), None
        if meta.bad and self._info.settings.on_bad_sample == "raise":
            staged.failures[order.part] = failure = BadSampleError(meta.bad[0].uri, meta.bad[0].reason, IF_BAD)
            error = str(failure)
        else:
            node = self.core.tasks.workers[order.worker].node
            needed = PartMeta(meta.samples, meta.bad, meta.fetch_s, meta.prep_s, meta.nbytes)
            staged.parts[order.part] = StagedPart(needed, memory, order.part, order.task, node, order.block_part)
        # Decoding for the cache is work for all: whoever comes first would otherwise pay for the others.
        work_s = meta.prep_s * max(0.0, 1 - meta.kept / max(1, meta.samples))
        self.send(ev.TaskEnded(order.task, error, bool(meta.bad) and error is None, work_s))
        self._counters.forget_below(self.core.lowest_blocks)
