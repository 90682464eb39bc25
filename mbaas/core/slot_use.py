"""Decides whether a lane's blocks are made in slots of workers' memory, and in how many; see `mbaas.slots`."""

from __future__ import annotations

from collections.abc import Iterable

SPARE_SLOTS = 2
"""Slots that each worker has beyond its part of the staging memory: one is written, and one was just let go."""

MOST_LOST = 3
"""So many slots, one after the other, may be lost before no more are used."""


class SlotUse:
    """Slots are used while all that write and read them run on one node, and as long as they can be read there.

    Args:
        node: where the coordinator runs.
        staging_blocks: how many blocks the staging memory of the feed holds.
    """

    def __init__(self, node: str, staging_blocks: int) -> None:
        self._node, self._staging_blocks = node, staging_blocks
        self._lost = 0
        self._given_up = False

    def most(self, workers: Iterable[str], consumers: Iterable[str]) -> int:
        """Return in how many slots a worker may make blocks; 0: all go through the object store.

        Args:
            workers: the node of each worker.
            consumers: the nodes of consumers. Where none is known, nobody knows where blocks will be read.
        """
        nodes = list(workers)
        if self._given_up or not {*nodes} == {*consumers} == {self._node}:
            return 0
        return self._staging_blocks // len(nodes) + SPARE_SLOTS

    def held(self) -> None:
        """Note that the coordinator holds a slot that a worker has written."""
        self._lost = 0

    def lost(self) -> bool:
        """Note that it could not be held: the worker died meanwhile, or its memory can never be opened here.

        Returns:
            Whether slots are given up by that.
        """
        self._lost += 1
        return self._lost > MOST_LOST and self.give_up()

    def give_up(self) -> bool:
        """Use no more slots; return whether any were used before."""
        before, self._given_up = self._given_up, True
        return not before
