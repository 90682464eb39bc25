"""Threads that work on the samples of a block, as an engine on the CPU has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait


class SampleThreads:
    """Threads among which samples are shared out, one at a time. Not thread-safe itself: one call at a time.

    Args:
        threads: how many, at least 1.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # A single thread is the caller's own, which need not wait for another one to do the work.
        self._pool = ThreadPoolExecutor(threads, "prep") if threads > 1 else None

    def run(self, work: Callable[[int], None], count: int) -> None:
        """Call ``work`` with each number below ``count``; raise what it raises, when all threads are done."""
        # One iterator for all threads: one that is done takes the next sample, so large ones hold up nobody. To take
        # the next number is one step of the interpreter, which needs no lock.
        todo = iter(range(count))
        if self._pool is None:
            _work(work, todo)
            return
        running = [self._pool.submit(_work, work, todo) for _ in range(self._threads)]
        wait(running)  # all of them, before one raises: the others still write to memory that is used again
        for done in running:
            done.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _work(work: Callable[[int], None], todo: Iterator[int]) -> None:
    for number in todo:
        work(number)
