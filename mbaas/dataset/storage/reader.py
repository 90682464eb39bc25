"""Reads byte ranges of files: local files by system calls, all others through `pyarrow.fs`."""

from __future__ import annotations

import contextlib
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
from mbaas.dataset.storage.faults import may_pass, message_of, s3_attempts
from mbaas.errors import BadSampleError, StorageError

_GONE = ("NO_SUCH_KEY", "RESOURCE_NOT_FOUND")
_DENIED = ("ACCESS_DENIED",)


@dataclass(frozen=True)
class ByteRange:
    """The location of one sample's bytes.

    Attributes:
        uri: name of the sample in messages.
        path: path of the file within its file system.
        offset, length: position and number of bytes in the file.
        file_bytes: size of the file when it was listed; another size means another file.
    """

    uri: str
    path: str
    offset: int
    length: int
    file_bytes: int


class FileReader(SampleReader):
    """Reads samples that are byte ranges of files. It keeps no file open, so it need not be closed.

    It makes one attempt. Callers that can wait retry (`PatientReader`, and the threads of cache nodes). Retries of the
    AWS SDK are disabled, so that one place controls pauses and attempts.

    A sample in a remote store takes two requests: the file's size, to detect a changed file, and the bytes. pyarrow can
    skip the first in C++ (`OpenInputFile(FileInfo)`), but not in Python.
    """

    def __init__(self, filesystem: pyarrow.fs.FileSystem, locate: Callable[[int], ByteRange]) -> None:
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
        except Exception as error:  # third-party file systems raise any exception
            raise self._bad_sample(where, error) from error

    def _bad_sample(self, where: ByteRange, error: Exception) -> BadSampleError:
        # S3 errors carry their cause in the message, other file systems in errno.
        text = message_of(error)
        if isinstance(error, FileNotFoundError) or any(f"AWS Error {code} " in text for code in _GONE):
            folder, file = self._look_up(where.path)
            if file:  # a missing mount, for example, was restored after the read
                return StorageError(where.uri, "the file was away, and is there again")
            if folder:
                return StorageError(where.uri, "the file is gone since the dataset was listed", is_missing=True)
            return StorageError(where.uri, "the file is gone since the dataset was listed, and so is its folder")
        if isinstance(error, PermissionError) or any(f"AWS Error {code} " in text for code in _DENIED):
            return BadSampleError(where.uri, "this process has no permission to read the file")
        return (StorageError if may_pass(error) or _is_an_answer(error) else BadSampleError)(
            where.uri, f"reading failed: {text}"
        )

    def _look_up(self, path: str) -> tuple[bool, bool]:
        """Return (folder exists, file exists); False if unknown."""
        try:
            folder, file = self._filesystem.get_file_info([posixpath.dirname(path), path])
            return bool(folder.type == pyarrow.fs.FileType.Directory), bool(file.is_file)
        except Exception:  # any exception, as above
            return False, False


def _is_an_answer(error: Exception) -> bool:
    # Store clients written in Python raise their own exception classes for the store's errors. Builtin exceptions mean
    # bugs in a client, and pyarrow's an unsupported operation.
    return type(error).__module__ != "builtins" and not isinstance(error, (OSError, pa.ArrowException))


def _read_local(where: ByteRange, view: memoryview) -> None:
    # Non-blocking: the name may now be a pipe, and opening one would block forever. As bytes: pyarrow uses UTF-8 for
    # names, but the locale may not.
    descriptor = os.open(where.path.encode(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Check the open file, not its name, which may be reused before the bytes are read.
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise BadSampleError(where.uri, "it is not a file any more")
        _check_size(where, found.st_size)
        if where.length < where.file_bytes:
            advise_random(descriptor)
        _fill(where, view, lambda rest, done: os.preadv(descriptor, [rest], where.offset + done))
    finally:
        os.close(descriptor)


def advise_random(descriptor: int) -> None:
    """Turn off the kernel's read-ahead for an open file whose samples are read in a random order.

    Otherwise reads also fetch bytes of other samples. With 8 MiB of read-ahead and 65 % of the file in the page cache,
    an epoch read 1.1 to 1.5 times the file, and with this advice 0.5 to 0.6 times.
    """
    with contextlib.suppress(OSError):  # a file system without read-ahead
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def _read_remote(filesystem: pyarrow.fs.FileSystem, where: ByteRange, view: memoryview) -> None:
    with filesystem.open_input_file(where.path) as file:
        _check_size(where, file.size())
        file.seek(where.offset)
        _fill(where, view, lambda rest, _: file.readinto(rest))


def _fill(where: ByteRange, view: memoryview, read: Callable[[memoryview, int], int]) -> None:
    """Fill the view; ``read(rest of the view, bytes done)`` returns the number of bytes read."""
    done = 0
    while done < where.length:
        count = read(view[done:], done)
        if count == 0:  # the size was right: a server cut the response short, or another process is writing
            raise StorageError(where.uri, f"the file ended after {done} of {where.length} bytes")
        done += count


def _check_size(where: ByteRange, size: int) -> None:
    if size != where.file_bytes:
        raise BadSampleError(
            where.uri, f"the file has {size} bytes now, {where.file_bytes} when the dataset was listed"
        )
