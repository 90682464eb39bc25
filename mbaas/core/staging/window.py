"""Staged blocks, their parts, and their byte budget.

A block that is not in the window is neither prepared nor held, and can be prepared at any time, even repeatedly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mbaas.core.staging.streams import StreamTable, block_name
from mbaas.core.staging.transitions import BLOCK_CHANGES, PART_CHANGES, BlockState, PartState
from mbaas.core.story import InvariantError, Stories, Story
from mbaas.samples.placement import BlockPart


class StagedPart:
    """One part of a staged block: its samples with the same home.

    Attributes:
        task: number of the newest task for it; -1 before the first.
        node: node where it is stored, while READY; otherwise None.
        due: while PUT_OFF, the time when it becomes OPEN again.
    """

    __slots__ = ("_story", "_what", "block_part", "due", "node", "state", "task")

    def __init__(self, number: int, block_part: BlockPart, story: Story) -> None:
        self.block_part, self.state = block_part, PartState.OPEN
        # A task number, not a flag: a consumer that cannot read a part reports its task, so a part that was prepared
        # again since then is not discarded.
        self.task = -1
        self.node: str | None = None
        self.due: float
        self._story, self._what = story, f"part {number}: "

    def transition(self, to: PartState, *why: object, node: str | None = None) -> None:
        """Change the state; raise InvariantError if the transition is not in `PART_CHANGES`."""
        self._story.change(self._what, self.state, to, PART_CHANGES, *why)
        self.state, self.node = to, node


class StagedBlock:
    """One staged block.

    Attributes:
        nbytes: bytes granted to it from the budget; 0 while FAILED.
        parts: in the order of the cut; at least one.
        is_ready: whether it is READY or FAILED, so that its data or its error can be delivered. Stored separately
            because every event reads it once per consumer.
        error: reason for the failure, while FAILED; otherwise None.
        may_mend: whether it is prepared again for a consumer that got its error and requests it again.
        told: consumers that got its error.
        given_as: number under which it was first delivered; None if it was not delivered yet.
        waits_for: clause on the cause of the last pause of a part.
    """

    __slots__ = (
        "_making", "_put_off", "_ready", "error", "given_as", "is_ready", "may_mend", "nbytes", "number", "parts",
        "state", "story", "told", "waits_for",
    )  # fmt: skip

    def __init__(self, number: int, nbytes: int, parts: Sequence[BlockPart], story: Story) -> None:
        self.number, self.nbytes, self.story = number, nbytes, story
        # Cut once, when granted: a later placement must not change parts that workers are preparing.
        self.parts = [StagedPart(i, block_part, story) for i, block_part in enumerate(parts)]
        self.state = BlockState.GRANTED
        self.is_ready = False
        self.error: str | None = None
        self.may_mend, self.told = False, set[str]()
        self.given_as: int | None = None
        self.waits_for: str
        self._making = self._ready = self._put_off = 0  # parts in these states
        story.tell("GRANTED: {} bytes, {} parts", nbytes, len(parts))

    @property
    def is_in_hand(self) -> bool:
        """True if a worker has a part of the block."""
        return self._making > 0

    @property
    def has_open_parts(self) -> bool:
        """True if a part still has to be assigned."""
        # Counted, because every event reads this for all blocks.
        return self._making + self._ready + self._put_off < len(self.parts) and self.state is not BlockState.FAILED

    @property
    def is_put_off(self) -> bool:
        """True if a part of the block is postponed."""
        return self._put_off > 0

    def open_parts(self) -> Iterator[tuple[int, StagedPart]]:
        """Yield the open parts with their numbers."""
        if self.has_open_parts:
            yield from ((i, part) for i, part in enumerate(self.parts) if part.state is PartState.OPEN)

    # ---- changes ----

    def transition(self, to: BlockState, *why: object) -> None:
        """Change the state; raise InvariantError if the transition is not in `BLOCK_CHANGES`."""
        self.story.change("", self.state, to, BLOCK_CHANGES, *why)
        self.state = to
        self.is_ready = to is BlockState.READY or to is BlockState.FAILED

    def begin(self, number: int, task: int, worker: str) -> None:
        """Mark a part as assigned to a worker."""
        part = self.parts[number]
        part.transition(PartState.MAKING, "task {} of {}", task, worker)
        part.task = task
        self._making += 1

    def finish(self, number: int, node: str) -> None:
        """Mark a part as prepared on ``node``; after the last part the block is ready."""
        self.parts[number].transition(PartState.READY, "on {}", node, node=node)
        self._making -= 1
        self._ready += 1
        # A FAILED block stays FAILED, even if its remaining parts succeed.
        if self._ready == len(self.parts) and self.state is not BlockState.FAILED:
            self.transition(BlockState.READY)

    def reopen(self, number: int, why: str) -> None:
        """Mark a part as open again, because its data or its worker is lost."""
        part = self.parts[number]
        was_ready = part.state is PartState.READY
        part.transition(PartState.OPEN, "{}", why)
        self._ready -= was_ready
        self._making -= not was_ready
        if self.state is BlockState.READY:
            self.transition(BlockState.GRANTED)

    def lies_elsewhere(self, number: int, node: str, task: int) -> None:
        """Replace a READY part by its copy on another node, which counts as prepared by ``task``."""
        part = self.parts[number]
        self.story.tell("part {}: now on {}, as task {}", number, node, task)
        part.node, part.task = node, task

    def put_off(self, number: int, until: float, waits_for: str) -> None:
        """Postpone a part until ``until``; ``waits_for`` is a clause on the cause, for messages."""
        # Not OPEN immediately: the scheduler would give it to the next worker, which would fail in the same way.
        part = self.parts[number]
        part.transition(PartState.PUT_OFF, "{}", waits_for)
        part.due, self.waits_for = until, waits_for
        self._making -= 1
        self._put_off += 1

    def resume(self, now: float) -> bool:
        """Open the parts whose pause is over; return whether there were any."""
        before = self._put_off
        for part in self.parts if before else ():
            if part.state is PartState.PUT_OFF and now >= part.due:
                part.transition(PartState.OPEN, "its pause is over")
                self._put_off -= 1
        return self._put_off < before

    def validate(self) -> None:
        """Check that state, error and counts agree with the parts."""
        states = [part.state for part in self.parts]
        if self.is_ready != (self.state in (BlockState.READY, BlockState.FAILED)):
            raise InvariantError(f"{self} is {self.state.name}, it is_ready: {self.is_ready}", self.story)
        if (states.count(PartState.MAKING), states.count(PartState.READY)) != (self._making, self._ready):
            raise InvariantError(
                f"{self._making} parts of {self} are counted as MAKING, {self._ready} READY", self.story
            )
        if states.count(PartState.PUT_OFF) != self._put_off:
            raise InvariantError(f"{self._put_off} parts of {self} are counted as PUT_OFF", self.story)
        if not states or (self.state is BlockState.READY) > (self._ready == len(states)):
            raise InvariantError(f"{self} is READY, its parts are {states}", self.story)
        if self.state is BlockState.GRANTED and self._ready == len(states):
            raise InvariantError(f"{self} is GRANTED, and all of its parts are READY", self.story)
        if (self.error is not None) != (self.state is BlockState.FAILED) or (self.error is not None and self.nbytes):
            raise InvariantError(
                f"{self} is {self.state.name} with {self.nbytes} bytes, error {self.error}", self.story
            )
        for part in self.parts:
            if (part.node is not None) != (part.state is PartState.READY):
                raise InvariantError(f"a part of {self} is {part.state.name} on node {part.node}", self.story)

    def __str__(self) -> str:
        return block_name(self.number)


class Window:
    """Blocks that are staged or in preparation.

    Args:
        budget_bytes: largest total size of all blocks.
        stories: where the blocks' stories are stored.
        streams: the feed's streams.

    Attributes:
        blocks: by the number under which each is staged (`staged_as`); none is DROPPED.
        used_bytes: sum of the blocks' ``nbytes``, at most ``budget_bytes``.
        failed: numbers of the FAILED blocks.
        lacking: numbers of the blocks from which bad samples were left out.
    """

    def __init__(self, budget_bytes: int, stories: Stories, streams: StreamTable) -> None:
        self.budget_bytes = budget_bytes
        self._streams = streams
        self.blocks: dict[int, StagedBlock] = {}
        self.used_bytes = 0
        self.failed: set[int] = set()
        self.lacking: set[int] = set()
        self._stories = stories

    def staged_as(self, number: int) -> int:
        """Return the number under which a block is staged: if all epochs are identical, that in the first epoch."""
        stream = self._streams.of(number)
        return stream.first + stream.index_of(number) if stream.keeps_all else number

    def all_staged_as(self, numbers: range) -> Sequence[int]:
        """Return `staged_as` for many blocks; a large feed needs thousands after each event."""
        if not numbers or not self._streams.of(numbers[0]).keeps_all:
            return numbers
        return list(map(self.staged_as, numbers))

    def find(self, number: int) -> StagedBlock | None:
        """Return the staged block for a number of the stream, or None."""
        return self.blocks.get(self.staged_as(number))

    def has_all(self, numbers: range) -> bool:
        """Return whether all of these blocks are staged or in preparation."""
        # From the end, where a block is most likely to be missing: a range may be long.
        return all(number in self.blocks for number in reversed(self.all_staged_as(numbers)))

    def fits(self, nbytes: int) -> bool:
        """Return whether the budget has ``nbytes`` left."""
        return self.used_bytes + nbytes <= self.budget_bytes

    def grant(self, number: int, nbytes: int, parts: Sequence[BlockPart]) -> StagedBlock:
        """Allocate the bytes of a block, before any of its parts is assigned."""
        # Granted as a whole: with bytes per part, two blocks could each hold half of the last bytes forever.
        story = self._stories.begin("block", block_name(number))
        block = self.blocks[number] = StagedBlock(number, nbytes, parts, story)
        self.used_bytes += nbytes
        return block

    def fail(self, number: int, error: str, *, may_mend: bool) -> None:
        """Fail a block and free its bytes; the results of its running tasks are discarded."""
        block = self.blocks[number]
        block.transition(BlockState.FAILED, "{}", error)
        self.used_bytes -= block.nbytes  # an error uses no memory; late parts are released on arrival
        block.error, block.nbytes, block.may_mend = error, 0, may_mend
        self.failed.add(number)

    def drop(self, number: int, why: str) -> None:
        """Drop a block and free its bytes."""
        block = self.blocks.pop(number)
        block.transition(BlockState.DROPPED, "{}", why)
        self.used_bytes -= block.nbytes
        self.failed.discard(number)
        self.lacking.discard(number)
        self._stories.end(block.story)

    def hand_out(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Record the delivery of blocks; return the ones delivered for the first time."""
        blocks = {number: self.blocks[self.staged_as(number)] for number in numbers}
        new = tuple(number for number, block in blocks.items() if block.given_as is None)
        for number in new:
            blocks[number].given_as = number
        return new

    def is_ready(self, number: int) -> bool:
        """Return whether the block can be delivered."""
        block = self.find(number)
        return block is not None and block.is_ready

    def has(self, number: int, part: int, task: int) -> bool:
        """Return whether the part is in memory as that task prepared it."""
        block = self.find(number)
        if block is None or part >= len(block.parts):  # a new cut may have fewer parts
            return False
        # The task number distinguishes a new version of the part from the one that the consumer could not read.
        found = block.parts[part]
        return found.state is PartState.READY and found.task == task

    def is_on_its_way(self, number: int) -> bool:
        """Return whether a part of the block is assigned to a worker or postponed."""
        block = self.find(number)
        return block is not None and (block.is_in_hand or block.is_put_off)

    def reopen_node(self, node: str) -> list[int]:
        """Reopen all parts stored on a lost node, and return the numbers of their blocks."""
        blocks = []
        for block in self.blocks.values():
            # Parts on other nodes stay.
            there = [i for i, part in enumerate(block.parts) if part.node == node]
            for number in there:
                block.reopen(number, "its node is gone")
            if there:
                blocks.append(block.number)
        return blocks

    def validate(self) -> None:
        """Check that the byte counts add up and every block agrees with its parts."""
        stories = [block.story for block in self.blocks.values()]
        if self.used_bytes != sum(block.nbytes for block in self.blocks.values()):
            raise InvariantError(f"{self.used_bytes} bytes are counted as used, the blocks have others", *stories)
        if self.used_bytes > self.budget_bytes:
            raise InvariantError(f"{self.used_bytes} bytes are staged, the budget is {self.budget_bytes}", *stories)
        if self.failed != {block.number for block in self.blocks.values() if block.state is BlockState.FAILED}:
            raise InvariantError(f"{self.failed} are counted as FAILED", *stories)
        if not self.lacking <= self.blocks.keys():
            raise InvariantError(f"{self.lacking} are counted as lacking samples", *stories)
        for block in self.blocks.values():
            block.validate()
