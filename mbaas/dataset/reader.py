"""Reads byte ranges of files: local ones by system calls, all others through `pyarrow.fs`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.fs
from numpy.typing import NDArray

from mbaas.dataset.base import SampleReader, exact_view
from mbaas.errors import BadSampleError

_ATTEMPTS = 3
_FIRST_PAUSE_S = 0.1  # doubled after each attempt
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)  # a retry cannot help


@dataclass(frozen=True)
class ByteRange:
    """Where the bytes of one sample are.

    Attributes:
        uri: for messages.
        path: of the file, within its file system.
        offset: of the first byte within the file.
        length: number of bytes.
        whole_file: the file ends with the sample.
    """

    uri: str
    path: str
    offset: int
    length: int
    whole_file: bool


class FileReader(SampleReader):
    """Reads samples that are byte ranges of files. Holds no file open, so it has nothing to close."""

    def __init__(
        self,
        filesystem: pyarrow.fs.FileSystem,
        locate: Callable[[int], ByteRange],
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            filesystem: where the files are.
            locate: gives the byte range of a sample id.
            sleep: waits so many seconds between two attempts.
        """
        self._filesystem = filesystem
        self._locate = locate
        self._sleep = sleep
        self._is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        where = self._locate(sample_id)
        view = exact_view(buffer, where.length, where.uri)
        try:
            self._read(where, view)
        except FileNotFoundError:
            raise BadSampleError(where.uri, "the file is gone since the dataset was listed") from None
        except PermissionError:
            raise BadSampleError(where.uri, "this process has no permission to read the file") from None
        except (OSError, pa.ArrowException) as error:
            raise BadSampleError(where.uri, f"reading failed: {error}") from error

    def _read(self, where: ByteRange, view: memoryview) -> None:
        if self._is_local:
            return _read_local(where, view)
        pause_s = _FIRST_PAUSE_S
        for _ in range(_ATTEMPTS - 1):
            try:
                return _read_remote(self._filesystem, where, view)
            except _FINAL:
                raise
            except OSError:
                self._sleep(pause_s)
                pause_s *= 2
        return _read_remote(self._filesystem, where, view)


def _read_local(where: ByteRange, view: memoryview) -> None:
    descriptor = os.open(where.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check_size(where, os.fstat(descriptor).st_size)
        _fill(where, view, lambda rest, done: os.preadv(descriptor, [rest], where.offset + done))
    finally:
        os.close(descriptor)


def _read_remote(filesystem: pyarrow.fs.FileSystem, where: ByteRange, view: memoryview) -> None:
    with filesystem.open_input_file(where.path) as file:
        _check_size(where, file.size())
        file.seek(where.offset)
        _fill(where, view, lambda rest, _: file.readinto(rest))


def _fill(where: ByteRange, view: memoryview, read: Callable[[memoryview, int], int]) -> None:
    """Calls `read(rest of the view, bytes done)`, which returns the bytes it read, until nothing is left."""
    done = 0
    while done < where.length:
        count = read(view[done:], done)
        if count == 0:
            raise BadSampleError(where.uri, f"the file ended after {done} of {where.length} bytes")
        done += count


def _check_size(where: ByteRange, size: int) -> None:
    end = where.offset + where.length
    if size < end or (where.whole_file and size > end):
        raise BadSampleError(where.uri, f"the file has {size} bytes now, {end} when the dataset was listed")
