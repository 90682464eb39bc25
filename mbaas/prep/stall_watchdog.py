"""A watchdog for stalls that writes the stacks of all threads to the process's log."""

from __future__ import annotations

import faulthandler
import math
import threading
import time
from types import TracebackType

STDERR = 2
"""File descriptor of standard error, which Ray writes to the log of the worker's process."""

PRECISION = 0.05
"""The dump may come early by this fraction of the timeout: resetting the timer each time would start one thread per
block.
"""


class StallWatchdog:
    """Context manager around pieces of work that dumps all threads' stacks to a file descriptor during a stall.

    In a stall, work is in progress, and no piece has begun or ended for ``after_s`` seconds. Dumps also while a thread
    holds the GIL. The timer is global: use one watchdog per process. Thread-safe.
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
            # Setting the timer replaces the running one.
            elif (now := time.monotonic()) - self._set_at > PRECISION * self._after_s:
                faulthandler.dump_traceback_later(self._after_s, file=self._fd)
                self._set_at = now
