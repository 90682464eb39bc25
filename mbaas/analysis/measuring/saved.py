"""Results of an analysis by stage, saved after each one, so that an interrupted analysis can continue."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Result = TypeVar("Result")

MOST_AGE_S = 24 * 3600
"""Age from which results are measured again: the machine may have changed."""


class _File(msgspec.Struct):
    about: str
    stages: dict[str, Any]


class SavedStages:
    """Results by stage, in a file that is replaced after each stage.

    Args:
        path: the file; None, also after a failed attempt to write it, saves nothing.
        about: everything that the results depend on. A file about something else is ignored, and overwritten.

    Attributes:
        earlier: stages that an earlier, interrupted analysis has saved.
    """

    def __init__(self, path: Path | None = None, *, about: str = "") -> None:
        self.path, self._file = path, _File(about, {})
        if path is not None:
            with suppress(OSError, msgspec.MsgspecError):
                found = msgspec.json.decode(path.read_bytes(), type=_File)
                if found.about == about and time.time() - path.stat().st_mtime < MOST_AGE_S:
                    self._file = found
        self.earlier = tuple(self._file.stages)

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages with a result."""
        return tuple(self._file.stages)

    def result(self, stage: str, kind: Any, measure: Callable[[], Result]) -> Result:
        """Return the saved result of a stage, of type ``kind``, or measure and save it."""
        if stage in self._file.stages:
            saved: Result = msgspec.convert(self._file.stages[stage], kind)
            return saved
        measured = measure()
        self._file.stages[stage] = msgspec.to_builtins(measured)
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                written = self.path.with_suffix(".tmp")
                written.write_bytes(msgspec.json.encode(self._file))
                written.replace(self.path)
            except OSError:  # no home folder, or a full disk: a measurement is worth more than its copy
                self.path = None
        return measured

    def end(self) -> None:
        """Delete the file of a complete analysis."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def saved_path(about: str) -> Path:
    """Return the file for the stages of an analysis, in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mbaas"
    return folder / f"analyze-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"
