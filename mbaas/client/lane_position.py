"""Where a consumer stands in a lane: what it received, what it holds, and what it should ask for next. Pure.

`mbaas.client.session` makes the calls. What is decided here is also what simulated consumers do
(`tests/support/system_trials.py`), so the protocol between consumers and the staging core is tested as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from mbaas.messages import Lane, Resumption, Start
from mbaas.order import ASIDE, OwnEpoch, Shuffle

KEPT_EPOCHS = 16
"""How many past epochs a consumer remembers, with their place and shuffle. With one block an epoch, two calls can bring
eight epochs while an older one is still in use.
"""


class Numbered(Protocol):
    """A block that was delivered."""

    @property
    def number(self) -> int:
        """Its number among the lane's own blocks."""

    @property
    def shuffle(self) -> Shuffle:
        """How the stream's epoch is shuffled that it is of."""


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
        own_epochs: where the consumer's own epochs lie, the one of ``following`` last.
        moves: whether it may begin an epoch elsewhere than where its last one ended, and goes back to the others'
            epochs when it has ended one aside.
        given_up: what was delivered from here on was let go without any use, and the coordinator must hear of it: while
            this consumer still looks at an older block, all behind that would else count as held, and could fill the
            budget. None if there is no such thing.
        lane: the lane, whose own blocks are counted here.
        block_samples: samples in a block.
    """

    moves = True

    def __init__(self, most: int) -> None:
        self.cursor = self.done = self.following = 0
        self.given_up: int | None = None
        self.lane, self.block_samples = Lane(1), 1
        self.own_epochs: deque[OwnEpoch] = deque([OwnEpoch(0, 1)], maxlen=KEPT_EPOCHS)
        self.received: deque[BlockT] = deque()
        self._shuffles: dict[int, Shuffle] = {}  # of the stream's epochs whose blocks came last
        self._most = most
        self._words = 0
        self._held: deque[tuple[int, Callable[[], bool]]] = deque()  # blocks that were read, oldest first

    def enter(self, cursor: int, own_epoch: OwnEpoch, lane: Lane, block_samples: int) -> None:
        """Begin a session at ``cursor``, in an epoch of its own."""
        self.cursor = self.done = self.following = cursor
        self.given_up = None
        # What an earlier session handed out is no block of this one, which may even count from other numbers.
        self.received.clear()
        self._held.clear()
        self.lane, self.block_samples = lane, block_samples
        self.own_epochs.clear()
        self.own_epochs.append(own_epoch)

    # ---- its own epochs ----

    def is_beginning(self, block: int) -> bool:
        """Whether the consumer begins an epoch of its own at ``block``, which it was given or is to ask for."""
        return self.own_epoch_of(block).first == block

    def own_epoch_of(self, block: int) -> OwnEpoch:
        """Return the consumer's own epoch in which it needs ``block``."""
        newest = self.own_epochs[-1]
        if block >= newest.end:
            return self._own_epoch_at(newest.end)
        # It may use, or go back to, a block that is some epochs behind the one that it asks for.
        return next((own for own in reversed(self.own_epochs) if own.first <= block), self.own_epochs[0])

    def _own_epoch_at(self, first: int) -> OwnEpoch:
        return OwnEpoch.at(first, self.lane.blocks_per_epoch, self.block_samples)

    def _shuffle_before(self, block: int) -> Shuffle | None:
        """Return how the epoch of the block before is shuffled, if anything of it was received."""
        return self._shuffles.get((block - 1) // self.lane.blocks_per_epoch)

    def next_epoch(self, block: int) -> int:
        """Return the number of the stream's first epoch of which it has seen nothing when it begins at ``block``.

        Args:
            block: where it begins an epoch of its own; or is in one of which it could use nothing so far.
        """
        first, blocks = self.own_epoch_of(block).first, self.lane.blocks_per_epoch
        if first // blocks < ASIDE:
            return -(-first // blocks)
        last = (first - 1) // blocks
        return last - self._aside(last) + 1

    def _aside(self, number: int) -> int:
        """Return by how much an epoch's number is above that of the epoch whose order it has."""
        if number < ASIDE:
            return 0
        # Epochs aside follow each other as those of the stream do. Who skips the rest of one may not have received its
        # last blocks, and so goes by the last of which it received any.
        known = max(each for each in self._shuffles if each <= number)
        return known - self._shuffles[known].epoch

    @property
    def aside(self) -> int:
        """By how much the number of the epoch that it is in is above that of the epoch whose order it has."""
        return self._aside(self.own_epoch_of(self.cursor).first // self.lane.blocks_per_epoch)

    def _enter_own_epoch(self, block: int) -> None:
        """Note that a block was received, perhaps as the first of an epoch, which may begin elsewhere than expected."""
        newest = self.own_epochs[-1]
        if block >= newest.end or (block != self.following and self.is_beginning(self.following)):
            self.own_epochs.append(self._own_epoch_at(block))

    # ---- asking, and what comes ----

    def next_call(self) -> int:
        """Return the number of the next call about the cursor: calls may overtake each other on their way."""
        self._words += 1
        return self._words

    @property
    def want(self) -> int:
        """How many blocks to ask for: one at an epoch's beginning, where this consumer may be moved, or be done."""
        return 1 if self.is_beginning(self.following) else self._most

    @property
    def began(self) -> int:
        """The first block of its own epoch in which it is then."""
        return self.own_epoch_of(self.following).first

    def runs_short(self, *, are_remote: bool) -> bool:
        """Whether more blocks should be asked for already.

        One is left then where blocks come from other nodes, so that the next one travels while this one is used; but
        none across an epoch's end, which may be the consumer's last: a block that nobody uses was sent for nothing. A
        consumer that asked there would also hold up the others while its trial does something else between two epochs.
        Only in a feed of several lanes all are asked before the first is waited for.
        """
        if self.is_beginning(self.following):
            return self.lane.lanes > 1 and not self.received
        return len(self.received) <= int(are_remote)

    def take_in(self, blocks: Iterable[BlockT]) -> None:
        """Take in delivered blocks: those from ``following`` on, or from another epoch's beginning."""
        for block in blocks:
            self._enter_own_epoch(block.number)
            number = block.number // self.lane.blocks_per_epoch
            self._shuffles.pop(number, None)
            self._shuffles[number] = block.shuffle  # at the end: its blocks came last
            self.received.append(block)
            self.following = block.number + 1
        self.given_up = None
        while len(self._shuffles) > KEPT_EPOCHS:
            del self._shuffles[next(iter(self._shuffles))]

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
        if block > self.own_epochs[-1].end:
            self.own_epochs.append(self._own_epoch_at(block))
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

    # ---- other sessions ----

    def start_at(self, block: int) -> Start:
        """Return where a new session of this consumer begins that needs ``block`` next, as this session counts."""
        if self.lane.lanes > 1:  # there all epochs are the stream's, and shuffled as a whole
            return Start(block)
        own, blocks = self.own_epoch_of(block), self.lane.blocks_per_epoch
        taken, is_aside, shuffle = block > own.first, block // blocks >= ASIDE, self._shuffle_before(block)
        if not taken and is_aside and self.moves:
            # Back to the others, and behind the epoch that it had aside: it sees no random numbers again.
            return Start(self.next_epoch(block) * blocks)
        if not (taken or own.begin or is_aside):
            # Between two epochs of its own. One that was given nothing so far has to begin where it was told to.
            return Start(block, now=self.moves and shuffle is not None)
        if shuffle is None:
            assert not taken, f"how block {block - 1} is shuffled is not known"
            # It was given nothing so far, or not the end of its last epoch, which it left.
            return Start(block if self._shuffles else None, now=True)
        return Start(block, resumed=Resumption(block, own, (block - 1) // blocks, shuffle, taken))

    def resume(self, resumed: Resumption, by: int) -> None:
        """Note how the epoch is shuffled in which a new session goes on, and by how much blocks are renumbered."""
        epochs = by // self.lane.blocks_per_epoch
        self._shuffles = {number + epochs: shuffle for number, shuffle in self._shuffles.items()}
        self._shuffles[resumed.epoch + epochs] = resumed.shuffle

    def hold(self, block: int, is_alive: Callable[[], bool]) -> None:
        """Count a block as held from here on, as long as anybody may look at its arrays."""
        self._held.append((block, is_alive))

    def released(self) -> int:
        """Return the block below which all are let go: neither received ahead nor seen by any array that is alive."""
        while self._held and not self._held[0][1]():
            self._held.popleft()
        return self._held[0][0] if self._held else self._unread

    @property
    def _unread(self) -> int:
        """The first block that was not read yet."""
        return self.received[0].number if self.received else self.following

    def unheld(self) -> tuple[int, int] | None:
        """Return what it has read and holds nothing of behind what it holds: first block and end; None if that is none.

        It was to copy that, or keeps older blocks only. A trial uses blocks in order, so all between the oldest and the
        newest that it looks at count as held.
        """
        newest = next((block for block, is_alive in reversed(self._held) if is_alive()), None)
        return None if newest is None or newest + 1 >= self._unread else (newest + 1, self._unread)

    def held_blocks(self) -> int:
        """Return how many blocks of this session have arrays that are alive in this process."""
        self.released()  # lets go of those whose arrays are not
        return len(self._held)
