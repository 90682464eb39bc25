"""Decides where consumers begin.

====================================================  ==================================================================
a consumer that joins                                 begins
====================================================  ==================================================================
in the middle of its own epoch, in the feed's order   there
in the middle of it, in another order                 there, in a side epoch that is prepared for it alone
at the beginning of such an epoch, in another order   at the next epoch of the feed
with a reservation that it can still use              there, with the others if the blocks between are staged
at an exact block                                     there
immediately (``now``)                                 where others are, even in the middle of their epoch
as another rank of a trial that has not begun         where that rank is
otherwise                                             where it waits least: at the epoch that a cohort has hardly begun,
                                                      or at that cohort's next one
without others with its pipeline                      at the beginning of an epoch that is nearest to the others, or
                                                      with ``now`` at their position
without other consumers                               at the first epoch that was never begun
====================================================  ==================================================================

Consumers that rested, and those that move to the cohort of others, begin their next epoch by the same rules.
"""

from __future__ import annotations

from mbaas.core.staging import events as ev
from mbaas.core.staging.consumers import Cohort, Consumer, ConsumerTable
from mbaas.core.staging.streams import Stream, stream_number
from mbaas.core.staging.window import Window
from mbaas.samples.order import OwnEpoch
from mbaas.wire.consumers import Resumption


class Beginnings:
    """Finds the block and the cohort where a consumer begins, from the others' positions and the staged blocks."""

    def __init__(self, consumers: ConsumerTable, window: Window) -> None:
        self._consumers, self._epochs, self._window = consumers, consumers.epochs, window

    # ---- consumers that join ----

    def of(self, event: ev.Join, place: Consumer | None, fresh: int) -> tuple[Cohort, int, OwnEpoch]:
        """Return the cohort, the first block and the own epoch of a consumer that joins.

        ``place`` is the reservation held for it; ``fresh`` the first block of the first epoch that was never begun, in
        its stream.
        """
        if place is not None and stream_number(place.cursor) != event.stream:
            place = None
        if event.resumed is not None:
            return self._resumption(event.resumed)
        cohort, cursor = self._first_block(event, place, fresh)
        # A consumer that names a block inside an epoch has already received the blocks before it.
        return cohort, cursor, self._epochs.around(cursor) if event.is_exact else self._epochs.own_epoch(cursor)

    def _resumption(self, resumed: Resumption) -> tuple[Cohort, int, OwnEpoch]:
        others = self._consumers.own_epochs()
        if not self._epochs.adopt(resumed, others):
            if not resumed.taken:
                start = self._epochs.next_boundary(resumed.start)
                return self.cohort_at(start), start, self._epochs.own_epoch(start)
            # The epoch is shuffled differently here, so its rest cannot be shared with other consumers.
            resumed = self._epochs.put_aside(resumed, others)
        return self.cohort_at(resumed.start), resumed.start, resumed.own_epoch

    def _first_block(self, event: ev.Join, place: Consumer | None, fresh: int) -> tuple[Cohort, int]:
        if place is not None and (found := self._at_place(event, place)) is not None:
            return found
        stream = self._consumers.streams[event.stream]
        otherwise = self._beside_others(stream, fresh, now=event.now) if event.start is None else event.start
        if event.is_exact:
            return self.cohort_at(otherwise), otherwise
        if event.now:
            if place is not None and event.start is None:  # without other consumers it continues where a trial ended
                can_begin = self._epochs.can_begin(place.cursor)
                otherwise = place.cursor if can_begin else self._epochs.next_boundary(place.cursor)
            return self._start_now(otherwise, event.start)
        return self.shared_start(otherwise, event.trial, event.start or 0)

    def _beside_others(self, stream: Stream, fresh: int, *, now: bool) -> int:
        """Return where a newcomer begins without other consumers in its stream.

        At the position of those who use other streams, they need the same samples at the same time, which are then
        fetched once.
        """
        others = [
            cohort
            for cohort in self._consumers.cohorts.values()
            if any(member.asked for member in cohort.members) and not self._epochs.is_aside(cohort.slowest)
        ]
        if stream.keeps_all or not others or any(cohort.stream is stream for cohort in others):
            return fresh
        there = max(others, key=lambda cohort: len(cohort.members))
        epoch, position = there.stream.epoch_of(there.slowest), there.stream.position_of(there.slowest)
        block = stream.at(epoch, position)
        if now:
            return block if self._epochs.can_begin(block) else self._epochs.next_boundary(block)
        return stream.begin_of(epoch + (2 * stream.index_of(block) >= stream.blocks_per_epoch))

    def _at_place(self, event: ev.Join, place: Consumer) -> tuple[Cohort, int] | None:
        # A restored trial that names an exact block gets that block. A reservation made for a trial that starts
        # immediately may be inside an epoch.
        if event.is_exact or not self._epochs.is_boundary(place.cursor) or place.cursor < (event.start or 0):
            return None
        cohort = self._consumers.cohorts.get(place.cohort)  # it ended if the reservation was its last member
        if event.now:
            waited = cohort is not None and not place.is_passive and place.cursor <= cohort.slowest
            if not waited or event.start is not None:
                return None
        if cohort is None:
            return self._consumers.new_cohort(place.cursor), place.cursor
        # The cohort has passed it if blocks between are gone.
        return (cohort, place.cursor) if self._window.has_all(range(place.cursor, cohort.slowest)) else None

    def shared_start(self, otherwise: int, trial: str | None = None, least: int = 0) -> tuple[Cohort, int]:
        """Return the cohort and block where a newcomer waits least; ``otherwise`` if there is no other in its stream.

        The newcomer has already had the epochs before block ``least``. Other ranks of its ``trial`` that have not
        started wait for it, and it starts with them.
        """
        for rank in self._consumers.of_trial(trial) if trial is not None else ():
            if not rank.asked and rank.cursor >= least and stream_number(rank.cursor) == stream_number(otherwise):
                return self._consumers.cohorts[rank.cohort], rank.cursor
        open_ones = self._open_to_newcomers(stream_number(otherwise), trial)
        open_ones = [each for each in open_ones if self.entrance(each, least) >= least]
        if not open_ones:
            return self._consumers.new_cohort(otherwise), otherwise

        # Least wait first, then the largest cohort: its blocks are shared by most consumers.
        def wait(cohort: Cohort) -> tuple[int, int]:
            return self.entrance(cohort, least) - cohort.slowest, -len(cohort.members)

        cohort = min(open_ones, key=wait)
        return cohort, self.entrance(cohort, least)

    def _open_to_newcomers(self, stream: int, trial: str | None = None) -> list[Cohort]:
        # Ranks of the same trial that have started belong to an earlier run whose leases have not ended, so their
        # cohort is not shared.
        return [
            cohort
            for cohort in self._consumers.cohorts_of(stream)
            if not self._epochs.is_aside(cohort.slowest)
            and not all(member.trial == trial and member.asked for member in cohort.members)
        ]

    def _start_now(self, otherwise: int, least: int | None) -> tuple[Cohort, int]:
        """Return the cohort and block where a newcomer starts immediately, possibly in the middle of an epoch.

        Without other consumers, that is block ``otherwise``. ``least`` is the end of the newcomer's last epoch: it
        starts there, or with a cohort that is past that block.
        """
        if least is None:
            found = self.place_now(stream_number(otherwise))
        else:
            cohort = self.cohort_ahead(least)
            found = self.place_now(stream_number(least), least) if cohort is None else (cohort, least)
        return (self._consumers.new_cohort(otherwise), otherwise) if found is None else found

    # ---- places ----

    def join_start(self, cohort: Cohort) -> int | None:
        """Return the first block of the slowest member's epoch if a newcomer can start it with that member."""
        slowest = cohort.slowest
        boundary = slowest - cohort.stream.index_of(slowest)
        return boundary if self._window.has_all(range(boundary, slowest)) else None

    def entrance(self, cohort: Cohort, least: int = 0) -> int:
        """Return the block where a newcomer to ``cohort`` starts: the join window's, or the start of the next epoch."""
        join_start = self.join_start(cohort)
        return join_start if join_start is not None and join_start >= least else cohort.next_boundary(cohort.slowest)

    def is_open_at(self, block: int, cohort: Cohort) -> bool:
        """Return whether a consumer can continue at ``block`` in ``cohort``: all blocks from there to the others are
        staged, and the others do not have to wait.
        """
        is_near = cohort.front <= block + self._consumers.ahead_blocks + self._consumers.slack_blocks
        return is_near and self._window.has_all(range(block, cohort.slowest))

    def place_now(self, stream: int, least: int = 0) -> tuple[Cohort, int] | None:
        """Return the cohort and block, at least ``least``, where a consumer of a stream can start immediately, or
        None.
        """
        found = [(cohort, self._block_now(cohort)) for cohort in self._open_to_newcomers(stream)]
        # Prefer a cohort whose block is ready, then the largest: its blocks are shared by most consumers.
        return min(
            (each for each in found if each[1] >= least),
            key=lambda each: (not self._window.is_ready(each[1]), -len(each[0].members)),
            default=None,
        )

    def _block_now(self, cohort: Cohort) -> int:
        slowest, join_start = cohort.slowest, self.join_start(cohort)
        if join_start is not None and slowest <= join_start + 1:
            return join_start  # the epoch has hardly begun
        # The slowest member holds the block before its cursor. The newcomer can start there while the next one is
        # prepared.
        least = max(slowest - 2, cohort.stream.first)
        near = (block for block in range(slowest, least - 1, -1) if self._window.is_ready(block))
        block = next((block for block in near if self._window.has_all(range(block, slowest))), slowest)
        # Blocks prepared ahead may already belong to the next epoch. Then that epoch has started and has ready blocks.
        return block if self._epochs.can_begin(block) else self._epochs.next_boundary(block)

    def near_start(self, cohort: Cohort) -> int:
        """Return the block where a consumer starts with a cohort without waiting."""
        entrance = self.entrance(cohort)
        return entrance if entrance <= cohort.horizon else self._block_now(cohort)

    def cohort_at(self, start: int) -> Cohort:
        """Return the cohort whose window contains ``start``, or a new one."""
        for cohort in self._consumers.cohorts_of(stream_number(start)):
            if start <= cohort.horizon and self._window.has_all(range(start, cohort.slowest)):
                return cohort
        return self._consumers.new_cohort(start)

    def cohort_ahead(self, start: int) -> Cohort | None:
        """Return a cohort in which a consumer can continue at block ``start``, or None."""
        open_ones = self._consumers.cohorts_of(stream_number(start))
        return next((each for each in open_ones if self.is_open_at(start, each) and start <= each.horizon), None)

    def has_all(self, first: int, end: int) -> bool:
        """Return whether all blocks from ``first`` to ``end`` are staged."""
        return self._window.has_all(range(first, end))
