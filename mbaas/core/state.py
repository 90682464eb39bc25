"""The staging core: who is where in the stream, which blocks to make next, which to hand out, keep and drop.

A feed is an endless stream of blocks (see `mbaas.order.SampleOrder`); a consumer is a cursor on it. This module turns
events into instructions and does nothing else: no clock, thread, randomness, file or Ray call. The promises:

- every consumer is handed each block of its epoch exactly once, in order, whatever happens to workers and others;
- a block is made once for all members of a cohort, unless a worker dies, the budget forces an undelivered block out,
  or a consumer was moved out of step;
- bytes granted never exceed the budget;
- a waiting consumer that lacks a block makes progress as long as any worker lives and not all bytes are held by
  others.

Coordinated prep is CoorDL's (VLDB 2021, section 5.3); cursors instead of use counts are ours.
"""

from __future__ import annotations

from collections.abc import Callable

from mbaas.core import events as ev
from mbaas.core.consumers import Cohort, Consumer, ConsumerState, ConsumerTable, names
from mbaas.core.layout import StagingLimits
from mbaas.core.scheduling import Assignment, Scheduler, Split
from mbaas.core.tasks import Task, TaskTable
from mbaas.core.window import PartState, Window
from mbaas.placement import WHOLE


class StagingState:
    """State of one feed's staging; see the module's docstring.

    Args:
        limits: the bounds.
        blocks_per_epoch: blocks in one epoch, at least 1.
        block_bytes: block number -> bytes it takes when staged; never above ``limits.budget_bytes``.
        split: block number -> the shares that different nodes make; by default it is made as a whole.
        lane: number of the lane whose blocks these are. Further lanes than the first decide neither where newcomers
            begin nor who moves to another's epoch: they put everybody where the first lane did.

    Attributes:
        roster: consumers, reservations and cohorts.
        crew: the workers that are up, and their tasks.
        window: blocks that are being made or are staged.
        next_epoch: the first epoch that was never begun; a feed that nobody is on starts there.
        failed: why the feed cannot go on; nothing changes any more then.
    """

    def __init__(
        self,
        limits: StagingLimits,
        blocks_per_epoch: int,
        block_bytes: Callable[[int], int],
        split: Split = lambda _: (WHOLE,),
        lane: int = 0,
    ) -> None:
        self.limits = limits
        self.blocks_per_epoch = blocks_per_epoch
        self.consumers = ConsumerTable(blocks_per_epoch, limits.ahead_blocks, leads=lane == 0)
        self.tasks = TaskTable(lane)
        self.window = Window(limits.budget_bytes)
        self.next_epoch = 0
        self.failed: str | None = None
        self._block_bytes = block_bytes
        self._dispatcher = Scheduler(
            self.consumers, self.tasks, self.window, split=split, block_bytes=block_bytes, drop=self._drop
        )
        self._out: list[ev.Instruction] = []

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take one event; what must be done about it, in order."""
        self._out = []
        if self.failed is None:
            self._dispatch(event, now)
            self._follow_up(now)
        elif isinstance(event, ev.Join | ev.Ask):
            self._refuse(event, self.failed)
        return self._out

    def _dispatch(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.WorkerUp():
                self.tasks.up(event.worker, event.credit, event.node)
            case ev.WorkerDown():
                self._worker_down(event.worker, event.reason)
            case ev.WorkerLeaves():
                if event.worker in self.tasks.workers:
                    self.tasks.workers[event.worker].leaving = True
            case ev.NodeDown():
                self._node_down(event.node, event.reason)
            case ev.PartLost():
                self._lost(event)
            case ev.Announce():
                self._announce(event.consumer, now)
            case ev.HoldReservations():
                self.consumers.hold_reservations(event.reservations)
            case ev.Join():
                self._join(event, now)
            case ev.Ask():
                self._ask(event, now)
            case ev.HandBack():
                self._hand_back(event)
            case ev.Heartbeat():
                self._heartbeat(event, now)
            case ev.DetachedElsewhere():
                self._detach(event.consumer)
            case ev.Leave():
                self._leave(event, now)
            case ev.TaskEnded():
                self._prepared(event, now)
            case ev.Tick():
                self._tick(now)

    # ---- consumers ----

    def _announce(self, name: str, now: float) -> None:
        deadline = now + self.limits.reservation_s
        if name in self.consumers.by_name or self.consumers.claim_reservation(name, deadline):
            return
        cohort, cursor = self.consumers.shared_start(self._fresh_start())
        self.consumers.enter(name, 0, cohort, cursor, deadline, ConsumerState.RESERVED)

    def _fresh_start(self) -> int:
        return self.next_epoch * self.blocks_per_epoch

    def _join(self, event: ev.Join, now: float) -> None:
        old = self.consumers.by_name.get(event.consumer)
        if old is not None and old.session >= event.session:
            self._refuse(event, f"session {old.session} of {event.consumer!r} is newer")
            return
        cohort, cursor = self._place(event, old)
        lease = now + self.limits.lease_s
        self.consumers.enter(event.consumer, event.session, cohort, cursor, lease, ConsumerState.BUSY)
        self.consumers.by_name[event.consumer].exact = None if event.flexible else event.start
        self._out.append(ev.Admitted(event.consumer, event.session, cursor))

    def _place(self, event: ev.Join, old: Consumer | None) -> tuple[Cohort, int]:
        """Cohort and first block of a new session: its reservation, an exact block, or an epoch that is shared."""
        if old is not None:
            self.consumers.exit(old)
        if not self.consumers.leads:
            assert event.start is not None, "the first lane decides where a consumer begins"
            find = self.consumers.cohort_towards if event.flexible else self.consumers.cohort_at
            return find(event.start), event.start
        exact = event.start is not None and not event.flexible
        if old is not None and old.state is ConsumerState.RESERVED and not exact:
            cohort = self.consumers.cohorts.get(old.cohort) or self.consumers.new_cohort(old.cursor)
            return cohort, old.cursor
        if event.start is None or not exact:
            return self.consumers.shared_start(self._fresh_start() if event.start is None else event.start)
        return self.consumers.cohort_at(event.start), event.start

    def _ask(self, event: ev.Ask, now: float) -> None:
        member = self._open_session(event)
        if member is None:
            return
        if event.cursor < member.released:
            reason = f"it asked for block {event.cursor} after it let go of all blocks below {member.released}"
            self._refuse(event, reason)
            return
        member.deadline = now + self.limits.lease_s
        member.go_to(event.cursor)
        member.let_go(event.released, event.done)
        if not member.waiting:
            member.since = now
        member.state, member.want, member.asked = ConsumerState.WAITING, event.want, True
        met = self.consumers.merge(member)
        if met is not None:
            self._out.append(ev.Note(met))

    def _hand_back(self, event: ev.HandBack) -> None:
        member = self._open_session(event)
        if member is not None:
            member.let_go(min(event.released, event.cursor), member.done)
            member.go_to(max(event.cursor, member.released, member.done))
            member.state = ConsumerState.BUSY

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> None:
        member = self._open_session(event)
        if member is not None:
            member.deadline = now + self.limits.lease_s
            member.let_go(event.released, event.done)

    def _leave(self, event: ev.Leave, now: float) -> None:
        member = self.consumers.by_name.get(event.consumer)
        if member is None or (event.session is not None and event.session != member.session):
            return
        if event.reserve:
            self.consumers.reserve_for_successor(member, now + self.limits.reservation_s)
        self.consumers.exit(member)

    def _open_session(self, event: ev.Ask | ev.HandBack | ev.Heartbeat) -> Consumer | None:
        member = self.consumers.session(event.consumer, event.session)
        if member is None:
            self._refuse(event, self.consumers.why_unknown(event.consumer, event.session))
        return member

    def _refuse(self, event: ev.Join | ev.Ask | ev.HandBack | ev.Heartbeat, reason: str) -> None:
        self._out.append(ev.Refuse(event.consumer, event.session, reason))

    # ---- workers ----

    def _worker_down(self, name: str, reason: str) -> None:
        tasks = self.tasks.down(name, blame=True)
        self._reopen(tasks)
        for task in tasks:
            self._out.append(ev.Note(f"{name} is gone ({reason}): block {task.block} will be made again"))
            deaths = self.tasks.deaths.get(task.block, 0)
            if deaths >= self.limits.max_deaths:
                self._fail(f"{deaths} prep workers died over block {task.block}; the last one: {reason}")

    def _reopen(self, tasks: list[Task]) -> None:
        for task in tasks:
            self.window.blocks[task.block].parts[task.part].state = PartState.OPEN

    def _node_down(self, node: str, reason: str) -> None:
        for worker in [w for w in self.tasks.workers.values() if w.node == node]:
            self._reopen(self.tasks.down(worker.name, blame=False))
        blocks = len(self.window.lost(node))
        lost = f"its parts of {blocks} staged block{'s' * (blocks != 1)} will be made again"
        self._out.append(ev.Note(f"node {node} is gone ({reason}): {lost}"))

    def _lost(self, event: ev.PartLost) -> None:
        block = self.window.blocks.get(event.block)
        if block is None or block.parts[event.part].task != event.task:
            return
        part = block.parts[event.part]
        if part.state is PartState.READY:
            part.state, part.node = PartState.OPEN, None
            self._out.append(ev.Note(f"a part of block {event.block} cannot be read any more: it will be made again"))

    def _fail(self, reason: str) -> None:
        self.failed = reason
        self._out.append(ev.FailFeed(reason))

    def _prepared(self, event: ev.TaskEnded, now: float) -> None:
        task = self.tasks.finish(event.task, now)
        if task is None:
            return
        part = self.window.blocks[task.block].parts[task.part]
        if event.error is None:
            part.state, part.node = PartState.READY, self.tasks.workers[task.worker].node
        else:
            part.state = PartState.OPEN
            if self.window.blocks[task.block].error is None:
                self.window.fail(task.block, event.error)

    # ---- time ----

    def _tick(self, now: float) -> None:
        for member in list(self.consumers.by_name.values()):
            if now >= member.deadline:
                self._expire(member)
        for worker in self.tasks.overdue(now, self.limits.prep_timeout_s):
            reason = f"it made block {worker.tasks[0].block} for more than {self.limits.prep_timeout_s:g} s"
            self._out.append(ev.ReplaceWorker(worker.name, reason))
            self._worker_down(worker.name, reason)
        for cohort in list(self.consumers.cohorts.values()):
            self._watch(cohort, now)

    def _expire(self, member: Consumer) -> None:
        if member.state is ConsumerState.RESERVED:
            self._out.append(
                ev.Note(f"{member.name} did not come within {self.limits.reservation_s:g} s: reservation given up")
            )
        else:
            reason = f"it was silent for {self.limits.lease_s:g} s"
            self._out.append(ev.RemoveConsumer(member.name, member.session, reason))
        self.consumers.exit(member)

    def _watch(self, cohort: Cohort, now: float) -> None:
        """Notice who keeps the others of a cohort waiting, and detach it when their patience is over."""
        if not self._limited_by_slowest(cohort):
            cohort.stuck = None
            return
        if cohort.stuck is None or cohort.stuck[0] != cohort.base:
            cohort.stuck = (cohort.base, now)
        waited_s = now - cohort.stuck[1]
        if waited_s >= self.limits.patience_s:
            base = cohort.base
            for member in [m for m in cohort.members if m.cursor == base]:
                self.consumers.detach(member)
                self._out.append(ev.Detached(member.name))
                self._out.append(ev.Note(_detached(member, cohort, waited_s)))
            cohort.stuck = None

    def _detach(self, name: str) -> None:
        member = self.consumers.by_name.get(name)
        if member is not None and len(self.consumers.cohorts[member.cohort].members) > 1:
            self.consumers.detach(member)

    def _limited_by_slowest(self, cohort: Cohort) -> bool:
        base = cohort.base
        slowest_busy = all(m.state is ConsumerState.BUSY for m in cohort.members if m.cursor == base)
        return slowest_busy and any(m.waiting and not self.window.at_work(m.cursor) for m in cohort.members)

    # ---- what follows from every event ----

    def _follow_up(self, now: float) -> None:
        self._deliver()
        self.consumers.advance()
        self._dispatcher.drop_unwanted()
        for worker in self.tasks.gone_idle():
            self.tasks.down(worker.name, blame=False)
            self._out.append(ev.ReleaseWorker(worker.name))
        while self.failed is None and (order := self._dispatcher.next_assignment()) is not None:
            self._start(order, now)

    def _deliver(self) -> None:
        for member in self.consumers.by_name.values():
            if not member.waiting:
                continue
            end = member.cursor
            while end - member.cursor < member.want and self.window.is_ready(end):
                end += 1
            if end > member.cursor:
                blocks = tuple(range(member.cursor, end))
                self._out.append(ev.Deliver(member.name, member.session, blocks))
                member.cursor, member.state = end, ConsumerState.BUSY

    def _drop(self, block: int) -> None:
        self.window.drop(block)
        self._out.append(ev.DropBlock(block))

    def _start(self, order: Assignment, now: float) -> None:
        worker, block = order.worker, order.block
        self.next_epoch = max(self.next_epoch, block // self.blocks_per_epoch + 1)
        part = self.window.blocks[block].parts[order.part]
        task = self.tasks.assign(worker, block, order.part, now)
        part.state, part.task = PartState.MAKING, task.number
        self._out.append(ev.Prepare(task.number, worker.name, block, order.part, part.block_part))

    # ---- for people and tests ----

    def explain_wait(self, name: str) -> str:
        """One clause that says what a waiting consumer waits for."""
        member = self.consumers.by_name.get(name)
        if member is None:
            return "it is not a member of the feed"
        makers = self.tasks.makers(member.cursor)
        if makers:
            return f"block {member.cursor} is being prepared by {', '.join(makers)}"
        if not self.tasks.workers:
            return "no prep worker is up"
        slowest = min(self.consumers.cohorts[member.cohort].members, key=lambda m: m.cursor)
        if slowest.cursor < member.cursor:
            return f"the slowest consumer, {slowest.name}, is at block {slowest.cursor}, this one at {member.cursor}"
        holders = {m.name for m in self.consumers.by_name.values() if m.released < m.cursor}
        if not self.window.fits(self._block_bytes(member.cursor)):
            who = ", ".join(sorted(holders)) or "blocks that are being made"
            return f"the staging budget of {self.window.budget_bytes} bytes is held by {who}"
        return f"block {member.cursor} waits for a prep worker"

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        self.window.validate()
        self.tasks.validate()
        making = {
            (block.number, number)
            for block in self.window.blocks.values()
            for number, part in enumerate(block.parts)
            if part.state is PartState.MAKING
        }
        assert making == self.tasks.making, f"being made {making}, on workers' lists {self.tasks.making}"
        self.consumers.validate()
        for member in self.consumers.by_name.values():
            assert not (member.waiting and self.window.is_ready(member.cursor)), (
                f"{member.name} waits for a ready block"
            )
        if self.failed is None:
            for block in self.window.blocks.values():
                unused = not block.at_work and not self.consumers.wanted(block.number)
                assert not unused, f"block {block.number} is kept for nobody"


def _detached(member: Consumer, others: Cohort, waited_s: float) -> str:
    return (
        f"{member.name} kept {names(others.members)} waiting at block {member.cursor} for {waited_s:.1f} s: "
        "it goes on in a cohort of its own"
    )
