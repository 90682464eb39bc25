"""Bugs in mbaas: how they are told from other errors, and logged where something else goes on in spite of them."""

from __future__ import annotations

import logging
import re
import traceback

import ray

from mbaas.errors import MbaasError

INTERNAL_ERROR = "an internal error; the feed goes on"

_log = logging.getLogger(__name__)


def is_bug(error: BaseException) -> bool:
    """Whether an error is a mistake in mbaas: neither one that it raises on purpose nor the end of another process."""
    cause = _cause_of(error)
    if isinstance(cause, ray.exceptions.RayError):
        return type(cause) is ray.exceptions.RayError  # what Ray puts in the place of an error that it cannot send
    return not isinstance(cause, MbaasError)


def in_short(error: BaseException) -> str:
    """One line that says which error it is; that of another process comes with a traceback, which is for the log."""
    cause = _cause_of(error)
    return f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[-1]}".rstrip(": ")


def _cause_of(error: BaseException) -> BaseException:
    """What a method raised, in whichever process that was: an error on its way through several is wrapped by each."""
    while isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    return error


class BugLog:
    """Logs each bug with its traceback, once for each line that it comes from: loops meet the same one every round."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str, int]] = set()

    def log(self, error: BaseException, where: str = "") -> bool:
        """Log an error, unless that was done for one from the same line.

        Args:
            error: that of another process brings its traceback there along.
            where: words that say where it was met, if that was not in this process: "in lane 1".

        Returns:
            Whether it was logged now.
        """
        line = _line_of(error)
        if line in self._logged:
            return False
        self._logged.add(line)
        _log.error(INTERNAL_ERROR + (f" ({where})" if where else ""), exc_info=error)
        return True


_of_process = BugLog()


def log_bug(error: BaseException, where: str) -> None:
    """Log an error if it is a bug, in a process that goes on in some other way, and has no counter for it."""
    if is_bug(error):
        _of_process.log(error, where)


_FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


def _line_of(error: BaseException) -> tuple[str, str, int]:
    """The kind of an error, and the file and line that it comes from, in whichever process that was."""
    if isinstance(error, ray.exceptions.RayTaskError) and (frames := _FRAME.findall(str(error))):
        file, line = frames[-1]
        return type(_cause_of(error)).__name__, file, int(line)
    *_, last = traceback.extract_tb(error.__traceback__)
    return type(error).__name__, last.filename, last.lineno or 0
