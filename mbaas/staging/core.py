"""The staging core: who is where in the stream, which blocks to make next, which to hand out, keep and drop.

A feed is an endless stream of blocks (see `mbaas.order.Sweep`); a consumer is a cursor on it. This module turns
events into instructions and does nothing else: no clock, thread, randomness, file or Ray call. The promises:

- every consumer is handed each block of its epoch exactly once, in order, whatever happens to workers and others;
- a block is made once for all members of a cohort, unless a worker dies, the budget forces an undelivered block
  out, or a consumer was moved out of step;
- bytes granted never exceed the budget;
- a waiting consumer that lacks a block makes progress as long as any worker lives and not all bytes are held by others.

Coordinated prep is CoorDL's (VLDB 2021, section 5.3); cursors instead of use counts are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mbaas.errors import ConfigError
from mbaas.staging import events as ev
from mbaas.staging.cohort import Cohort, Member, MemberState, can_merge
from mbaas.staging.crew import Crew
from mbaas.staging.window import BlockState, Window


@dataclass(frozen=True)
class StagingLimits:
    """Bounds that the staging core keeps.

    Attributes:
        budget_bytes: the most that staged blocks, and blocks being made, may take together.
        ahead_blocks: how far the sweep may run ahead of the slowest consumer of a cohort.
        lease_s: a consumer that is silent for so long is removed.
        boarding_s: how long a seat is held for an announced consumer.
        patience_s: how long others wait for one consumer before it is moved to a cohort of its own.
        prep_timeout_s: a worker that takes longer for one block is killed and replaced.
        max_deaths: workers that may die over one block before the feed gives up.
    """

    budget_bytes: int
    ahead_blocks: int
    lease_s: float = 30.0
    boarding_s: float = 20.0
    patience_s: float = 30.0
    prep_timeout_s: float = 120.0
    max_deaths: int = 3

    def __post_init__(self) -> None:
        if self.ahead_blocks < 1:
            raise ConfigError(f"ahead_blocks must be at least 1, got {self.ahead_blocks}")
        for name in ("lease_s", "boarding_s", "patience_s", "prep_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0 seconds, got {getattr(self, name)}")


class StagingCore:
    """State of one feed's staging; see the module's docstring.

    Args:
        limits: the bounds.
        blocks_per_epoch: blocks in one epoch, at least 1.
        block_bytes: block number -> bytes it takes when staged; never above ``limits.budget_bytes``.

    Attributes:
        members: by name; each is in the member list of exactly one cohort.
        cohorts: by id; none is empty.
        next_epoch: the first epoch that was never begun; a feed that nobody is on starts there.
    """

    def __init__(self, limits: StagingLimits, blocks_per_epoch: int, block_bytes: Callable[[int], int]) -> None:
        self.limits = limits
        self.blocks_per_epoch = blocks_per_epoch
        self.members: dict[str, Member] = {}
        self.cohorts: dict[int, Cohort] = {}
        self.crew = Crew()
        self.window = Window(limits.budget_bytes)
        self.next_epoch = 0
        self.failed: str | None = None
        self._block_bytes = block_bytes
        self._next_cohort = 0
        self._next_seat = 0
        self._out: list[ev.Instruction] = []

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take one event; what must be done about it, in order."""
        self._out = []
        if self.failed is None:
            self._dispatch(event, now)
            self._settle(now)
        elif isinstance(event, ev.Join | ev.Ask):
            self._out.append(ev.Refuse(event.consumer, event.session, self.failed))
        return self._out

    def _dispatch(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.WorkerUp():
                self.crew.up(event.worker, event.credit)
            case ev.WorkerDown():
                self._worker_down(event.worker, event.reason)
            case ev.Announce():
                self._announce(event.consumer, now)
            case ev.Join():
                self._join(event, now)
            case ev.Ask():
                self._ask(event, now)
            case ev.Heartbeat():
                self._heartbeat(event, now)
            case ev.Leave():
                self._leave(event, now)
            case ev.Prepared():
                self._prepared(event, now)
            case ev.Tick():
                self._tick(now)

    # ---- consumers ----

    def _announce(self, name: str, now: float) -> None:
        if name in self.members:
            return
        waiting_seats = [m for m in self.members.values() if _is_open_seat(m)]
        deadline = now + self.limits.boarding_s
        if waiting_seats:
            seat = min(waiting_seats, key=lambda m: m.cursor)
            del self.members[seat.name]
            seat.name, seat.deadline = name, deadline
            self.members[name] = seat
        else:
            cohort, cursor = self._shared_start(None)
            self._enter(name, 0, cohort, cursor, deadline, MemberState.SEAT)

    def _join(self, event: ev.Join, now: float) -> None:
        old = self.members.get(event.consumer)
        if old is not None and old.session >= event.session:
            self._refuse(event.consumer, event.session, f"session {old.session} of {event.consumer!r} is newer")
            return
        at_seat = old is not None and old.state is MemberState.SEAT and (event.start is None or event.flexible)
        if old is not None:
            self._exit(old)
        if old is not None and at_seat and old.cohort in self.cohorts:
            cohort, cursor = self.cohorts[old.cohort], old.cursor
        elif old is not None and at_seat:
            cohort, cursor = self._new_cohort(old.cursor), old.cursor
        elif event.start is None or event.flexible:
            cohort, cursor = self._shared_start(event.start)
        else:
            cohort, cursor = self._cohort_at(event.start), event.start
        lease = now + self.limits.lease_s
        self._enter(event.consumer, event.session, cohort, cursor, lease, MemberState.BUSY)
        self._out.append(ev.Seat(event.consumer, event.session, cursor))

    def _ask(self, event: ev.Ask, now: float) -> None:
        member = self._current(event.consumer, event.session)
        if member is None:
            self._refuse(event.consumer, event.session, self._why_unknown(event.consumer, event.session))
            return
        member.deadline = now + self.limits.lease_s
        if event.cursor < member.released:
            reason = f"it asked for block {event.cursor} after it let go of all blocks below {member.released}"
            self._refuse(event.consumer, event.session, reason)
            return
        member.cursor = event.cursor
        self._let_go(member, event.released, event.done)
        if not member.waiting:
            member.since = now
        member.state, member.want = MemberState.WAITING, event.want
        self._merge(member)

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> None:
        member = self._current(event.consumer, event.session)
        if member is None:
            self._refuse(event.consumer, event.session, self._why_unknown(event.consumer, event.session))
            return
        member.deadline = now + self.limits.lease_s
        self._let_go(member, event.released, event.done)

    def _let_go(self, member: Member, released: int, done: int) -> None:
        member.released = max(member.released, min(released, member.cursor))
        member.done = max(member.done, min(done, member.cursor))

    def _leave(self, event: ev.Leave, now: float) -> None:
        member = self.members.get(event.consumer)
        if member is None or (event.session is not None and event.session != member.session):
            return
        if event.keep_seat:
            name, self._next_seat = f"seat:{self._next_seat}", self._next_seat + 1
            cursor = -(-member.done // self.blocks_per_epoch) * self.blocks_per_epoch
            deadline = now + self.limits.boarding_s
            self._enter(name, 0, self.cohorts[member.cohort], cursor, deadline, MemberState.SEAT)
        self._exit(member)

    def _current(self, name: str, session: int) -> Member | None:
        member = self.members.get(name)
        return member if member is not None and member.session == session and session > 0 else None

    def _refuse(self, consumer: str, session: int, reason: str) -> None:
        self._out.append(ev.Refuse(consumer, session, reason))

    def _why_unknown(self, name: str, session: int) -> str:
        member = self.members.get(name)
        if member is None or member.session == 0:
            return f"the service has no session {session} of consumer {name!r}: it left or was removed"
        return f"consumer {name!r} is now in session {member.session}, this call is from session {session}"

    # ---- cohorts ----

    def _enter(
        self, name: str, session: int, cohort: Cohort, cursor: int, deadline: float, state: MemberState
    ) -> None:
        member = Member(name, session, cursor, cursor, cursor, deadline, cohort.number, state)
        self.members[name] = member
        cohort.members.append(member)

    def _exit(self, member: Member) -> None:
        del self.members[member.name]
        cohort = self.cohorts[member.cohort]
        cohort.members.remove(member)
        if not cohort.members:
            del self.cohorts[cohort.number]

    def _new_cohort(self, start: int) -> Cohort:
        boundary = start - start % self.blocks_per_epoch
        door = start if start == boundary else None
        cohort = Cohort(self._next_cohort, [], top=start, boundary=boundary, door=door, floor=start)
        self._next_cohort += 1
        self.cohorts[cohort.number] = cohort
        return cohort

    def _shared_start(self, wish: int | None) -> tuple[Cohort, int]:
        """Cohort and block at which a newcomer begins an epoch: through an open door, else at the nearest boundary."""
        if not self.cohorts:
            start = wish if wish is not None else self.next_epoch * self.blocks_per_epoch
            return self._new_cohort(start), start

        def wait(cohort: Cohort) -> tuple[int, int]:
            return self._boundary_for(cohort) - cohort.base, -len(cohort.members)

        cohort = min(self.cohorts.values(), key=wait)
        return cohort, self._boundary_for(cohort)

    def _boundary_for(self, cohort: Cohort) -> int:
        """Where a newcomer to ``cohort`` begins: its door, or the next epoch."""
        if cohort.door is not None:
            return cohort.door
        base = cohort.base
        return -(-base // self.blocks_per_epoch) * self.blocks_per_epoch

    def _cohort_at(self, start: int) -> Cohort:
        """The cohort whose window holds ``start``, or a new one."""
        for cohort in self.cohorts.values():
            if cohort.floor <= start <= cohort.base + self.limits.ahead_blocks:
                return cohort
        return self._new_cohort(start)

    def _merge(self, member: Member) -> None:
        """Join the asking member's cohort with one that its cursor has reached, or that begins an epoch with it."""
        own = self.cohorts[member.cohort]
        for other in list(self.cohorts.values()):
            if other is own:
                continue
            if can_merge(own, other, self.limits.ahead_blocks):
                self._unite(other, own)
                return
            if len(own.members) == 1 and self._can_reseat(member, other):
                member.cursor = member.released = member.done = self._boundary_for(other)
                self._unite(other, own)
                return

    def _can_reseat(self, member: Member, other: Cohort) -> bool:
        """Whether a member that begins an epoch alone can begin it with ``other`` at once and without a re-make."""
        at_boundary = member.cursor % self.blocks_per_epoch == 0
        wait = self._boundary_for(other) - other.base
        return at_boundary and self._boundary_for(other) > member.cursor and wait <= self.limits.ahead_blocks

    def _unite(self, keep: Cohort, gone: Cohort) -> None:
        self._out.append(ev.Note(f"{_names(gone.members)} joined the cohort of {_names(keep.members)}"))
        behind = min(keep, gone, key=lambda cohort: cohort.base)
        keep.top = max(keep.top, gone.top)
        keep.boundary, keep.door, keep.floor = behind.boundary, behind.door, min(keep.floor, gone.floor)
        keep.stuck = None
        for member in gone.members:
            member.cohort = keep.number
        keep.members += gone.members
        del self.cohorts[gone.number]

    def _detach(self, member: Member, waited_s: float) -> None:
        """Move a laggard to a cohort of its own: it goes on at its cursor, nobody waits for it any more."""
        old = self.cohorts[member.cohort]
        cohort = self._new_cohort(member.cursor)
        cohort.floor, cohort.door = min(member.released, old.floor), old.door
        cohort.boundary = member.cursor - member.cursor % self.blocks_per_epoch
        old.members.remove(member)
        member.cohort = cohort.number
        cohort.members.append(member)
        self._out.append(
            ev.Note(
                f"{member.name} kept {_names(old.members)} waiting at block {member.cursor} for {waited_s:.1f} s: "
                "it goes on in a cohort of its own"
            )
        )

    # ---- workers ----

    def _worker_down(self, name: str, reason: str) -> None:
        for task in self.crew.down(name):
            self.window.drop(task.block)
            self._out.append(ev.Note(f"{name} is gone ({reason}): block {task.block} will be made again"))
            deaths = self.crew.deaths.get(task.block, 0)
            if deaths >= self.limits.max_deaths:
                self._fail(f"{deaths} prep workers died over block {task.block}; the last one: {reason}")

    def _fail(self, reason: str) -> None:
        self.failed = reason
        self._out.append(ev.FailFeed(reason))

    def _prepared(self, event: ev.Prepared, now: float) -> None:
        task = self.crew.finish(event.task, now)
        if task is None:
            return
        if event.error is None:
            self.window.ready(task.block)
        else:
            self.window.fail(task.block, event.error)

    # ---- time ----

    def _tick(self, now: float) -> None:
        for member in list(self.members.values()):
            if now >= member.deadline:
                self._expire(member)
        for worker in self.crew.overdue(now, self.limits.prep_timeout_s):
            reason = f"it made block {worker.tasks[0].block} for more than {self.limits.prep_timeout_s:g} s"
            self._out.append(ev.Retire(worker.name, reason))
            self._worker_down(worker.name, reason)
        for cohort in list(self.cohorts.values()):
            self._watch(cohort, now)

    def _expire(self, member: Member) -> None:
        if member.state is MemberState.SEAT:
            self._out.append(ev.Note(f"{member.name} did not come within {self.limits.boarding_s:g} s: seat given up"))
        else:
            reason = f"it was silent for {self.limits.lease_s:g} s"
            self._out.append(ev.Remove(member.name, member.session, reason))
        self._exit(member)

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
                self._detach(member, waited_s)
            cohort.stuck = None

    def _limited_by_slowest(self, cohort: Cohort) -> bool:
        base = cohort.base
        slowest_busy = all(m.state is MemberState.BUSY for m in cohort.members if m.cursor == base)
        starved = any(m.waiting and m.cursor not in self.window.blocks for m in cohort.members)
        return slowest_busy and starved and self.crew.idle() is not None

    # ---- what follows from every event ----

    def _settle(self, now: float) -> None:
        self._deliver()
        for cohort in self.cohorts.values():
            cohort.settle(self.blocks_per_epoch)
        self._drop_unwanted()
        if self.failed is None:
            self._schedule(now)

    def _deliver(self) -> None:
        for member in self.members.values():
            if not member.waiting:
                continue
            end = member.cursor
            while end - member.cursor < member.want and self.window.settled(end):
                end += 1
            if end > member.cursor:
                blocks = tuple(range(member.cursor, end))
                self._out.append(ev.Deliver(member.name, member.session, blocks))
                member.cursor, member.state = end, MemberState.BUSY

    def _drop_unwanted(self) -> None:
        for block in list(self.window.blocks.values()):
            if block.state is not BlockState.MAKING and not self._wanted(block.number):
                self._drop(block.number)

    def _wanted(self, block: int) -> bool:
        return any(cohort.wants(block, self.limits.ahead_blocks) for cohort in self.cohorts.values())

    def _drop(self, block: int) -> None:
        self.window.drop(block)
        self._out.append(ev.Drop(block))

    def _schedule(self, now: float) -> None:
        """Give work out, most urgent block first, as long as workers have credit and the budget has bytes."""
        while (worker := self.crew.idle()) is not None:
            candidate = self._most_urgent()
            if candidate is None:
                return
            block, urgent = candidate
            nbytes = self._block_bytes(block)
            if not self.window.fits(nbytes) and not self._make_room(nbytes, urgent):
                return
            self._start(block, nbytes, worker.name, now)

    def _start(self, block: int, nbytes: int, worker: str, now: float) -> None:
        self.window.grant(block, nbytes)
        self.next_epoch = max(self.next_epoch, block // self.blocks_per_epoch + 1)
        for cohort in self.cohorts.values():
            if cohort.base <= block < cohort.base + self.limits.ahead_blocks:
                cohort.top = max(cohort.top, block + 1)
        task = self.crew.assign(self.crew.workers[worker], block, now)
        self._out.append(ev.Prepare(task.number, worker, block))

    def _most_urgent(self) -> tuple[int, bool] | None:
        """The block to make next, and whether a cohort's slowest consumer waits for it.

        Whoever waits longest comes first, so that no cohort starves another; then the smallest lead over the slowest cursor.
        """
        candidates = []
        for cohort in self.cohorts.values():
            base = cohort.base
            missing = (b for b in range(base, base + self.limits.ahead_blocks) if b not in self.window.blocks)
            block = next(missing, None)
            if block is not None:
                waits = [m.since for m in cohort.members if m.waiting and m.cursor == base == block]
                since = min(waits, default=math.inf)
                candidates.append((since, block - base, -len(cohort.members), block))
        if not candidates:
            return None
        since, _, _, block = min(candidates)
        return block, since < math.inf

    def _make_room(self, nbytes: int, urgent: bool) -> bool:
        """Free bytes: first what is kept for newcomers; for a waiting consumer also what is made furthest ahead."""
        if any([cohort.close_door() for cohort in self.cohorts.values()]):
            self._drop_unwanted()
        while urgent and not self.window.fits(nbytes):
            victim = self._furthest_ahead()
            if victim is None:
                return False
            self._drop(victim)
        return self.window.fits(nbytes)

    def _furthest_ahead(self) -> int | None:
        """The staged block that nobody holds and that is needed last, if it is not needed next."""
        best: tuple[int, int] | None = None
        for block in self.window.blocks.values():
            number = block.number
            held = any(m.released <= number < m.cursor for m in self.members.values())
            if block.state is not BlockState.READY or held:
                continue
            lead = min((number - c.base for c in self.cohorts.values() if c.floor <= number), default=0)
            if lead > 0 and (best is None or (lead, number) > best):
                best = (lead, number)
        return best[1] if best else None

    # ---- for people and tests ----

    def explain_wait(self, name: str) -> str:
        """One clause that says what a waiting consumer waits for."""
        member = self.members.get(name)
        if member is None:
            return "it is not a member of the feed"
        worker = self.crew.making.get(member.cursor)
        if worker is not None:
            return f"block {member.cursor} is being prepared by {worker}"
        if not self.crew.workers:
            return "no prep worker is up"
        slowest = min(self.cohorts[member.cohort].members, key=lambda m: m.cursor)
        if slowest.cursor < member.cursor:
            return f"the slowest consumer, {slowest.name}, is at block {slowest.cursor}, this one at {member.cursor}"
        holders = {m.name for m in self.members.values() if m.released < m.cursor}
        if not self.window.fits(self._block_bytes(member.cursor)):
            return f"the staging budget of {self.window.budget_bytes} bytes is held by {', '.join(sorted(holders))}"
        return f"block {member.cursor} waits for a prep worker"

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        self.window.validate()
        self.crew.validate()
        making = {b.number for b in self.window.blocks.values() if b.state is BlockState.MAKING}
        assert making == set(self.crew.making), f"granted {making}, on workers' lists {set(self.crew.making)}"
        listed = [m.name for c in self.cohorts.values() for m in c.members]
        assert sorted(listed) == sorted(self.members), "a member is in no cohort, or in two"
        for number, cohort in self.cohorts.items():
            assert cohort.members, f"cohort {number} is empty"
            assert all(m.cohort == number for m in cohort.members)
            assert cohort.floor <= cohort.low, f"cohort {number} drops blocks that a member still holds"
        for member in self.members.values():
            assert max(member.released, member.done) <= member.cursor
            assert not (member.waiting and self.window.settled(member.cursor)), f"{member.name} waits for a ready block"
        if self.failed is None:
            for block in self.window.blocks.values():
                unused = block.state is not BlockState.MAKING and not self._wanted(block.number)
                assert not unused, f"block {block.number} is kept for nobody"


def _is_open_seat(member: Member) -> bool:
    return member.state is MemberState.SEAT and member.name.startswith("seat:")


def _names(members: list[Member]) -> str:
    return ", ".join(m.name for m in members) or "nobody"
