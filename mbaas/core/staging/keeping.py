"""Why each staged block stays, and which one goes first when its bytes are needed.

A reason follows from the positions of consumers and from the blocks that are staged; none is stored. A block is dropped
as soon as its reason is UNWANTED. Others are dropped only for the bytes of a block that is needed sooner: the weakest
reason first, and among equals the block that its next cohort reaches last.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator

from mbaas.core.staging.beginnings import Beginnings
from mbaas.core.staging.consumers import ConsumerTable
from mbaas.core.staging.transitions import BlockState
from mbaas.core.staging.window import StagedBlock, Window


class Reason(enum.IntEnum):
    """Why a staged block stays, weakest first."""

    UNWANTED = 0
    # Newcomers may never come, and resting consumers do not wait.
    JOINABLE = 1
    RESTING = 2
    USEFUL = 3
    AHEAD = 4
    # Otherwise two waiting cohorts would repeatedly drop each other's block; this way the longer-waiting one keeps it.
    AWAITED = 5
    # Its memory stays in use until the consumer releases it, so dropping it would free nothing.
    HELD = 6
    IN_PREPARATION = 7


WHY = {
    Reason.UNWANTED: "no cohort wants it",
    Reason.JOINABLE: "newcomers can start the slowest consumer's epoch",
    Reason.RESTING: "a consumer that pauses between epochs continues there",
    Reason.USEFUL: "a cohort reaches it later",
    Reason.AHEAD: "it is prepared ahead for a cohort",
    Reason.AWAITED: "a consumer waits for it",
    Reason.HELD: "a consumer uses it",
    Reason.IN_PREPARATION: "a worker prepares a part of it",
}
"""One clause for each reason, for people."""


class Keeping:
    """Decides which blocks of the window stay."""

    def __init__(self, consumers: ConsumerTable, window: Window, beginnings: Beginnings) -> None:
        self._consumers, self._window, self._beginnings = consumers, window, beginnings

    def reason(self, block: StagedBlock) -> Reason:
        """Return the strongest reason to keep a block."""
        if block.is_in_hand:
            return Reason.IN_PREPARATION
        if self._is_held(block.number):
            return Reason.HELD
        # A postponed block waits for storage, and only its own consumers should wait for that.
        if block.number in self._awaited() and not block.is_put_off:
            return Reason.AWAITED
        return _by_position(block, [*self._spans()])

    def unwanted(self) -> list[StagedBlock]:
        """Return the blocks to drop now."""
        return [block for _, block in self._weaker(Reason.JOINABLE)]

    def _weaker(self, than: Reason) -> list[tuple[Reason, StagedBlock]]:
        """Return the blocks with a weaker reason, at most AWAITED, and their reasons; see `reason`."""
        # Called after every event, so positions are computed once, and consumers are searched last, only for blocks
        # that one of them may hold.
        spans = [*self._spans()]
        awaited = self._awaited() if than > Reason.AHEAD else set()
        held_from = min([consumer.released for consumer in self._consumers.by_name.values()], default=0)
        return [
            (reason, block)
            for block in self._window.blocks.values()
            if not block.is_in_hand
            and (reason := _by_position(block, spans)) < than
            and (block.number not in awaited or block.is_put_off)
            and (block.number < held_from or not self._is_held(block.number))
        ]

    def weakest(self, below: Reason) -> tuple[StagedBlock, Reason] | None:
        """Return the block to drop first for its bytes, with its reason, which is weaker than ``below``; or None.

        ``below`` is at most AWAITED.
        """
        return min(
            ((block, reason) for reason, block in self._weaker(below) if block.nbytes),
            key=lambda each: (each[1], -self.lead(each[0].number), -each[0].number),
            default=None,
        )

    def could_free(self, nbytes: int) -> bool:
        """Return whether dropping blocks that are not prepared ahead, awaited or used would free ``nbytes``."""
        free = self._window.budget_bytes - self._window.used_bytes
        if free >= nbytes:
            return True
        return free + sum(block.nbytes for _, block in self._weaker(Reason.AHEAD)) >= nbytes

    def lead(self, number: int) -> float:
        """Return the distance in blocks from the nearest cohort at or before the block; infinite if all are past it."""
        cohorts = self._consumers.cohorts.values()
        return min((number - cohort.slowest for cohort in cohorts if cohort.slowest <= number), default=math.inf)

    def _is_held(self, number: int) -> bool:
        return any(consumer.holds(number) for consumer in self._consumers.by_name.values())

    def _awaited(self) -> set[int]:
        return {
            cohort.slowest
            for cohort in self._consumers.cohorts.values()
            if any(member.waiting and member.cursor == cohort.slowest for member in cohort.members)
        }

    def _spans(self) -> Iterator[tuple[Reason, range]]:
        """Yield the reasons that follow from positions alone, strongest first within each cohort."""
        if self._consumers.keeps_all:
            yield Reason.AHEAD, range(self._consumers.blocks_per_epoch)
            return
        for cohort in self._consumers.cohorts.values():
            slowest = cohort.slowest
            yield Reason.AHEAD, range(slowest, cohort.ahead_end)
            yield Reason.USEFUL, cohort.useful
            for member in cohort.members if len(cohort.active) < len(cohort.members) else ():
                place = range(member.cursor, slowest)
                if member.rests and self._window.has_all(place):  # also far behind the others, which may leave
                    yield Reason.RESTING, place
            join_start = self._beginnings.join_start(cohort)
            if join_start is not None:
                yield Reason.JOINABLE, range(join_start, slowest)


def _by_position(block: StagedBlock, spans: list[tuple[Reason, range]]) -> Reason:
    return max(
        (
            reason
            for reason, blocks in spans
            # A block that is only useful later is not worth preparing to its end, nor is its error worth keeping.
            if block.number in blocks and (reason is not Reason.USEFUL or block.state is BlockState.READY)
        ),
        default=Reason.UNWANTED,
    )
