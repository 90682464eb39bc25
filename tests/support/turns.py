"""Lets a test that measures seconds run alone: where files run side by side (``pytest -n``), the others wait for it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """The turns that tests of several processes take.

    Args:
        folder: the same for all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept = contextlib.ExitStack()
        self._is_kept = False

    @contextlib.contextmanager
    def turn(self, *, alone: bool, keep: bool = False) -> Iterator[None]:
        """Run while no test that is to be alone runs in another process, or with ``alone`` while no test at all does.

        Args:
            alone: whether to be alone.
            keep: the next turn here goes on as this one: several that are to be alone need not wait for others each.
        """
        if not self._is_kept:
            self._wait(alone)
        self._is_kept = keep
        try:
            yield
        finally:
            if not keep:
                self._kept.close()

    def _wait(self, alone: bool) -> None:
        door, room = (self._kept.enter_context((self._folder / name).open("a")) for name in ("door", "room"))
        # Whoever waits to be alone stands in the door, or others, who may always join those that are in, would keep it
        # out. Closing the files gives up what is locked.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
