"""Threads of a worker process, its GPU, and a watchdog for stalls."""

from __future__ import annotations

import faulthandler
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

STDERR = 2
"""File descriptor of standard error, which Ray writes to the log of the worker's process."""

PRECISION = 0.05
"""The dump may come early by this fraction of the timeout: resetting the timer each time would start one thread per
block.
"""


_marks: list[socket.socket] = []
"""Sockets held by this process, by which others see its choice."""


MOST_EACH = 64
"""Maximum number of workers counted per GPU; further workers choose one at random."""


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

    def __exit__(self, *_: object) -> None:
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


def choose_gpu(count: int, *, mark: str = "mbaas-prep-gpu") -> int:
    """Return the GPU in [0, count) of this machine that the fewest prep workers have chosen.

    ``mark`` is the prefix of the socket names by which a machine's processes see each other's choices.
    """
    for others, gpu in itertools.product(range(MOST_EACH), range(count)):
        # An abstract socket name (Linux, no file): one process holds it, and the kernel releases it when the process
        # ends.
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0{mark}-{gpu}-{others}")
        except OSError:
            holder.close()
        else:
            _marks.append(holder)
            return gpu
    return os.getpid() % count


class SampleThreads:
    """Threads that process samples one at a time; calls of `run` may overlap."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # With a single thread, the caller does the work itself.
        self._pool = ThreadPoolExecutor(threads, "prep") if threads > 1 else None

    def run(self, work: Callable[[int], object], count: int) -> None:
        """Call ``work`` with each number below ``count``; raise its exception after all threads have finished."""
        # All threads share one iterator and take one sample at a time, so large samples delay no others. Advancing it
        # is atomic under the GIL and needs no lock.
        todo = iter(range(count))
        if self._pool is None:
            _work(work, todo)
            return
        running = [self._pool.submit(_work, work, todo) for _ in range(self._threads)]
        wait(running)  # before raising: other threads may still write to shared memory
        for done in running:
            done.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _work(work: Callable[[int], object], todo: Iterator[int]) -> None:
    for number in todo:
        work(number)
