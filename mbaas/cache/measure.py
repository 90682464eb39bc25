"""Measures what this machine can move, for the bandwidth model (`mbaas.allocation.bandwidth`), in about half a second.

Reads that come from the kernel's page cache are memory in disguise. So what is written here is synced, and driven out
of the page cache before it is read. Storage is not touched: its rate is that of the reads that are made anyway.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mbaas.errors import ConfigError

_PIECE_BYTES = 4 << 20  # of a memory copy or a disk write
_MEMORY_BYTES = 32 << 20  # copied from one end to the other: past what the caches of most processors hold
_READ_BYTES = 128 << 10  # of a disk read: a photo's worth
_MAX_DISK_BYTES = 256 << 20
_MEMORY_S, _DISK_S = 0.03, 0.125  # no copy, write or read begins after so long


def try_out(*, disk_path: str | os.PathLike[str] | None, disk_bytes: int, threads: int) -> tuple[float, float | None]:
    """Tries out what a thread gets from memory, and from the disk tier's disk.

    Args:
        disk_path: the disk tier's folder; None: there is none.
        disk_bytes: the most that the file which is made there, and removed again, may hold; with less than a piece the
            disk is not tried out.
        threads: how many read the disk at once.

    Returns:
        Both in bytes/s; None for the disk if it was not tried out.

    Raises:
        ConfigError: a folder that cannot be written to.
    """
    most_bytes = min(disk_bytes, _MAX_DISK_BYTES)
    if disk_path is None or most_bytes < _PIECE_BYTES:
        return _memory(), None
    return _memory(), _disk(Path(disk_path), most_bytes, threads)


def _memory() -> float:
    source, target = np.ones(_MEMORY_BYTES, np.uint8), np.ones(_MEMORY_BYTES, np.uint8)
    starts = itertools.cycle(range(0, _MEMORY_BYTES, _PIECE_BYTES))

    def copy() -> int:
        start = next(starts)
        np.copyto(target[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])
        return _PIECE_BYTES

    return _rate(copy, _MEMORY_S, threads=1)


def _disk(path: Path, most_bytes: int, threads: int) -> float:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, prefix="mbaas-measure-") as file:
            return _disk_rate(file.fileno(), most_bytes, threads) / threads
    except OSError as error:
        raise ConfigError(f"the disk cache needs a folder that it may write to, got {path}: {error}") from error


def _disk_rate(file: int, most_bytes: int, threads: int) -> float:
    """The rate of all threads together, which read random pieces of what was written before."""
    content = np.random.default_rng(0).bytes(_PIECE_BYTES)  # compressible bytes would flatter some disks
    pieces = iter(range(most_bytes // _PIECE_BYTES))
    written: list[int] = []

    def write() -> int:
        if (piece := next(pieces, None)) is None:
            return 0
        count = os.pwrite(file, content, piece * _PIECE_BYTES)
        os.fdatasync(file)
        written.append(piece)
        return count

    _rate(write, _DISK_S, threads=1)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    starts = np.array(written)[:, None] * _PIECE_BYTES + np.arange(0, _PIECE_BYTES, _READ_BYTES)
    spots = iter(np.random.default_rng(1).permutation(starts.ravel()).tolist())

    def read() -> int:
        start = next(spots, None)
        return 0 if start is None else len(os.pread(file, _READ_BYTES, start))

    return _rate(read, _DISK_S, threads=threads)


def _rate(step: Callable[[], int], seconds: float, *, threads: int) -> float:
    """Bytes per second of threads that repeat a step, together.

    A step returns the bytes that it moved, or 0 when there is nothing left. None begins after ``seconds``, and those in
    progress are waited for, so the rate rests on at least one step, however slow.

    Raises:
        Exception: what a step raised.
    """
    moved: list[int] = []
    failures: list[Exception] = []
    began = time.monotonic()

    def work() -> None:
        try:
            while nbytes := step():
                moved.append(nbytes)
                if time.monotonic() - began >= seconds:
                    break
        except Exception as error:
            failures.append(error)

    workers = [threading.Thread(target=work, name="mbaas-measure") for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return sum(moved) / max(time.monotonic() - began, 1e-9)
