"""Limits the staging memory that consumers hold, so that there is always room for the next block.

A trial that reads views still holds its last minibatch while it waits for the next one, and may keep older ones. If all
trials together held the whole budget, no block could be prepared. Beyond the limit, a consumer therefore gets copies.
"""

from __future__ import annotations

from mbaas.core.staging.consumers import Consumer, ConsumerTable
from mbaas.core.staging.streams import Stream

HELD_BLOCKS = 2
"""The block in use and the one before it, which is released only by the next call."""

SPARED_BLOCKS = 2 * HELD_BLOCKS
"""Blocks left to others by a consumer that keeps older minibatches; beyond that it gets copies."""


class Holding:
    """Blocks of one stream that consumers hold during one round of deliveries.

    ``room_blocks`` fit the stream's part of the staging budget (`mbaas.core.staging.rooms`).
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
