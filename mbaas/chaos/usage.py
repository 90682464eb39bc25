"""What the processes of a run use, over time: whatever grows on and on, or is still there at the end, is a leak."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")

FOREIGN = ("plasma", "sem.mp-", ".")
"""Shared files that Ray, and Python's multiprocessing in any program of this machine, make and remove themselves; and
hidden ones, which browsers make, and nothing that mbaas uses."""

WARM_UP = 0.25
"""The first part of a run says nothing about slopes: caches fill, modules are imported."""

FEWEST = 8
"""The fewest looks from which a slope is found."""


@dataclass(frozen=True)
class Usage:
    """What all processes of a run used together at a moment.

    Attributes:
        at: seconds of the machine's monotonic clock.
        processes, threads, descriptors: how many there were; of files, sockets and pipes.
        memory_bytes: what they would give back if they all ended; memory that several share counts once.
        shared_files: entries of /dev/shm that Ray does not remove itself.
    """

    at: float
    processes: int
    threads: int
    descriptors: int
    memory_bytes: int
    shared_files: int

    @classmethod
    def now(cls, pids: Iterable[int]) -> Usage:
        """Look at processes; those that end meanwhile do not count."""
        count = threads = descriptors = memory_bytes = 0
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process = psutil.Process(pid)
                # PSS, not RSS: all processes map the same object store, which RSS would count once for each.
                memory_bytes += process.memory_full_info().pss
                threads += process.num_threads()
                descriptors += process.num_fds()
                count += 1
        return cls(time.monotonic(), count, threads, descriptors, memory_bytes, len(shared_files()))


THINGS = tuple(each.name for each in fields(Usage))[1:]
"""What is counted."""


@dataclass(frozen=True)
class Growth:
    """How the use of one thing went.

    Attributes:
        thing: one of `THINGS`.
        first, last: medians of the first and the last quarter after the warm-up.
        per_min: its slope in a minute; the median of those between any two looks, which outliers do not move.
    """

    thing: str
    first: float
    last: float
    per_min: float


def growth(looks: Sequence[Usage]) -> list[Growth]:
    """Find how much of each thing there was ever more of; nothing if there are too few looks to tell."""
    looks = looks[int(WARM_UP * len(looks)) :]
    if len(looks) < FEWEST:
        return []
    quarter = len(looks) // 4
    found = []
    for thing in THINGS:
        points = [(look.at / 60, float(getattr(look, thing))) for look in looks]
        values = [value for _, value in points]
        first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        found.append(Growth(thing, first, last, _slope(points)))
    return found


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Compute the median of the slopes between all pairs of points.

    Theil, "A rank-invariant method of linear and polynomial regression analysis", 1950.
    """
    slopes = [(y2 - y1) / (x2 - x1) for at, (x1, y1) in enumerate(points) for x2, y2 in points[at + 1 :] if x2 > x1]
    return statistics.median(slopes) if slopes else 0.0


def shared_files() -> frozenset[str]:
    """Return the names of entries of /dev/shm that no library takes care of itself."""
    return frozenset(path.name for path in SHARED.iterdir() if not path.name.startswith(FOREIGN))


def pids_with(variable: str, value: str) -> list[int]:
    """Return the processes that live and were started with a variable of the environment, whichever process started
    them.
    """
    wanted = f"{variable}={value}".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if wanted in path.joinpath("environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
    return sorted(found)
