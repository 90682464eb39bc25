"""How each epoch of a stream is shuffled: fixed when its first block is begun, and the same for everybody from then on.

Most epochs are shuffled as a whole. While the epochs of some consumer begin in the middle of those of the stream, each
epoch is shuffled within the segments that its beginning cuts (`mbaas.order.Shuffle`), so that it gets each sample once.

How an epoch is shuffled is written down before anybody is given a block of it, and a coordinator that was restarted is
told. Else a rank that comes back would have the epochs in which its sisters are ahead of it in another order than they.

A consumer that was restored in an epoch which has been shuffled in another way here gets the rest of it from epochs
aside: epochs with numbers far above all others, which nobody else goes through.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping

from mbaas.core.story import InvariantError
from mbaas.messages import Resumption
from mbaas.order import ASIDE, MOST_LEVELS, OwnEpoch, Shuffle

ASIDE_EPOCHS = 1 << 8
"""Epoch numbers in one run aside: for the epoch that was put aside, and those that follow it."""

ASIDE_RUNS = 1 << 24
"""Runs of epochs aside, each of ``ASIDE_EPOCHS`` numbers. Which run an epoch gets follows from what it holds. So
consumers that need the same epoch share it, and find it again in a coordinator that was restarted.
"""

PAGE_EPOCHS = 64
"""Epochs that are written down together: a page is written anew with each of them."""

MOST_PAGES = 64
"""Pages that are remembered, those changed last; others only as long as somebody is near their epochs."""


class EpochTable:
    """The shuffles of the epochs that were begun.

    Args:
        blocks_per_epoch: blocks in one epoch.
        block_samples: samples in a block, of which only an epoch's last may have fewer.
        is_shuffled: whether epochs are shuffled; else all have the same order, and anybody may begin anywhere.
        lanes: how many the feed has; with several, consumers begin only where epochs do, so that all lanes agree.
        written: epoch -> how it is shuffled, as an earlier coordinator wrote it down; None if nobody writes it down.
    """

    def __init__(
        self,
        blocks_per_epoch: int,
        block_samples: int = 1,
        *,
        is_shuffled: bool = True,
        lanes: int = 1,
        written: Mapping[int, Shuffle] | None = None,
    ) -> None:
        self.blocks_per_epoch, self.block_samples = blocks_per_epoch, block_samples
        self.lanes, self._is_shuffled = lanes, is_shuffled
        self._shuffles = dict(written or {})
        self._pages = dict.fromkeys(number // PAGE_EPOCHS for number in self._shuffles)  # those changed last come last
        self._are_written = written is not None
        self._unwritten: set[int] = set()
        self._changed: set[int] = set()  # pages

    # ---- where a consumer's own epoch lies ----

    def own_epoch(self, first: int) -> OwnEpoch:
        """Return the epoch of a consumer that begins it at block ``first``."""
        return OwnEpoch.at(first, self.blocks_per_epoch, self.block_samples)

    def around(self, block: int) -> OwnEpoch:
        """Return the epoch of a consumer that is at ``block`` and whose epochs are those of the stream."""
        return self.own_epoch(block - block % self.blocks_per_epoch)

    def next_boundary(self, block: int) -> int:
        """Return the first block of the epoch after that of ``block``."""
        return (block // self.blocks_per_epoch + 1) * self.blocks_per_epoch

    def is_aside(self, block: int) -> bool:
        """Whether the block belongs to an epoch aside."""
        return block // self.blocks_per_epoch >= ASIDE

    # ---- shuffles ----

    def shuffle_of(self, block: int) -> Shuffle:
        """Return the shuffle of the block's epoch; of one that was not begun, as if nobody was out of phase."""
        number = block // self.blocks_per_epoch
        return self._shuffles.get(number) or Shuffle(number)

    def has_begun(self, block: int) -> bool:
        """Whether the shuffle of the block's epoch is fixed."""
        return block // self.blocks_per_epoch in self._shuffles

    def is_written(self, block: int) -> bool:
        """Whether blocks of the block's epoch may be given to consumers: how it is shuffled will not be forgotten."""
        return not self._unwritten or block // self.blocks_per_epoch not in self._unwritten

    def note_written(self, epochs: Iterable[int]) -> None:
        """Note that it is written down how these epochs are shuffled."""
        self._unwritten.difference_update(epochs)

    def take_changed(self) -> dict[int, dict[int, Shuffle]]:
        """Return the pages that are to be written down since the last call; those that are to be deleted are empty."""
        pages: dict[int, dict[int, Shuffle]] = {page: {} for page in self._changed}
        if pages:
            for number, shuffle in self._shuffles.items():
                if number // PAGE_EPOCHS in pages:
                    pages[number // PAGE_EPOCHS][number] = shuffle
        self._changed = set()
        return pages

    def _set(self, number: int, shuffle: Shuffle) -> None:
        if self._shuffles.get(number) == shuffle:
            return
        self._shuffles[number] = shuffle
        page = number // PAGE_EPOCHS
        self._pages.pop(page, None)
        self._pages[page] = None
        if self._are_written:
            self._unwritten.add(number)
            self._changed.add(page)

    def fix(self, block: int, own_epochs: Iterable[OwnEpoch]) -> None:
        """Fix the shuffle of the block's epoch, if that was not begun before.

        Args:
            block: its number.
            own_epochs: of all consumers.
        """
        number = block // self.blocks_per_epoch
        if number in self._shuffles:
            return
        before = self._shuffles.get(number - 1)
        if before is None:  # nobody came through the epoch before
            self._set(number, Shuffle(number))
        else:  # an epoch aside has another number than the one that chance follows from
            epoch = number if number < ASIDE else before.epoch + 1
            self._set(number, before.after(epoch, self._cuts(number, own_epochs)))

    def _cuts(self, number: int, own_epochs: Iterable[OwnEpoch]) -> set[int]:
        """Return the positions before which an epoch must have the same samples as the one before it."""
        if not self._is_shuffled:
            return set()
        begin, length = number * self.blocks_per_epoch, self.blocks_per_epoch
        cuts = set()
        for own in own_epochs:
            if own.first < begin < own.end:
                cuts.add(own.begin)
            elif begin - length < own.end < begin:  # the consumer's next epoch reaches across the beginning
                cuts.add(own.end % length * self.block_samples)
        return cuts

    def can_begin(self, block: int) -> bool:
        """Whether a consumer that begins its epoch at ``block`` will get each sample once."""
        cut = block % self.blocks_per_epoch * self.block_samples
        if not cut or self.lanes > 1:
            return not cut
        if not self._is_shuffled:
            return True
        number = block // self.blocks_per_epoch
        here, after = self._shuffles.get(number), self._shuffles.get(number + 1)
        if here is None:  # nobody is here: its shuffle would be fixed without knowing what came before
            return False
        return here.levels < MOST_LEVELS if after is None else after.keeps(cut, here)

    def keeps(self, own: OwnEpoch) -> bool:
        """Whether a consumer that is in an epoch of its own will get each sample of it once."""
        if not own.begin or not self._is_shuffled:
            return True
        number = own.first // self.blocks_per_epoch
        here, after = self._shuffles.get(number), self._shuffles.get(number + 1)
        return after is None or here is None or after.keeps(own.begin, here)

    def adopt(self, resumed: Resumption, own_epochs: Iterable[OwnEpoch]) -> bool:
        """Adopt the shuffle that a returning consumer knows for its epoch, unless it contradicts what is fixed here.

        Args:
            resumed: what the consumer knows.
            own_epochs: of the other consumers.

        Returns:
            whether it can go on there.
        """
        number, shuffle = resumed.epoch, resumed.shuffle
        before = self._shuffles.get(number - 1)
        # Consumers that are in the epoch before need what this one begins with.
        needed = self._cuts(number, own_epochs) if number not in self._shuffles else set()
        if before is not None and not all(shuffle.keeps(cut, before) for cut in needed):
            return False
        if self._shuffles.get(number, shuffle) != shuffle:
            return False
        own, after = resumed.own_epoch, self._shuffles.get(number + 1)
        reaches_across = own.first < (number + 1) * self.blocks_per_epoch < own.end
        if self._is_shuffled and reaches_across and after is not None and not after.keeps(own.begin, shuffle):
            return False
        self._set(number, shuffle)
        return True

    def put_aside(self, resumed: Resumption, own_epochs: Collection[OwnEpoch]) -> Resumption:
        """Give the rest of a consumer's epoch numbers aside of all others, and return where it goes on."""
        run = zlib.crc32(repr((resumed.shuffle, resumed.own_epoch.begin)).encode()) % ASIDE_RUNS
        moved = resumed.moved(ASIDE + run * ASIDE_EPOCHS - resumed.epoch, self.blocks_per_epoch)
        while not self.adopt(moved, own_epochs):  # something else is there, or its next epoch has begun
            moved = moved.moved(ASIDE_EPOCHS, self.blocks_per_epoch)
        return moved

    def forget(self, kept: Iterable[int]) -> None:
        """Forget the shuffles of epochs long ago, but not those of the epochs of ``kept`` blocks and near them.

        The epoch before one that is kept stays with it, because the next may have to have its samples.
        """
        if len(self._pages) <= MOST_PAGES:
            return
        near = {(block // self.blocks_per_epoch + by) // PAGE_EPOCHS for block in kept for by in (-1, 0, 1)}
        gone = {page for page in [*self._pages][:-MOST_PAGES] if page not in near}
        self._pages = {page: None for page in self._pages if page not in gone}
        for number in [number for number in self._shuffles if number // PAGE_EPOCHS in gone]:
            del self._shuffles[number]
            self._unwritten.discard(number)
        if self._are_written:
            self._changed |= gone

    def validate(self) -> None:
        """Check that no epoch has another number than its shuffle, except those aside."""
        wrong = {n: s for n, s in self._shuffles.items() if n < ASIDE and s.epoch != n}
        if wrong:
            raise InvariantError(f"epochs are shuffled as others: {wrong}")
