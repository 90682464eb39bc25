"""Who is on a feed: the consumers, the reservations held for some, and the cohorts they form.

A cohort is a set of consumers that go through the stream of blocks together: each block is made once for all of them,
the fast wait for the slow within the window. Normally there is one. A consumer that lags too long, or that was restored
from a checkpoint far from the others, is a cohort of its own until its cursor meets another cohort's window again.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field


class ConsumerState(enum.Enum):
    """What a place in a cohort is."""

    RESERVED = "held for a consumer that was announced, or for the successor of one that ended; ends at its deadline"
    BUSY = "joined; it works on what it was given"
    WAITING = "joined; its call waits for the block at its cursor"


@dataclass
class Consumer:
    """One consumer, or a reservation held for one.

    Attributes:
        name: the consumer's name; reservations that wait for any successor begin with ``reservation:``.
        session: number of the registration; words from other sessions are refused.
        cursor: the next block to hand out; everything below was handed out.
        released: the memory of blocks below is let go; never above ``cursor``.
        done: blocks below are used up; never above ``cursor``.
        want: while WAITING, how many blocks the call takes at most.
        since: while WAITING, when it began to wait.
        deadline: when the lease (or, for a RESERVED, the reservation time) ends.
        cohort: id of the one cohort that it belongs to.
        asked: whether this session has asked for a block; nothing is made for a cohort before one of its members did.
        exact: the block at which it asked to go on, and from which nobody may move it; None if any epoch will do.
        skipped: ranges below ``cursor`` that were never handed out, because it went on behind them.
    """

    name: str
    session: int
    cursor: int
    released: int
    done: int
    deadline: float
    cohort: int
    state: ConsumerState = ConsumerState.BUSY
    want: int = 1
    since: float = 0.0
    asked: bool = False
    exact: int | None = None
    skipped: tuple[range, ...] = ()

    @property
    def waiting(self) -> bool:
        return self.state is ConsumerState.WAITING

    def holds(self, block: int) -> bool:
        """Whether the block was handed out and is not let go."""
        return self.released <= block < self.cursor and not any(block in gap for gap in self.skipped)

    def go_to(self, cursor: int) -> None:
        """Go on elsewhere than at the block after the last that was handed out: further on, or again at an earlier."""
        if cursor > self.cursor:
            self.skipped = (*self.skipped, range(self.cursor, cursor))
        else:
            self.skipped = tuple(range(gap.start, min(gap.stop, cursor)) for gap in self.skipped if gap.start < cursor)
        self.cursor = cursor

    def let_go(self, released: int, done: int) -> None:
        """Blocks below are let go, and used up; neither ever goes back."""
        self.released = max(self.released, min(released, self.cursor))
        self.done = max(self.done, min(done, self.cursor))
        self.skipped = tuple(gap for gap in self.skipped if gap.stop > self.released)


@dataclass
class Cohort:
    """Consumers that share one sweep.

    Attributes:
        blocks_per_epoch: blocks in one epoch.
        ahead_blocks: how far the sweep may run ahead of the slowest member.
        members: never empty after an event.
        top: one past the highest block that was ever begun for this cohort.
        boundary: beginning of the epoch that the slowest member is in.
        door: ``boundary`` while all blocks from there on are still staged, so that a newcomer can step in; else None.
        floor: the lowest block that must stay staged.
        stuck: (base, since): the slowest cursor while others wait for it, and since when; None while nobody waits.
    """

    number: int
    blocks_per_epoch: int
    ahead_blocks: int
    members: list[Consumer] = field(default_factory=list)
    top: int = 0
    boundary: int = 0
    join_window: int | None = None
    floor: int = 0
    stuck: tuple[int, float] | None = None

    @property
    def base(self) -> int:
        """The slowest member's cursor."""
        return min(m.cursor for m in self.members)

    @property
    def low(self) -> int:
        """The lowest block that some member has not let go of."""
        return min(m.released for m in self.members)

    @property
    def horizon(self) -> int:
        """One past the highest block that may be made now: so far ahead, but not beyond the next epoch.

        A small dataset would else be prepared for several epochs that no trial may ever begin.
        """
        base = self.base
        return min(base + self.ahead_blocks, self.next_boundary(base + 1) + self.blocks_per_epoch)

    def next_boundary(self, block: int) -> int:
        """The first block of the epoch that begins at ``block`` or next after it."""
        return -(-block // self.blocks_per_epoch) * self.blocks_per_epoch

    def wants(self, block: int) -> bool:
        """Whether the block is of use to a member, or kept for newcomers."""
        if block < self.floor:
            return False
        return block < self.top or block < self.horizon or any(block < m.cursor for m in self.members)

    def advance(self) -> None:
        """Bring ``boundary``, ``join_window`` and ``floor`` up to date after the members moved."""
        base = self.base
        boundary = base - base % self.blocks_per_epoch
        if boundary != self.boundary:
            self.join_window = boundary if self.floor <= boundary else None
            self.boundary = boundary
        self.floor = self.low if self.join_window is None else min(self.join_window, self.low)

    def close_join_window(self) -> bool:
        """Give up the blocks kept for newcomers; whether that frees anything."""
        if self.join_window is None or self.join_window >= self.low:
            return False
        self.join_window = None
        self.floor = self.low
        return True


def can_merge(one: Cohort, other: Cohort) -> bool:
    """Whether two cohorts overlap so far that one sweep serves both without making a block again."""
    behind, front = sorted((one, other), key=lambda cohort: cohort.base)
    return front.floor <= behind.base and front.base <= behind.horizon


_OPEN_RESERVATION = "reservation:"
"""Names of reservations that wait for any successor begin so."""


class ConsumerTable:
    """Members and cohorts of one feed.

    Args:
        blocks_per_epoch: blocks in one epoch.
        ahead_blocks: how far a sweep may run ahead of its slowest member.
        leads: whether it is decided here where newcomers begin, and who moves to another's epoch.

    Attributes:
        by_name: every consumer and reservation; each is in the member list of exactly one cohort.
        cohorts: by number; none is empty between two events.
    """

    def __init__(self, blocks_per_epoch: int, ahead_blocks: int, *, leads: bool = True) -> None:
        self.blocks_per_epoch, self.ahead_blocks, self.leads = blocks_per_epoch, ahead_blocks, leads
        self.by_name: dict[str, Consumer] = {}
        self.cohorts: dict[int, Cohort] = {}
        self._next_cohort = 0
        self._next_reservation = 0

    # ---- members ----

    def enter(
        self, name: str, session: int, cohort: Cohort, cursor: int, deadline: float, state: ConsumerState
    ) -> None:
        """Put a consumer, or a reservation, into a cohort; it has used up all before ``cursor``."""
        member = Consumer(name, session, cursor, cursor, cursor, deadline, cohort.number, state)
        self.by_name[name] = member
        cohort.members.append(member)

    def exit(self, member: Consumer) -> None:
        """Take a member out; a cohort ends with its last member."""
        del self.by_name[member.name]
        cohort = self.cohorts[member.cohort]
        cohort.members.remove(member)
        if not cohort.members:
            del self.cohorts[cohort.number]

    def session(self, name: str, session: int) -> Consumer | None:
        """The consumer, if this is its open session."""
        member = self.by_name.get(name)
        return member if member is not None and session > 0 and member.session == session else None

    def why_unknown(self, name: str, session: int) -> str:
        """One clause that says why `session` found nobody."""
        member = self.by_name.get(name)
        if member is None or member.session == 0:
            return f"the service has no session {session} of consumer {name!r}: it left or was removed"
        return f"consumer {name!r} is now in session {member.session}, this call is from session {session}"

    # ---- reservations ----

    def reserve_for_successor(self, member: Consumer, deadline: float) -> None:
        """Hold a leaving member's place for any successor, at the beginning of the epoch after the one it
        used up.
        """
        name, self._next_reservation = f"{_OPEN_RESERVATION}{self._next_reservation}", self._next_reservation + 1
        cohort = self.cohorts[member.cohort]
        self.enter(name, 0, cohort, cohort.next_boundary(member.done), deadline, ConsumerState.RESERVED)

    def claim_reservation(self, name: str, deadline: float) -> bool:
        """Give the open reservation that is furthest behind to ``name``; False if there is none."""
        reservations = [m for m in self.by_name.values() if m.name.startswith(_OPEN_RESERVATION)]
        if not reservations:
            return False
        reservation = min(reservations, key=lambda m: m.cursor)
        del self.by_name[reservation.name]
        reservation.name, reservation.deadline = name, deadline
        self.by_name[name] = reservation
        return True

    def hold_reservations(self, reservations: frozenset[tuple[str, int]]) -> None:
        """Have these reservations and no others: (name, block). Somebody else says when they end."""
        for member in [m for m in self.by_name.values() if m.state is ConsumerState.RESERVED]:
            if (member.name, member.cursor) not in reservations:
                self.exit(member)
        for name, start in sorted(reservations):
            if name not in self.by_name:
                self.enter(name, 0, self.cohort_towards(start), start, math.inf, ConsumerState.RESERVED)

    # ---- where to begin ----

    def entrance(self, cohort: Cohort) -> int:
        """Where a newcomer to ``cohort`` begins: its open door, or the next epoch."""
        return cohort.join_window if cohort.join_window is not None else cohort.next_boundary(cohort.base)

    def shared_start(self, otherwise: int) -> tuple[Cohort, int]:
        """Cohort and block at which a newcomer begins an epoch with the least wait; ``otherwise`` if
        nobody is there.
        """
        if not self.cohorts:
            return self.new_cohort(otherwise), otherwise

        def wait(cohort: Cohort) -> tuple[int, int]:
            return self.entrance(cohort) - cohort.base, -len(cohort.members)

        cohort = min(self.cohorts.values(), key=wait)
        return cohort, self.entrance(cohort)

    def cohort_at(self, start: int) -> Cohort:
        """The cohort whose window holds ``start``, or a new one."""
        for cohort in self.cohorts.values():
            if cohort.floor <= start <= cohort.horizon:
                return cohort
        return self.new_cohort(start)

    def cohort_towards(self, start: int) -> Cohort:
        """The cohort that an epoch's beginning at ``start`` is open for, or that comes there next, or a new one."""
        met = [c for c in self.cohorts.values() if start in (c.join_window, c.next_boundary(c.base))]
        return max(met, key=lambda cohort: len(cohort.members)) if met else self.cohort_at(start)

    def new_cohort(self, start: int) -> Cohort:
        """A cohort without members yet, whose sweep begins at ``start``."""
        boundary = start - start % self.blocks_per_epoch
        join_window = start if start == boundary else None
        cohort = Cohort(self._next_cohort, self.blocks_per_epoch, self.ahead_blocks)
        cohort.top, cohort.boundary, cohort.join_window, cohort.floor = start, boundary, join_window, start
        self._next_cohort += 1
        self.cohorts[cohort.number] = cohort
        return cohort

    # ---- cohorts that meet and part ----

    def merge(self, member: Consumer) -> str | None:
        """Bring a member's cohort together with one that its cursor has reached, or that begins an epoch with it.

        Only the one that is behind does so, by asking: those ahead of a laggard must not pull it back in before it
        moves.
        Returns a line for the log if that happened.
        """
        own = self.cohorts[member.cohort]
        for other in self.cohorts.values():
            if other is own:
                continue
            if member.cursor == own.base <= other.base and can_merge(own, other):
                return self._unite(other, own)
            if self.leads and len(own.members) == 1 and self._can_move_ahead(member, other):
                member.cursor = member.released = member.done = self.entrance(other)
                return self._unite(other, own)
        return None

    def _can_move_ahead(self, member: Consumer, other: Cohort) -> bool:
        """Whether a member that begins an epoch alone can begin it with ``other`` at once and without a
        re-make.
        """
        entrance = self.entrance(other)
        near = entrance <= other.horizon
        begins = member.cursor % self.blocks_per_epoch == 0 and member.cursor != member.exact
        return begins and entrance > member.cursor and near

    def _unite(self, keep: Cohort, gone: Cohort) -> str:
        text = f"{names(gone.members)} joined the cohort of {names(keep.members)}"
        behind = min(keep, gone, key=lambda cohort: cohort.base)
        keep.top = max(keep.top, gone.top)
        keep.boundary, keep.join_window, keep.floor = behind.boundary, behind.join_window, min(keep.floor, gone.floor)
        keep.stuck = None
        for member in gone.members:
            member.cohort = keep.number
        keep.members += gone.members
        del self.cohorts[gone.number]
        return text

    def detach(self, member: Consumer) -> None:
        """Move a member to a cohort of its own: it goes on at its cursor."""
        old = self.cohorts[member.cohort]
        cohort = self.new_cohort(member.cursor)
        cohort.floor, cohort.join_window = min(member.released, old.floor), old.join_window
        cohort.boundary = member.cursor - member.cursor % self.blocks_per_epoch
        old.members.remove(member)
        member.cohort = cohort.number
        cohort.members.append(member)

    def advance(self) -> None:
        """Bring all cohorts up to date after their members moved."""
        for cohort in self.cohorts.values():
            cohort.advance()

    def wanted(self, block: int) -> bool:
        """Whether any cohort has a use for the block."""
        return any(cohort.wants(block) for cohort in self.cohorts.values())

    def validate(self) -> None:
        listed = [m.name for c in self.cohorts.values() for m in c.members]
        assert sorted(listed) == sorted(self.by_name), "a member is in no cohort, or in two"
        for number, cohort in self.cohorts.items():
            assert cohort.members, f"cohort {number} is empty"
            assert all(m.cohort == number for m in cohort.members)
            assert cohort.floor <= cohort.low, f"cohort {number} drops blocks that a member still holds"
        assert all(max(m.released, m.done) <= m.cursor for m in self.by_name.values())


def names(members: list[Consumer]) -> str:
    """The members' names, for the log."""
    return ", ".join(m.name for m in members) or "nobody"
