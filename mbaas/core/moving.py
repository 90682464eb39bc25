"""Staged parts on a machine that will be gone soon: which are copied, and to where.

What lies there would have to be made again when the machine is gone. To copy it takes no CPU of a prep worker. It takes
no room that could be missing either: every object store has room for all that may be staged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from mbaas.core.tasks import TaskTable
from mbaas.core.transitions import PartState
from mbaas.core.window import StagedPart, Window

MOST_AT_ONCE = 2
"""How many parts are copied at the same time: one on its way while another one is written is what a network carries."""


class Move(Struct, frozen=True):
    """A part that is copied to another machine.

    Attributes:
        block, part: which part it is.
        task: the task that made it: if it was made again meanwhile, the copy is of no use.
        target: the machine.
    """

    block: int
    part: int
    task: int
    target: str


class PartMoves:
    """Decides which parts are copied next.

    Args:
        window: the staged blocks.
        tasks: the workers; parts go to machines of theirs.

    Attributes:
        leaving: machines that will be gone soon.
    """

    def __init__(self, window: Window, tasks: TaskTable) -> None:
        self._window, self._tasks = window, tasks
        self.leaving: set[str] = set()
        self._under_way: dict[int, Move] = {}
        self._failed: set[int] = set()  # tasks of parts that could not be copied
        self._next = 0

    def begin(self, lead: Callable[[int], float]) -> Iterator[tuple[int, Move]]:
        """Yield the number of each copy that is to be begun, and what it is.

        Args:
            lead: how far a block lies ahead of the consumer that needs it next: the soonest goes first.
        """
        targets = [node for node in self._tasks.nodes() if node not in self.leaving]
        if not self.leaving or not targets:
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
        """Note how a copy ended, and return what it is if it can be used in the original's place."""
        move = self._under_way.pop(number, None)
        if move is None:
            return None
        if not is_there:
            self._failed.add(move.task)
            return None
        return move if self._window.has(move.block, move.part, move.task) else None

    def node_stays(self, node: str) -> None:
        """Note that nothing has to move from a machine any more."""
        self.leaving.discard(node)
        if not self.leaving:
            self._failed.clear()

    def node_gone(self, node: str) -> None:
        """Note that nothing lies on a machine any more, no copy that was on its way there either."""
        self.node_stays(node)
        self._under_way = {number: move for number, move in self._under_way.items() if move.target != node}
