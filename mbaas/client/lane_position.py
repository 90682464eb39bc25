"""Where a consumer stands in a lane: what it received, what it holds, and what it should ask for next. Pure.

`mbaas.client.session` makes the calls. What is decided here is also what simulated consumers do
(`tests/support/system_schedules.py`), so the protocol between consumers and the staging core is tested as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class Numbered(Protocol):
    """A block that was delivered."""

    @property
    def number(self) -> int:
        """Its number among the lane's own blocks."""


BlockT = TypeVar("BlockT", bound=Numbered)


class LanePosition(Generic[BlockT]):
    """One consumer's position in one lane.

    Args:
        most: how many blocks one call may bring, except across an epoch's end.

    Attributes:
        cursor: the next block that the consumer needs.
        done: all blocks below are used up, as the consumer says.
        received: blocks from ``cursor`` on, in order, without gaps.
        following: the first block that was not received yet.
        given_up: what was delivered from here on was let go without any use, and the coordinator must hear of it: while
            this consumer still looks at an older block, all behind that would else count as held, and could fill the
            budget. None if there is no such thing.
        blocks_per_epoch: the lane's.
    """

    def __init__(self, most: int) -> None:
        self.cursor = self.done = self.following = 0
        self.given_up: int | None = None
        self.blocks_per_epoch = 1
        self.received: deque[BlockT] = deque()
        self._most = most
        self._words = 0
        self._held: deque[tuple[int, Callable[[], bool]]] = deque()  # blocks that were read, oldest first

    def enter(self, cursor: int, blocks_per_epoch: int) -> None:
        """Begin a session at ``cursor``; what is held from an earlier one stays held."""
        self.cursor = self.done = self.following = cursor
        self.given_up = None
        self.blocks_per_epoch = blocks_per_epoch

    # ---- asking, and what comes ----

    def next_word(self) -> int:
        """Return the number of the next word about the cursor: words may overtake each other on their way."""
        self._words += 1
        return self._words

    @property
    def want(self) -> int:
        """How many blocks to ask for: one at an epoch's beginning, where this consumer may be moved, or be done."""
        return 1 if self.following % self.blocks_per_epoch == 0 else self._most

    def runs_short(self, *, are_remote: bool) -> bool:
        """Whether more blocks should be asked for already.

        One is left then where blocks come from other nodes, so that the next one travels while this one is used; but
        none across an epoch's end, which may be the consumer's last: a block that nobody uses was sent for nothing.
        """
        return len(self.received) <= int(are_remote and self.following % self.blocks_per_epoch != 0)

    def take_in(self, blocks: Iterable[BlockT]) -> None:
        """Take in delivered blocks: those from ``following`` on, or from another epoch's beginning."""
        self.received.extend(blocks)
        self.following = self.received[-1].number + 1
        self.given_up = None

    def go_back(self, block: int) -> None:
        """Return to a block that was received and cannot be read."""
        self.received.clear()  # blocks come in order, without gaps: those behind it come again, too
        self.following = block

    # ---- using blocks, and letting go of them ----

    def move_on(self) -> None:
        """Move the cursor past the block that stands there, which was read."""
        self.cursor = self.received.popleft().number + 1

    def leap(self, block: int) -> bool:
        """Go on at ``block``, which lies ahead, and let go of what was received before it.

        Returns:
            whether nothing is left of what was received. Then a call that is in flight is out of date, and the
            coordinator must be told what is given up.
        """
        before = self.cursor
        while self.received and self.received[0].number < block:
            self.received.popleft()
        self.cursor = max(self.cursor, block)
        self.following = max(self.following, block)
        if block <= before or self.received:
            return False
        self.given_up = before if self.given_up is None else min(before, self.given_up)
        return True

    def give_up_received(self) -> None:
        """Let go of what was received ahead of its use; it will be asked for again."""
        self.received.clear()
        self.following = self.cursor
        self.given_up = self.cursor if self.given_up is None else min(self.cursor, self.given_up)

    def hold(self, block: int, is_alive: Callable[[], bool]) -> None:
        """Count a block as held from here on, as long as anybody may look at its arrays."""
        self._held.append((block, is_alive))

    def released(self) -> int:
        """Return the block below which all are let go: neither received ahead nor seen by any array that is alive.

        One number says it, so what is held behind the oldest array counts as held: a trial uses blocks in order.
        """
        while self._held and not self._held[0][1]():
            self._held.popleft()
        if self._held:
            return self._held[0][0]
        return self.received[0].number if self.received else self.following

    def held_blocks(self) -> int:
        """Return how many blocks have arrays that are alive in this process."""
        self.released()  # lets go of those whose arrays are not
        return len(self._held)
