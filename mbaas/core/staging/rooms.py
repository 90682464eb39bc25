"""Room for blocks: each cohort's part of the staging budget, the part that consumers may hold, and slots of workers.

With one stream, prep runs ahead as far as the layout says. With several, the cohorts share the budget: each gets room
for `MIN_BLOCKS_STAGED` of its blocks, and what is left is divided equally. If not even that fits, a cohort's next block
is prepared while the one before is in use, or only once a consumer waits for it. So any number of pipelines runs in any
budget that holds one block. A block that is staged ahead is dropped only for one that a consumer waits for.
"""

from __future__ import annotations

from collections.abc import Iterable

from mbaas.core.layout import MIN_BLOCKS_STAGED
from mbaas.core.staging.consumers import Cohort, Consumer, ConsumerTable
from mbaas.core.staging.streams import Stream

HELD_BLOCKS = 2
"""The block in use and the one before it, which is released only by the next call."""

SPARED_BLOCKS = 2 * HELD_BLOCKS
"""Blocks left to others by a consumer that keeps older minibatches; beyond that it gets copies."""

SPARE_SLOTS = 2
"""Slots of each worker beyond its share of the staging memory: one being written, and one just released."""

MOST_LOST = 3
"""Consecutive lost slots after which slots are no longer used."""


def room_blocks(stream: Stream, cohorts: Iterable[Cohort], budget_bytes: int) -> int:
    """Return the blocks of a stream that fit its part of the budget, as the last `divide` made it."""
    cohorts = [*cohorts]
    if not _share(cohorts):
        return budget_bytes // stream.block_bytes
    return sum(cohort.room_blocks for cohort in cohorts if cohort.stream is stream)


def divide(cohorts: Iterable[Cohort], budget_bytes: int, ahead_blocks: int, slack_blocks: int) -> None:
    """Set each cohort's room, and how far prep may run ahead for it.

    ``ahead_blocks`` and ``slack_blocks`` are the layout's, which bound both.
    """
    cohorts = [*cohorts]
    if not _share(cohorts):
        for cohort in cohorts:
            cohort.ahead_blocks, cohort.slack_blocks = ahead_blocks, slack_blocks
        return
    reading = [cohort for cohort in cohorts if any(member.asked for member in cohort.members)]
    all_bytes = sum([cohort.stream.block_bytes for cohort in reading])
    left = budget_bytes - MIN_BLOCKS_STAGED * all_bytes
    for cohort in reading:
        if left >= 0:
            ahead = MIN_BLOCKS_STAGED - 1 + left // len(reading) // cohort.stream.block_bytes
        else:
            ahead = int((MIN_BLOCKS_STAGED - 1) * all_bytes <= budget_bytes)
        cohort.room_blocks = 1 + ahead
        cohort.ahead_blocks = min(ahead, ahead_blocks)
        cohort.slack_blocks = min(ahead - cohort.ahead_blocks, slack_blocks)


def _share(cohorts: Iterable[Cohort]) -> bool:
    return len({cohort.stream.number for cohort in cohorts}) > 1


class Holding:
    """Limits the blocks of one stream that consumers hold, during one round of deliveries.

    A trial that reads views still holds its last minibatch while it waits for the next one, and may keep older ones. If
    all trials together held the whole budget, no block could be prepared. Beyond the limit, a consumer gets copies.
    ``room_blocks`` fit the stream's part of the staging budget.
    """

    def __init__(self, consumers: ConsumerTable, stream: Stream, room_blocks: int) -> None:
        self._consumers, self._stream, self._most = consumers, stream, room_blocks - 1
        self._cohorts = cohorts = [cohort for cohort in consumers.cohorts.values() if cohort.stream is stream]
        self._members = [member for cohort in cohorts for member in cohort.members]
        self._apart = {number for cohort in cohorts for blocks in cohort.held_apart() for number in blocks}
        # All blocks held by a single cohort are in this range. It is cheap to compute and usually sufficient.
        self._lowest = min(cohort.lowest_held for cohort in cohorts)
        self._end = max([member.cursor for member in self._members])

    def holdable(self, consumer: Consumer, ready: int) -> int:
        """Return how many of the ``ready`` blocks a consumer may hold; below 1, it must copy one."""
        if self._stream.keeps_all and len(self._consumers.streams) == 1:
            return ready
        if len(self._cohorts) > 1 or self._apart:
            # Each cohort holds blocks while it waits, and needs another one.
            below = sum(max(HELD_BLOCKS, cohort.slowest - cohort.lowest_held) for cohort in self._cohorts)
            ready = min(ready, self._most - below - len(self._apart))
        else:
            self._end = max(self._end, consumer.cursor + ready)
            if self._end - self._lowest <= self._most - SPARED_BLOCKS:
                return ready
        held = {number for each in self._members for blocks in each.held() for number in blocks}
        keeps_old = sum(number < consumer.cursor for blocks in consumer.held() for number in blocks) > HELD_BLOCKS
        free = self._most - SPARED_BLOCKS * keeps_old - len(held)
        for count in range(ready):
            free -= consumer.cursor + count not in held  # blocks held by others need no extra room
            if free < 0:
                return count
        return ready


class SlotUse:
    """Decides whether blocks are prepared in slots of workers' memory (`mbaas.memory.slots`), and in how many.

    Slots are used while all writers and readers run on one node, and as long as reading them works there. ``node`` is
    the coordinator's node.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._lost = 0
        self._given_up = False

    def most(self, workers: Iterable[str], consumers: Iterable[str], room_blocks: int) -> int:
        """Return the number of slots per worker for one pipeline; 0 if all blocks go through the object store.

        The first arguments are the nodes of the workers and of the consumers. Without consumers it is unknown where
        blocks will be read, so slots are not used. ``room_blocks`` fit the pipeline's part of the staging memory.
        """
        nodes = list(workers)
        if self._given_up or not {*nodes} == {*consumers} == {self._node}:
            return 0
        return room_blocks // len(nodes) + SPARE_SLOTS

    def held(self) -> None:
        """Record that the coordinator holds a slot that a worker has written."""
        self._lost = 0

    def lost(self) -> bool:
        """Record a slot that could not be held (worker died, memory cannot be opened). True if slots end now."""
        self._lost += 1
        return self._lost > MOST_LOST and self.give_up()

    def give_up(self) -> bool:
        """Stop using slots; return whether they were in use before."""
        before, self._given_up = self._given_up, True
        return not before
