"""Why each staged block stays, and which one goes first when its bytes are needed.

A reason follows from the positions of consumers and from the blocks that are staged; none is stored. A block is dropped
as soon as its reason is UNWANTED. Others are dropped only for the bytes of a block that is needed sooner: the weakest
reason first, and among equals the block that its next cohort reaches last.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Sequence

from mbaas.core.staging.beginnings import Beginnings
from mbaas.core.staging.consumers import Cohort, Consumer, ConsumerTable
from mbaas.core.staging.streams import Stream, stream_number
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
        stream = stream_number(block.number)
        if self._is_held(block.number, self._consumers_of()[stream]):
            return Reason.HELD
        # A postponed block waits for storage, and only its own consumers should wait for that.
        if block.number in self._awaited() and not block.is_put_off:
            return Reason.AWAITED
        return _by_position(block, self._spans(self._consumers.streams[stream]))

    def unwanted(self) -> list[StagedBlock]:
        """Return the blocks to drop now."""
        return [block for _, block in self._weaker(Reason.JOINABLE)]

    def _weaker(self, than: Reason) -> list[tuple[Reason, StagedBlock]]:
        """Return the blocks with a weaker reason, at most AWAITED, and their reasons; see `reason`."""
        # Called after every event, so positions are computed once, only for streams with such blocks, and consumers are
        # searched last, only for blocks that one of them may hold.
        spans = dict[int, list[tuple[Reason, range]]]()
        awaited = self._awaited() if than > Reason.AHEAD else set()
        found = []
        for block in self._window.blocks.values():
            if block.is_in_hand:
                continue
            stream = stream_number(block.number)
            if stream not in spans:
                spans[stream] = self._spans(self._consumers.streams[stream])
            reason = _by_position(block, spans[stream])
            if reason < than and (block.number not in awaited or block.is_put_off):
                found.append((reason, block))
        if not found:
            return []
        consumers, held_from = self._consumers_of(), dict[int, int]()
        for stream, there in consumers.items():
            keeps_all = self._consumers.streams[stream].keeps_all
            held_from[stream] = 0 if keeps_all else min([consumer.released for consumer in there])

        def is_held(number: int) -> bool:
            there = consumers.get(stream_number(number))
            return there is not None and number >= held_from[stream_number(number)] and self._is_held(number, there)

        return [(reason, block) for reason, block in found if not is_held(block.number)]

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
        stream = stream_number(number)
        cohorts = [cohort for cohort in self._consumers.cohorts.values() if cohort.stream.number == stream]
        return min((number - cohort.slowest for cohort in cohorts if cohort.slowest <= number), default=math.inf)

    def _is_held(self, number: int, consumers: Sequence[Consumer]) -> bool:
        # ``consumers`` are those of the block's stream.
        stream = self._consumers.streams.of(number)
        if not stream.keeps_all:
            return any(consumer.holds(number) for consumer in consumers)
        # Staged under one number, and held under those of several epochs.
        index = stream.index_of(number)
        return any(
            stream.index_of(held) == index for consumer in consumers for blocks in consumer.held() for held in blocks
        )

    def _consumers_of(self) -> dict[int, list[Consumer]]:
        """Return the consumers of each stream that has any."""
        found = defaultdict[int, list[Consumer]](list)
        for consumer in self._consumers.by_name.values():
            found[stream_number(consumer.cursor)].append(consumer)
        return found

    def _awaited(self) -> set[int]:
        return {
            self._window.staged_as(cohort.slowest)
            for cohort in self._consumers.cohorts.values()
            if any(member.waiting and member.cursor == cohort.slowest for member in cohort.members)
        }

    def _spans(self, stream: Stream) -> list[tuple[Reason, range]]:
        """Return the reasons that follow from positions alone, for the blocks of a stream."""
        cohorts = [cohort for cohort in self._consumers.cohorts.values() if cohort.stream is stream]
        if stream.keeps_all:
            return self._spans_of_epoch(stream, cohorts)
        return [span for cohort in cohorts for span in self._spans_of(cohort)]

    def _spans_of_epoch(self, stream: Stream, cohorts: Sequence[Cohort]) -> list[tuple[Reason, range]]:
        whole = range(stream.first, stream.first + stream.blocks_per_epoch)
        if len(self._consumers.streams) == 1:
            return [(Reason.AHEAD, whole)]
        # Consumers with other pipelines need room, too.
        near = [(Reason.AHEAD, range(at, at + 1)) for cohort in cohorts for at in self._near(cohort)]
        return [(Reason.USEFUL, whole), *near]

    def _near(self, cohort: Cohort) -> Sequence[int]:
        return self._window.all_staged_as(range(cohort.slowest, cohort.ahead_end))

    def _spans_of(self, cohort: Cohort) -> list[tuple[Reason, range]]:
        slowest = cohort.slowest
        found = [(Reason.AHEAD, range(slowest, cohort.ahead_end)), (Reason.USEFUL, cohort.useful)]
        for member in cohort.members if len(cohort.active) < len(cohort.members) else ():
            place = range(member.cursor, slowest)
            if member.rests and self._window.has_all(place):  # also far behind the others, which may leave
                found.append((Reason.RESTING, place))
        join_start = self._beginnings.join_start(cohort)
        if join_start is not None:
            found.append((Reason.JOINABLE, range(join_start, slowest)))
        return found


def _by_position(block: StagedBlock, spans: list[tuple[Reason, range]]) -> Reason:
    number, strongest = block.number, Reason.UNWANTED
    for reason, blocks in spans:
        if number not in blocks:
            continue
        if reason is Reason.AHEAD:  # no position gives a stronger one, and most blocks have it
            return reason
        # A block that is only useful later is not worth preparing to its end, nor is its error worth keeping.
        if reason is not Reason.USEFUL or block.state is BlockState.READY:
            strongest = max(strongest, reason)
    return strongest
