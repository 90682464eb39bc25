"""The staged blocks and their byte budget."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BlockState(enum.Enum):
    """A block that nobody makes or holds has no state: it is not in the window."""

    MAKING = "a worker has it on its list; its bytes are granted"
    READY = "it lies in the object store"
    FAILED = "a sample in it is bad; its consumers get the error in its place"


@dataclass
class Block:
    """One staged block; ``nbytes`` is what it takes, or will take, from the budget."""

    number: int
    nbytes: int
    state: BlockState
    error: str | None = None


class Window:
    """Blocks that are being made or are staged.

    Attributes:
        budget_bytes: the most that all blocks together may take.
        blocks: by number; their ``nbytes`` always add up to ``used_bytes``.
        used_bytes: never above ``budget_bytes``.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.blocks: dict[int, Block] = {}
        self.used_bytes = 0

    def fits(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self.budget_bytes

    def grant(self, number: int, nbytes: int) -> None:
        """Take the block's bytes from the budget before anybody makes it."""
        self.blocks[number] = Block(number, nbytes, BlockState.MAKING)
        self.used_bytes += nbytes

    def ready(self, number: int) -> None:
        self.blocks[number].state = BlockState.READY

    def fail(self, number: int, error: str) -> None:
        """The block ended in an error, which takes no bytes."""
        block = self.blocks[number]
        self.used_bytes -= block.nbytes
        block.state, block.error, block.nbytes = BlockState.FAILED, error, 0

    def drop(self, number: int) -> None:
        self.used_bytes -= self.blocks.pop(number).nbytes

    def settled(self, number: int) -> bool:
        """Whether the block can be handed out, as pixels or as an error."""
        block = self.blocks.get(number)
        return block is not None and block.state is not BlockState.MAKING

    def validate(self) -> None:
        assert self.used_bytes == sum(b.nbytes for b in self.blocks.values()), "bytes do not add up"
        assert self.used_bytes <= self.budget_bytes, f"{self.used_bytes} staged, budget {self.budget_bytes}"
