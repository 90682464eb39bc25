"""How much of the staging budget consumers may hold, so that there is always room for a block that somebody waits for.

A trial that reads views looks at its last minibatch while it waits for the next one, and may keep older ones. If all of
them together held the whole budget, nobody would ever get the next block. So what is too much comes as a copy.
"""

from __future__ import annotations

from mbaas.core.consumers import Consumer, ConsumerTable

HELD_BLOCKS = 2
"""The block that a consumer works on, and the one before: only its next call says that it has let go of that."""

SPARED_BLOCKS = 2 * HELD_BLOCKS
"""A consumer that keeps older minibatches leaves this many blocks to others, and gets copies beyond that."""


class Holding:
    """What consumers hold when blocks are handed out to some of them.

    Args:
        consumers: the staging core's.
        budget_blocks: blocks that fit the staging budget.
    """

    def __init__(self, consumers: ConsumerTable, budget_blocks: int) -> None:
        self._consumers, self._most = consumers, budget_blocks - 1
        self._cohorts = cohorts = [*consumers.cohorts.values()]
        self._apart = {number for cohort in cohorts for blocks in cohort.held_apart() for number in blocks}
        # All that a single cohort holds lies between these two. That is known at once, and mostly enough.
        self._lowest = min(cohort.lowest_held for cohort in cohorts)
        self._end = max([member.cursor for cohort in cohorts for member in cohort.members])

    def holdable(self, consumer: Consumer, ready: int) -> int:
        """Return how many of the ``ready`` blocks a consumer may be given to hold; below 1, it must copy one."""
        if self._consumers.keeps_all:
            return ready
        if len(self._cohorts) > 1 or self._apart:
            # Each cohort waits with some block in its hands, and needs another one.
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
            free -= consumer.cursor + count not in held  # what others hold already takes no more room
            if free < 0:
                return count
        return ready
