"""Shuffles of the epochs of a stream, each fixed when its first block is started, and then the same for all consumers.

Most epochs are shuffled as a whole. A consumer whose epochs start in the middle of the stream's epochs must still get
each sample once. As long as there is one, each epoch is shuffled only within the segments cut at that consumer's start
(`mbaas.samples.order.Shuffle`). Shuffles are persisted before any block of the epoch is delivered. Otherwise a rank
that returns after a restart of the coordinator would see another order than the ranks that are ahead.

A consumer may be restored in an epoch whose shuffle is different here. It then gets the rest of that epoch from side
epochs: epochs outside the stream, numbered from `ASIDE` on.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping

from mbaas.core.staging.streams import StreamTable
from mbaas.core.story import InvariantError
from mbaas.samples.order import ASIDE, MOST_LEVELS, OwnEpoch, Shuffle
from mbaas.wire.consumers import Resumption

ASIDE_EPOCHS = 1 << 8
"""Epoch numbers per run of side epochs: for the interrupted epoch and its successors."""

ASIDE_RUNS = 1 << 24
"""Runs of side epochs, each of ``ASIDE_EPOCHS`` numbers. The run is derived from the epoch's contents, so consumers
that need the same epoch share it, and find it again after a restart of the coordinator.
"""

PAGE_EPOCHS = 64
"""Epochs persisted together; each new epoch rewrites its page."""

MOST_PAGES = 64
"""Pages that are remembered, the last changed ones. Others are kept only while a consumer is near their epochs."""


class EpochTable:
    """Shuffles of the epochs that have started. An epoch has the same shuffle in all streams.

    Args:
        streams: the feed's streams.
        is_shuffled: whether epochs are shuffled; otherwise all have the same order, and consumers may start anywhere.
        written: epoch -> shuffle, as persisted by an earlier coordinator; None if shuffles are not persisted.
    """

    def __init__(
        self, streams: StreamTable, *, is_shuffled: bool = True, written: Mapping[int, Shuffle] | None = None
    ) -> None:
        self.streams = streams
        self._is_shuffled = is_shuffled
        self._shuffles = dict(written or {})
        self._pages = dict.fromkeys(number // PAGE_EPOCHS for number in self._shuffles)  # ordered by last change
        self._are_written = written is not None
        self._unwritten: set[int] = set()
        self._changed: set[int] = set()  # pages

    # ---- epochs of consumers ----

    def number_of(self, block: int) -> int:
        """Return the number of the block's epoch."""
        return self.streams.of(block).epoch_of(block)

    def own_epoch(self, first: int) -> OwnEpoch:
        """Return the epoch of a consumer that starts it at block ``first``."""
        stream = self.streams.of(first)
        return OwnEpoch(first, first + stream.blocks_per_epoch, stream.position_of(first))

    def around(self, block: int) -> OwnEpoch:
        """Return the stream's epoch that contains ``block``, as a consumer's epoch."""
        return self.own_epoch(block - self.streams.of(block).index_of(block))

    def is_boundary(self, block: int) -> bool:
        """Return whether the block is the first of its epoch."""
        return not self.streams.of(block).index_of(block)

    def next_boundary(self, block: int) -> int:
        """Return the first block of the epoch after the epoch of ``block``."""
        stream = self.streams.of(block)
        return block - stream.index_of(block) + stream.blocks_per_epoch

    def is_aside(self, block: int) -> bool:
        """Return whether the block belongs to a side epoch."""
        return self.number_of(block) >= ASIDE

    # ---- shuffles ----

    def shuffle_of(self, block: int) -> Shuffle:
        """Return the shuffle of the block's epoch; for an epoch that has not started, a shuffle without segments."""
        number = self.number_of(block)
        return self._shuffles.get(number) or Shuffle(number)

    def has_begun(self, block: int) -> bool:
        """Return whether the shuffle of the block's epoch is fixed."""
        return self.number_of(block) in self._shuffles

    def is_written(self, block: int) -> bool:
        """Return whether blocks of the block's epoch may be delivered, because its shuffle is persisted."""
        return not self._unwritten or self.number_of(block) not in self._unwritten

    def note_written(self, epochs: Iterable[int]) -> None:
        """Record epochs whose shuffles are persisted."""
        self._unwritten.difference_update(epochs)

    def take_changed(self) -> dict[int, dict[int, Shuffle]]:
        """Return the pages that changed since the last call and must be persisted; empty pages must be deleted."""
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
        """Fix the shuffle of the block's epoch, unless that epoch has started; ``own_epochs`` covers all consumers."""
        number = self.number_of(block)
        if number in self._shuffles:
            return
        before = self._shuffles.get(number - 1)
        if before is None:  # no consumer read the epoch before
            self._set(number, Shuffle(number))
        else:  # a side epoch has another number than its random seed
            epoch = number if number < ASIDE else before.epoch + 1
            self._set(number, before.after(epoch, self._cuts(number, own_epochs)))

    def _cuts(self, number: int, own_epochs: Iterable[OwnEpoch]) -> set[int]:
        # Positions before which an epoch must have the same samples as the one before it.
        if not self._is_shuffled:
            return set()
        cuts = set()
        for own in own_epochs:
            stream = self.streams.of(own.first)
            begin = stream.begin_of(number)
            if own.first < begin < own.end:
                cuts.add(own.begin)
            elif begin - stream.blocks_per_epoch < own.end < begin:  # the consumer's next epoch spans the start
                cuts.add(stream.position_of(own.end))
        return cuts

    def can_begin(self, block: int) -> bool:
        """Return whether a consumer that starts its epoch at ``block`` will get each sample once."""
        cut = self.streams.of(block).position_of(block)
        if not cut or not self._is_shuffled:
            return True
        number = self.number_of(block)
        here, after = self._shuffles.get(number), self._shuffles.get(number + 1)
        if here is None:  # no consumer is here: its shuffle would ignore the epoch before
            return False
        return here.levels < MOST_LEVELS if after is None else after.keeps(cut, here)

    def keeps(self, own: OwnEpoch) -> bool:
        """Return whether a consumer inside its epoch will get each of the epoch's samples once."""
        if not own.begin or not self._is_shuffled:
            return True
        number = self.number_of(own.first)
        here, after = self._shuffles.get(number), self._shuffles.get(number + 1)
        return after is None or here is None or after.keeps(own.begin, here)

    def adopt(self, resumed: Resumption, own_epochs: Iterable[OwnEpoch]) -> bool:
        """Adopt the shuffle of a returning consumer's epoch, unless it contradicts the shuffles fixed here.

        ``own_epochs`` are the epochs of the other consumers. Returns whether the consumer can continue there.
        """
        number, shuffle = resumed.epoch, resumed.shuffle
        before = self._shuffles.get(number - 1)
        # Consumers in the epoch before need this epoch's first samples.
        needed = self._cuts(number, own_epochs) if number not in self._shuffles else set()
        if before is not None and not all(shuffle.keeps(cut, before) for cut in needed):
            return False
        if self._shuffles.get(number, shuffle) != shuffle:
            return False
        own, after = resumed.own_epoch, self._shuffles.get(number + 1)
        reaches_across = own.first < self.streams.of(own.first).begin_of(number + 1) < own.end
        if self._is_shuffled and reaches_across and after is not None and not after.keeps(own.begin, shuffle):
            return False
        self._set(number, shuffle)
        return True

    def put_aside(self, resumed: Resumption, own_epochs: Collection[OwnEpoch]) -> Resumption:
        """Assign side epochs to the rest of a consumer's epoch, and return where it continues."""
        run = zlib.crc32(repr((resumed.shuffle, resumed.own_epoch.begin)).encode()) % ASIDE_RUNS
        length = self.streams.of(resumed.start).blocks_per_epoch
        moved = resumed.moved(ASIDE + run * ASIDE_EPOCHS - resumed.epoch, length)
        while not self.adopt(moved, own_epochs):  # occupied, or its next epoch has started
            moved = moved.moved(ASIDE_EPOCHS, length)
        return moved

    def forget(self, kept: Iterable[int]) -> None:
        """Forget the shuffles of old epochs, except those near the epochs of ``kept`` blocks."""
        if len(self._pages) <= MOST_PAGES:
            return
        near = {(self.number_of(block) + by) // PAGE_EPOCHS for block in kept for by in (-1, 1)}
        gone = {page for page in [*self._pages][:-MOST_PAGES] if page not in near}
        self._pages = {page: None for page in self._pages if page not in gone}
        for number in [number for number in self._shuffles if number // PAGE_EPOCHS in gone]:
            del self._shuffles[number]
            self._unwritten.discard(number)
        if self._are_written:
            self._changed |= gone

    def validate(self) -> None:
        """Check that the number of each epoch and of its shuffle agree, except for side epochs."""
        wrong = {n: s for n, s in self._shuffles.items() if n < ASIDE and s.epoch != n}
        if wrong:
            raise InvariantError(f"epochs are shuffled as others: {wrong}")
