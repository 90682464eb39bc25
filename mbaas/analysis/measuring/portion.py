"""What measurements read: parts of a dataset, slower storage, and files that are not in the page cache.

A file that was read lately is memory in disguise: a storage rate measured on it is too good to be true. Whether pages
are resident is asked with mincore(2), which reads nothing; a read that refuses to wait (RWF_NOWAIT) may start
read-ahead on newer kernels, and so cannot ask without changing the answer.
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
from mbaas.dataset.base import SampleReader, Subset, WrappedDataset
from mbaas.dataset.concatenated import ConcatDataset
from mbaas.dataset.redrawn import Redrawn
from mbaas.dataset.table import TableDataset
from mbaas.errors import ConfigError


@dataclass(frozen=True)
class Span:
    """Bytes of a local file."""

    path: str
    offset: int
    length: int


def drop(spans: Iterable[Span]) -> None:
    """Ask the kernel to forget these bytes; it keeps pages that are dirty or mapped. Missing files are left out."""
    for span in spans:
        with contextlib.suppress(OSError), _opened(span.path) as file:
            os.posix_fadvise(file, span.offset, span.length, os.POSIX_FADV_DONTNEED)


def resident_share(spans: Iterable[Span]) -> float | None:
    """Return the share of the pages of these bytes that are in the page cache; None if it cannot be known."""
    resident = pages = 0
    for span in spans:
        found = _resident_pages(span)
        if found is not None:
            resident, pages = resident + int(found.sum()), pages + len(found)
    return resident / pages if pages else None


def _resident_pages(span: Span) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
    """Tell whether each page is resident; None if the file cannot be mapped or asked about."""
    # mmap takes only offsets of whole pages
    start = span.offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = span.offset + span.length - start
    try:
        with _opened(span.path) as file, mmap.mmap(file, length, prot=mmap.PROT_READ, offset=start) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            flags = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            failed = _libc.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(length), flags.ctypes.data_as(_BYTES)
            )
            del view  # a map that is still looked at cannot be closed
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

    Idle time is lost, as on a real link: there are no bursts, so no stretch of time sees more than the limit.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            raise ConfigError(f"bytes_per_s must be above 0, got {bytes_per_s}")
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def book(self, nbytes: int, now: float) -> float:
        """Tell when a transfer that is asked for at ``now`` ends, in seconds on the same clock."""
        with self._lock:
            self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
            return self._free_at

    def carry(self, nbytes: int) -> None:
        """Return when a transfer that begins now ends."""
        time.sleep(max(0.0, self.book(nbytes, time.monotonic()) - time.monotonic()))


@dataclass(frozen=True, eq=False, repr=False)
class SlowedDataset(WrappedDataset):
    """A dataset that is read at most at a given rate.

    Attributes:
        bytes_per_s: that all readers of a process get together.
    """

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
    """A dataset whose samples are dropped from the page cache whenever they were read, as far as they are local."""

    def reader(self) -> SampleReader:
        return _ColdReader(self.inner)


class _ColdReader(SampleReader):
    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._inner = dataset, dataset.reader()

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        self._inner.read_into(sample_id, buffer)
        drop(local_spans(self._dataset, [sample_id]))


# By fingerprint: a dataset that is sent to an actor is another object there, but its storage is the same.
_throttles: dict[tuple[str, float], Throttle] = {}
_lock = threading.Lock()


def _shared_throttle(fingerprint: str, bytes_per_s: float) -> Throttle:
    """Return the link that all readers of a process share."""
    # under a lock, because several threads make their readers at once, and all must get the same link
    with _lock:
        return _throttles.setdefault((fingerprint, bytes_per_s), Throttle(bytes_per_s))


def portion(
    dataset: Dataset, *, samples: int | None = None, bytes_per_s: float | None = None, seed: int = 0
) -> Dataset:
    """Make a part of a dataset: at most ``samples`` random ones, in storage of at most ``bytes_per_s``.

    Raises:
        ConfigError: no samples.
    """
    if samples is not None and samples < 1:
        raise ConfigError(f"samples must be at least 1, got {samples}")
    # random, because neighbours in a listing are often of one class, one camera, one size
    dataset = dataset.in_epoch_0() if isinstance(dataset, Redrawn) else dataset
    ids = np.sort(np.random.default_rng(seed).permutation(len(dataset))[:samples])
    part = dataset.select(ids)
    return part if bytes_per_s is None else SlowedDataset.around(part, bytes_per_s=bytes_per_s)


def local_spans(dataset: Dataset, sample_ids: Sequence[int]) -> list[Span]:
    """Find the places of samples in local files; none if they lie elsewhere."""
    if isinstance(dataset, WrappedDataset):
        return local_spans(dataset.inner, sample_ids)
    if isinstance(dataset, Subset):
        return local_spans(dataset.inner, dataset.ids[list(sample_ids)].tolist())
    if isinstance(dataset, ConcatDataset):
        places = map(dataset.place, sample_ids)
        return [span for number, inner in places for span in local_spans(dataset.parts[number], [inner])]
    if not isinstance(dataset, TableDataset) or not isinstance(dataset.filesystem, pyarrow.fs.LocalFileSystem):
        return []
    ranges = [dataset.byte_range(sample) for sample in sample_ids]
    return [Span(where.path, where.offset, where.length) for where in ranges]
