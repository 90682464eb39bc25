"""Lets a test that measures seconds run alone: where files run side by side (``pytest -n``), the others wait for it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Run while no test that is to be alone runs in another process, or with ``alone`` while no test at all does.

    Args:
        folder: the same for all processes that take turns.
        alone: whether to be alone.
    """
    # Whoever waits to be alone stands in the door, or others, who may always join those that are in, would keep it out.
    with (folder / "door").open("a") as door, (folder / "room").open("a") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield  # closing the files gives up what is locked
