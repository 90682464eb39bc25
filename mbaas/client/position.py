"""A consumer's position: blocks received, blocks held, and the next request. No I/O.

`mbaas.client.stream` makes the calls. Simulated consumers use the same decisions (`tests/support/system_trials.py`),
so tests cover the real protocol between consumers and the staging core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from mbaas.samples.order import ASIDE, OwnEpoch, Shuffle
from mbaas.wire.consumers import Resumption, Start

KEPT_EPOCHS = 16
"""Number of past epochs whose position and shuffle are kept.

With one block per epoch, two calls can bring eight epochs while an older one is still in use.
"""


class Numbered(Protocol):
    """A delivered block: its number, and the shuffle of the stream's epoch that contains it."""

    @property
    def number(self) -> int: ...

    @property
    def shuffle(self) -> Shuffle: ...


BlockT = TypeVar("BlockT", bound=Numbered)


class Position(Generic[BlockT]):
    """One consumer's position in a feed.

    One call requests at most ``most`` blocks, and one block at the start of an epoch.
    """

    # True if the consumer may start an epoch elsewhere than at the end of its last one. It then returns to the others'
    # epochs after a side epoch.
    moves = True

    def __init__(self, most: int) -> None:
        # The next block that the consumer needs, the first one that was not received yet, and the one below which all
        # are used up.
        self.cursor = self.following = self.done = 0
        # First of the blocks that were delivered and dropped unused. The coordinator must learn of them: otherwise they
        # would count as held while the consumer uses an older block, and could fill the budget.
        self.given_up: int | None = None
        self.blocks_per_epoch = self.block_samples = 1
        self._least: int | None = None  # where the consumer may begin, as requested; it may have had earlier epochs
        # Ranges of the consumer's own epochs; the last one contains ``following``.
        self.own_epochs: deque[OwnEpoch] = deque([OwnEpoch(0, 1)], maxlen=KEPT_EPOCHS)
        self.received: deque[BlockT] = deque()  # from ``cursor`` on, in order, without gaps
        self._shuffles: dict[int, Shuffle] = {}  # of the stream's epochs that were received last
        self._most = most
        self._words = 0
        self._held: deque[tuple[int, Callable[[], bool]]] = deque()  # blocks that were read, oldest first

    def enter(
        self,
        cursor: int,
        own_epoch: OwnEpoch,
        blocks_per_epoch: int,
        block_samples: int,
        *,
        requested: int | None = None,
    ) -> None:
        """Start a session at ``cursor``, within ``own_epoch``; ``requested`` is the block of the request's `Start`."""
        self._least = requested
        self.cursor = self.done = self.following = cursor
        self.given_up = None
        # Blocks of an earlier session do not belong to this one, whose numbers may even differ.
        self.received.clear()
        self._held.clear()
        self.blocks_per_epoch, self.block_samples = blocks_per_epoch, block_samples
        self.own_epochs.clear()
        self.own_epochs.append(own_epoch)

    # ---- the consumer's epochs ----

    def is_beginning(self, block: int) -> bool:
        """Return whether ``block`` is the first of an own epoch of the consumer."""
        return self.own_epoch_of(block).first == block

    def own_epoch_of(self, block: int) -> OwnEpoch:
        """Return the consumer's own epoch that contains ``block``."""
        newest = self.own_epochs[-1]
        if block >= newest.end:
            return self._own_epoch_at(newest.end)
        # The block may be some epochs behind the one to request next.
        return next((own for own in reversed(self.own_epochs) if own.first <= block), self.own_epochs[0])

    def _own_epoch_at(self, first: int) -> OwnEpoch:
        return OwnEpoch.at(first, self.blocks_per_epoch, self.block_samples)

    def _shuffle_before(self, block: int) -> Shuffle | None:
        return self._shuffles.get((block - 1) // self.blocks_per_epoch)

    def next_epoch(self, block: int) -> int:
        """Return the first epoch of the stream that is entirely new to a consumer that starts at ``block``.

        ``block`` is the first block of an own epoch, or in an own epoch without used blocks.
        """
        first, blocks = self.own_epoch_of(block).first, self.blocks_per_epoch
        if first // blocks < ASIDE:
            return -(-first // blocks)
        last = (first - 1) // blocks
        return last - self._aside(last) + 1

    def _aside(self, number: int) -> int:
        """Return the difference between an epoch's number and the number of the epoch whose order it has."""
        if number < ASIDE:
            return 0
        # Side epochs follow each other like normal ones. A consumer that skips the rest of an epoch may lack its last
        # blocks, so use the last epoch with a received block.
        known = max(each for each in self._shuffles if each <= number)
        return known - self._shuffles[known].epoch

    @property
    def aside(self) -> int:
        """Offset of the current epoch's number from the epoch whose order it has; 0 outside side epochs."""
        return self._aside(self.own_epoch_of(self.cursor).first // self.blocks_per_epoch)

    # ---- requests and deliveries ----

    def next_call(self) -> int:
        """Return the number of the next call about the cursor. It orders calls, which may overtake each other."""
        self._words += 1
        return self._words

    @property
    def want(self) -> int:
        """Number of blocks to request: one at the start of an epoch, where the consumer may be moved or be done."""
        return 1 if self.is_beginning(self.following) else self._most

    @property
    def began(self) -> int:
        """The first block of the own epoch that contains ``following``."""
        return self.own_epoch_of(self.following).first

    def runs_short(self, *, are_remote: bool) -> bool:
        """Return whether to request more blocks now.

        If blocks come from other nodes, request more when one is left, so that the next travels while this one is used.
        Never request ahead across an epoch's end: it may be the consumer's last, and the request would delay others
        while the trial does other work.
        """
        if self.is_beginning(self.following):
            return False
        return len(self.received) <= int(are_remote)

    def take_in(self, blocks: Iterable[BlockT]) -> None:
        """Add delivered blocks, which start at ``following`` or at another epoch's start."""
        for block in blocks:
            newest = self.own_epochs[-1]
            # the block may start an own epoch, elsewhere than expected
            if block.number >= newest.end or (block.number != self.following and self.is_beginning(self.following)):
                self.own_epochs.append(self._own_epoch_at(block.number))
            number = block.number // self.blocks_per_epoch
            self._shuffles.pop(number, None)
            self._shuffles[number] = block.shuffle  # re-inserted at the end: the newest delivery
            self.received.append(block)
            self.following = block.number + 1
        self.given_up = None
        while len(self._shuffles) > KEPT_EPOCHS:
            del self._shuffles[next(iter(self._shuffles))]

    def go_back(self, block: int) -> None:
        """Go back to a received block that cannot be read."""
        self.received.clear()  # blocks arrive in order, without gaps: later ones are delivered again too
        self.following = block

    # ---- using and releasing blocks ----

    def move_on(self) -> None:
        """Move the cursor past the current block, which was read."""
        self.cursor = self.received.popleft().number + 1

    def leap(self, block: int) -> bool:
        """Continue at the later block ``block``, and drop blocks received before it.

        Return True if no received blocks are left. A pending call is then out of date, and ``given_up`` must be sent.
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

    # ---- new sessions ----

    def start_at(self, block: int) -> Start:
        """Return the start of a new session that needs ``block`` next, in this session's numbers."""
        own, blocks = self.own_epoch_of(block), self.blocks_per_epoch
        taken, is_aside, shuffle = block > own.first, block // blocks >= ASIDE, self._shuffle_before(block)
        if not taken and is_aside and self.moves:
            # Return to the others, after the side epoch, so that no random numbers are repeated.
            return Start(self.next_epoch(block) * blocks)
        if not (taken or own.begin or is_aside):
            # Between two own epochs. A consumer that has received nothing yet must begin as assigned.
            return Start(block, now=self.moves and shuffle is not None)
        if shuffle is None:
            assert not taken, f"how block {block - 1} is shuffled is not known"
            # It has received nothing yet, or skipped the end of its last epoch.
            return Start(block if self._shuffles else self._least, now=True)
        return Start(block, resumed=Resumption(block, own, (block - 1) // blocks, shuffle, taken))

    def resume(self, resumed: Resumption, by: int) -> None:
        """Record the shuffle of the resumed epoch, and renumber blocks by ``by``."""
        epochs = by // self.blocks_per_epoch
        self._shuffles = {number + epochs: shuffle for number, shuffle in self._shuffles.items()}
        self._shuffles[resumed.epoch + epochs] = resumed.shuffle

    def hold(self, block: int, is_alive: Callable[[], bool]) -> None:
        """Count a block as held while ``is_alive`` returns True."""
        self._held.append((block, is_alive))

    def released(self) -> int:
        """Return the first block that is held or received ahead. All blocks below are released."""
        while self._held and not self._held[0][1]():
            self._held.popleft()
        return self._held[0][0] if self._held else self._unread

    @property
    def _unread(self) -> int:
        return self.received[0].number if self.received else self.following

    def unheld(self) -> tuple[int, int] | None:
        """Return the range [first, end) of blocks that were read and released behind the newest held block, or None.

        A trial uses blocks in order, so all blocks between the oldest and the newest held block count as held.
        """
        newest = next((block for block, is_alive in reversed(self._held) if is_alive()), None)
        return None if newest is None or newest + 1 >= self._unread else (newest + 1, self._unread)
