"""Cohorts that unite, and consumers that move from one cohort to another between two of their epochs."""

from __future__ import annotations

from collections.abc import Sequence

from mbaas.core.staging.beginnings import Beginnings
from mbaas.core.staging.consumers import Cohort, Consumer, ConsumerTable
from mbaas.core.staging.pace import Group, may_unite
from mbaas.core.staging.streams import shown_block


class Regrouping:
    """Decides which consumers read the stream together."""

    def __init__(self, consumers: ConsumerTable, beginnings: Beginnings) -> None:
        self._consumers, self._beginnings = consumers, beginnings

    def merge(self, consumer: Consumer) -> str | None:
        """Merge a consumer's cohort with one that its cursor has reached, or move it to an epoch of a cohort ahead.

        Only a requesting consumer that is behind merges cohorts: a consumer ahead must not pull in a laggard before
        that one moves. Returns a line for the log, or None if nothing happened.
        """
        own = self._consumers.cohorts[consumer.cohort]
        others = [each for each in self._consumers.cohorts_of(own.stream.number) if each is not own]
        for other in others:
            # A restored or lagging consumer has caught up.
            if (
                consumer.cursor == own.slowest <= other.slowest
                and self.can_merge(own, other)
                and self._suits(own.group, other, own)
            ):
                return self._unite(other, own)
        return self._begin_ahead(consumer, others) if self._may_move(consumer) else None

    def _begin_ahead(self, consumer: Consumer, others: Sequence[Cohort]) -> str | None:
        # Moving is safe because any epoch has every sample once. Without it, two cohorts of equal pace would never
        # meet, and all of their blocks would be prepared twice.
        own = self._consumers.cohorts[consumer.cohort]
        is_alone = len(own.members) == 1
        if not is_alone and not consumer.asked:
            return None  # it makes its first request, and has just been assigned to this cohort
        blocks = {other.number: self._beginnings.near_start(other) for other in others}
        ahead = [
            other
            for other in others
            if consumer.cursor < blocks[other.number] <= other.horizon  # beyond it, it would wait for them
            and not self._consumers.epochs.is_aside(other.slowest)
        ]
        suiting = [other for other in ahead if self._suits(consumer.group, other, own)]
        # A consumer that is alone moves there even if that cohort is faster: its blocks stay useful while there is
        # room.
        found = next(iter(suiting or (ahead if is_alone else ())), None)
        if found is None:
            return None
        # The trial may still use the last block of the epoch before; that block counts as held until it is released.
        self._consumers.begin_at(consumer, blocks[found.number])
        consumer.story.tell("moved on to block {}, where others are", shown_block(consumer.cursor))
        if not suiting:
            return None
        if is_alone:
            return self._unite(found, own)
        own.remove(consumer)
        found.add(consumer)
        found.held_up = found.uneven = None
        consumer.apart = ""
        return f"{consumer.name} joined the cohort of {', '.join(m.name for m in found.members if m is not consumer)}"

    def go_on(self, consumer: Consumer) -> None:
        """Return a requesting consumer to a cohort after it rested, or after its cohort dropped its position.

        It continues at its cursor while the blocks there are kept and the others are within the allowed lead. Otherwise
        it starts its next epoch where another cohort is. If it may not move, it continues in a separate cohort.
        """
        cohort = self._consumers.cohorts[consumer.cohort]
        cohort.remove(consumer)
        if cohort.members and not self._beginnings.is_open_at(consumer.cursor, cohort):
            stream, cursor = cohort.stream.number, consumer.cursor
            found = self._beginnings.place_now(stream, cursor) if self._may_move(consumer) else None
            if found is None:
                cohort = self._beginnings.cohort_ahead(cursor) or self._consumers.new_cohort(cursor)
            else:
                cohort, block = found
                self._consumers.begin_at(consumer, block)
                if not self._suits(consumer.group, cohort):
                    cohort = self._consumers.new_cohort(block)  # it still shares the blocks that are kept there
            consumer.apart = "" if cohort.members else consumer.apart
            consumer.story.tell("goes on at block {} in cohort {}", shown_block(consumer.cursor), cohort.number)
        cohort.add(consumer)

    def can_merge(self, one: Cohort, other: Cohort) -> bool:
        """Return whether two cohorts overlap so far that merging them causes no block to be prepared again."""
        behind, front = sorted((one.slowest, other.slowest))
        horizon = min(one, other, key=lambda cohort: cohort.slowest).horizon
        return front <= horizon and self._beginnings.has_all(behind, front)

    def groups(self, *but: Cohort) -> list[Group]:
        """Return the known paces of all cohorts except ``but``."""
        others = (cohort.group for cohort in self._consumers.cohorts.values() if cohort not in but)
        return [group for group in others if group is not None]

    def _suits(self, group: Group | None, cohort: Cohort, *own: Cohort) -> bool:
        # A cohort suits trials that it does not slow down, or if paces are unknown. ``own`` is the present cohort of
        # the trials.
        if group is None or cohort.group is None or not self._consumers.prep_per_s:
            return True
        return may_unite(group, cohort.group, self.groups(cohort, *own), self._consumers.prep_per_s)

    def _may_move(self, consumer: Consumer) -> bool:
        begins = consumer.cursor == consumer.own_epoch.first and consumer.cursor != consumer.exact
        return begins and consumer.moves

    def _unite(self, keep: Cohort, gone: Cohort) -> str:
        text = f"{gone} joined the cohort of {keep}"
        keep.held_up = keep.uneven = None
        for member in [*keep.members, *gone.members]:
            member.apart = ""
        for member in gone.members:
            member.cohort = keep.number
            member.story.tell("in cohort {} now, with {} others", keep.number, len(keep.members))
        keep.members += gone.members
        keep.active += gone.active
        del self._consumers.cohorts[gone.number]
        return text
