"""Reading byte ranges of files: local ones by system calls, all others through `pyarrow.fs`."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.fs
from numpy.typing import NDArray

from mbaas.dataset.base import SampleReader, exact_view
from mbaas.dataset.faults import may_pass, s3_attempts, said
from mbaas.errors import BadSampleError, StorageError

_GONE = ("NO_SUCH_KEY", "RESOURCE_NOT_FOUND")
_DENIED = ("ACCESS_DENIED",)


@dataclass(frozen=True)
class ByteRange:
    """Where one sample's bytes lie.

    Attributes:
        uri: what messages call the sample.
        path: path of the file, within its file system.
        offset: position of the first byte within the file.
        length: number of bytes.
        file_bytes: size of the file: if it has another one, it is not the file that was listed.
    """

    uri: str
    path: str
    offset: int
    length: int
    file_bytes: int


class FileReader(SampleReader):
    """A reader of samples that are byte ranges of files. It holds no file open, so it has nothing to close.

    It asks once. Callers that may wait ask again (`mbaas.dataset.retry.PatientReader`, and a cache node's threads). The
    AWS SDK's own retries are turned off, so that pauses and attempts are counted in one place.

    A sample of a remote store takes two requests: one for the size of its file, which tells whether it is
    still the one that was listed, and one for its bytes. pyarrow can skip the first one in C++
    (`OpenInputFile(FileInfo)`) but has no Python call for it.
    """

    def __init__(self, filesystem: pyarrow.fs.FileSystem, locate: Callable[[int], ByteRange]) -> None:
        """
        Args:
            filesystem: where the files are.
            locate: gives the byte range of a sample id.
        """
        self._filesystem = s3_attempts(filesystem, 1)
        self._locate = locate
        self._is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        where = self._locate(sample_id)
        view = exact_view(buffer, where.length, where.uri)
        try:
            if self._is_local:
                _read_local(where, view)
            else:
                _read_remote(self._filesystem, where, view)
        except (BadSampleError, MemoryError):
            raise
        except Exception as error:  # a file system of somebody else's raises what it likes
            raise self._told(where, error) from error

    def _told(self, where: ByteRange, error: Exception) -> BadSampleError:
        """Say in one clause what is wrong; S3 says by the words of its answer what others say by errno."""
        text = said(error)
        if isinstance(error, FileNotFoundError) or any(f"AWS Error {code} " in text for code in _GONE):
            folder, file = self._look(where.path)
            if file:  # whatever held the folder came back between the read and this look
                return StorageError(where.uri, "the file was away, and is there again")
            if folder:
                return StorageError(where.uri, "the file is gone since the dataset was listed", is_missing=True)
            return StorageError(where.uri, "the file is gone since the dataset was listed, and so is its folder")
        if isinstance(error, PermissionError) or any(f"AWS Error {code} " in text for code in _DENIED):
            return BadSampleError(where.uri, "this process has no permission to read the file")
        return (StorageError if may_pass(error) or _is_an_answer(error) else BadSampleError)(
            where.uri, f"reading failed: {text}"
        )

    def _look(self, path: str) -> tuple[bool, bool]:
        """Tell whether the folder of a file is there, and whether the file is; where nobody can tell, they are not."""
        try:
            folder, file = self._filesystem.get_file_info([posixpath.dirname(path), path])
            return bool(folder.type == pyarrow.fs.FileType.Directory), bool(file.is_file)
        except Exception:  # of any kind, as above
            return False, False


def _is_an_answer(error: Exception) -> bool:
    """Tell whether an error may be the answer of a store, by its class.

    Clients of stores that are written in Python have classes of their own for what a store answers; Python's classes
    tell of a bug in them, and pyarrow's of what it cannot do.
    """
    return type(error).__module__ != "builtins" and not isinstance(error, (OSError, pa.ArrowException))


def _read_local(where: ByteRange, view: memoryview) -> None:
    # Without waiting: what has taken the file's name may be a pipe, into which nobody ever writes.
    # As bytes, because the locale may have another encoding than UTF-8, with which pyarrow found the file.
    descriptor = os.open(where.path.encode(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Of the open file, not of its name: another file may take the name before the bytes are read.
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise BadSampleError(where.uri, "it is no file any more")
        _check_size(where, found.st_size)
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
        if count == 0:  # its size was right a moment ago: a server cut the answer short, or somebody is writing to it
            raise StorageError(where.uri, f"the file ended after {done} of {where.length} bytes")
        done += count


def _check_size(where: ByteRange, size: int) -> None:
    if size != where.file_bytes:
        raise BadSampleError(
            where.uri, f"the file has {size} bytes now, {where.file_bytes} when the dataset was listed"
        )
