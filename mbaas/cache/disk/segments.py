"""The segment files of the disk tier: space for new samples, reads and writes."""

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
    """Samples [start, stop) of a list that are stored end to end in one segment, starting at `offset`."""

    start: int
    stop: int
    segment: int
    offset: int


class Segments:
    """The open segment files of a folder. `write` and `read` are thread-safe.

    Args:
        folder: a folder locked by this process.
        ends: segment number -> valid bytes. Files are truncated to these; other segment files are removed.
        segment_bytes: largest size of a file.
    """

    def __init__(self, folder: Folder, ends: Mapping[int, int], *, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}  # number -> descriptor
        self._last = max(ends, default=0)  # the segment being appended to; 0 if none
        self._last_end = ends.get(self._last, 0)
        for number in folder.segments():
            if number in ends:
                # Leftovers of a crash after the last sample take space that is not charged to the budget.
                os.truncate(folder.segment(number), ends[number])
                self._files[number] = os.open(folder.segment(number), os.O_RDWR | os.O_CLOEXEC)
            else:
                folder.segment(number).unlink()

    def __len__(self) -> int:
        with self._lock:
            return len(self._files)

    def reserve(self, lengths: NDArray[np.int64]) -> list[Run]:
        """Reserve space for samples of int64[n] bytes, end to end, none across two segments. Not thread-safe."""
        runs: list[Run] = []
        ends, start = np.cumsum(lengths), 0
        while start < len(lengths):
            base = int(ends[start - 1]) if start else 0
            room = self._segment_bytes - self._last_end if self._last else 0
            # As many as fit into the current segment; if none fits, start the next segment.
            stop = int(np.searchsorted(ends, base + room, side="right"))
            if stop > start:
                runs.append(Run(start, stop, self._last, self._last_end))
                self._last_end += int(ends[stop - 1]) - base
                start = stop
            else:
                self._last, self._last_end = self._last + 1, 0
        return runs

    def write(self, run: Run, data: memoryview, *, starts: list[int], lengths: list[int]) -> None:
        """Write the samples of a run, which start at offsets `starts` of `data`. Raises OSError if this fails."""
        file, offset = self._file(run.segment), run.offset
        for first, last in _end_to_end(starts, lengths, run):
            part = data[starts[first] : starts[last] + lengths[last]]
            write_all(file, part, offset)
            offset += len(part)

    def read(self, spots: Spots, targets: list[memoryview]) -> NDArray[np.bool_]:
        """Read each sample into its target: bool[n], true if all of its bytes were read."""
        came = np.ones(len(spots), np.bool_)
        order = np.argsort(spots["address"], kind="stable")
        for run in _neighbours(spots[order]):
            rows = order[run.start : run.stop].tolist()
            # A failed batch does not identify the damaged sample, so its samples are read one by one.
            if not self._read_run(run, [targets[i] for i in rows]):
                came[rows] = [self._read_one(spots[i], targets[i]) for i in rows]
        return came

    def close(self) -> None:
        """Close the files; no read or write may be in progress."""
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
        try:
            return os.preadv(self._files[run.segment], targets, run.offset) == sum(map(len, targets))
        except OSError:
            return False

    def _read_one(self, spot: Any, target: memoryview) -> bool:
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
    """Write all of `content` at `offset`, in as many calls as needed."""
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], offset + done)


def _end_to_end(starts: list[int], lengths: list[int], run: Run) -> Iterator[tuple[int, int]]:
    """Split a run into pieces whose samples are adjacent in the data: (first, last) of each piece."""
    first = run.start
    for i in range(run.start, run.stop):
        if i + 1 == run.stop or starts[i + 1] != starts[i] + lengths[i]:
            yield first, i
            first = i + 1


def _neighbours(spots: Spots) -> Iterator[Run]:
    """Split spots, sorted by address, into runs that one call can read."""
    numbers, offsets = split(spots["address"])
    follows = spots["address"][:-1] + spots["length"][:-1] == spots["address"][1:]
    follows &= numbers[:-1] == numbers[1:]
    cuts = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(spots)]
    for begin, end in pairwise(cuts):
        for start in range(begin, end, _MAX_VIEWS):
            yield Run(start, min(start + _MAX_VIEWS, end), int(numbers[start]), int(offsets[start]))
