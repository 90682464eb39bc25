"""Who is on a feed: the consumers, the reservations held for some, and the cohorts they form."""

from __future__ import annotations

import math

from mbaas.core.cohort import Cohort, Consumer, ConsumerState, can_merge

_OPEN_RESERVATION = "reservation:"
"""Names of reservations that wait for any successor begin so."""


class ConsumerTable:
    """Members and cohorts of one feed.

    Args:
        blocks_per_epoch: blocks in one epoch.
        ahead_blocks: how far a sweep may run ahead of its slowest member.
        leads: whether it is decided here where newcomers begin, and who moves to another's epoch.

    Attributes:
        members: by name; each is in the member list of exactly one cohort.
        cohorts: by number; none is empty between two events.
    """

    def __init__(self, blocks_per_epoch: int, ahead_blocks: int, *, leads: bool = True) -> None:
        self.blocks_per_epoch, self.ahead_blocks, self.leads = blocks_per_epoch, ahead_blocks, leads
        self.members: dict[str, Consumer] = {}
        self.cohorts: dict[int, Cohort] = {}
        self._next_cohort = 0
        self._next_reservation = 0

    # ---- members ----

    def enter(
        self, name: str, session: int, cohort: Cohort, cursor: int, deadline: float, state: ConsumerState
    ) -> None:
        """Put a consumer, or a reservation, into a cohort; it has used up all before ``cursor``."""
        member = Consumer(name, session, cursor, cursor, cursor, deadline, cohort.number, state)
        self.members[name] = member
        cohort.members.append(member)

    def exit(self, member: Consumer) -> None:
        """Take a member out; a cohort ends with its last member."""
        del self.members[member.name]
        cohort = self.cohorts[member.cohort]
        cohort.members.remove(member)
        if not cohort.members:
            del self.cohorts[cohort.number]

    def session(self, name: str, session: int) -> Consumer | None:
        """The consumer, if this is its open session."""
        member = self.members.get(name)
        return member if member is not None and session > 0 and member.session == session else None

    def why_unknown(self, name: str, session: int) -> str:
        """One clause that says why `session` found nobody."""
        member = self.members.get(name)
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
        reservations = [m for m in self.members.values() if m.name.startswith(_OPEN_RESERVATION)]
        if not reservations:
            return False
        reservation = min(reservations, key=lambda m: m.cursor)
        del self.members[reservation.name]
        reservation.name, reservation.deadline = name, deadline
        self.members[name] = reservation
        return True

    def hold_reservations(self, reservations: frozenset[tuple[str, int]]) -> None:
        """Have these reservations and no others: (name, block). Somebody else says when they end."""
        for member in [m for m in self.members.values() if m.state is ConsumerState.RESERVED]:
            if (member.name, member.cursor) not in reservations:
                self.exit(member)
        for name, start in sorted(reservations):
            if name not in self.members:
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
        assert sorted(listed) == sorted(self.members), "a member is in no cohort, or in two"
        for number, cohort in self.cohorts.items():
            assert cohort.members, f"cohort {number} is empty"
            assert all(m.cohort == number for m in cohort.members)
            assert cohort.floor <= cohort.low, f"cohort {number} drops blocks that a member still holds"
        assert all(max(m.released, m.done) <= m.cursor for m in self.members.values())


def names(members: list[Consumer]) -> str:
    """The members' names, for the log."""
    return ", ".join(m.name for m in members) or "nobody"
