"""Staging state machine of one feed: which blocks to prepare, deliver, keep and drop.

A feed is an endless stream of blocks (see `mbaas.samples.order.SampleOrder`), and a consumer is a cursor on it. Each
further pipeline that consumers use has a stream of its own (`mbaas.core.staging.streams`). This module turns events
into instructions. It uses no clock, threads, randomness, files or Ray calls. Guarantees:

- Every consumer receives each block of its epoch exactly once and in order, even if workers or other consumers fail.
- A block is prepared once per cohort. Exceptions: a worker died, the budget evicted an undelivered block, or a consumer
  was detached from its cohort.
- Granted bytes never exceed the budget.
- A waiting consumer makes progress as long as a worker is alive and other consumers do not hold the whole budget.

Coordinated prep follows CoorDL (VLDB 2021, section 5.3). CoorDL counts the uses of each minibatch; mbaas uses cursors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mbaas.base import units
from mbaas.core.cluster.supervisor import PROBE_S
from mbaas.core.layout import StagingLimits
from mbaas.core.peer_idle import PeerIdle
from mbaas.core.staging import events as ev
from mbaas.core.staging import pace, rooms
from mbaas.core.staging.beginnings import Beginnings
from mbaas.core.staging.consumers import Cohort, Consumer, ConsumerTable
from mbaas.core.staging.epochs import EpochTable
from mbaas.core.staging.keeping import Keeping
from mbaas.core.staging.moving import PartMoves
from mbaas.core.staging.regrouping import Regrouping
from mbaas.core.staging.reservations import Arrivals
from mbaas.core.staging.rooms import Holding
from mbaas.core.staging.scheduling import Assignment, Scheduler
from mbaas.core.staging.streams import FEED_STREAM, Stream, StreamTable, block_name, shown_block, stream_number
from mbaas.core.staging.tasks import Task, TaskTable, Worker
from mbaas.core.staging.transitions import BlockState, ConsumerState, PartState
from mbaas.core.staging.turns import Charge, Progress, Turns
from mbaas.core.staging.window import StagedBlock, Window
from mbaas.core.story import InvariantError, Stories, Story
from mbaas.samples.order import ASIDE, Shuffle
from mbaas.samples.placement import WHOLE, BlockPart

Cut = Callable[[int, Shuffle], Sequence[BlockPart]]
"""(block number, shuffle of its epoch) -> the block's parts, at least one."""

PUT_OFF_S = 1.0
"""Pause before a part is retried when storage does not return a sample. The cache node waits longer between its own
attempts, and answers immediately during its pauses.
"""

VERDICT_S = PROBE_S + 2.0
"""Pause of a block after too many workers died on it. The node may have died instead of the worker; probing the cache
on that node takes up to `PROBE_S`.
"""

WORKER_FAILURES = 2
"""Consecutive failed tasks after which a worker is replaced. Some errors persist in a process (GPU errors, state left
inconsistent by a bug), and such a worker would fail every block. A single error may be the block's fault or temporary.
"""


MOST_AHEAD_EPOCHS = 1 << 20
"""Largest lead of a consumer over the newest started epoch; one further ahead starts where the others are."""

UNUSED_S = 60.0
"""A stream ends after this time without consumers. Trials that a search restarts find it within that time."""

REST_AFTER_S = 1.0
"""A consumer between two of its epochs stops blocking others after max(this, 2 x its longest step) without a request.
Within that time, trials of similar pace start their next epochs together.
"""


class StagingState:
    """Staging state of one feed; see the module docstring.

    Args:
        limits: bounds on bytes, distances and times.
        blocks_per_epoch: blocks in one epoch, at least 1.
        block_bytes: block number -> staged size in bytes, at most ``limits.budget_bytes``.
        block_samples: samples per block; the last block of an epoch may have fewer.
        is_shuffled: whether epochs are shuffled; otherwise all have the dataset's order.
        cut: returns the parts of a block, which different nodes prepare; default: one part.
        keeps_all: whether all epochs are identical and one epoch fits the budget. Each block is then prepared once and
            kept, so no consumer waits for another.
        written: epoch -> shuffle, as persisted by an earlier coordinator; None if shuffles are not persisted.

    Attributes:
        next_epoch: first epoch that was never started; where a feed without consumers continues.
        failed: reason why the feed failed; the state is frozen afterwards.
    """

    def __init__(
        self,
        limits: StagingLimits,
        blocks_per_epoch: int,
        block_bytes: Callable[[int], int],
        cut: Cut = lambda _block, _shuffle: (WHOLE,),
        *,
        keeps_all: bool = False,
        block_samples: int = 1,
        is_shuffled: bool = True,
        written: Mapping[int, Shuffle] | None = None,
    ) -> None:
        self.limits = limits
        self.blocks_per_epoch = blocks_per_epoch
        self.stories = Stories()
        self.streams = StreamTable(
            Stream(FEED_STREAM, blocks_per_epoch, block_samples, block_bytes, keeps_all=keeps_all)
        )
        self.epochs = EpochTable(self.streams, is_shuffled=is_shuffled, written=written)
        self.window = Window(limits.budget_bytes, self.stories, self.streams)
        self.consumers = ConsumerTable(self.epochs, limits.ahead_blocks, self.stories, slack_blocks=limits.slack_blocks)
        self.tasks = TaskTable(self.stories)
        self.beginnings = Beginnings(self.consumers, self.window)
        self._regrouping = Regrouping(self.consumers, self.beginnings)
        self.keeping = Keeping(self.consumers, self.window, self.beginnings)
        self.next_epoch = max([number + 1 for number in written or () if number < ASIDE], default=0)
        self.failed: str | None = None
        self._cut = cut
        self._turns = Turns(self.consumers.trials_in)
        self._charged: dict[int, Charge] = {}  # task -> charge to its stream, in advance
        self._unused_since: dict[int, float] = {}  # stream without consumers -> since when
        self._scheduler = Scheduler(
            self.consumers,
            self.tasks,
            self.window,
            self.keeping,
            self._turns,
            cut=self._begin_block,
            drop=self._drop,
            evict=partial(self._drop, for_room=True),
        )
        self._moves = PartMoves(self.window, self.tasks)
        self._arrivals = Arrivals(self.consumers, self.beginnings, limits.timeouts.reservation_s)
        self._peer_idle = PeerIdle(self.consumers, self.keeping.could_free)
        self._out: list[ev.Instruction] = []
        self._changed_nothing: bool  # True if no follow-up is needed after the event

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Process one event and return the resulting instructions, in order; InvariantError signals a bug."""
        self._changed_nothing = False
        self._out = []  # a new list: the shell may still be iterating over the previous one
        self.stories.now, self.stories.cause = now, event
        if self.failed is None:
            self._dispatch(event, now)
            # Most events of a large feed are heartbeats and ticks without effect.
            if self.failed is None and not self._changed_nothing:
                self._follow_up(now)
        elif isinstance(event, ev.Join | ev.Ask):  # callers that wait need the reason
            self._refuse(event, self.failed)
        return self._out

    @property
    def instructions(self) -> list[ev.Instruction]:
        """Instructions of the current event so far. After a bug, these must still be carried out."""
        return self._out

    def _dispatch(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.WorkerUp():
                self.tasks.worker_up(event.worker, event.credit, event.node)
            case ev.WorkerDown():
                self._worker_down(event.worker, event.reason, now, blame=event.blame)
            case ev.WorkerLeaves():
                self.tasks.worker_leaves(event.worker)
            case ev.NodeDown():
                self._node_down(event.node, event.reason)
            case ev.NodeLeaves():
                self._moves.leaving.add(event.node)
            case ev.NodeStays():
                self._moves.node_stays(event.node)
            case ev.PartMoved():
                self._part_moved(event.move)
            case ev.PartStays():
                self._moves.end(event.move, is_there=False)
            case ev.UnreadablePart():
                self._part_unreadable(event)
            case ev.TaskEnded():
                self._task_ended(event, now)
            case ev.PutOff():
                self._put_off(event, now)
            case ev.TaskFailed():
                self._task_failed(event, now)
            case ev.Announce():
                self._announce(event, now)
            case ev.OpenStream():
                self._open_stream(event.stream, now)
            case ev.Join():
                self._join(event, now)
            case ev.Ask():
                self._ask(event, now)
            case ev.HandBack():
                self._hand_back(event)
            case ev.Heartbeat():
                self._heartbeat(event, now)
            case ev.PacesMeasured():
                self._part_by_pace(event, now)
                self._changed_nothing = not self._out
            case ev.Leave():
                self._leave(event, now)
            case ev.EpochsWritten():
                self.epochs.note_written(event.epochs)
            case ev.Stop():
                self._stop(event.reason)
            case ev.Tick():
                self._tick(now)

    def _stop(self, reason: str) -> None:
        # The state is frozen from here on.
        self.failed = reason
        consumers, workers, blocks = self.consumers.by_name, self.tasks.workers, self.window.blocks
        stories: list[Story] = [thing.story for table in (consumers, workers, blocks) for thing in table.values()]
        for story in stories:
            story.tell("the feed ended: {}", reason)
        for consumer in self.consumers.by_name.values():
            if consumer.waiting:
                self._out.append(ev.Refuse(consumer.name, consumer.session, reason))

    # ---- consumers ----

    def _announce(self, event: ev.Announce, now: float) -> None:
        fresh = self._fresh_start()
        self._arrivals.announce(event.consumer, event.others, now, fresh=fresh, epoch_s=self._epoch_s)

    @property
    def _epoch_s(self) -> float:
        return self.blocks_per_epoch / self.consumers.prep_per_s if self.consumers.prep_per_s else 0.0

    @property
    def has_all(self) -> bool:
        """True if every block that consumers can request is staged and kept, so that prep has no work left."""
        blocks, feed = self.window.blocks.values(), self.streams[FEED_STREAM]
        if not feed.keeps_all or len(self.streams) > 1:
            return False
        return len(blocks) == feed.blocks_per_epoch and all(block.is_ready for block in blocks)

    def out_of_reach(self, stream: int = FEED_STREAM) -> range:
        """Return the block numbers within a stream where no consumer may be: far beyond it, below the side epochs."""
        first, length = self.next_epoch + MOST_AHEAD_EPOCHS + 1, self.streams[stream].blocks_per_epoch
        return range(first * length, ASIDE * length)

    def _fresh_start(self, stream: int = FEED_STREAM) -> int:
        # First block of the first epoch that was never started. Consumers may have seen parts of earlier epochs.
        return self.streams[stream].begin_of(self.next_epoch)

    def _open_stream(self, stream: Stream, now: float) -> None:
        if stream.number not in self.streams:
            self.streams[stream.number] = stream
            self._unused_since[stream.number] = now

    def _close_streams(self, now: float) -> None:
        used = {stream_number(consumer.cursor) for consumer in self.consumers.by_name.values()}
        used.update(map(stream_number, self.window.blocks))
        for stream in sorted(self.streams.keys() - {FEED_STREAM}):
            if stream in used:
                self._unused_since.pop(stream, None)
            elif now - self._unused_since.setdefault(stream, now) >= UNUSED_S:
                del self._unused_since[stream]
                del self.streams[stream]
                self._turns.forget(stream)
                self._out.append(ev.CloseStream(stream))

    def _join(self, event: ev.Join, now: float) -> None:
        old = self.consumers.by_name.get(event.consumer)
        # The shell numbers sessions in the order of joins, so a smaller number comes from an overtaken call.
        if old is not None and old.session >= event.session:
            self._refuse(event, f"session {old.session} of {event.consumer!r} is newer")
            return
        if event.stream not in self.streams:
            self._refuse(event, "its pipeline is not known any more")
            return
        if not self._ends_other_groups(event):
            return
        at_once = None if event.resumed is not None or event.is_exact else event.now
        place = self._arrivals.join(event.trial or event.consumer, now, at_once=at_once)
        for before in (old, place):
            if before is not None and before.state is not ConsumerState.GONE:  # one object, or just ended
                self.consumers.exit(before, f"session {event.session} of {event.consumer} takes its place")
        cohort, cursor, own_epoch = self.beginnings.of(event, place, self._fresh_start(event.stream))
        lease = now + self.limits.timeouts.lease_s
        joined = self.consumers.enter(
            event.consumer, event.session, cohort, cursor, lease, ConsumerState.BUSY, own_epoch, event.trial
        )
        joined.exact, joined.since = event.start if event.is_exact else None, now
        joined.world_size, joined.node, joined.born = event.world_size, event.node, event.born
        joined.is_announced = place is not None
        self._out.append(ev.Admitted(event.consumer, event.session, cursor, own_epoch))

    def _ends_other_groups(self, event: ev.Join) -> bool:
        # Sessions of an earlier run of the trial, with another number of ranks, have other names than the new ones.
        # Until their leases ended, they would block the restarted trial. If this consumer belongs to that run, it is
        # refused.
        others = [
            consumer
            for consumer in self.consumers.of_trial(event.trial or event.consumer)
            if consumer.session and consumer.world_size != event.world_size
        ]
        younger = next((consumer for consumer in others if consumer.born > event.born), None)
        if younger is not None:
            self._refuse(event, f"trial {younger.trial!r} was started again later, with {_ranks(younger.world_size)}")
            return False
        for consumer in others:
            reason = f"trial {consumer.trial!r} goes on with {_ranks(event.world_size)}"
            self._remove(consumer, reason)
        return True

    def _remove(self, consumer: Consumer, reason: str) -> None:
        self._out.append(ev.RemoveConsumer(consumer.name, consumer.session, reason))
        self.consumers.exit(consumer, reason)

    def _ask(self, event: ev.Ask, now: float) -> None:
        consumer = self._open_session(event)
        if consumer is None:
            return
        again = 0 < event.number == consumer.heard  # a repeated call; its first answer may not have arrived
        if consumer.was_overtaken(event.number):
            return
        if again and event.cursor < max(consumer.released, consumer.done):
            return  # the first answer did arrive: a later heartbeat reported that block as finished
        if event.cursor < consumer.released:  # its blocks may be dropped and re-prepared with other contents
            asked, released = shown_block(event.cursor), shown_block(consumer.released)
            reason = f"it asked for block {asked} after it let go of all blocks below {released}"
            self._refuse(event, reason)
            return
        cohort = self.consumers.cohorts[consumer.cohort]
        if event.began is not None and not 0 <= event.cursor - event.began <= cohort.stream.blocks_per_epoch:
            asked, began = shown_block(event.cursor), shown_block(event.began)
            reason = f"it asked for block {asked} in an epoch of its own that began with block {began}"
            self._refuse(event, reason)
            return
        consumer.deadline = now + self.limits.timeouts.lease_s
        # A consumer that went back to a block that its cohort passed cannot continue there.
        is_lost = event.cursor < consumer.cursor and not self.window.has_all(range(event.cursor, cohort.slowest))
        consumer.go_to(event.cursor, again=again)
        consumer.let_go(event.released, event.done)
        if event.unheld is not None:
            consumer.let_go_between(*event.unheld)
        ends = consumer.cursor >= consumer.own_epoch.end
        if ends and consumer.moves and self.epochs.is_aside(consumer.cursor):
            self._refuse(event, "it has the rest of its epoch, and joins the others")
            self.consumers.exit(consumer, "it has the rest of its epoch, and joins the others")
            return
        if not self.consumers.update_own_epoch(consumer, event.began):
            self._refuse(event, "the rest of its epoch is made for it alone: it was not known where that began")
            self.consumers.exit(consumer, "it continues in a side epoch")
            return
        if is_lost or consumer.state is ConsumerState.RESTING:
            self._regrouping.go_on(consumer)
        self._try_anew(consumer)
        if consumer.state is ConsumerState.BUSY:
            # Pauses between epochs do not count as steps.
            within = consumer.asked and consumer.cursor > consumer.own_epoch.first
            consumer.longest_s = max(consumer.longest_s, now - consumer.since) if within else 0.0
        if not consumer.waiting:  # a repeated call keeps its turn
            consumer.transition(ConsumerState.WAITING)
            consumer.since = now
        consumer.want = event.want
        self._peer_idle.asked(consumer, now)
        met = self._regrouping.merge(consumer)
        consumer.asked = True
        if met is not None:
            self._out.append(ev.Note(met))

    def _hand_back(self, event: ev.HandBack) -> None:
        consumer = self._open_session(event)
        if consumer is not None and not consumer.was_overtaken(event.number):
            # Finished blocks cannot be returned: the trial has trained on them.
            consumer.let_go(min(event.released, event.cursor), consumer.done)
            consumer.go_to(max(event.cursor, consumer.released, consumer.done))
            if consumer.waiting:
                consumer.transition(ConsumerState.BUSY, "it gave up its call")

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> None:
        consumer = self._open_session(event)
        if consumer is not None:
            consumer.deadline = now + self.limits.timeouts.lease_s
        self._changed_nothing = consumer is None or not consumer.let_go(event.released, event.done)

    def _leave(self, event: ev.Leave, now: float) -> None:
        if event.session is None:  # Tune or the user ended the trial, with all of its ranks
            leaving = self.consumers.of_trial(event.consumer)
        else:
            consumer = self.consumers.session(event.consumer, event.session)
            leaving = [] if consumer is None else [consumer]
        # Reserve first: the cohort and its staged blocks would end with the last consumer.
        self._arrivals.leave(leaving, event.successors, now, epoch_s=self._epoch_s)
        for consumer in leaving:
            self.consumers.note_leaving(consumer)
            self.consumers.exit(consumer, "it left")

    def _open_session(self, event: ev.Ask | ev.HandBack | ev.Heartbeat) -> Consumer | None:
        consumer = self.consumers.session(event.consumer, event.session)
        if consumer is None:
            self._refuse(event, self.consumers.why_unknown(event.consumer, event.session))
        return consumer

    def _refuse(self, event: ev.Join | ev.Ask | ev.HandBack | ev.Heartbeat, reason: str) -> None:
        self._out.append(ev.Refuse(event.consumer, event.session, reason))

    # ---- workers and tasks ----

    def _replace(self, worker: Worker, reason: str, *, blame: bool) -> None:
        # The supervisor ends it and says so (`WorkerDown`); until then it gets no tasks.
        self.tasks.worker_failed(worker.name, reason)
        self._out.append(ev.ReplaceWorker(worker.name, reason, blame=blame))

    def _worker_down(self, name: str, reason: str, now: float, *, blame: bool) -> None:
        worker = self.tasks.workers.get(name)
        if worker is None:
            return  # the same death may be reported twice
        tasks = self.tasks.worker_down(name)
        if blame and tasks:  # the oldest task is the one in progress
            self.tasks.charge(tasks[0], worker.node, reason, now)
        for task in tasks:
            self._discharge(task, None)
            self._out.append(ev.Note(f"{name} is gone ({reason}): {block_name(task.block)} will be made again"))
            block = self.window.blocks[task.block]
            if self._is_deadly(task.block):
                block.put_off(task.part, now + VERDICT_S, "too many prep workers died over it")
            else:
                block.reopen(task.part, f"{name} is gone: {reason}")

    def _is_deadly(self, number: int) -> bool:
        return len(self.tasks.deaths.get(number, ())) >= self.limits.max_deaths

    def _condemn(self, now: float) -> None:
        # Fail blocks that too many workers died on, unless their nodes died: bad data or bad code. The feed continues.
        for number, deaths in self.tasks.deaths.items():
            is_due = self._is_deadly(number) and now >= deaths[self.limits.max_deaths - 1].at + VERDICT_S
            if is_due and self.window.blocks[number].state is not BlockState.FAILED:
                why = f"{units.counted(len(deaths), 'prep worker')} died over it; the last one: {deaths[-1].reason}"
                # A retry would cost another worker. It is worthwhile only with `keeps_all`, where the block would
                # otherwise fail in all epochs.
                self.window.fail(number, why, may_mend=self.streams.of(number).keeps_all)

    def _node_down(self, node: str, reason: str) -> None:
        # The node's death is not a block's fault, so deaths on this node no longer count. Workers come first: their
        # parts are MAKING, parts stored on the node are READY, and both must become OPEN.
        for worker in [w for w in self.tasks.workers.values() if w.node == node]:
            for task in self.tasks.worker_down(worker.name):
                self._discharge(task, None)
                self.window.blocks[task.block].reopen(task.part, f"{worker.name} is gone: {reason}")
        for number in self.tasks.forgive(node):
            if not self._is_deadly(number):
                self.window.blocks[number].resume(math.inf)
        self._moves.node_gone(node)
        blocks = len(self.window.reopen_node(node))
        again = f"its parts of {units.counted(blocks, 'staged block')} will be made again"
        self._out.append(ev.Note(f"node {node} is gone ({reason}): {again}"))
        # Remove its consumers now: others would wait for them until their leases end. A consumer that survives on a
        # disconnected node joins again at its position.
        for consumer in [consumer for consumer in self.consumers.by_name.values() if consumer.node == node]:
            self._remove(consumer, f"its node is gone: {reason}")

    def _part_moved(self, number: int) -> None:
        move = self._moves.end(number, is_there=True)
        if move is None:
            return
        # A new task number: a consumer that cannot read the original, because its node is gone, reports the old number.
        # This must not discard the copy.
        task = self.tasks.number()
        self.window.blocks[move.block].lies_elsewhere(move.part, move.target, task)
        self._out.append(ev.UsePart(number, move.block, move.part, task))

    def _part_unreadable(self, event: ev.UnreadablePart) -> None:
        block = self.window.find(event.block)
        if block is None or event.part >= len(block.parts) or block.parts[event.part].task != event.task:
            return  # dropped or prepared again since the consumer received it
        # MAKING, OPEN or PUT_OFF: an earlier report already reopened it.
        if block.parts[event.part].state is PartState.READY:
            block.reopen(event.part, "a consumer could not read it")
            self._out.append(ev.Note(f"a part of {block} cannot be read any more: it will be made again"))

    def _task_ended(self, event: ev.TaskEnded, now: float) -> None:
        since = self.tasks.since(event.task)
        task = self.tasks.finish(event.task, now)
        if task is None:
            return  # its worker was replaced; the part belongs to another task now
        self._discharge(task, now - since if event.work_s is None else event.work_s)
        block = self.window.blocks[task.block]
        if event.error is None:
            self.tasks.failures.pop(task.block, None)
            if event.lacks:
                self.window.lacking.add(task.block)
            block.finish(task.part, self.tasks.workers[task.worker].node)
            return
        # Only with on_bad_sample="raise". The block fails as a whole: a minibatch may contain samples of all parts.
        block.reopen(task.part, "a sample is bad")
        if block.state is not BlockState.FAILED:
            self._out.append(ev.Note(event.error))
            self.window.fail(task.block, event.error, may_mend=True)

    def _put_off(self, event: ev.PutOff, now: float) -> None:
        task = self.tasks.finish(event.task, now)
        if task is not None:
            self._discharge(task, None)
            self.window.blocks[task.block].put_off(task.part, now + PUT_OFF_S, event.reason)

    def _task_failed(self, event: ev.TaskFailed, now: float) -> None:
        task = self.tasks.fail(event.task, now)
        if task is None:
            return  # its worker was replaced; the part belongs to another task now
        self._discharge(task, None)
        block, worker = self.window.blocks[task.block], self.tasks.workers[task.worker]
        self._out.append(ev.Note(f"{task.worker} failed on {block}: {event.reason}"))
        # Pause first: the error may be temporary, and other workers may be free by then.
        block.put_off(task.part, now + PUT_OFF_S, f"it is tried again after an error: {event.reason}")
        failures = self.tasks.failures[task.block]
        if failures >= self.limits.max_deaths and block.state is not BlockState.FAILED:
            del self.tasks.failures[task.block]
            # A retry costs no worker, so a consumer that requests the block again triggers one.
            why = f"{failures} tries to prepare it ended in an error; the last one: {event.reason}"
            self.window.fail(task.block, why, may_mend=True)
            worker.failures = 0  # the block is to blame, not the worker
        if worker.failures >= WORKER_FAILURES:
            reason = f"{worker.failures} of its tasks in a row ended in an error; the last one: {event.reason}"
            self._replace(worker, reason, blame=False)

    def _discharge(self, task: Task, took_s: float | None) -> None:
        self._turns.ended(stream_number(task.block), self._charged.pop(task.number), took_s)

    def _try_anew(self, consumer: Consumer) -> None:
        # The data may be repaired. On a consumer's first request the block stays: it would wait for another failure
        # instead of getting the error.
        first, stream = self.window.staged_as(consumer.cursor), stream_number(consumer.cursor)
        for number in [n for n in self.window.failed if n >= first and stream_number(n) == stream]:
            block = self.window.blocks[number]
            if block.may_mend and not block.is_in_hand and consumer.name in block.told:
                self._drop(number, f"{consumer.name} had its error, and asks again")

    # ---- time ----

    def _tick(self, now: float) -> None:
        if not self.consumers.by_name:
            self._arrivals.expect_none()
        rested = False
        for consumer in list(self.consumers.by_name.values()):
            if now >= consumer.deadline:
                self._expire(consumer)
            elif self._is_to_rest(consumer, now):
                self.consumers.rest(consumer)
                rested = True
        # The core has no clock: deadlines take effect only with the shell's ticks. A hanging worker looks like a slow
        # one, so tasks have a deadline; its node and the other workers continue.
        for worker in self.tasks.overdue(now, self.limits.timeouts.prep_s):
            limit = units.seconds(self.limits.timeouts.prep_s)
            reason = f"it made {block_name(worker.tasks[0].block)} for more than {limit}"
            self._replace(worker, reason, blame=True)
        for cohort in list(self.consumers.cohorts.values()):
            self._watch(cohort, now)
        self._close_streams(now)
        self._condemn(now)  # before `resume`, which ends the pause of its part
        resumed = [block.resume(now) for block in self.window.blocks.values()]
        self._changed_nothing = not (self._out or any(resumed) or rested)

    def _is_to_rest(self, consumer: Consumer, now: float) -> bool:
        if consumer.state is not ConsumerState.BUSY or not consumer.is_between_epochs:
            return False
        # A consumer that named its block, or that may not start elsewhere, keeps its position until its first request.
        is_free = consumer.asked or (consumer.moves and consumer.exact is None)
        return is_free and now - consumer.since >= max(REST_AFTER_S, 2 * consumer.longest_s)

    def _expire(self, consumer: Consumer) -> None:
        if consumer.state is not ConsumerState.RESERVED:
            self._remove(consumer, f"it was silent for {units.seconds(self.limits.timeouts.lease_s)}")
            return
        self._arrivals.expire(consumer)
        held = units.seconds(consumer.deadline - consumer.since)
        reason = f"{consumer.name} did not come within {held}: reservation given up"
        self._out.append(ev.Note(reason))
        self.consumers.exit(consumer, reason)

    def _watch(self, cohort: Cohort, now: float) -> None:
        if not self._limited_by_slowest(cohort):
            cohort.held_up = None
            return
        # The patience restarts with every step of the slowest: being slow is allowed, stalling is not.
        if cohort.held_up is None or cohort.held_up[0] != cohort.slowest:
            cohort.held_up = (cohort.slowest, now)
        slowest, since = cohort.held_up
        limits, waited_s = self.limits.timeouts, now - since
        for member in [m for m in cohort.active if m.cursor == slowest]:
            # A loader that is never read still sends heartbeats. It gets as much time as an announced trial.
            never_began = not member.asked and now - member.since >= limits.reservation_s
            if waited_s < limits.patience_s and not never_began:
                continue
            others = ", ".join(other.name for other in cohort.members if other is not member)
            kept = f"kept {others} waiting at {block_name(member.cursor)} for {units.seconds(waited_s)}"
            self.consumers.detach([member], f"it {kept}")
            why = ", and has asked for nothing since it joined" if never_began else ""
            self._out.append(ev.Note(f"{member.name} {kept}{why}: it goes on in a cohort of its own"))

    def _limited_by_slowest(self, cohort: Cohort) -> bool:
        slowest = cohort.slowest
        # If a slowest consumer waits, prep is the limit. A block already assigned to a worker arrives soon.
        slowest_busy = all(m.state is ConsumerState.BUSY for m in cohort.active if m.cursor == slowest)
        waiting = [m.cursor for m in cohort.active if m.waiting and self.epochs.is_written(m.cursor)]
        return slowest_busy and not all(map(self.window.is_on_its_way, waiting))

    def _part_by_pace(self, event: ev.PacesMeasured, now: float) -> None:
        self.consumers.prep_per_s = event.prep_per_s
        for trial in event.trials:
            for consumer in map(self.consumers.by_name.get, trial.consumers):
                if consumer is not None:
                    consumer.blocks_per_s = trial.blocks_per_s
        for cohort in [cohort for stream in self.streams for cohort in self.consumers.cohorts_of(stream)]:
            apart = self._part(cohort, now, pace.SPLIT_AFTER_S)
            while apart is not None:
                apart = self._part(apart, now, 0.0)

    def _part(self, cohort: Cohort, now: float, after_s: float) -> Cohort | None:
        # Returns the new cohort of the slower trials, if a split was worthwhile for ``after_s`` seconds.
        paces = cohort.paces()
        others, prep_per_s = self._regrouping.groups(cohort), self.consumers.prep_per_s
        split = pace.best_split([*paces.values()], others, prep_per_s) if len(paces) > 1 and prep_per_s else None
        if split is None:
            cohort.uneven = None
            return None
        slow = frozenset([*paces][split.faster :])
        if cohort.uneven is None or cohort.uneven[0] != slow:
            cohort.uneven = slow, now
        if now - cohort.uneven[1] < after_s:
            return None
        faster, slower = pace.parted([*paces.values()], split.faster)
        why = (
            f"{units.number(slower.blocks_per_s)} blocks/s instead of {units.number(faster.blocks_per_s)}; the split "
            f"delivers {units.percent(split.gain)} more in total"
        )
        apart = self.consumers.detach([m for m in cohort.active if m.trial in slow], why)
        self._out.append(ev.Note(f"split {apart} from {cohort}: {why}"))
        return apart

    # ---- after every event ----

    def _follow_up(self, now: float) -> None:
        # The order matters: delivery moves cursors, cursors decide which blocks are dropped, and drops free bytes for
        # new work.
        rooms.divide(
            self.consumers.cohorts.values(),
            self.limits.budget_bytes,
            self.limits.ahead_blocks,
            self.limits.slack_blocks,
        )
        if self.window.lacking:
            self._drop_lacking()  # a consumer that takes many blocks at once would get them before it came near
        self._deliver(now)
        self._scheduler.drop_unwanted()
        if self.window.lacking:
            self._drop_lacking()
        for worker in self.tasks.done_leaving():
            self.tasks.worker_down(worker.name)
            self._out.append(ev.ReleaseWorker(worker.name))
        for assignment in self._scheduler.assignments():
            self._assign(assignment, now)
        for number, move in self._moves.begin(self.keeping.lead):
            self._out.append(ev.MovePart(number, move.block, move.part, move.target))
        self._out += [ev.WriteEpochs(page, shuffles) for page, shuffles in self.epochs.take_changed().items()]
        self._peer_idle.look(now, is_idle=self._scheduler.leaves_idle)

    def _deliver(self, now: float) -> None:
        holdings: dict[int, Holding] = {}
        for consumer in self.consumers.by_name.values():
            if not consumer.waiting:
                continue
            # Deliver all consecutive ready blocks, so that a lagging loader makes few calls.
            end = consumer.cursor
            # At the end of its epoch it may pause, or continue elsewhere.
            most = min(consumer.want, consumer.own_epoch.end - consumer.cursor)
            while end - consumer.cursor < most and self.window.is_ready(end) and self.epochs.is_written(end):
                end += 1
            if end > consumer.cursor:
                stream = self.streams.of(consumer.cursor)
                if stream.number not in holdings:
                    starved = self._scheduler.starved
                    room = 0 if starved is not None and starved != stream.number else self.room_blocks(stream)
                    holdings[stream.number] = Holding(self.consumers, stream, room)
                holdable = holdings[stream.number].holdable(consumer, end - consumer.cursor)
                end = consumer.cursor + max(1, holdable)
                blocks = tuple(range(consumer.cursor, end))
                for number in self.window.failed.intersection(map(self.window.staged_as, blocks)):
                    self.window.blocks[number].told.add(consumer.name)
                idle_s = self._peer_idle.given(consumer, now)
                new = self.window.hand_out(blocks)
                self._out.append(ev.Deliver(consumer.name, consumer.session, blocks, idle_s, holdable < 1, new))
                first, last = shown_block(consumer.cursor), shown_block(end - 1)
                consumer.transition(ConsumerState.BUSY, "it is given blocks {} to {}", first, last)
                consumer.cursor, consumer.since = end, now
                consumer.given = max(consumer.given, end)

    def _begin_block(self, number: int) -> Sequence[BlockPart]:
        if not self.epochs.has_begun(number):
            self.epochs.fix(number, self.consumers.own_epochs())
            self._tell_shuffle(number)
            # A block in preparation stays even if unwanted; a newcomer then gets it with the shuffle that it began
            # with.
            held = (consumer.released for consumer in self.consumers.by_name.values())
            self.epochs.forget([number, *self.window.blocks, *held])
        return self._cut(number, self.epochs.shuffle_of(number))

    def _tell_shuffle(self, block: int) -> None:
        stream = self.streams.of(block)
        if block - stream.first < stream.blocks_per_epoch:
            return
        shuffle, before = self.epochs.shuffle_of(block), self.epochs.shuffle_of(block - stream.blocks_per_epoch)
        if shuffle.cuts != before.cuts and not self.epochs.is_aside(block):
            cuts = ", ".join(map(str, shuffle.cuts))
            how = f"within segments cut at {cuts}" if cuts else "all together again"
            self._out.append(ev.Note(f"from epoch {shuffle.epoch} on, samples are shuffled {how}"))

    def _drop_lacking(self) -> None:
        # Each such block is dropped once per epoch. This usually causes no wait: a consumer comes near before it
        # requests it.
        for number in sorted(self.window.lacking):
            block = self.window.blocks[number]
            is_due = self.streams.of(number).keeps_all and block.state is BlockState.READY
            if not is_due or block.given_as is None:
                continue
            if self.consumers.needs_anew(number, block.given_as):
                self._drop(number, "it lacks samples, which may be there in the next epoch", anew=True)

    def _drop(self, block: int, why: str, *, for_room: bool = False, anew: bool = False) -> None:
        self.window.drop(block, why)
        self.tasks.forget(block)
        self._out.append(ev.DropBlock(block, anew, for_room))

    def _assign(self, assignment: Assignment, now: float) -> None:
        worker, number, part = assignment
        # An epoch counts as started from its first block. A consumer that joins after all others left gets the next
        # one.
        if not self.epochs.is_aside(number):
            self.next_epoch = max(self.next_epoch, self.epochs.number_of(number) + 1)
        task = self.tasks.assign(worker, number, part, now)
        block = self.window.blocks[number]
        self._charged[task.number] = self._turns.assigned(stream_number(number), self._progress_of(block))
        block.begin(part, task.number, worker.name)
        shuffle = self.epochs.shuffle_of(number)
        self._out.append(ev.Prepare(task.number, worker.name, number, part, block.parts[part].block_part, shuffle))

    def _progress_of(self, block: StagedBlock) -> Progress | None:
        if self.epochs.is_aside(block.number):
            return None
        stream = self.streams.of(block.number)
        share = 1 / stream.blocks_per_epoch
        position = stream.epoch_of(block.number) + stream.index_of(block.number) * share
        return Progress(position, share, share / len(block.parts))

    # ---- diagnostics ----

    def room_blocks(self, stream: Stream) -> int:
        """Return the blocks of a stream that fit its part of the staging budget."""
        return rooms.room_blocks(stream, self.consumers.cohorts.values(), self.limits.budget_bytes)

    def lowest_blocks(self) -> dict[int, int]:
        """Return stream -> its lowest block that is staged, or that a consumer may request."""
        lowest: dict[int, int] = {}
        for number in [*self.window.blocks, *(c.released for c in self.consumers.by_name.values())]:
            stream = stream_number(number)
            lowest[stream] = min(number, lowest.get(stream, number))
        return lowest

    def validate(self) -> None:
        """Check every invariant; raise InvariantError with the stories concerned."""
        self.window.validate()
        self.tasks.validate()
        self.consumers.validate()
        self.epochs.validate()
        self._check_links()
        if self.failed is None and (unwanted := self.keeping.unwanted()):  # a failed feed drops no blocks
            raise InvariantError(f"{unwanted[0]} is kept without a reason", unwanted[0].story)

    def _check_links(self) -> None:
        # Invariants that link the tables; each table checks its own.
        making = {
            (block.number, number)
            for block in self.window.blocks.values()
            for number, part in enumerate(block.parts)
            if part.state is PartState.MAKING
        }
        if making != self.tasks.in_hand():
            odd = {number for number, _ in making ^ self.tasks.in_hand()}
            stories = [self.window.blocks[number].story for number in sorted(odd & self.window.blocks.keys())]
            stories += [worker.story for worker in self.tasks.workers.values()]
            # It is unknown which side is wrong, so show both stories.
            raise InvariantError(f"parts in MAKING are {making}, on workers' lists {self.tasks.in_hand()}", *stories)
        if blamed := (self.tasks.deaths.keys() | self.tasks.failures.keys()) - self.window.blocks.keys():
            raise InvariantError(
                f"blocks {sorted(blamed)} are not staged, and deaths or errors are counted against them"
            )
        for consumer in self.consumers.by_name.values():
            block = self.window.find(consumer.cursor)
            if consumer.waiting and block is not None and block.is_ready and self.epochs.is_written(consumer.cursor):
                raise InvariantError(f"{consumer.name} waits for {block}, which is ready", consumer.story, block.story)


def _ranks(world_size: int) -> str:
    return "one process" if world_size == 1 else f"{world_size} ranks"
