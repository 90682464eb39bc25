"""CPU seconds of a tree of processes, including short-lived ones: trials, prep workers and daemons."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

LOOK_S = 1.0
"""Interval of the counts in seconds. CPU time in a process's last interval may be missed."""


@dataclass(frozen=True)
class Seen:
    """A living process.

    Attributes:
        pid: its process id.
        born: its start time, because process ids are reused.
        cpu_s: its CPU seconds, plus the CPU seconds of ended children that it waited for.
        is_waited_for: whether its parent's count includes it after its end. A raylet waits for none of its workers.
    """

    pid: int
    born: float
    cpu_s: float
    is_waited_for: bool


class TreeCpu:
    """Context manager that counts CPU seconds from its start.

    Args:
        look: lists the living processes of the tree; by default this one and all below it.
    """

    def __init__(self, look: Callable[[], Iterable[Seen]] | None = None) -> None:
        self._look = living if look is None else look
        self._ended_s = self._living_s = self._before_s = 0.0
        self._orphans: dict[tuple[int, float], float] = {}
        """CPU seconds of processes at the last look that no parent counts after their end."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tree-cpu", daemon=True)

    def __enter__(self) -> TreeCpu:
        self._before_s = self._count()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def seconds(self) -> float:
        """Return the CPU seconds, user and system, of all processes since the start."""
        return self._count() - self._before_s

    def _count(self) -> float:
        with self._lock:
            there = list(self._look())
            orphans = {(each.pid, each.born): each.cpu_s for each in there if not each.is_waited_for}
            self._ended_s += sum(cpu_s for process, cpu_s in self._orphans.items() if process not in orphans)
            self._orphans = orphans
            return self._ended_s + sum(each.cpu_s for each in there)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self._count()


def living() -> Iterable[Seen]:
    """List this process and all below it."""
    me = psutil.Process()
    raylets: set[int] = set()
    for process in (me, *me.children(recursive=True)):  # parents come before their children
        try:
            times, born, name, parent = process.cpu_times(), process.create_time(), process.name(), process.ppid()
        except psutil.Error:  # it ended meanwhile
            continue
        if name == "raylet":
            raylets.add(process.pid)
        cpu_s = times.user + times.system + times.children_user + times.children_system
        yield Seen(process.pid, born, cpu_s, parent not in raylets)
