"""Which worker makes what next, and which blocks are dropped.

Work goes to the bytes: a worker makes the parts whose home is its own node, most urgent block first, and may begin
new blocks as long as the budget has bytes. Only a worker that has nothing at all to do, because the window does not
let it run further ahead, takes over a part whose home is far behind.

A block is dropped when no cohort wants it any more (`Scheduler.drop_unwanted`), or when a consumer that waits needs its
bytes (`Scheduler._make_room`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mbaas.core.consumers import Cohort, ConsumerTable
from mbaas.core.story import InvariantError
from mbaas.core.tasks import TaskTable, Worker
from mbaas.core.transitions import BlockState
from mbaas.core.window import StagedBlock, Window
from mbaas.placement import BlockPart

BACKLOG = 2
"""A home is far behind when this many of its parts wait, besides those that its workers have in hand. If fewer counted,
bytes would often cross nodes for nothing: the home would have begun the part a moment later.
"""

MOST_GRANTS = 100
"""A block that is granted more often after one event shows a bug. An error with its story ends the coordinator, which
starts anew; in an endless loop it would stand still and say nothing.
"""


class Assignment(NamedTuple):
    """One part of a block, and the worker that is to make it."""

    worker: Worker
    block: int
    part: int


class _Need(NamedTuple):
    """A block that a cohort lacks; the smaller comes first.

    Attributes:
        since: when the member that waits longest for a block of this cohort began to wait; infinite if none does.
        lead: distance from the slowest cursor.
        fewness: minus the number of members.
        block: the number under which it is staged.
        urgent: whether the slowest member waits for it.
    """

    since: float
    lead: int
    fewness: int
    block: int
    urgent: bool


class _OpenParts:
    """Open parts by home, so that only the nodes with open parts are looked at.

    A large feed has thousands of parts and workers, and after most events only one node has anything new to do.

    Attributes:
        by_home: block -> home -> number of the one part there, where no worker has it.
        strays: block -> homes without a worker; parts that are open there are anybody's.
    """

    def __init__(self, window: Window, nodes: list[str]) -> None:
        self.by_home: dict[int, dict[str, int]] = {}
        self.strays: dict[int, set[str]] = {}
        self._cuts: Counter[int] = Counter()  # block -> how often it was cut since the event
        self._nodes, self._known = nodes, frozenset(nodes)
        for block in window.blocks.values():
            self._look_at(block)

    def _look_at(self, block: StagedBlock) -> None:
        homes = {part.block_part.home: number for number, part in block.open_parts()} if block.has_open_parts else {}
        self.by_home[block.number] = homes
        self.strays[block.number] = homes.keys() - self._known if homes else set()

    def cut(self, block: StagedBlock) -> None:
        """Add a block that was just cut: all of its parts are open.

        Raises:
            InvariantError: it was granted and dropped again and again after one event, which would never end.
        """
        self._cuts[block.number] += 1
        if self._cuts[block.number] > MOST_GRANTS:
            raise InvariantError(f"{block} was granted more than {MOST_GRANTS} times after one event", block.story)
        self._look_at(block)

    @property
    def cuts(self) -> int:
        """How many blocks were cut since the event."""
        return self._cuts.total()

    def part_for(self, node: str, block: int) -> int | None:
        """Find the block's first part for a worker of the node.

        That is one whose home is the node, or one whose home has no worker and which nobody would make otherwise.
        """
        homes = self.by_home[block]
        return min((homes[home] for home in (node, *self.strays[block]) if home in homes), default=None)

    def nodes(self) -> list[str]:
        """Find the nodes whose workers have open parts to make."""
        if any(self.strays.values()):
            return list(self._nodes)
        waiting = {home for homes in self.by_home.values() for home in homes}
        return [node for node in self._nodes if node in waiting]

    def given(self, assignment: Assignment) -> None:
        """Take out a part that a worker got."""
        homes = self.by_home[assignment.block]
        del homes[next(home for home, part in homes.items() if part == assignment.part)]


class Scheduler:
    """Finds work for workers, and room for it.

    Args:
        consumers, tasks, window: the staging core's.
        cut: cuts a block when its bytes are granted.
        block_bytes: bytes that a block takes when staged.
        drop: ends a staged block; told why.

    Attributes:
        leaves_idle: whether a worker had nothing to do when all work was given that there was.
    """

    def __init__(
        self,
        consumers: ConsumerTable,
        tasks: TaskTable,
        window: Window,
        *,
        cut: Callable[[int], Sequence[BlockPart]],
        block_bytes: Callable[[int], int],
        drop: Callable[[int, str], None],
    ) -> None:
        self._consumers, self._tasks, self._window = consumers, tasks, window
        self._cut, self._block_bytes, self._drop = cut, block_bytes, drop
        self.leaves_idle = False

    def assignments(self) -> Iterator[Assignment]:
        """Yield what to make next, each block's bytes granted, until there is no work, no room or no worker.

        The caller must give a part to its worker before it takes the next.
        """
        self.leaves_idle = False
        if not self._tasks.any_credit():
            return
        parts = _OpenParts(self._window, self._tasks.nodes())
        # Own parts of all nodes first; then new blocks, as long as there is room; only what is left after that may be
        # taken over by workers of other nodes, for its raw bytes must cross the network.
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

    # ---- parts that lie where the worker is ----

    def _own(self, node: str, parts: _OpenParts) -> Assignment | None:
        """Find a part for the node's least busy worker, of a block that is staged or of one that is cut now."""
        # A block that is cut now may have no part for this node; then the next one is looked at.
        free = self._tasks.with_credit(node)
        while free and (number := self._next_block(lambda block: parts.part_for(node, block))) is not None:
            if number not in self._window.blocks:
                parts.cut(self._grant(number))
            part = parts.part_for(node, number)
            if part is not None:
                return Assignment(free[0], number, part)
        return None

    def _begins_block(self, parts: _OpenParts) -> bool:
        """Cut the next block if there is room; it is the same one for all nodes that no part waits for."""
        number = self._next_block(lambda _: None)
        if number is not None:
            parts.cut(self._grant(number))
        return number is not None

    def _grant(self, number: int) -> StagedBlock:
        # A member that comes to this block will want it, even if a slower one joins and the horizon falls behind it.
        for cohort in self._consumers.cohorts.values():
            if cohort.slowest <= number < cohort.horizon:
                cohort.begun = max(cohort.begun, number + 1)
        return self._window.grant(number, self._block_bytes(number), self._cut(number))

    def _next_block(self, part_of: Callable[[int], int | None]) -> int | None:
        """Find the block to work at next, and make room for it; None if there is no block or no room.

        Cohorts take turns by how long a member waits, so that nobody starves; then the smallest lead over the slowest
        cursor counts. A block that does not fit keeps bytes from all that come after it, except from those that a
        cohort's slowest consumer waits for: these may push others out.
        """
        waiting_for_room = False
        needs = [need for c in self._consumers.cohorts.values() if (need := self._need(c, part_of)) is not None]
        for need in sorted(needs):
            if need.block in self._window.blocks:
                return need.block  # its bytes were granted when it was cut
            nbytes = self._block_bytes(need.block)
            # Small blocks would else pass a large one that waits for room, again and again, and starve it.
            may_take = need.urgent or not waiting_for_room
            if may_take and (self._window.fits(nbytes) or self._make_room(nbytes, need.urgent)):
                return need.block
            waiting_for_room = True
        return None

    def _need(self, cohort: Cohort, part_of: Callable[[int], int | None]) -> _Need | None:
        """Find the first block that a cohort lacks and the worker can help with.

        In stream order, so that fast members take no bytes from slow ones. Nothing is made before a member asks: a
        loader that is about to load a state may join only to move elsewhere.
        """
        if not any(member.asked for member in cohort.members):
            return None  # a reservation alone makes nothing either: its consumer may never come
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
        # A member whose block is being made does not count as waiting: no new work would help it.
        since = min((m.since for m in cohort.members if m.waiting and m.cursor in lacking), default=math.inf)
        urgent = any(m.waiting and m.cursor == first == slowest for m in cohort.members)
        return _Need(since, first - slowest, -len(cohort.members), window.staged_as(first), urgent)

    # ---- parts of others ----

    def _taken_over(self, parts: _OpenParts) -> Assignment | None:
        """Find a part for a worker without any work: the most urgent one of a home that is far behind."""
        worker = self._tasks.idle()
        if worker is None:
            return None
        blocks = self._wanted_blocks()
        # Counted anew each time: only an idle worker needs it, and a count that is kept would change with every event.
        backlog = Counter(home for block in blocks for home in parts.by_home[block])
        for block in blocks:
            for home, part in parts.by_home[block].items():
                if backlog[home] >= BACKLOG:
                    return Assignment(worker, block, part)
        self.leaves_idle = True
        return None

    def _wanted_blocks(self) -> list[int]:
        """Blocks that were cut and that a cohort still lacks, smallest lead first."""
        leads = [
            (lead, staged_as)
            for cohort in self._consumers.cohorts.values()
            for lead, staged_as in enumerate(self._window.all_staged_as(range(cohort.slowest, cohort.horizon)))
            if staged_as in self._window.blocks
        ]
        return [number for _, number in sorted(leads)]

    # ---- room ----

    def drop_unwanted(self) -> None:
        """Drop the blocks that no cohort wants (`Cohort.wanted`), nor will need soon enough (`Cohort.useful`).

        A block in hand stays: its worker cannot be stopped, so its bytes are still to come.
        """
        useful = self._consumers.useful()
        for block in self._unwanted():
            if block.state is not BlockState.READY or not any(block.number in blocks for blocks in useful):
                self._drop(block.number, "no cohort wants it any more")

    def _unwanted(self) -> list[StagedBlock]:
        """Find the blocks that no cohort wants and no worker has in hand."""
        wanted = self._consumers.wanted()
        return [
            block
            for block in self._window.blocks.values()
            if not block.is_in_hand and not any(block.number in blocks for blocks in wanted)
        ]

    def has_room(self, nbytes: int) -> bool:
        """Whether there is room for ``nbytes`` if only blocks that no cohort wants are dropped."""
        return self._window.fits(nbytes) or self._window.fits(nbytes - sum(b.nbytes for b in self._unwanted()))

    def _make_room(self, nbytes: int, urgent: bool) -> bool:
        """Free bytes, and return whether there is room now.

        First goes what is kept for newcomers, then what a cohort far behind would need last; for a waiting consumer
        also what was made furthest ahead.
        """
        # Newcomers that may never come, and those who rest, yield to anybody who asks.
        given_up = [cohort.give_up_places() for cohort in self._consumers.cohorts.values()]
        if any(given_up):
            self.drop_unwanted()
        # The consumer that needs these soonest is furthest behind: what it needs last is made again for it, or never.
        unwanted = sorted(self._unwanted(), key=lambda block: self.lead(block.number))
        while unwanted and not self._window.fits(nbytes):
            self._drop(unwanted.pop().number, "its bytes are needed, and its next consumer is far behind")
        # Only for a cohort's slowest consumer that waits: all others can wait until something is let go of, but if it
        # got no room, nobody of its cohort would ever move, and nothing would ever be let go of.
        while urgent and not self._window.fits(nbytes):
            furthest = self._furthest_ahead()
            if furthest is None:
                return False
            self._drop(furthest, "a consumer that waits needs bytes, and this one is needed last")
        return self._window.fits(nbytes)

    def _furthest_ahead(self) -> int | None:
        """Find the block that is needed last, or never; none that is held, awaited, in hand or FAILED."""
        best: tuple[float, int] | None = None
        awaited = {
            cohort.slowest
            for cohort in self._consumers.cohorts.values()
            if any(member.waiting and member.cursor == cohort.slowest for member in cohort.members)
        }
        for block in self._window.blocks.values():
            number = block.number
            # A consumer that holds it keeps its memory alive: dropped, it would free nothing.
            held = any(consumer.holds(number) for consumer in self._consumers.by_name.values())
            if block.is_in_hand or block.state is BlockState.FAILED or held:
                continue  # a FAILED block takes no bytes
            # Two cohorts that wait would else take the same bytes from each other, again and again: the one that waited
            # longer keeps them. But storage keeps nobody waiting except those whose samples it does not give.
            if number in awaited and not block.is_put_off:
                continue
            lead = self.lead(number)
            if best is None or (lead, number) > best:
                best = (lead, number)
        return best[1] if best else None

    def lead(self, number: int) -> float:
        """Return how many blocks the next consumer of a block lies behind it; infinite if all have passed it."""
        cohorts = self._consumers.cohorts.values()
        return min((number - cohort.slowest for cohort in cohorts if cohort.slowest <= number), default=math.inf)
