"""A watchdog for work that may stall, which writes the stacks of all threads to the process's log."""

from __future__ import annotations

import faulthandler
import math
import threading
import time
from types import TracebackType

STDERR = 2
"""File descriptor of standard error, which Ray writes to the log of the worker's process."""

PRECISION = 0.05
"""Share of the time by which the stacks may come too early: to set the timer anew each time would start a thread a
block.
"""


class StallWatchdog:
    """A context for each piece of work; while any is in progress and none begins or ends for too long, the stacks of
    all threads go to standard error, even if they hold Python's lock.

    There is one such timer in a process. May be used by several threads.

    Args:
        after_s: how long is too long.
        fd: where stacks are written, a file descriptor.
    """

    def __init__(self, after_s: float, *, fd: int = STDERR) -> None:
        self._after_s, self._fd = after_s, fd
        self._lock = threading.Lock()
        self._in_progress = 0
        self._set_at = -math.inf

    def __enter__(self) -> None:
        self._moved(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._moved(-1)

    def _moved(self, change: int) -> None:
        with self._lock:
            self._in_progress += change
            if not self._in_progress:
                faulthandler.cancel_dump_traceback_later()
                self._set_at = -math.inf
            # To set the timer replaces the one that runs.
            elif (now := time.monotonic()) - self._set_at > PRECISION * self._after_s:
                faulthandler.dump_traceback_later(self._after_s, file=self._fd)
                self._set_at = now
