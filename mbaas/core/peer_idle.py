"""How long prep stood idle because consumers wait for each other: what a trial waits for that no worker would mend.

A cohort's blocks are made only so far ahead of its slowest member, and all cohorts share one staging budget. So a
worker may have nothing to do while a consumer waits. The differential method (DS-Analyzer, VLDB 2021) asks how much
sooner a block would have come without that: by the time that a worker stood idle since the consumer was given its block
before, and by no more than the consumer waited (`mbaas.client.stalls`).
"""

from __future__ import annotations

from collections.abc import Callable

from mbaas.core.consumers import Cohort, Consumer, ConsumerTable


class PeerIdle:
    """Adds up, for each cohort, the seconds in which prep was idle because of other consumers.

    Args:
        consumers: the staging core's.
        has_room: whether there is, or can be, room for a number of bytes.
        block_bytes: bytes that a block takes when staged.
    """

    def __init__(
        self, consumers: ConsumerTable, has_room: Callable[[int], bool], block_bytes: Callable[[int], int]
    ) -> None:
        self._consumers, self._has_room, self._block_bytes = consumers, has_room, block_bytes

    def look(self, now: float, *, is_idle: bool) -> None:
        """Note which cohorts prep could work for, and does not.

        Args:
            now: the time in seconds.
            is_idle: whether a worker has nothing to do, although all work was given that may be.
        """
        for cohort in self._consumers.cohorts.values():
            if is_idle and (cohort.is_held_back or self._lacks_room(cohort)):
                if cohort.peer_idle_since is None:
                    cohort.peer_idle_since = now
            elif cohort.peer_idle_since is not None:
                cohort.peer_idle_s = _total_s(cohort, now)
                cohort.peer_idle_since = None

    def asked(self, consumer: Consumer, now: float) -> None:
        """Begin to count for a consumer that asks for the first time, or in another cohort than before."""
        if consumer.peer_idle_mark[0] != consumer.cohort:
            consumer.peer_idle_mark = consumer.cohort, _total_s(self._consumers.cohorts[consumer.cohort], now)

    def given(self, consumer: Consumer, now: float) -> float:
        """Return the idle seconds since the consumer asked first, or was given blocks last; count anew from now on."""
        cohort, before_s = consumer.peer_idle_mark
        total_s = _total_s(self._consumers.cohorts[consumer.cohort], now)
        consumer.peer_idle_mark = consumer.cohort, total_s
        return total_s - before_s if cohort == consumer.cohort else 0.0

    def _lacks_room(self, cohort: Cohort) -> bool:
        """Whether there is no room for another block because of what others have, or have not let go of yet."""
        # A loader is given several blocks at once: it may stand where others do, and hold what they are done with.
        lowest = cohort.lowest_held
        others_hold = any(m.released > lowest for m in cohort.active) or cohort.held_apart()
        if len(self._consumers.cohorts) == 1 and not others_hold:
            return False
        return not self._has_room(self._block_bytes(cohort.slowest))


def _total_s(cohort: Cohort, now: float) -> float:
    if cohort.peer_idle_since is None:
        return cohort.peer_idle_s
    return cohort.peer_idle_s + now - cohort.peer_idle_since
