"""Copies staged parts from draining nodes to other nodes.

Otherwise the parts would have to be prepared again. A copy uses no CPU of a prep worker, and every object store has
room for the whole staging budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from mbaas.core.staging.tasks import TaskTable
from mbaas.core.staging.transitions import PartState
from mbaas.core.staging.window import StagedPart, Window

MOST_AT_ONCE = 2
"""Number of concurrent copies: one in transfer while another is written saturates a network link."""


class Move(Struct, frozen=True):
    """A copy of a part to another node.

    Attributes:
        task: the task that prepared the part; if it was prepared again, the copy is useless.
        target: id of the target node.
    """

    block: int
    part: int
    task: int
    target: str


class PartMoves:
    """Decides which parts are copied next; ``leaving`` are the draining nodes. Targets are the nodes of workers."""

    def __init__(self, window: Window, tasks: TaskTable) -> None:
        self._window, self._tasks = window, tasks
        self.leaving: set[str] = set()
        self._under_way: dict[int, Move] = {}
        self._failed: set[int] = set()  # tasks whose parts could not be copied
        self._next = 0

    def begin(self, lead: Callable[[int], float]) -> Iterator[tuple[int, Move]]:
        """Yield the number and the description of each copy to start, the blocks with the smallest ``lead`` first."""
        if not self.leaving:
            return
        targets = [node for node in self._tasks.nodes() if node not in self.leaving]
        if not targets:
            return
        copied = {move.task for move in self._under_way.values()}
        waiting = [
            (lead(block.number), block.number, number, part.task)
            for block in self._window.blocks.values()
            for number, part in enumerate(block.parts)
            if self._must_move(part) and part.task not in copied
        ]
        for _, block_number, part_number, task in sorted(waiting)[: MOST_AT_ONCE - len(self._under_way)]:
            number, self._next = self._next, self._next + 1
            move = Move(block_number, part_number, task, targets[number % len(targets)])
            self._under_way[number] = move
            yield number, move

    def _must_move(self, part: StagedPart) -> bool:
        return part.state is PartState.READY and part.node in self.leaving and part.task not in self._failed

    def end(self, number: int, *, is_there: bool) -> Move | None:
        """Record the end of a copy; return it if it can replace the original."""
        move = self._under_way.pop(number, None)
        if move is None:
            return None
        if not is_there:
            self._failed.add(move.task)
            return None
        return move if self._window.has(move.block, move.part, move.task) else None

    def node_stays(self, node: str) -> None:
        """Stop copying from a node."""
        self.leaving.discard(node)
        if not self.leaving:
            self._failed.clear()

    def node_gone(self, node: str) -> None:
        """Forget a lost node, and the copies in transfer to it."""
        self.node_stays(node)
        self._under_way = {number: move for number, move in self._under_way.items() if move.target != node}
