"""Measures what this machine can move, for the bandwidth model (`tiers`), in about a second.

Reads that come from the kernel's page cache are memory in disguise. So what is written here is synced within
the time that counts and driven out of the page cache before it is read; the dataset's own files are left alone.
How much of either was in the page cache nevertheless is looked up and told.
"""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.fs
from numpy.typing import NDArray

from mbaas.cache.tiers import Rate
from mbaas.dataset.table import TableDataset
from mbaas.errors import BadSampleError, ConfigError, DatasetError

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

_PIECE_BYTES = 4 << 20  # of a memory copy or a disk write
_MEMORY_BYTES = 128 << 20  # copied from one end to the other: past what the caches of processors hold
_READ_BYTES = 128 << 10  # of a disk read: a photo's worth
_LITTLE_MEMORY_BYTES = 32 << 20  # for a first guess: past what most processors hold
_PROBES = 16
_MAX_DISK_BYTES = 256 << 20
_MAX_SAMPLES = 4096  # that are drawn; a second is over before they are read, unless they lie in memory


@dataclass(frozen=True)
class MeasuredRates:
    """What was measured; of each rate, the total of as many threads as its points say.

    Attributes:
        memory: copies within memory, each byte counted once.
        storage: reads of random samples of the dataset.
        storage_cached: fraction of a few samples that lay in this machine's page cache before they were read;
            above 0, `storage` is too good to be true for the rest. None where that cannot be known, as for
            remote storage.
        disk_write: writes to the disk tier's disk, synced; None without a disk tier.
        disk_read: reads of random pieces of what was written; None without a disk tier.
        disk_cached: fraction of a few of those pieces that were in the page cache although they were driven
            out; above 0, `disk_read` is too good to be true. None where that cannot be known, as on a tmpfs.
        elapsed_s: what all of it took.
    """

    memory: Rate
    storage: Rate
    storage_cached: float | None
    disk_write: Rate | None
    disk_read: Rate | None
    disk_cached: float | None
    elapsed_s: float


def measure_rates(
    dataset: Dataset,
    *,
    disk_path: str | os.PathLike[str] | None = None,
    threads: Sequence[int] = (1, 8),
    budget_s: float = 1.0,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> MeasuredRates:
    """Measures memory, storage and, if there is one, the disk tier's disk.

    Takes about `budget_s`: the time is shared out evenly, no read or write begins after its share, and those in
    progress are waited for. So each rate rests on at least one sample a thread, however slow.

    Args:
        dataset: a few of its samples are read, each at most once.
        disk_path: the disk tier's folder; a file of at most 256 MiB is made there and removed again.
        threads: the numbers of threads to measure with, ascending.
        budget_s: above 0.
        seed: of the choice of samples.
        clock: seconds that never go back.

    Raises:
        ConfigError: no threads, no time, or a folder that cannot be written to.
        DatasetError: not one of the samples could be read.
    """
    if budget_s <= 0:
        raise ConfigError(f"budget_s must be above 0, got {budget_s}")
    if not threads or min(threads) < 1:
        raise ConfigError(f"threads must name numbers of at least 1, got {tuple(threads)}")
    begun = clock()
    parts = 2 if disk_path is None else 4
    share = _Share(budget_s / parts, tuple(threads), clock)
    memory = _memory(share)
    storage, storage_cached = _storage(dataset, share, np.random.default_rng(seed))
    disk_write, disk_read, disk_cached = (None, None, None) if disk_path is None else _disk(Path(disk_path), share)
    return MeasuredRates(memory, storage, storage_cached, disk_write, disk_read, disk_cached, clock() - begun)


def try_out(*, disk_path: str | os.PathLike[str] | None, disk_bytes: int, threads: int) -> tuple[float, float | None]:
    """What a thread gets from memory, and from the disk tier's disk, in bytes/s; takes about half a second.

    Storage is not touched: its rate is that of the reads that are made anyway.

    Args:
        disk_path: the disk tier's folder; None: there is none.
        disk_bytes: that the file which is made there may hold; with less than a piece the disk is not tried out.
        threads: that read the disk at once.

    Returns:
        Of the disk None if it was not tried out.

    Raises:
        ConfigError: a folder that cannot be written to.
    """
    memory = _memory(_Share(0.03, (1,), time.monotonic), _LITTLE_MEMORY_BYTES).share(1)
    most_bytes = min(disk_bytes, _MAX_DISK_BYTES)
    if disk_path is None or most_bytes < _PIECE_BYTES:
        return memory, None
    _, read, _ = _disk(Path(disk_path), _Share(0.25, (threads,), time.monotonic), most_bytes)
    return memory, read.share(threads) if read is not None else None


@dataclass(frozen=True)
class _Share:
    """The time that one part of the measurement may take.

    Attributes:
        seconds: for all numbers of threads together.
        threads: the numbers of threads.
        clock: seconds that never go back.
    """

    seconds: float
    threads: tuple[int, ...]
    clock: Callable[[], float]

    def rate(self, make_step: Callable[[int], Callable[[], int]]) -> Rate | None:
        """Repeats a step in each number of threads.

        Args:
            make_step: gets the index of the number of threads, and is called for each thread. A step returns
                the bytes that it moved, or 0 when there is nothing left.

        Returns:
            A point for each number of threads that moved anything; None if none did.
        """
        totals = [self._total(make_step, i) for i in range(len(self.threads))]
        points = [(count, total) for count, total in zip(self.threads, totals, strict=True) if total]
        return Rate(tuple(count for count, _ in points), tuple(total for _, total in points)) if points else None

    def _total(self, make_step: Callable[[int], Callable[[], int]], index: int) -> float:
        moved: list[int] = []
        failures: list[Exception] = []
        steps = [make_step(index) for _ in range(self.threads[index])]
        begun = self.clock()
        until = begun + self.seconds / len(self.threads)

        def work(step: Callable[[], int]) -> None:
            try:
                while nbytes := step():
                    moved.append(nbytes)
                    if self.clock() >= until:
                        break
            except Exception as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(step,), name="mbaas-measure") for step in steps]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]
        return sum(moved) / max(self.clock() - begun, 1e-9)


class _Turns:
    """Hands out items to threads, each once; every number of threads has an even part of its own."""

    def __init__(self, items: NDArray[np.int64], parts: int) -> None:
        self._lock = threading.Lock()
        self._left = [iter(part.tolist()) for part in np.array_split(items, parts)]

    def take(self, part: int) -> int | None:
        with self._lock:
            return next(self._left[part], None)


def _memory(share: _Share, size_bytes: int = _MEMORY_BYTES) -> Rate:
    source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
    turn = itertools.count()

    def copy() -> int:
        start = next(turn) * _PIECE_BYTES % size_bytes
        np.copyto(target[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])
        return _PIECE_BYTES

    rate = share.rate(lambda _: copy)
    assert rate, "memory has no end"
    return rate


def _storage(dataset: Dataset, share: _Share, random: np.random.Generator) -> tuple[Rate, float | None]:
    sample_ids = random.choice(len(dataset), min(len(dataset), _MAX_SAMPLES), replace=False)
    lengths = dict(zip(sample_ids.tolist(), dataset.lengths(sample_ids).tolist(), strict=True))
    cached = _cached_samples(dataset, sample_ids[:_PROBES].tolist())
    reader, turns = dataset.reader(), _Turns(sample_ids, len(share.threads))
    errors: list[BadSampleError] = []

    def read(part: int) -> int:
        while (sample_id := turns.take(part)) is not None:
            try:
                reader.read_into(sample_id, np.empty(lengths[sample_id], np.uint8))
            except BadSampleError as error:
                errors.append(error)
            else:
                if lengths[sample_id]:
                    return lengths[sample_id]
        return 0

    rate = share.rate(lambda part: lambda: read(part))
    if rate is None:
        why = f"; {errors[0]}" if errors else ""
        raise DatasetError(f"{dataset.root}: no bytes came from any of {len(sample_ids)} samples{why}")
    return rate, cached


def _disk(
    path: Path, share: _Share, most_bytes: int = _MAX_DISK_BYTES
) -> tuple[Rate | None, Rate | None, float | None]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, prefix="mbaas-measure-") as file:
            return _disk_rates(file.fileno(), share, most_bytes)
    except OSError as error:
        raise ConfigError(f"the disk cache needs a folder that it may write to, got {path}: {error}") from error


def _disk_rates(file: int, share: _Share, most_bytes: int) -> tuple[Rate | None, Rate | None, float | None]:
    content = np.random.default_rng(0).bytes(_PIECE_BYTES)  # compressible bytes would flatter some disks
    pieces = _Turns(np.arange(most_bytes // _PIECE_BYTES), len(share.threads))
    filled: list[int] = []

    def write(part: int) -> int:
        piece = pieces.take(part)
        if piece is None:
            return 0
        count = os.pwrite(file, content, piece * _PIECE_BYTES)
        os.fdatasync(file)
        filled.append(piece)
        return count

    written = share.rate(lambda part: lambda: write(part))
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    starts = np.array(filled)[:, None] * _PIECE_BYTES + np.arange(0, _PIECE_BYTES, _READ_BYTES)
    starts = np.random.default_rng(1).permutation(starts.ravel())
    cached = _fraction([_is_cached(file, start) for start in starts[:_PROBES].tolist()])
    spots = _Turns(starts, len(share.threads))

    def read(part: int) -> int:
        start = spots.take(part)
        return 0 if start is None else len(os.pread(file, _READ_BYTES, start))

    return written, share.rate(lambda part: lambda: read(part)), cached


def _cached_samples(dataset: Dataset, sample_ids: list[int]) -> float | None:
    if not isinstance(dataset, TableDataset) or not isinstance(dataset.filesystem, pyarrow.fs.LocalFileSystem):
        return None
    found: list[bool | None] = []
    for where in map(dataset.byte_range, sample_ids):
        try:
            file = os.open(where.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        found.append(_is_cached(file, where.offset))
        os.close(file)
    return _fraction(found)


def _fraction(answers: list[bool | None]) -> float | None:
    known = [answer for answer in answers if answer is not None]
    return sum(known) / len(known) if known else None


def _is_cached(file: int, offset: int) -> bool | None:
    """Whether a page of a file is in the page cache: then it can be read without waiting."""
    try:
        return bool(os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
