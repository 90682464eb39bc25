"""Measures CPU seconds and memory of a process tree, including daemons and workers.

`TreeWatch` divides the CPU seconds of living processes by kind, and finds the peak of memory. `TreeCpu` also counts
short-lived processes, such as trials, after their end.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from typing_extensions import Self

LEAST_INTERVAL_S = 0.5
MOST_SHARE = 0.005
"""Maximum fraction of one core used by the watch itself; reading the memory of large processes takes milliseconds."""

LOOK_S = 1.0
"""Interval of the counts of `TreeCpu` in seconds. CPU time in a process's last interval may be missed."""


@dataclass(frozen=True)
class CpuReading:
    """CPU seconds used so far, by (process id, kind of process), at ``time.monotonic()`` == ``at_s``."""

    at_s: float
    cpu_s: dict[tuple[int, str], float]

    def cores_until(self, later: CpuReading) -> dict[str, float]:
        """Return the mean busy cores until a later reading, by kind of process, busiest first."""
        used: dict[str, float] = {}
        for (pid, kind), cpu_s in later.cpu_s.items():
            used[kind] = used.get(kind, 0.0) + cpu_s - self.cpu_s.get((pid, kind), 0.0)
        return {kind: s / (later.at_s - self.at_s) for kind, s in sorted(used.items(), key=lambda item: -item[1])}


def cpu_model() -> str:
    """Return the processor's model name, or its architecture if the kernel reports none."""
    with suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def kind_of(process: psutil.Process) -> str:
    """Return a process's kind as a readable name, such as an actor's class, "raylet", "trial" or "host"."""
    name, command = process.name(), process.cmdline()
    # Ray's process titles contain the current method, as in "ray::PrepWorker.prepare".
    if command and command[0].startswith("ray::"):
        return re.split(r"[.(]", command[0].removeprefix("ray::"))[0]
    if name in ("pt_data_worker", "raylet", "gcs_server"):
        return name
    if any("spawn_main" in part for part in command):  # a process started by multiprocessing with "spawn"
        return "trial"
    return "host" if process.pid == os.getpid() else "other"


class _Watch(ABC):
    """A context manager whose thread runs `_watch` until `_over` is set."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tree-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    @abstractmethod
    def _watch(self) -> None: ...


class TreeWatch(_Watch):
    """Watches this process and its descendants.

    Memory is the sum of PSS: pages mapped by several processes count once, divided among them. Files that are only in
    the kernel's page cache do not count.
    """

    def __init__(self, interval_s: float = LEAST_INTERVAL_S) -> None:
        super().__init__()
        self.peak_bytes = 0
        """Largest sum of PSS seen, in bytes."""
        self._interval_s = interval_s
        self._kinds: dict[int, str] = {}

    def cpu(self) -> CpuReading:
        """Read the CPU seconds (user and system) of every process of the tree."""
        used = {}
        for process in _tree():
            try:
                times, kind = process.cpu_times(), self._kind(process)
            except psutil.Error:  # it ended meanwhile
                continue
            used[process.pid, kind] = times.user + times.system
        return CpuReading(time.monotonic(), used)

    def _kind(self, process: psutil.Process) -> str:
        # The kind when first seen: an actor's title changes with its current method.
        if process.pid not in self._kinds:
            self._kinds[process.pid] = kind_of(process)
        return self._kinds[process.pid]

    def _watch(self) -> None:
        pause_s = 0.0
        while not self._over.wait(pause_s):
            began = time.thread_time()
            self.peak_bytes = max(self.peak_bytes, memory_bytes())
            pause_s = max(self._interval_s, (time.thread_time() - began) / MOST_SHARE)


def memory_bytes() -> int:
    """Return the current sum of PSS of this process and its descendants."""
    total = 0
    for process in _tree():
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue  # it ended meanwhile
    return total


def _tree() -> Iterator[psutil.Process]:
    me = psutil.Process()
    yield me
    yield from me.children(recursive=True)


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


class TreeCpu(_Watch):
    """Counts CPU seconds from its start.

    Args:
        look: lists the living processes of the tree; by default this one and all below it.
    """

    def __init__(self, look: Callable[[], Iterable[Seen]] | None = None) -> None:
        super().__init__()
        self._look = living if look is None else look
        self._ended_s = self._before_s = 0.0
        self._orphans: dict[tuple[int, float], float] = {}
        """CPU seconds of processes at the last look that no parent counts after their end."""
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._before_s = self._count()
        return super().__enter__()

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
    raylets: set[int] = set()
    for process in _tree():  # parents come before their children
        try:
            times, born, name, parent = process.cpu_times(), process.create_time(), process.name(), process.ppid()
        except psutil.Error:  # it ended meanwhile
            continue
        if name == "raylet":
            raylets.add(process.pid)
        cpu_s = times.user + times.system + times.children_user + times.children_system
        yield Seen(process.pid, born, cpu_s, parent not in raylets)
