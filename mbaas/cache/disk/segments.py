"""The segment files of the disk tier: where new samples go, and how bytes get in and out."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.cache.disk.folder import Folder
from mbaas.cache.disk.index import Spots, split

_MAX_VIEWS = 1024  # the kernel's limit for one preadv (IOV_MAX)


class Run(Struct, frozen=True):
    """A run of samples, [start, stop) of a list, which lie end to end in one segment from `offset` on."""

    start: int
    stop: int
    segment: int
    offset: int


class Segments:
    """The open segment files of a folder. `write` and `read` may be called from many threads.

    Args:
        folder: held by this process.
        ends: segment number -> bytes that count; the files are cut to them, other files removed.
        segment_bytes: the most of one file.
    """

    def __init__(self, folder: Folder, ends: Mapping[int, int], *, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}  # number -> descriptor
        self._last = max(ends, default=0)  # the one that grows; 0 before there is any
        self._last_end = ends.get(self._last, 0)
        for number in folder.segments():
            if number in ends:
                # What a crash left behind the last sample takes room that nobody is charged for.
                os.truncate(folder.segment(number), ends[number])
                self._files[number] = os.open(folder.segment(number), os.O_RDWR | os.O_CLOEXEC)
            else:
                folder.segment(number).unlink()

    def __len__(self) -> int:
        with self._lock:
            return len(self._files)

    def reserve(self, lengths: NDArray[np.int64]) -> list[Run]:
        """Take room for samples, end to end, none across two segments. One thread at a time.

        Args:
            lengths: int64[n], bytes, each at most `segment_bytes`.
        """
        runs: list[Run] = []
        ends, start = np.cumsum(lengths), 0
        while start < len(lengths):
            base = int(ends[start - 1]) if start else 0
            room = self._segment_bytes - self._last_end if self._last else 0
            # As many as there is room for in the segment that grows; if not even one, the next segment begins.
            stop = int(np.searchsorted(ends, base + room, side="right"))
            if stop > start:
                runs.append(Run(start, stop, self._last, self._last_end))
                self._last_end += int(ends[stop - 1]) - base
                start = stop
            else:
                self._last, self._last_end = self._last + 1, 0
        return runs

    def write(self, run: Run, data: memoryview, *, starts: list[int], lengths: list[int]) -> None:
        """Write the samples of a run, which begin at `starts` of `data`.

        Raises:
            OSError: the disk does not take them.
        """
        file, offset = self._file(run.segment), run.offset
        for first, last in _end_to_end(starts, lengths, run):
            part = data[starts[first] : starts[last] + lengths[last]]
            write_all(file, part, offset)
            offset += len(part)

    def read(self, spots: Spots, targets: list[memoryview]) -> NDArray[np.bool_]:
        """Read samples, each into its target: bool[n], true where all of its bytes came."""
        came = np.ones(len(spots), np.bool_)
        order = np.argsort(spots["address"], kind="stable")
        for run in _neighbours(spots[order]):
            rows = order[run.start : run.stop].tolist()
            # Together, it is not known which of them failed: one that is damaged must not cost its neighbours.
            if not self._read_run(run, [targets[i] for i in rows]):
                came[rows] = [self._read_one(spots[i], targets[i]) for i in rows]
        return came

    def close(self) -> None:
        """Close the files; nothing may be reading or writing."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _file(self, number: int) -> int:
        with self._lock:
            if number not in self._files:
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._files[number] = os.open(self._folder.segment(number), flags, 0o644)
            return self._files[number]

    def _read_run(self, run: Run, targets: list[memoryview]) -> bool:
        """Read samples that lie end to end in one call; false unless all of their bytes came."""
        try:
            return os.preadv(self._files[run.segment], targets, run.offset) == sum(map(len, targets))
        except OSError:
            return False

    def _read_one(self, spot: Any, target: memoryview) -> bool:
        """Read one sample, in as many calls as it takes; false unless all of its bytes came."""
        segment, offset = split(spot["address"])
        done = 0
        try:
            while done < len(target):
                count = os.preadv(self._files[int(segment)], [target[done:]], int(offset) + done)
                if not count:
                    return False
                done += count
        except OSError:
            return False
        return True


def write_all(file: int, content: memoryview, offset: int) -> None:
    """Write all of `content` at `offset`, in as many calls as it takes."""
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], offset + done)


def _end_to_end(starts: list[int], lengths: list[int], run: Run) -> Iterator[tuple[int, int]]:
    """Cut a run where its samples do not follow each other in the data: (first, last) of each piece."""
    first = run.start
    for i in range(run.start, run.stop):
        if i + 1 == run.stop or starts[i + 1] != starts[i] + lengths[i]:
            yield first, i
            first = i + 1


def _neighbours(spots: Spots) -> Iterator[Run]:
    """Cut spots, in the order of their addresses, into runs that one call can read."""
    numbers, offsets = split(spots["address"])
    follows = spots["address"][:-1] + spots["length"][:-1] == spots["address"][1:]
    follows &= numbers[:-1] == numbers[1:]
    cuts = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(spots)]
    for begin, end in pairwise(cuts):
        for start in range(begin, end, _MAX_VIEWS):
            yield Run(start, min(start + _MAX_VIEWS, end), int(numbers[start]), int(offsets[start]))
