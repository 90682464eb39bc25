"""Generates a benchmark's data once, and finds it again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def made_once(path: Path, write: Callable[[Path], None], what: str, report: Callable[[str], None]) -> Path:
    """Return ``path``, a file or folder, which is generated if it does not exist.

    It gets its name only when it is complete, so interrupted data is generated again.

    Args:
        path: the name must contain everything that the content depends on.
        write: writes the data to the path passed to it.
        what, report: description of the data, and a function that is called with one line if it is generated.
    """
    if path.exists():
        return path
    report(f"making {what} in {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}-{os.getpid()}"
    try:
        write(unfinished)
        _publish(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if unfinished.is_file():
            unfinished.unlink()
    return path


def _publish(unfinished: Path, path: Path) -> None:
    # Another process may have generated the same data meanwhile, which is fine.
    try:
        unfinished.rename(path)
    except OSError:
        if not path.exists():
            raise
