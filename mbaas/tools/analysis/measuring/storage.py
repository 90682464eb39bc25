"""Read rates: S from cold storage, a disk tier's disk, and C from memory; and data sources for measurements.

Data sources are parts of a dataset, slower storage, and files outside the page cache. A recently read file is in
memory, so a storage rate measured on it is too high. mincore(2) reports residency without reading. A non-blocking read
(RWF_NOWAIT) may start read-ahead on newer kernels, so it would change the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Generic, TypeVar

import numpy as np
import pyarrow.fs
from numpy.typing import NDArray

from mbaas.base import units
from mbaas.cache.disk.store import DiskStore
from mbaas.cache.slab import pack
from mbaas.dataset import Dataset
from mbaas.dataset.base import RedrawnDataset, SampleReader, Subset, WrappedDataset, bounded
from mbaas.dataset.concatenation import ConcatDataset
from mbaas.dataset.storage.retry import PatientReader
from mbaas.dataset.table import TableDataset
from mbaas.errors import ConfigError
from mbaas.model.curves import MeasuredCurve
from mbaas.model.quantity import Quantity, stated
from mbaas.tools.analysis.measuring.effort import Effort, repeat
from mbaas.tools.analysis.measuring.prep import Raw


@dataclass(frozen=True)
class Span:
    path: str
    offset: int
    length: int


def drop(spans: Iterable[Span]) -> None:
    """Drop these bytes from the page cache. The kernel keeps dirty and mapped pages; missing files are skipped."""
    for span in spans:
        with contextlib.suppress(OSError), Path(span.path).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), span.offset, span.length, os.POSIX_FADV_DONTNEED)


def resident_share(spans: Iterable[Span]) -> float | None:
    """Return the share of these bytes' pages in the page cache, or None if unknown."""
    resident = pages = 0
    for span in spans:
        found = _resident_pages(span)
        if found is not None:
            resident, pages = resident + int(found.sum()), pages + len(found)
    return resident / pages if pages else None


def _resident_pages(span: Span) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
    """Return whether each page is resident; None if the file cannot be mapped or queried."""
    # mmap offsets must be multiples of the page size
    start = span.offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = span.offset + span.length - start
    try:
        with (
            Path(span.path).open("rb", buffering=0) as file,
            mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ, offset=start) as mapped,
        ):
            view = np.frombuffer(mapped, np.uint8)
            flags = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            failed = _libc.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(length), flags.ctypes.data_as(_BYTES)
            )
            del view  # a map with a live view cannot be closed
    except (OSError, ValueError):
        return None
    return None if failed else (flags & 1).astype(np.bool_)  # the other bits are reserved


# Python's mmap has no mincore
_libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
_BYTES = ctypes.POINTER(ctypes.c_ubyte)


class Throttle:
    """A link that carries ``bytes_per_s``, one transfer after the other, for all threads that share it.

    Idle time is lost, as on a real link. There are no bursts, so the limit holds over every interval.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            raise ConfigError(f"bytes_per_s must be above 0, got {bytes_per_s}")
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def book(self, nbytes: int, now: float) -> float:
        """Return the end of a transfer requested at ``now``, in seconds on the same clock."""
        with self._lock:
            self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
            return self._free_at

    def carry(self, nbytes: int) -> None:
        """Sleep until a transfer that starts now has ended."""
        time.sleep(max(0.0, self.book(nbytes, time.monotonic()) - time.monotonic()))


@dataclass(frozen=True, eq=False, repr=False)
class SlowedDataset(WrappedDataset):
    """A dataset with a limit ``bytes_per_s`` on the total read rate of all readers of a process."""

    bytes_per_s: float

    def reader(self) -> SampleReader:
        throttle = _shared_throttle(self.fingerprint, self.bytes_per_s)
        return WatchedReader(self.inner.reader(), before=lambda _, size: throttle.carry(size))


@dataclass(frozen=True, eq=False, repr=False)
class ColdDataset(WrappedDataset):
    """A dataset whose local samples are dropped from the page cache after each read."""

    def reader(self) -> SampleReader:
        return WatchedReader(self.inner.reader(), after=lambda sample, _: drop(local_spans(self.inner, [sample])))


class WatchedReader(SampleReader):
    """Calls functions of a sample's id and size before and after reading it."""

    def __init__(
        self,
        inner: SampleReader,
        before: Callable[[int, int], None] = lambda *_: None,
        after: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._inner, self._before, self._after = inner, before, after

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        self._before(sample_id, len(buffer))
        self._inner.read_into(sample_id, buffer)
        self._after(sample_id, len(buffer))


# By fingerprint: a dataset sent to an actor is a different object there, but uses the same storage.
_throttles: dict[tuple[str, float], Throttle] = {}
_lock = threading.Lock()


def _shared_throttle(fingerprint: str, bytes_per_s: float) -> Throttle:
    # Locked, because threads create readers concurrently and must all get the same link.
    with _lock:
        return _throttles.setdefault((fingerprint, bytes_per_s), Throttle(bytes_per_s))


def portion(
    dataset: Dataset, *, samples: int | None = None, bytes_per_s: float | None = None, seed: int = 0
) -> Dataset:
    """Return a random part of a dataset, at most ``samples``, read at most at ``bytes_per_s``."""
    if samples is not None and samples < 1:
        raise ConfigError(f"samples must be at least 1, got {samples}")
    # Random, because neighbors in a listing often share a class, a camera or a size.
    dataset = dataset.in_epoch_0() if isinstance(dataset, RedrawnDataset) else dataset
    ids = np.sort(np.random.default_rng(seed).permutation(len(dataset))[:samples])
    part = dataset.select(ids)
    return part if bytes_per_s is None else SlowedDataset.around(part, bytes_per_s=bytes_per_s)


def local_spans(dataset: Dataset, sample_ids: Sequence[int]) -> list[Span]:
    """Return the spans of samples in local files; empty for other storage."""
    if isinstance(dataset, WrappedDataset):
        return local_spans(dataset.inner, sample_ids)
    if isinstance(dataset, Subset):
        return local_spans(dataset.inner, dataset.ids[list(sample_ids)].tolist())
    if isinstance(dataset, ConcatDataset):
        places = map(dataset.part_of, sample_ids)
        return [span for number, inner in places for span in local_spans(dataset.parts[number], [inner])]
    if not isinstance(dataset, TableDataset) or not isinstance(dataset.filesystem, pyarrow.fs.LocalFileSystem):
        return []
    ranges = [dataset.byte_range(sample) for sample in sample_ids]
    return [Span(where.path, where.offset, where.length) for where in ranges]


Part = TypeVar("Part")

READERS = (1, 2, 4, 8, 16)
"""Numbers of readers for S."""

COLD = 0.02
"""Storage counts as cold if at most this share of the data to read is in the page cache."""

DISK_READERS = 8
"""Concurrent readers of a disk tier, as many as a cache node starts with."""

READ_SAMPLES = 16
"""Samples per request of a thread to the disk tier."""

DROP_S = 0.25
"""Interval at which files are dropped from the page cache to keep them cold."""

HELD_BYTES = 256 << 20
"""Size of the copied buffer: much larger than processor caches."""


@dataclass(frozen=True)
class StorageRate:
    """S, with the CPU cost of reading and the cold state of storage.

    Attributes:
        curve: samples/s against readers.
        cpu_s: CPU seconds of this process for a sample, with the fastest number of readers.
        resident: largest share of the data to read that was still in the page cache after being dropped; None if
            unknown, as with remote storage, which may have its own cache.
    """

    curve: MeasuredCurve
    cpu_s: Quantity
    resident: float | None

    @property
    def note(self) -> str | None:
        if self.resident is None:
            return "whether storage was cold cannot be known here; if it has a cache of its own, S is too high"
        return _not_cold("storage", self.resident, "S")


@dataclass(frozen=True)
class DiskRate:
    """Read rate of a disk: total bytes/s of all readers.

    ``resident`` is the share of the data that was still in the page cache; None if unknown.
    """

    rate: Quantity
    resident: float | None

    @property
    def note(self) -> str | None:
        # If page residency is unknown, pages were still dropped, and a disk has no other cache.
        return _not_cold("the disk", self.resident or 0.0, "its rate")


def _not_cold(what: str, resident: float, rate: str) -> str | None:
    if resident <= COLD:
        return None
    lay = f"{units.percent(resident)} of what was read lay in the page cache"
    return f"{what} could not be made cold: {lay}, so {rate} is too high"


def storage_rate(dataset: Dataset, effort: Effort, *, readers: Sequence[int] = READERS, seed: int = 0) -> StorageRate:
    """Measure random reads of samples dropped from the page cache, in windows of `Effort.window_s`.

    Each window reads samples that no earlier window has read, as long as there are any.
    """
    readable = bounded(dataset)
    reader, lengths = PatientReader(readable.reader()), readable.lengths(np.arange(len(dataset)))

    def read(ids: Sequence[int]) -> int:
        for sample in ids:
            reader.read_into(sample, np.empty(int(lengths[sample]), np.uint8))
        return len(ids)

    order = np.random.default_rng(seed).permutation(len(dataset)).tolist()
    samples = _ColdParts(order, lambda ids: local_spans(dataset, ids))
    # Each number of readers continues after the last one: no sample is read twice before all have been.
    found = [_read_rate(samples, read, count, effort, unit="samples/s") for count in readers]
    curve = MeasuredCurve(tuple((float(count), rate) for count, (rate, _) in zip(readers, found, strict=True)))
    # CPU costs depend on how much readers wait for each other. Predictions use the number of readers that helps.
    _, cpu_s = max(found, key=lambda each: each[0].value)
    return StorageRate(curve, stated(cpu_s, unit="CPU-s"), samples.resident)


class _ColdParts(Generic[Part]):
    """Parts in random order, repeated endlessly, each dropped from the page cache before it is returned.

    ``resident`` is the largest share of the returned parts that was still cached; None if unknown.
    """

    def __init__(self, order: Sequence[Part], spans: Callable[[Sequence[Part]], Sequence[Span]]) -> None:
        self._turns, self._most, self._spans = cycle(order), len(order), spans
        self.resident: float | None = None

    def next(self, count: int) -> list[Part]:
        parts = [next(self._turns) for _ in range(min(count, self._most))]
        spans = self._spans(parts)
        drop(spans)
        # Checked after dropping: the kernel keeps dirty and mapped pages, and other programs may read the files.
        if (share := resident_share(spans)) is not None:
            self.resident = max(self.resident or 0.0, share)
        return parts


def _read_rate(
    parts: _ColdParts[Part], read: Callable[[Sequence[Part]], int], readers: int, effort: Effort, *, unit: str
) -> tuple[Quantity, float]:
    """Measure with a number of readers; return the rate in what ``read`` counts, and CPU seconds of a part."""
    # At least two parts per reader: with one, a window is as long as its slowest read.
    least = count = 2 * readers
    done, cpu_s = 0, 0.0

    def window() -> float:
        nonlocal count, done, cpu_s
        some = parts.next(count)
        began, busy = perf_counter(), process_time()
        # Each reader gets its list at once: one task per sample would measure the pool.
        amount = sum(threads.map(read, [some[i::readers] for i in range(readers)]))
        elapsed_s = max(perf_counter() - began, 1e-9)
        done, cpu_s = done + len(some), cpu_s + process_time() - busy
        count = max(least, round(len(some) * effort.window_s / elapsed_s))  # sized by the rate of the last window
        return amount / elapsed_s

    with ThreadPoolExecutor(readers, thread_name_prefix="mbaas-measure") as threads:
        rate = repeat(window, effort, unit=unit)
    return rate, cpu_s / max(done, 1)


@contextmanager
def scratch(disk_path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder on the disk; feeds' samples there are not touched."""
    try:
        Path(disk_path).mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(dir=disk_path, prefix="mbaas-analyze-")
    except OSError as error:
        raise ConfigError(f"the disk tier needs a folder that it may write to, got {disk_path}: {error}") from None
    with folder as name:
        yield Path(name)


def disk_rate(raw: Raw, disk_path: str | os.PathLike[str], effort: Effort) -> DiskRate:
    """Write samples to a disk tier and measure reading them back, in windows of `Effort.window_s`."""
    lengths = np.diff(raw.ends, prepend=0)
    with scratch(disk_path) as folder:
        tier = DiskStore(folder, 2 * len(raw.content), "analyze", num_samples=int(raw.sample_ids.max()) + 1)

        def read(parts: Sequence[NDArray[np.int64]]) -> int:
            read_bytes = 0
            for rows in parts:
                buffer = np.empty(int(lengths[rows].sum()), np.uint8)
                tier.get(raw.sample_ids[rows], lengths[rows], buffer=buffer, offsets=pack(lengths[rows]))
                read_bytes += len(buffer)
            return read_bytes

        try:
            kept = tier.put(raw.sample_ids, lengths, raw.content)
            if not kept.all():
                why = tier.stats().write_failure or "there was no room"
                raise ConfigError(f"the disk tier at {disk_path} kept {kept.sum()} of {len(kept)} samples: {why}")
            order = np.random.default_rng(0).permutation(len(lengths))
            # Samples are packed into a few large files, and pages span several samples: drop all files each time.
            spans = spans_of(folder)
            parts = _ColdParts(np.array_split(order, max(1, len(lengths) // READ_SAMPLES)), lambda _: spans)
            rate, _ = _read_rate(parts, read, DISK_READERS, effort, unit="bytes/s")
        finally:
            tier.close()
    return DiskRate(rate, parts.resident)


def spans_of(folder: Path) -> list[Span]:
    """Return the spans of all files below a folder, after syncing them so that the page cache can drop them."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in files:  # POSIX_FADV_DONTNEED keeps dirty pages
        with file.open("rb", buffering=0) as opened:
            os.fsync(opened.fileno())
    return [Span(str(file), 0, size) for file in files if (size := file.stat().st_size)]


@contextmanager
def kept_cold(folder: str | Path) -> Iterator[None]:
    """Drop the files below a folder from the page cache every `DROP_S`."""
    is_over = threading.Event()

    def forget() -> None:
        while not is_over.wait(DROP_S):
            # Listed each time: a disk tier creates files while it fills, and may delete one.
            with suppress(FileNotFoundError):
                drop(spans_of(Path(folder)))

    thread = threading.Thread(target=forget, name="mbaas-measure-cold", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def memory_rate(sample_bytes: int, effort: Effort) -> Quantity:
    """Measure the bytes/s of one thread that copies samples of this size from random offsets of a large buffer."""
    held = np.ones(HELD_BYTES, np.uint8)  # not zeros, which would all map to the kernel's zero page
    size = min(max(1, sample_bytes), HELD_BYTES // 2)
    into = np.empty(size, np.uint8)
    starts = np.random.default_rng(0).integers(0, HELD_BYTES - size, 4096).tolist()

    def rate() -> float:
        copied, began = 0, perf_counter()
        while perf_counter() - began < effort.window_s:
            # Many copies per clock reading, which takes as long as copying a small sample.
            for start in starts[: max(1, min(len(starts), (32 << 20) // size))]:
                np.copyto(into, held[start : start + size])
                copied += size
        return copied / (perf_counter() - began)

    return repeat(rate, effort, unit="bytes/s")
