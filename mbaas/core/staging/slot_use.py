"""Decides whether blocks are prepared in slots of workers' memory (`mbaas.memory.slots`), and in how many."""

from __future__ import annotations

from collections.abc import Iterable

SPARE_SLOTS = 2
"""Slots of each worker beyond its share of the staging memory: one being written, and one just released."""

MOST_LOST = 3
"""Consecutive lost slots after which slots are no longer used."""


class SlotUse:
    """Slots are used while all writers and readers run on one node, and as long as reading them works there.

    ``node`` is the coordinator's node.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._lost = 0
        self._given_up = False

    def most(self, workers: Iterable[str], consumers: Iterable[str], room_blocks: int) -> int:
        """Return the number of slots per worker for one pipeline; 0 if all blocks go through the object store.

        The first arguments are the nodes of the workers and of the consumers. Without consumers it is unknown where
        blocks will be read, so slots are not used. ``room_blocks`` fit the pipeline's part of the staging memory.
        """
        nodes = list(workers)
        if self._given_up or not {*nodes} == {*consumers} == {self._node}:
            return 0
        return room_blocks // len(nodes) + SPARE_SLOTS

    def held(self) -> None:
        """Record that the coordinator holds a slot that a worker has written."""
        self._lost = 0

    def lost(self) -> bool:
        """Record a slot that could not be held (worker died, memory cannot be opened). True if slots end now."""
        self._lost += 1
        return self._lost > MOST_LOST and self.give_up()

    def give_up(self) -> bool:
        """Stop using slots; return whether they were in use before."""
        before, self._given_up = self._given_up, True
        return not before
