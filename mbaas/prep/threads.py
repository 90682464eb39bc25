"""A thread pool over the samples of a block, for engines on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait


class SampleThreads:
    """Threads that process samples one at a time. Not thread-safe itself: one call at a time."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # With a single thread, the caller does the work itself.
        self._pool = ThreadPoolExecutor(threads, "prep") if threads > 1 else None

    def run(self, work: Callable[[int], None], count: int) -> None:
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
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _work(work: Callable[[int], None], todo: Iterator[int]) -> None:
    for number in todo:
        work(number)
