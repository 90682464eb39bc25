"""The staged blocks, their parts, and their byte budget.

A block that is not here is not staged: nobody makes it and nobody holds it. It can be made at any time, also a second
time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mbaas.core.story import InvariantError, Stories, Story, block_name
from mbaas.core.transitions import BLOCK_CHANGES, PART_CHANGES, BlockState, PartState
from mbaas.placement import BlockPart


class StagedPart:
    """One part of a staged block: all samples that have one home.

    Attributes:
        block_part: which samples.
        state: changed by `transition` only.
        task: number of the task that makes it or made it; -1 before the first.
        node: where it lies, while READY; else None.
        due: when it is OPEN again, while PUT_OFF.
    """

    __slots__ = ("_story", "_what", "block_part", "due", "node", "state", "task")

    def __init__(self, number: int, block_part: BlockPart, story: Story) -> None:
        self.block_part, self.state = block_part, PartState.OPEN
        # The number of the last task, not a flag: a consumer that cannot read a part says which task made it, and what
        # was made again since then is not thrown away because of it.
        self.task = -1
        self.node: str | None = None
        self.due: float
        self._story, self._what = story, f"part {number}: "

    def transition(self, to: PartState, *why: object, node: str | None = None) -> None:
        """Change the state.

        Raises:
            InvariantError: ``to`` may not follow, see `PART_CHANGES`.
        """
        self._story.change(self._what, self.state, to, PART_CHANGES, *why)
        self.state, self.node = to, node


class StagedBlock:
    """One staged block.

    Attributes:
        number: the block's.
        nbytes: what it takes, or will take, from the budget.
        parts: in the order in which the block was cut; at least one.
        state: changed by `transition` only.
        is_ready: whether it is READY or FAILED and can be handed out, as pixels or as an error; kept beside the state
            because every event asks for it, once for each consumer.
        error: why it has no samples, while FAILED; else None.
        may_mend: whether it is made anew for a consumer that had its error and asks again.
        told: the consumers that were given its error.
        given_as: the number under which it was handed out first; None if nobody has it yet.
        lacks: whether bad samples were left out of it.
        waits_for: what the part that was put off last waits for.
        story: what happened to it.
    """

    __slots__ = (
        "_making", "_put_off", "_ready", "error", "given_as", "is_ready", "lacks", "may_mend", "nbytes", "number",
        "parts", "state", "story", "told", "waits_for",
    )  # fmt: skip

    def __init__(self, number: int, nbytes: int, parts: Sequence[BlockPart], story: Story) -> None:
        self.number, self.nbytes, self.story = number, nbytes, story
        # Cut once, when it is granted: a placement that comes later must not change parts which workers have in hand.
        self.parts = [StagedPart(i, block_part, story) for i, block_part in enumerate(parts)]
        self.state = BlockState.GRANTED
        self.is_ready = False
        self.error: str | None = None
        self.may_mend, self.told, self.lacks = False, set[str](), False
        self.given_as: int | None = None
        self.waits_for: str
        self._making = self._ready = self._put_off = 0  # parts in these states
        story.tell("GRANTED: {} bytes, {} parts", nbytes, len(parts))

    @property
    def is_in_hand(self) -> bool:
        """Whether a worker has a part of it."""
        return self._making > 0

    @property
    def has_open_parts(self) -> bool:
        """Whether a part of it has to be made by somebody."""
        # Counted, not looked up: every event asks this of all blocks.
        return self._making + self._ready + self._put_off < len(self.parts) and self.state is not BlockState.FAILED

    @property
    def is_put_off(self) -> bool:
        """Whether a part of it waits for storage."""
        return self._put_off > 0

    def open_parts(self) -> Iterator[tuple[int, StagedPart]]:
        """The parts that somebody should make, with their numbers."""
        if self.has_open_parts:
            yield from ((i, part) for i, part in enumerate(self.parts) if part.state is PartState.OPEN)

    # ---- changes ----

    def transition(self, to: BlockState, *why: object) -> None:
        """Change the state.

        Raises:
            InvariantError: ``to`` may not follow, see `BLOCK_CHANGES`.
        """
        self.story.change("", self.state, to, BLOCK_CHANGES, *why)
        self.state = to
        self.is_ready = to is BlockState.READY or to is BlockState.FAILED

    def begin(self, number: int, task: int, worker: str) -> None:
        """Mark a part as being made: a worker got it."""
        part = self.parts[number]
        part.transition(PartState.MAKING, "task {} of {}", task, worker)
        part.task = task
        self._making += 1

    def finish(self, number: int, node: str) -> None:
        """Mark a part as made, on ``node``; with its last part the block becomes ready."""
        self.parts[number].transition(PartState.READY, "on {}", node, node=node)
        self._making -= 1
        self._ready += 1
        # A block that FAILED stays FAILED, even if the parts that were in hand then are made after all.
        if self._ready == len(self.parts) and self.state is not BlockState.FAILED:
            self.transition(BlockState.READY)

    def reopen(self, number: int, why: str) -> None:
        """Mark a part as to be made again: what was made of it, or was being made, is lost."""
        part = self.parts[number]
        was_ready = part.state is PartState.READY
        part.transition(PartState.OPEN, "{}", why)
        self._ready -= was_ready
        self._making -= not was_ready
        if self.state is BlockState.READY:
            self.transition(BlockState.GRANTED)

    def lies_elsewhere(self, number: int, node: str, task: int) -> None:
        """Mark a part that is READY as lying on another node, where it was copied; it counts as made by ``task``."""
        part = self.parts[number]
        self.story.tell("part {}: lies on {} now, as task {}", number, node, task)
        part.node, part.task = node, task

    def put_off(self, number: int, until: float, waits_for: str) -> None:
        """Mark a part as put off until ``until``: it cannot be made now.

        Args:
            number: of the part.
            until: when it is OPEN again.
            waits_for: a clause for people: what it waits for.
        """
        # Not OPEN at once: the scheduler would give it to the next worker, which would be sent away like this one.
        part = self.parts[number]
        part.transition(PartState.PUT_OFF, "{}", waits_for)
        part.due, self.waits_for = until, waits_for
        self._making -= 1
        self._put_off += 1

    def resume(self, now: float) -> bool:
        """Open the parts whose pause is over, and return whether there were any."""
        before = self._put_off
        for part in self.parts if before else ():
            if part.state is PartState.PUT_OFF and now >= part.due:
                part.transition(PartState.OPEN, "its pause is over")
                self._put_off -= 1
        return self._put_off < before

    def validate(self) -> None:
        """Check that state, error and counts say the same as the parts."""
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
        return f"block {self.number}"


class Window:
    """Blocks that are being made or are staged.

    Args:
        budget_bytes: the most that all blocks together may take.
        stories: where the stories of blocks are kept.
        period: blocks after which the stream repeats itself; 0 if it never does.

    Attributes:
        budget_bytes: see above.
        blocks: by the number under which each is staged (`staged_as`); their ``nbytes`` always add up to
            ``used_bytes``. None is DROPPED.
        used_bytes: never above ``budget_bytes``.
        failed: the numbers of those that are FAILED.
        lacking: the numbers of those that bad samples were left out of.
    """

    def __init__(self, budget_bytes: int, stories: Stories, period: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self._period = period
        self.blocks: dict[int, StagedBlock] = {}
        self.used_bytes = 0
        self.failed: set[int] = set()
        self.lacking: set[int] = set()
        self._stories = stories

    def staged_as(self, number: int) -> int:
        """The number under which a block is staged: in a stream that repeats itself, that of the first equal one."""
        return number % self._period if self._period else number

    def all_staged_as(self, numbers: range) -> Sequence[int]:
        """The same for many blocks, of which a large feed looks at thousands after each event."""
        return [number % self._period for number in numbers] if self._period else numbers

    def find(self, number: int) -> StagedBlock | None:
        """The block of the stream, if it is staged."""
        return self.blocks.get(self.staged_as(number))

    def fits(self, nbytes: int) -> bool:
        """Whether the budget has ``nbytes`` left."""
        return self.used_bytes + nbytes <= self.budget_bytes

    def grant(self, number: int, nbytes: int, parts: Sequence[BlockPart]) -> StagedBlock:
        """Take the block's bytes from the budget before anybody makes a part of it."""
        # Granted as a whole: if its parts came one by one, two blocks could each hold half of the last bytes for ever.
        story = self._stories.begin("block", block_name(number))
        block = self.blocks[number] = StagedBlock(number, nbytes, parts, story)
        self.used_bytes += nbytes
        return block

    def fail(self, number: int, error: str, *, may_mend: bool) -> None:
        """End the block in an error, which takes no bytes; parts that are being made come to nothing."""
        block = self.blocks[number]
        block.transition(BlockState.FAILED, "{}", error)
        self.used_bytes -= block.nbytes  # an error takes no memory, and its parts are let go of as they come in
        block.error, block.nbytes, block.may_mend = error, 0, may_mend
        self.failed.add(number)

    def leave_out(self, number: int) -> None:
        """Note that bad samples were left out of the block."""
        self.blocks[number].lacks = True
        self.lacking.add(number)

    def drop(self, number: int, why: str) -> None:
        """Give the block's bytes back."""
        block = self.blocks.pop(number)
        block.transition(BlockState.DROPPED, "{}", why)
        self.used_bytes -= block.nbytes
        self.failed.discard(number)
        self.lacking.discard(number)
        self._stories.end(block.story)

    def hand_out(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Note that blocks are handed out; return those that nobody was given before."""
        blocks = {number: self.blocks[self.staged_as(number)] for number in numbers}
        new = tuple(number for number, block in blocks.items() if block.given_as is None)
        for number in new:
            blocks[number].given_as = number
        return new

    def is_ready(self, number: int) -> bool:
        """Whether the block can be handed out."""
        block = self.find(number)
        return block is not None and block.is_ready

    def has(self, number: int, part: int, task: int) -> bool:
        """Whether the part lies in memory as the task made it."""
        block = self.find(number)
        if block is None or part >= len(block.parts):  # made again, it may be cut into fewer
            return False
        # The task's number tells a part that was made again from the one that the consumer could not read.
        found = block.parts[part]
        return found.state is PartState.READY and found.task == task

    def is_on_its_way(self, number: int) -> bool:
        """Whether a worker has a part of the block, or one of them waits for storage."""
        block = self.find(number)
        return block is not None and (block.is_in_hand or block.is_put_off)

    def reopen_node(self, node: str) -> list[int]:
        """Reopen all parts that lay on a node which is gone, and return the numbers of their blocks."""
        blocks = []
        for block in self.blocks.values():
            # Parts of it on other nodes stay: only what lay there is made again.
            there = [i for i, part in enumerate(block.parts) if part.node == node]
            for number in there:
                block.reopen(number, "it lay on a node that is gone")
            if there:
                blocks.append(block.number)
        return blocks

    def validate(self) -> None:
        """Check that bytes add up and every block agrees with its parts."""
        stories = [block.story for block in self.blocks.values()]
        if self.used_bytes != sum(block.nbytes for block in self.blocks.values()):
            raise InvariantError(f"{self.used_bytes} bytes are counted as used, the blocks have others", *stories)
        if self.used_bytes > self.budget_bytes:
            raise InvariantError(f"{self.used_bytes} bytes are staged, the budget is {self.budget_bytes}", *stories)
        if self.failed != {block.number for block in self.blocks.values() if block.state is BlockState.FAILED}:
            raise InvariantError(f"{self.failed} are counted as FAILED", *stories)
        if self.lacking != {block.number for block in self.blocks.values() if block.lacks}:
            raise InvariantError(f"{self.lacking} are counted as lacking samples", *stories)
        for block in self.blocks.values():
            block.validate()
