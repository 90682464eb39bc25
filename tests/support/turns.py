"""Lets a timing test run alone: with ``pytest -n``, tests in other processes wait for it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """Turns taken by tests of several processes.

    Args:
        folder: shared by all tests.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept = contextlib.ExitStack()
        self._is_kept = False

    @contextlib.contextmanager
    def turn(self, *, alone: bool, keep: bool = False) -> Iterator[None]:
        """Run while no exclusive test runs in another process or, with ``alone``, while no other test runs at all.

        Args:
            alone: run exclusively.
            keep: let the next turn here continue this one, so that consecutive exclusive tests wait for others only
                once.
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
        # A process that waits to be alone holds the door. Otherwise others could keep joining and shut it out. Closing
        # the files releases the locks.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
