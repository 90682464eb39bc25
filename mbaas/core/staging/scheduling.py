"""Assignment of parts to workers, and eviction of blocks.

Work goes where the bytes are: a worker prepares the parts whose home is its node, the most urgent block first, and
starts new blocks while the budget has room. An idle worker takes over a part of a node that has fallen far behind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mbaas.core.staging.consumers import Cohort, ConsumerTable
from mbaas.core.staging.keeping import WHY, Keeping, Reason
from mbaas.core.staging.streams import stream_number
from mbaas.core.staging.tasks import TaskTable, Worker
from mbaas.core.staging.turns import Turns
from mbaas.core.staging.window import StagedBlock, Window
from mbaas.core.story import InvariantError
from mbaas.samples.placement import BlockPart

BACKLOG = 2
"""A home node is far behind when this many of its parts wait, besides those assigned to its workers. With a smaller
number, bytes would often cross the network although the home node would have started the part a moment later.
"""

MOST_GRANTS = 100
"""A block granted more often than this after one event is a bug. An error restarts the coordinator; an endless loop
would stall it silently.
"""


class Assignment(NamedTuple):
    """A part of a block and the worker that will prepare it."""

    worker: Worker
    block: int
    part: int


class _Need(NamedTuple):
    """A block that a cohort lacks; smaller tuples come first.

    Attributes:
        turn: see `Turns`; 0 if all consumers use one stream.
        since: start of the cohort's longest wait for a block; infinite if no member waits.
        lead: distance from the slowest cursor.
        fewness: minus the number of members.
        block: the number under which it is staged.
        urgent: whether the slowest member waits for it.
        holds: whether a member that waits for it holds earlier blocks, which it may release only when it gets this one.
    """

    turn: float
    since: float
    lead: int
    fewness: int
    block: int
    urgent: bool
    holds: bool


class _OpenParts:
    # Open parts by home node, so that only nodes with open parts are visited: a large feed has thousands of parts and
    # workers, and most events create work on one node only.

    def __init__(self, window: Window, nodes: list[str]) -> None:
        self.by_home: dict[int, dict[str, int]] = {}  # of blocks with open parts
        self.strays: dict[int, set[str]] = {}
        self._cuts: Counter[int] = Counter()  # block -> number of times it was cut since the event
        self._nodes, self._known = nodes, frozenset(nodes)
        for block in window.blocks.values():
            self._look_at(block)

    def _look_at(self, block: StagedBlock) -> None:
        if block.has_open_parts:
            homes = {part.block_part.home: number for number, part in block.open_parts()}
            self.by_home[block.number] = homes
            self.strays[block.number] = homes.keys() - self._known

    def cut(self, block: StagedBlock) -> None:
        # A block that is granted and dropped again and again after one event would loop forever.
        self._cuts[block.number] += 1
        if self._cuts[block.number] > MOST_GRANTS:
            raise InvariantError(f"{block} was granted more than {MOST_GRANTS} times after one event", block.story)
        self._look_at(block)

    @property
    def cuts(self) -> int:
        return self._cuts.total()

    def part_for(self, node: str, block: int) -> int | None:
        # Parts whose home has no worker are open to all nodes.
        homes = self.by_home.get(block)
        if homes is None:
            return None
        return min((homes[home] for home in (node, *self.strays[block]) if home in homes), default=None)

    def nodes(self) -> list[str]:
        if any(self.strays.values()):
            return list(self._nodes)
        waiting = {home for homes in self.by_home.values() for home in homes}
        return [node for node in self._nodes if node in waiting]

    def given(self, assignment: Assignment) -> None:
        homes = self.by_home[assignment.block]
        del homes[next(home for home, part in homes.items() if part == assignment.part)]


class Scheduler:
    """Finds work for workers, and room for that work.

    Args:
        consumers, tasks, window, keeping: tables of the staging core.
        turns: whose turn it is, if there are several streams.
        cut: cuts a block when its bytes are granted.
        drop: drops a staged block that is not needed any more, given its number and the reason.
        evict: drops one because its bytes are needed.

    Attributes:
        leaves_idle: whether a worker was idle after all available work was assigned.
        starved: stream for which there was no room although a consumer waits; None without one. Its blocks may be
            larger than those of others, whose blocks would otherwise take every byte that becomes free.
    """

    def __init__(
        self,
        consumers: ConsumerTable,
        tasks: TaskTable,
        window: Window,
        keeping: Keeping,
        turns: Turns,
        *,
        cut: Callable[[int], Sequence[BlockPart]],
        drop: Callable[[int, str], None],
        evict: Callable[[int, str], None],
    ) -> None:
        self._consumers, self._tasks, self._window, self._keeping = consumers, tasks, window, keeping
        self._turns, self._block_bytes, self._cut = turns, consumers.streams.bytes_of, cut
        self._drop, self._evict = drop, evict
        self.leaves_idle = False
        self.starved: int | None = None

    def assignments(self) -> Iterator[Assignment]:
        """Yield assignments, with the bytes of each block granted, until work, room or workers run out.

        The caller must register each assignment before it takes the next one.
        """
        self.leaves_idle = False
        if not self._tasks.any_credit():
            return
        self.starved = None
        parts = _OpenParts(self._window, self._tasks.nodes())
        # First each node's own parts, then new blocks while there is room. Only the remaining parts may be taken over
        # by other nodes, because their raw bytes must cross the network.
        has_credit = True
        while has_credit:
            cuts = parts.cuts
            for node in parts.nodes():
                while (found := self._own(node, parts)) is not None:
                    yield found
                    parts.given(found)
                    has_credit = self._tasks.any_credit()
            if parts.cuts > cuts or (has_credit and self._begins_block(parts)):
                continue
            taken = self._taken_over(parts)
            if taken is None:
                return
            yield taken
            parts.given(taken)
            has_credit = self._tasks.any_credit()

    # ---- parts whose home is the worker's node ----

    def _own(self, node: str, parts: _OpenParts) -> Assignment | None:
        # A block that is cut now may have no part for this node; then try the next one.
        free = self._tasks.with_credit(node)
        while free and (number := self._next_block(lambda block: parts.part_for(node, block))) is not None:
            if number not in self._window.blocks:
                parts.cut(self._grant(number))
            part = parts.part_for(node, number)
            if part is not None:
                return Assignment(free[0], number, part)
        return None

    def _begins_block(self, parts: _OpenParts) -> bool:
        number = self._next_block(lambda _: None)
        if number is not None:
            parts.cut(self._grant(number))
        return number is not None

    def _grant(self, number: int) -> StagedBlock:
        return self._window.grant(number, self._block_bytes(number), self._cut(number))

    def _next_block(self, part_of: Callable[[int], int | None]) -> int | None:
        # The stream that had least comes first. In a stream, the cohort whose member waits longest does, so that none
        # starves; then the smallest lead over the slowest cursor decides. A block that does not fit blocks all later
        # ones, except those that a cohort's slowest consumer waits for: these may evict others.
        waiting_for_room = False
        needs = [need for c in self._consumers.cohorts.values() if (need := self._need(c, part_of)) is not None]
        if len(self._consumers.streams) > 1:
            turns = self._turns.of({stream_number(need.block) for need in needs})
            needs = [need._replace(turn=turns[stream_number(need.block)]) for need in needs]
        for need in sorted(needs):
            if need.block in self._window.blocks:
                return need.block  # its bytes are already granted
            nbytes, stream = self._block_bytes(need.block), stream_number(need.block)
            # Otherwise small blocks would repeatedly pass a large one that waits for room, and starve it.
            may_take = need.urgent or not waiting_for_room
            if self.starved is not None and stream != self.starved:
                may_take = need.urgent and need.holds
            if may_take and (self._window.fits(nbytes) or self._make_room(nbytes, need.urgent)):
                return need.block
            waiting_for_room = True
            if need.urgent and self.starved is None:
                self.starved = stream
        return None

    def _need(self, cohort: Cohort, part_of: Callable[[int], int | None]) -> _Need | None:
        # In stream order, so that fast members do not use bytes that slow ones need. Nothing is prepared before a
        # member's first request: a loader that is about to load a state may join only to move elsewhere.
        if not any(member.asked for member in cohort.members):
            return None  # a reservation alone causes no work: its trial may never join
        window, slowest = self._window, cohort.slowest
        blocks, numbers = window.blocks, range(slowest, cohort.horizon)
        lacking = [
            number
            for number, staged_as in zip(numbers, window.all_staged_as(numbers), strict=True)
            if staged_as not in blocks or part_of(staged_as) is not None
        ]
        if not lacking:
            return None
        first = lacking[0]
        # A member whose block is in preparation does not count as waiting: new work would not help it.
        since = min((m.since for m in cohort.members if m.waiting and m.cursor in lacking), default=math.inf)
        urgent = any(m.waiting and m.cursor == first == slowest for m in cohort.members)
        holds = any(blocks for m in cohort.members if m.waiting and m.cursor == first for blocks in m.held())
        return _Need(0.0, since, first - slowest, -len(cohort.members), window.staged_as(first), urgent, holds)

    # ---- parts of other nodes ----

    def _taken_over(self, parts: _OpenParts) -> Assignment | None:
        worker = self._tasks.idle()
        if worker is None:
            return None
        blocks = [block for block in self._wanted_blocks() if block in parts.by_home]
        # Counted on demand: only an idle worker needs it, and a running count would change with every event.
        backlog = Counter(home for block in blocks for home in parts.by_home[block])
        for block in blocks:
            for home, part in parts.by_home[block].items():
                if backlog[home] >= BACKLOG:
                    return Assignment(worker, block, part)
        self.leaves_idle = True
        return None

    def _wanted_blocks(self) -> list[int]:
        leads = [
            (lead, staged_as)
            for cohort in self._consumers.cohorts.values()
            for lead, staged_as in enumerate(self._window.all_staged_as(range(cohort.slowest, cohort.horizon)))
            if staged_as in self._window.blocks
        ]
        return [number for _, number in sorted(leads)]

    # ---- room ----

    def drop_unwanted(self) -> None:
        """Drop the blocks without a reason to stay."""
        for block in self._keeping.unwanted():
            self._drop(block.number, WHY[Reason.UNWANTED])

    def _make_room(self, nbytes: int, urgent: bool) -> bool:
        # Blocks that are prepared ahead go only for a cohort's slowest consumer while it waits. All others can wait
        # until blocks are released. Without room for the slowest, its cohort would never move, and no block would ever
        # be released.
        while not self._window.fits(nbytes):
            found = self._keeping.weakest(Reason.AWAITED if urgent else Reason.AHEAD)
            if found is None:
                return False
            block, reason = found
            self._evict(block.number, f"its bytes are needed; it was staged because {WHY[reason]}")
            self.drop_unwanted()  # newcomers and resting consumers need a block only together with the ones after it
        return True
