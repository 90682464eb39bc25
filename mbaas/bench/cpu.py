"""CPU seconds and memory of a tree of processes, daemons and workers included."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import psutil

LEAST_INTERVAL_S = 0.5
MOST_SHARE = 0.005
"""Reading the memory of large processes takes milliseconds; the watch keeps itself below this share of one core."""


@dataclass(frozen=True)
class CpuReading:
    """CPU seconds used so far, by process id, at ``time.monotonic()`` == ``at_s``."""

    at_s: float
    cpu_s: dict[int, float]

    def cores_until(self, later: CpuReading) -> float:
        """Cores kept busy, on average, from this reading to a later one; processes that started in between count."""
        used = sum(cpu_s - self.cpu_s.get(pid, 0.0) for pid, cpu_s in later.cpu_s.items())
        return used / (later.at_s - self.at_s)


class TreeWatch:
    """Watches this process and all below it; a context manager.

    Memory is the sum of PSS: pages that several processes map are counted once, divided among them. Files that are only in the kernel's page
    cache are not in it.
    """

    def __init__(self, interval_s: float = LEAST_INTERVAL_S) -> None:
        self.peak_bytes = 0
        """Largest sum of PSS seen, in bytes."""
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="tree-watch", daemon=True)

    def __enter__(self) -> TreeWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def cpu(self) -> CpuReading:
        """CPU seconds (user and system) of every process of the tree."""
        used = {}
        for process in _tree():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            used[process.pid] = times.user + times.system
        return CpuReading(time.monotonic(), used)

    def _sample(self) -> None:
        pause_s = 0.0
        while not self._over.wait(pause_s):
            began = time.thread_time()
            self.peak_bytes = max(self.peak_bytes, memory_bytes())
            pause_s = max(self._interval_s, (time.thread_time() - began) / MOST_SHARE)


def memory_bytes() -> int:
    """Sum of the PSS of this process and all below it, now."""
    total = 0
    for process in _tree():
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue  # it ended while we looked
    return total


def _tree() -> Iterator[psutil.Process]:
    me = psutil.Process()
    yield me
    yield from me.children(recursive=True)
