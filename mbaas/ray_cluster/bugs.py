"""Detect bugs in mbaas among errors, and log them in processes that continue."""

from __future__ import annotations

import logging
import re
import traceback

import ray

from mbaas.errors import MbaasError

INTERNAL_ERROR = "an internal error; the feed goes on"

_log = logging.getLogger(__name__)


def is_bug(error: BaseException) -> bool:
    """Return whether an error is a bug in mbaas: not raised on purpose, and not the end of another process."""
    cause = _cause_of(error)
    if isinstance(cause, ray.exceptions.RayError):
        return type(cause) is ray.exceptions.RayError  # Ray's substitute for an error that it cannot send
    return not isinstance(cause, MbaasError)


def in_short(error: BaseException) -> str:
    """Return an error as one line; errors of other processes contain a traceback, which belongs in the log."""
    cause = _cause_of(error)
    return f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[-1]}".rstrip(": ")


def _cause_of(error: BaseException) -> BaseException:
    while isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    return error


class BugLog:
    """Logs each bug with its traceback, once per source line, because loops hit the same bug every round."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str, int]] = set()

    def log(self, error: BaseException, where: str = "") -> bool:
        """Log an error, unless one from the same line was logged before; return True if it was logged now.

        An error from another process includes its traceback there; ``where`` is a location outside of this process: "in
        prep-1".
        """
        line = _line_of(error)
        if line in self._logged:
            return False
        self._logged.add(line)
        _log.error(INTERNAL_ERROR + (f" ({where})" if where else ""), exc_info=error)
        return True


_of_process = BugLog()


def log_bug(error: BaseException, where: str) -> None:
    """Log an error if it is a bug, in a process that continues and has no counter for bugs."""
    if is_bug(error):
        _of_process.log(error, where)


_FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


def _line_of(error: BaseException) -> tuple[str, str, int]:
    """Return the error's type, file and line, in whichever process it was raised."""
    if isinstance(error, ray.exceptions.RayTaskError) and (frames := _FRAME.findall(str(error))):
        file, line = frames[-1]
        return type(_cause_of(error)).__name__, file, int(line)
    *_, last = traceback.extract_tb(error.__traceback__)
    return type(error).__name__, last.filename, last.lineno or 0
