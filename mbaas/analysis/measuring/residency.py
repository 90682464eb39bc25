"""Which parts of files are in the operating system's page cache, and how to get them out of it.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np


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
    """The share of the pages of these bytes that are in the page cache; None if it cannot be known."""
    resident = pages = 0
    for span in spans:
        found = _resident_pages(span)
        if found is not None:
            resident, pages = resident + int(found.sum()), pages + len(found)
    return resident / pages if pages else None


def _resident_pages(span: Span) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
    """Whether each page is resident; None if the file cannot be mapped or asked about."""
    start = span.offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = span.offset + span.length - start
    try:
        with _opened(span.path) as file, mmap.mmap(file, length, prot=mmap.PROT_READ, offset=start) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            flags = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            failed = _libc.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(length), flags.ctypes.data_as(_BYTES)
            )
            del view
    except (OSError, ValueError):
        return None
    return None if failed else (flags & 1).astype(np.bool_)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


_libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
_BYTES = ctypes.POINTER(ctypes.c_ubyte)
