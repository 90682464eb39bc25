"""Reading byte ranges of files: local ones by system calls, all others through `pyarrow.fs`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.fs
from numpy.typing import NDArray
from tenacity import Retrying

from mbaas.dataset.base import SampleReader, exact_view
from mbaas.dataset.retry import GaveUpError, retrying, s3_attempts
from mbaas.errors import BadSampleError

_GONE = ("NO_SUCH_KEY", "NO_SUCH_BUCKET", "RESOURCE_NOT_FOUND")
_DENIED = ("ACCESS_DENIED",)


@dataclass(frozen=True)
class ByteRange:
    """The place of one sample's bytes.

    Attributes:
        uri: what messages call the sample.
        path: path of the file, within its file system.
        offset: position of the first byte within the file.
        length: number of bytes.
        whole_file: whether the file ends with the sample.
    """

    uri: str
    path: str
    offset: int
    length: int
    whole_file: bool


class FileReader(SampleReader):
    """A reader of samples that are byte ranges of files. It holds no file open, so it has nothing to close.

    A sample of a remote store takes two requests: one for the size of its file, which tells whether it is
    still the one that was listed, and one for its bytes. pyarrow can skip the first one in C++
    (`OpenInputFile(FileInfo)`) but has no Python call for it.
    """

    def __init__(
        self,
        filesystem: pyarrow.fs.FileSystem,
        locate: Callable[[int], ByteRange],
        *,
        retry: Retrying | None = None,
    ) -> None:
        """
        Args:
            filesystem: where the files are.
            locate: gives the byte range of a sample id.
            retry: how passing faults of a remote store are answered; local files are read once. The AWS SDK's
                own retries are turned off: pauses and attempts are counted in one place.
        """
        self._filesystem = s3_attempts(filesystem, 1)
        self._locate = locate
        self._retry = retry or retrying()
        self._is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        where = self._locate(sample_id)
        view = exact_view(buffer, where.length, where.uri)
        try:
            if self._is_local:
                _read_local(where, view)
            else:
                self._retry(_read_remote, self._filesystem, where, view)
        except GaveUpError as gave_up:
            # From what the store answered last: that nobody asks any more is said in the message.
            raise BadSampleError(where.uri, f"reading failed: {gave_up}") from gave_up.last
        except (OSError, pa.ArrowException) as error:
            raise BadSampleError(where.uri, _reason(error)) from error


def _reason(error: Exception) -> str:
    """Say in one clause what no retry can mend; S3 says by the words of its answer what others say by errno."""
    text = str(error)
    if isinstance(error, FileNotFoundError) or any(f"AWS Error {code} " in text for code in _GONE):
        return "the file is gone since the dataset was listed"
    if isinstance(error, PermissionError) or any(f"AWS Error {code} " in text for code in _DENIED):
        return "this process has no permission to read the file"
    return f"reading failed: {error}"


def _read_local(where: ByteRange, view: memoryview) -> None:
    descriptor = os.open(where.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Of the open file, not of its name: another file may take the name before the bytes are read.
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
    """Call `read(rest of the view, bytes done)`, which returns the bytes it read, until nothing is left."""
    done = 0
    while done < where.length:
        count = read(view[done:], done)
        if count == 0:  # its size was right a moment ago: somebody is writing to it
            raise BadSampleError(where.uri, f"the file ended after {done} of {where.length} bytes")
        done += count


def _check_size(where: ByteRange, size: int) -> None:
    end = where.offset + where.length
    if size < end or (where.whole_file and size > end):
        raise BadSampleError(where.uri, f"the file has {size} bytes now, {end} when the dataset was listed")
