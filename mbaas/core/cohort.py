"""Consumers, and the cohorts in which they go through the stream together.

A cohort is a set of consumers that share one sweep: each block is made once for all of them, the fast wait for the
slow within the window. Normally there is one. A consumer that lags too long, or that was restored from a checkpoint
far from the others, is a cohort of its own until its cursor meets another cohort's window again.
"""

from __future__ import annotations

import enum
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
