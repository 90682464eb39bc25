"""The staged blocks, their parts, and their byte budget."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mbaas.placement import BlockPart


class PartState(enum.Enum):
    """How far a part of a block is."""

    OPEN = "no worker has it: it was just cut, or what was made of it is lost"
    MAKING = "it is on a worker's list"
    READY = "it lies in the object store of a node"


@dataclass
class StagedPart:
    """One part of a staged block: all samples of one home.

    Attributes:
        share: which samples.
        state: see `PartState`.
        task: number of the task that makes it or made it; -1 before the first.
        node: where it lies, while READY.
    """

    block_part: BlockPart
    state: PartState = PartState.OPEN
    task: int = -1
    node: str | None = None


@dataclass
class StagedBlock:
    """One staged block.

    Attributes:
        nbytes: what it takes, or will take, from the budget.
        parts: in the order in which the block was cut.
        error: why it has no samples: one of them is bad, and consumers get the error in the block's place.
    """

    number: int
    nbytes: int
    parts: list[StagedPart] = field(default_factory=list)
    error: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it can be handed out, as pixels or as an error."""
        return self.error is not None or all(part.state is PartState.READY for part in self.parts)

    @property
    def at_work(self) -> bool:
        """Whether a worker has a part of it."""
        return any(part.state is PartState.MAKING for part in self.parts)

    def open_parts(self) -> Iterator[tuple[int, StagedPart]]:
        """The parts that no worker has, with their numbers."""
        if self.error is None:
            yield from ((i, part) for i, part in enumerate(self.parts) if part.state is PartState.OPEN)


class Window:
    """Blocks that are being made or are staged.

    Attributes:
        budget_bytes: the most that all blocks together may take.
        blocks: by number; their ``nbytes`` always add up to ``used_bytes``.
        used_bytes: never above ``budget_bytes``.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.blocks: dict[int, StagedBlock] = {}
        self.used_bytes = 0

    def fits(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self.budget_bytes

    def grant(self, number: int, nbytes: int, parts: Sequence[BlockPart]) -> StagedBlock:
        """Take the block's bytes from the budget before anybody makes a part of it."""
        block = self.blocks[number] = StagedBlock(number, nbytes, [StagedPart(block_part) for block_part in parts])
        self.used_bytes += nbytes
        return block

    def fail(self, number: int, error: str) -> None:
        """The block ended in an error, which takes no bytes; parts that are being made come to nothing."""
        block = self.blocks[number]
        self.used_bytes -= block.nbytes
        block.error, block.nbytes = error, 0

    def drop(self, number: int) -> None:
        self.used_bytes -= self.blocks.pop(number).nbytes

    def is_ready(self, number: int) -> bool:
        """Whether the block can be handed out."""
        block = self.blocks.get(number)
        return block is not None and block.is_ready

    def has(self, number: int, part: int, task: int) -> bool:
        """Whether the part lies in memory as the task made it."""
        block = self.blocks.get(number)
        if block is None:
            return False
        found = block.parts[part]
        return found.state is PartState.READY and found.task == task

    def at_work(self, number: int) -> bool:
        """Whether a worker has a part of the block."""
        block = self.blocks.get(number)
        return block is not None and block.at_work

    def lost(self, node: str) -> list[int]:
        """A node is gone: what lay there must be made again. The blocks that this concerns."""
        blocks = []
        for block in self.blocks.values():
            gone = [part for part in block.parts if part.state is PartState.READY and part.node == node]
            for part in gone:
                part.state, part.node = PartState.OPEN, None
            if gone:
                blocks.append(block.number)
        return blocks

    def validate(self) -> None:
        assert self.used_bytes == sum(b.nbytes for b in self.blocks.values()), "bytes do not add up"
        assert self.used_bytes <= self.budget_bytes, f"{self.used_bytes} staged, budget {self.budget_bytes}"
        for block in self.blocks.values():
            assert block.parts, f"block {block.number} has no parts"
            assert block.error is None or block.nbytes == 0
            for part in block.parts:
                assert (part.node is not None) == (part.state is PartState.READY), f"block {block.number}: {part}"
