"""Probes of memory and of the disk tier's disk, run once at startup in about half a second.

Other tiers, and a disk tier that is read, are measured on regular reads (`mbaas.cache.stats`). Storage is never read
just to measure it. The disk probe evicts its file from the page cache first, since it would otherwise measure memory.
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

_PIECE_BYTES = 4 << 20  # size of a memory copy or disk write
_MEMORY_BYTES = 32 << 20  # copied from end to end; larger than most processor caches
_READ_BYTES = 128 << 10  # size of a disk read, about one photo
_MAX_DISK_BYTES = 256 << 20
_MEMORY_S, _DISK_S = 0.03, 0.125  # no operation starts after this


def probe_speeds(
    *, disk_path: str | os.PathLike[str] | None, disk_bytes: int, threads: int
) -> tuple[float, float | None]:
    """Measure one thread's speed from memory and from the disk tier's disk, in bytes/s.

    Args:
        disk_path: the disk tier's folder, or None.
        disk_bytes: largest size of the temporary probe file. Below one piece (4 MiB) the disk is not probed (None).
        threads: number of concurrent disk readers.

    Raises:
        ConfigError: the folder is not writable.
    """
    most_bytes = min(disk_bytes, _MAX_DISK_BYTES)
    if disk_path is None or most_bytes < _PIECE_BYTES:
        return _memory(), None
    return _memory(), _disk(Path(disk_path), most_bytes, threads)


def _memory() -> float:
    # Ones, not zeros: untouched zero pages all map to one page, which stays in the processor's cache.
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
        # An unnamed file disappears with the process, even after a crash.
        with tempfile.TemporaryFile(dir=path, prefix="mbaas-measure-") as file:
            return _disk_rate(file.fileno(), most_bytes, threads) / threads
    except OSError as error:
        raise ConfigError(f"the disk cache needs a folder that it may write to, got {path}: {error}") from error


def _disk_rate(file: int, most_bytes: int, threads: int) -> float:
    """Return the total rate of all threads reading random pieces of a freshly written file."""
    content = np.random.default_rng(0).bytes(_PIECE_BYTES)  # some disks are faster with compressible data
    pieces = iter(range(most_bytes // _PIECE_BYTES))
    written: list[int] = []

    def write() -> int:
        if (piece := next(pieces, None)) is None:  # the file has its largest size
            return 0
        count = os.pwrite(file, content, piece * _PIECE_BYTES)
        os.fdatasync(file)  # the page cache only evicts synced pages
        written.append(piece)
        return count

    _rate(write, _DISK_S, threads=1)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    # In random order, like sample reads, and each piece once: a second read would come from memory.
    starts = np.array(written)[:, None] * _PIECE_BYTES + np.arange(0, _PIECE_BYTES, _READ_BYTES)
    spots = iter(np.random.default_rng(1).permutation(starts.ravel()).tolist())

    def read() -> int:
        start = next(spots, None)
        return 0 if start is None else len(os.pread(file, _READ_BYTES, start))

    return _rate(read, _DISK_S, threads=threads)


def _rate(step: Callable[[], int], seconds: float, *, threads: int) -> float:
    """Return the total bytes/s of threads that repeat a step, which returns the bytes moved, or 0 at the end.

    No step starts after ``seconds``, but steps in progress are waited for, so the rate includes at least one.
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
        except Exception as error:  # raised below; an exception in a thread would only be printed
            failures.append(error)

    workers = [threading.Thread(target=work, name="mbaas-measure") for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    # Avoids division by zero on a coarse clock.
    return sum(moved) / max(time.monotonic() - began, 1e-9)
