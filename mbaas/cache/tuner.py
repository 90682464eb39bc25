"""Measures a cache node's speeds, and applies the bandwidth model's advice (`mbaas.model.tiers`).

Memory and each disk are probed once at startup, in about a third of a second each. Other tiers, and disks that are
read, are measured on regular reads (`mbaas.cache.stats`). Storage is never read just to measure it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from mbaas.base import units
from mbaas.cache.disk.tier import DISK_THREADS, DiskTier, in_daemon
from mbaas.cache.planner import Planner
from mbaas.cache.read_pool import LATE_S, HangingReads, Read
from mbaas.cache.readahead import DEPTH_BLOCKS
from mbaas.cache.stats import Meter, Speedometer
from mbaas.errors import ConfigError
from mbaas.model.tiers import Advisor, FetchSpeeds, UpcomingBytes

TierName = Literal["local", "remote", "disk", "storage"]
"""Tiers that are measured, named as in `FetchSpeeds`."""

PROBE_S = 10.0
"""A disk that takes longer to measure is dropped; it takes a third of a second if it works."""

LOOKAHEAD_SAMPLES = 20_000
"""Samples of upcoming blocks used to compute the read-ahead depth: a few milliseconds of work per second."""

LOG_LINES = 20
"""Log lines kept for the coordinator, which reads them about once a second."""


class ReadAheadTuner:
    """Sets a cache node's read-ahead depth, and tells its disks how fast storage is, from measured speeds.

    Attributes:
        advisor: the model's advice.
        logged, lines: number of lines logged so far, and the last lines.
    """

    def __init__(self, planner: Planner, meter: Meter, disk: DiskTier | None, *, block_samples: int) -> None:
        self._planner, self._meter, self._disk = planner, meter, disk
        self._blocks = min(DEPTH_BLOCKS, max(2, LOOKAHEAD_SAMPLES // block_samples))
        self._speedometers: dict[TierName, Speedometer] = {name: Speedometer() for name in get_args(TierName)}
        self.advisor = Advisor(readahead_bytes=planner.ahead.budget_bytes)
        self._storage_is_logged = False
        self._late: tuple[Read, float] | None = None  # last logged read, and its age at the next log line
        self._all_replaced = True  # as last logged: each hanging read has a replacement thread
        self.logged, self.lines = 0, deque[str](maxlen=LOG_LINES)
        # In a separate thread, because the probe takes half a second or more and the node must respond at once.
        self._probe: Future[None] = in_daemon(self._probe_all)

    def _probe_all(self) -> None:
        self._speedometers["local"].probed(_memory())
        # One after another, because folders may share a disk or a network.
        for index, path, free_bytes in self._disk.to_probe() if self._disk is not None else ():
            assert self._disk is not None
            probe = in_daemon(functools.partial(probe_disk, path, disk_bytes=free_bytes, threads=DISK_THREADS))
            try:
                if (rate := probe.result(PROBE_S)) is not None:
                    self._disk.probed(index, rate)
            except FutureTimeoutError:
                self._disk.drop(index, f"it was not measured within {units.seconds(PROBE_S)}")
            except (OSError, ConfigError) as error:
                self._disk.drop(index, str(error))
        if self._disk is not None and (rate := self._disk.order.speed) is not None:
            self._speedometers["disk"].probed(rate)

    @property
    def speeds(self) -> FetchSpeeds:
        return FetchSpeeds(**{name: each.speed for name, each in self._speedometers.items()})

    async def until_probed(self) -> None:
        """Wait until the disk probes end; until then their files take space meant for samples."""
        if not self._probe.done():
            await asyncio.wait([asyncio.wrap_future(self._probe)])

    def update(self, *, threads: int, pace_per_s: float) -> None:
        """Update the speeds and apply the model's advice.

        Args:
            threads: threads that read storage.
            pace_per_s: samples/s that prep on this node could consume; 0 if unknown.
        """
        self._speedometers["storage"].update(self._meter.storage.sums())
        self._speedometers["disk"].update(self._meter.disk.sums())
        self._speedometers["remote"].update(self._meter.remote.sums())
        if self._disk is not None:
            self._disk.update(self.speeds.storage)
        # Logged once, when all speeds are available; later only changes are logged.
        if self.speeds.storage is not None and self._probe.done() and not self._storage_is_logged:
            self._storage_is_logged = True
            self.log(f"a thread gets from {self.speeds}; {threads} threads read storage")
            if self._disk is not None and self._disk.is_used:
                self.log(f"disks, fastest first, by what a thread gets: {self._disk.order}")
        if self._planner.ahead.budget_bytes:
            # Examine the blocks ahead only if a depth can be computed from them.
            matters = pace_per_s and self.speeds.storage is not None and not self._planner.keeps_all
            upcoming = self._upcoming(self._blocks if matters else 0)
            for line in self.advisor.look_ahead(upcoming, self.speeds, threads=threads, pace_per_s=pace_per_s):
                self.log(line)
            self._planner.ahead.set_depth(self.advisor.depth_bytes)

    def log_hanging(self, oldest: Read | None, hanging: HangingReads, uri: Callable[[int], str], now: float) -> None:
        """Log if the oldest read hangs, again each time its age has doubled. Also log if too many reads hang."""
        if oldest is not None:
            waited_s = now - oldest.since
            due_s = self._late[1] if self._late is not None and self._late[0] == oldest else LATE_S
            if waited_s >= due_s:
                self._late = oldest, 2 * waited_s
                others = f", and {hanging.reads - 1} more hang" if hanging.reads > 1 else ""
                self.log(f"storage has not given {uri(oldest.sample_id)} for {units.seconds(waited_s)}{others}")
        all_replaced = hanging.reads == hanging.replaced
        if self._all_replaced and not all_replaced:
            self.log(
                f"{hanging.reads} reads hang, more than the {hanging.replaced} in whose place others read: "
                "this node reads less, or nothing, until storage answers"
            )
        self._all_replaced = all_replaced

    def _upcoming(self, blocks: int) -> UpcomingBytes:
        parts = self._planner.upcoming(blocks)
        from_storage, from_disk = np.zeros((2, len(parts)))
        for row, (_, lacking) in enumerate(parts):
            on_disk, lengths = np.zeros(len(lacking), np.bool_), self._planner.lengths(lacking)
            if self._disk is not None:
                on_disk = self._disk.has(lacking)
            from_disk[row], from_storage[row] = lengths[on_disk].sum(), lengths[~on_disk].sum()
        return UpcomingBytes(sum(samples for samples, _ in parts), from_storage, from_disk)

    def log(self, line: str) -> None:
        """Append a line to the log, which the coordinator copies into its own."""
        self.logged += 1
        self.lines.append(line)


# ---- the probe ----

_PIECE_BYTES = 4 << 20  # size of a memory copy or disk write
_MEMORY_BYTES = 32 << 20  # copied from end to end; larger than most processor caches
_READ_BYTES = 128 << 10  # size of a disk read, about one photo
_MAX_DISK_BYTES = 256 << 20
_MEMORY_S, _DISK_S = 0.03, 0.125  # no operation starts after this


def probe_disk(path: str | os.PathLike[str], *, disk_bytes: int, threads: int) -> float | None:
    """Measure one thread's speed from a disk, in bytes/s.

    Args:
        path: a folder on the disk, created if missing.
        disk_bytes: largest size of the temporary probe file. If it is less than a piece (4 MiB), stored samples are
            read instead. Without a piece of these, the result is None.
        threads: number of concurrent disk readers.

    Raises:
        ConfigError: the folder is not writable.
    """
    most_bytes = min(disk_bytes, _MAX_DISK_BYTES)
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        if most_bytes < _PIECE_BYTES:
            return _stored_rate(Path(path), threads)
        # An unnamed file disappears with the process, even after a crash.
        with tempfile.TemporaryFile(dir=path, prefix="mbaas-measure-") as file:
            return _new_file_rate(file.fileno(), most_bytes, threads) / threads
    except OSError as error:
        raise ConfigError(f"the disk cache needs a folder that it may write to, got {path}: {error}") from error


def _memory() -> float:
    # Ones, not zeros: untouched zero pages all map to one page, which stays in the processor's cache.
    source, target = np.ones(_MEMORY_BYTES, np.uint8), np.ones(_MEMORY_BYTES, np.uint8)
    starts = itertools.cycle(range(0, _MEMORY_BYTES, _PIECE_BYTES))

    def copy() -> int:
        start = next(starts)
        np.copyto(target[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])
        return _PIECE_BYTES

    return _rate(copy, _MEMORY_S, threads=1)


def _stored_rate(path: Path, threads: int) -> float | None:
    """Return one thread's rate from the largest file of samples, or None if there is none of at least a piece."""
    files = [(file.stat().st_size, file) for file in path.glob("*/segment-*.bin") if not file.is_symlink()]
    nbytes, largest = max(files, default=(0, path))
    if nbytes < _PIECE_BYTES:
        return None
    with largest.open("rb") as file:
        pieces = [*range(min(nbytes, _MAX_DISK_BYTES) // _PIECE_BYTES)]
        return _read_rate(file.fileno(), pieces, threads) / threads


def _new_file_rate(file: int, most_bytes: int, threads: int) -> float:
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
    return _read_rate(file, written, threads)


def _read_rate(file: int, pieces: list[int], threads: int) -> float:
    """Return the total rate of all threads reading random parts of these pieces of a file, each once."""
    # Evicted from the page cache: otherwise the reads would measure memory.
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    # In random order, like sample reads, and each piece once: a second read would come from memory.
    starts = np.array(pieces)[:, None] * _PIECE_BYTES + np.arange(0, _PIECE_BYTES, _READ_BYTES)
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
