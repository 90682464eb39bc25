"""The speeds at which bytes come from each tier, for the bandwidth model (`mbaas.cache.bandwidth`).

Rates of storage, of other nodes and of the disk tier are those of the reads that are made anyway; storage is never read
for the sake of measuring. Memory, and a disk tier that was not read yet, are tried out beforehand, in about half a
second (`try_out`). Reads that come from the kernel's page cache are memory in disguise: so what is written for that is
synced, and driven out of the page cache before it is read.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np
from msgspec import Struct

from mbaas.errors import ConfigError
from mbaas.messages import FetchSpeeds

TierName = Literal["remote", "disk", "storage"]
"""The tiers that are measured while they are read, by their names in `FetchSpeeds`."""

ENOUGH_S = 0.05
"""Thread-seconds of reading after which a rate counts; what is read in less time tells more of chance than of speed."""

FRESH = 0.5
"""Weight of a new rate against the older ones: a change shows after a few looks, and one odd look does little."""

_PIECE_BYTES = 4 << 20  # of a memory copy or a disk write
_MEMORY_BYTES = 32 << 20  # copied from one end to the other: past what the caches of most processors hold
_READ_BYTES = 128 << 10  # of a disk read: a photo's worth
_MAX_DISK_BYTES = 256 << 20
_MEMORY_S, _DISK_S = 0.03, 0.125  # no copy, write or read begins after this


class TransferSums(Struct, frozen=True):
    """Running sums of what came from one tier.

    Attributes:
        nbytes: bytes that came.
        thread_s: seconds of all threads that waited for them, unfinished reads included.
        busy_s: seconds in which at least one thread waited.
    """

    nbytes: int = 0
    thread_s: float = 0.0
    busy_s: float = 0.0

    def since(self, before: TransferSums) -> TransferSums:
        """Tell what came after another look at the same sums."""
        return TransferSums(self.nbytes - before.nbytes, self.thread_s - before.thread_s, self.busy_s - before.busy_s)


class TierMeter:
    """The meter of one tier that bytes come from; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = 0
        self._thread_s = self._busy_s = 0.0  # up to _at
        self._using = 0  # threads, since _at
        self._at = 0.0

    def moved(self, nbytes: int) -> None:
        """Count bytes that have come."""
        with self._lock:
            self._nbytes += nbytes

    @contextmanager
    def using(self) -> Iterator[None]:
        """Count the time until the block ends as one thread's waiting for bytes from this tier."""
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    def sums(self) -> TransferSums:
        """Tell what has come up to now."""
        self._change(0)  # so that reads in progress count: a read that hangs must show in the rate
        with self._lock:
            return TransferSums(self._nbytes, self._thread_s, self._busy_s)

    def _change(self, users: int) -> None:
        # Both times grow with every change, so that no list of reads is kept.
        with self._lock:
            now = perf_counter()
            self._thread_s += self._using * (now - self._at)
            self._busy_s += (now - self._at) if self._using else 0.0
            self._using += users
            self._at = now


class Speedometer:
    """The newest speeds, made of running sums.

    Attributes:
        speeds: of each tier; None where too little came so far.
    """

    def __init__(self) -> None:
        self.speeds = FetchSpeeds()
        self._counted: dict[TierName, TransferSums] = {}  # the sums up to the last rate of each tier

    def probed(self, *, local: float, disk: float | None) -> None:
        """Take in what was tried out; the disk's own reads say more, if there were any."""
        known = self.speeds.disk if self.speeds.disk is not None else disk
        self.speeds = replace(self.speeds, local=local, disk=known)

    def look(self, tier: TierName, sums: TransferSums) -> None:
        """Take in the sums of a tier by now."""
        new = sums.since(self._counted.get(tier, TransferSums()))
        if new.thread_s < ENOUGH_S or not new.nbytes:
            return
        rate = new.nbytes / new.thread_s  # what one thread gets, beside all others
        if tier in self._counted:
            old = getattr(self.speeds, tier)
            rate = old + FRESH * (rate - old)
        self._counted[tier] = sums
        self.speeds = replace(self.speeds, **{tier: rate})


def try_out(*, disk_path: str | os.PathLike[str] | None, disk_bytes: int, threads: int) -> tuple[float, float | None]:
    """Try out what a thread gets from memory, and from the disk tier's disk.

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
    # Ones, not zeros: pages that were never written to are all the same page, and come from the processor's cache.
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
        # A file without a name: it goes with the process, however that ends.
        with tempfile.TemporaryFile(dir=path, prefix="mbaas-measure-") as file:
            return _disk_rate(file.fileno(), most_bytes, threads) / threads
    except OSError as error:
        raise ConfigError(f"the disk cache needs a folder that it may write to, got {path}: {error}") from error


def _disk_rate(file: int, most_bytes: int, threads: int) -> float:
    """Measure the rate of all threads together, which read random pieces of what was written before."""
    content = np.random.default_rng(0).bytes(_PIECE_BYTES)  # compressible bytes would flatter some disks
    pieces = iter(range(most_bytes // _PIECE_BYTES))
    written: list[int] = []

    def write() -> int:
        if (piece := next(pieces, None)) is None:  # the file is as large as it may be
            return 0
        count = os.pwrite(file, content, piece * _PIECE_BYTES)
        os.fdatasync(file)  # the page cache gives up only what the disk has
        written.append(piece)
        return count

    _rate(write, _DISK_S, threads=1)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    # In random order, as samples are asked for, and each spot once: a second read would come from memory.
    starts = np.array(written)[:, None] * _PIECE_BYTES + np.arange(0, _PIECE_BYTES, _READ_BYTES)
    spots = iter(np.random.default_rng(1).permutation(starts.ravel()).tolist())

    def read() -> int:
        start = next(spots, None)
        return 0 if start is None else len(os.pread(file, _READ_BYTES, start))

    return _rate(read, _DISK_S, threads=threads)


def _rate(step: Callable[[], int], seconds: float, *, threads: int) -> float:
    """Measure how many bytes per second threads move together that repeat a step.

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
        except Exception as error:  # raised below: an exception in a thread would be printed, and forgotten
            failures.append(error)

    workers = [threading.Thread(target=work, name="mbaas-measure") for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    # Something, also on a clock too coarse to see the time pass.
    return sum(moved) / max(time.monotonic() - began, 1e-9)
