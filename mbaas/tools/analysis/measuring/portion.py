"""Data sources for measurements: parts of a dataset, slower storage, and files outside the page cache.

A recently read file is in memory, so a storage rate measured on it is too high. mincore(2) reports residency without
reading. A non-blocking read (RWF_NOWAIT) may start read-ahead on newer kernels, so it would change the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.fs
from numpy.typing import NDArray

from mbaas.dataset import Dataset
from mbaas.dataset.base import RedrawnDataset, SampleReader, Subset, WrappedDataset
from mbaas.dataset.concatenation import ConcatDataset
from mbaas.dataset.table import TableDataset
from mbaas.errors import ConfigError


@dataclass(frozen=True)
class Span:
    path: str
    offset: int
    length: int


def drop(spans: Iterable[Span]) -> None:
    """Drop these bytes from the page cache. The kernel keeps dirty and mapped pages; missing files are skipped."""
    for span in spans:
        with contextlib.suppress(OSError), _opened(span.path) as file:
            os.posix_fadvise(file, span.offset, span.length, os.POSIX_FADV_DONTNEED)


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
        with _opened(span.path) as file, mmap.mmap(file, length, prot=mmap.PROT_READ, offset=start) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            flags = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            failed = _libc.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(length), flags.ctypes.data_as(_BYTES)
            )
            del view  # a map with a live view cannot be closed
    except (OSError, ValueError):
        return None
    return None if failed else (flags & 1).astype(np.bool_)  # the other bits are reserved


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


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
        return _SlowedReader(self.inner.reader(), _shared_throttle(self.fingerprint, self.bytes_per_s))


class _SlowedReader(SampleReader):
    def __init__(self, inner: SampleReader, throttle: Throttle) -> None:
        self._inner, self._throttle = inner, throttle

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        self._throttle.carry(len(buffer))
        self._inner.read_into(sample_id, buffer)


@dataclass(frozen=True, eq=False, repr=False)
class ColdDataset(WrappedDataset):
    """A dataset whose local samples are dropped from the page cache after each read."""

    def reader(self) -> SampleReader:
        return _ColdReader(self.inner)


class _ColdReader(SampleReader):
    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._inner = dataset, dataset.reader()

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        self._inner.read_into(sample_id, buffer)
        drop(local_spans(self._dataset, [sample_id]))


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
