"""Limits the staging memory that consumers hold, so that there is always room for the next block.

A trial that reads views still holds its last minibatch while it waits for the next one, and may keep older ones. If all
trials together held the whole budget, no block could be prepared. Beyond the limit, a consumer therefore gets copies.
"""

from __future__ import annotations

from mbaas.core.staging.consumers import Consumer, ConsumerTable

HELD_BLOCKS = 2
"""The block in use and the one before it, which is released only by the next call."""

SPARED_BLOCKS = 2 * HELD_BLOCKS
"""Blocks left to others by a consumer that keeps older minibatches; beyond that it gets copies."""


class Holding:
    """Blocks held by consumers during one round of deliveries; ``budget_blocks`` fit the staging budget."""

    def __init__(self, consumers: ConsumerTable, budget_blocks: int) -> None:
        self._consumers, self._most = consumers, budget_blocks - 1
        self._cohorts = cohorts = [*consumers.cohorts.values()]
        self._apart = {number for cohort in cohorts for blocks in cohort.held_apart() for number in blocks}
        # All blocks held by a single cohort are in this range. It is cheap to compute and usually sufficient.
        self._lowest = min(cohort.lowest_held for cohort in cohorts)
        self._end = max([member.cursor for cohort in cohorts for member in cohort.members])

    def holdable(self, consumer: Consumer, ready: int) -> int:
        """Return how many of the ``ready`` blocks a consumer may hold; below 1, it must copy one."""
        if self._consumers.keeps_all:
            return ready
        if len(self._cohorts) > 1 or self._apart:
            # Each cohort holds blocks while it waits, and needs another one.
            below = sum(max(HELD_BLOCKS, cohort.slowest - cohort.lowest_held) for cohort in self._cohorts)
            ready = min(ready, self._most - below - len(self._apart))
        else:
            self._end = max(self._end, consumer.cursor + ready)
            if self._end - self._lowest <= self._most - SPARED_BLOCKS:
                return ready
        everybody = self._consumers.by_name.values()
        held = {number for each in everybody for blocks in each.held() for number in blocks}
        keeps_old = sum(number < consumer.cursor for blocks in consumer.held() for number in blocks) > HELD_BLOCKS
        free = self._most - SPARED_BLOCKS * keeps_old - len(held)
        for count in range(ready):
            free -= consumer.cursor + count not in held  # blocks held by others need no extra room
            if free < 0:
                return count
        return ready
