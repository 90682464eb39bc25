"""Resource use of a run's processes over time. Steady growth, or leftovers at the end, indicate a leak."""

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
"""Prefixes of files that Ray and Python's multiprocessing create and remove; hidden files come from browsers."""

WARM_UP = 0.25
"""Fraction at the start of a run without a meaningful slope: caches fill, modules are imported."""

FEWEST = 8
"""Minimum number of measurements for a slope."""


@dataclass(frozen=True)
class Usage:
    """Total resource use of all processes of a run at one time.

    Attributes:
        at: seconds of the machine's monotonic clock.
        descriptors: of files, sockets and pipes.
        memory_bytes: memory that would be freed if all processes ended; shared memory counts once.
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
        """Measure processes. Processes that end meanwhile are not counted."""
        count = threads = descriptors = memory_bytes = 0
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process = psutil.Process(pid)
                # PSS rather than RSS, which would count the object store once per process.
                memory_bytes += process.memory_full_info().pss
                threads += process.num_threads()
                descriptors += process.num_fds()
                count += 1
        return cls(time.monotonic(), count, threads, descriptors, memory_bytes, len(shared_files()))


THINGS = tuple(each.name for each in fields(Usage))[1:]
"""Measured resources."""


@dataclass(frozen=True)
class Growth:
    """Trend of one of `THINGS`.

    Attributes:
        first, last: medians of the first and the last quarter after the warm-up.
        per_min: slope per minute; the median over all pairs of measurements, which is robust against outliers.
    """

    thing: str
    first: float
    last: float
    per_min: float


def growth(looks: Sequence[Usage]) -> list[Growth]:
    """Return the trend of each resource; empty with too few measurements."""
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
    """Return the median slope of all pairs of points (Theil, 1950)."""
    slopes = [(y2 - y1) / (x2 - x1) for at, (x1, y1) in enumerate(points) for x2, y2 in points[at + 1 :] if x2 > x1]
    return statistics.median(slopes) if slopes else 0.0


def shared_files() -> frozenset[str]:
    """Return the names of entries in /dev/shm that no library removes itself."""
    return frozenset(path.name for path in SHARED.iterdir() if not path.name.startswith(FOREIGN))


def pids_with(variable: str, value: str) -> list[int]:
    """Return live processes that were started with an environment variable, including indirect children."""
    wanted = f"{variable}={value}".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if wanted in path.joinpath("environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
    return sorted(found)
