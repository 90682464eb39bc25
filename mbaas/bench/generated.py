"""Makes a benchmark's data once, and finds it again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def made_once(path: Path, write: Callable[[Path], None], what: str, report: Callable[[str], None]) -> Path:
    """Return ``path``, a file or folder, which is made if it is not there.

    It appears under its name only when it is complete, so what was interrupted is made again.

    Args:
        path: its name says all on which its content depends.
        write: makes it, at the path that it is given.
        what: it is, for the report.
        report: told once, if it has to be made.
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
    """Give it its name; another process may have made the same meanwhile, which is as good."""
    try:
        unfinished.rename(path)
    except OSError:
        if not path.exists():
            raise
