"""Idle time of prep that is caused by other consumers: waits of a trial that more workers would not shorten.

Blocks are prepared only up to a limit ahead of a cohort's slowest member, and all cohorts share one staging budget. A
worker may therefore be idle while a consumer waits. The differential method (DS-Analyzer, VLDB 2021) asks how much
sooner a block would have arrived without that. The answer is the idle time of prep since the consumer's last delivery,
limited to the time that the consumer waited (`mbaas.client.stalls`).
"""

from __future__ import annotations

from collections.abc import Callable

from mbaas.core.staging.consumers import Cohort, Consumer, ConsumerTable


class PeerIdle:
    """Sums, for each cohort, the seconds during which other consumers kept prep idle.

    ``has_room`` returns whether there is, or can be, room for a number of bytes.
    """

    def __init__(self, consumers: ConsumerTable, has_room: Callable[[int], bool]) -> None:
        self._consumers, self._has_room = consumers, has_room

    def look(self, now: float, *, is_idle: bool) -> None:
        """Start or stop counting for each cohort; ``is_idle`` if a worker is idle after all available work was
        assigned.
        """
        for cohort in self._consumers.cohorts.values():
            if is_idle and (cohort.is_held_back or self._lacks_room(cohort)):
                if cohort.peer_idle_since is None:
                    cohort.peer_idle_since = now
            elif cohort.peer_idle_since is not None:
                cohort.peer_idle_s = _total_s(cohort, now)
                cohort.peer_idle_since = None

    def asked(self, consumer: Consumer, now: float) -> None:
        """Start counting for a consumer's first request, or its first one in another cohort."""
        if consumer.peer_idle_mark[0] != consumer.cohort:
            consumer.peer_idle_mark = consumer.cohort, _total_s(self._consumers.cohorts[consumer.cohort], now)

    def given(self, consumer: Consumer, now: float) -> float:
        """Return the idle seconds since the consumer's first request or last delivery, and restart its count."""
        cohort, before_s = consumer.peer_idle_mark
        total_s = _total_s(self._consumers.cohorts[consumer.cohort], now)
        consumer.peer_idle_mark = consumer.cohort, total_s
        return total_s - before_s if cohort == consumer.cohort else 0.0

    def _lacks_room(self, cohort: Cohort) -> bool:
        # True only if the lack of room is due to blocks that other consumers hold.
        lowest = cohort.lowest_held
        others_hold = any(m.released > lowest for m in cohort.active) or cohort.held_apart()
        if len(self._consumers.cohorts) == 1 and not others_hold:
            return False
        return not self._has_room(self._consumers.streams.bytes_of(cohort.slowest))


def _total_s(cohort: Cohort, now: float) -> float:
    if cohort.peer_idle_since is None:
        return cohort.peer_idle_s
    return cohort.peer_idle_s + now - cohort.peer_idle_since
