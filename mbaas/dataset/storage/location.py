"""Locations: a path or URI as a file system and a path in it; sizes and times of many files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs
from pyarrow.fs import FileInfo, FileType

from mbaas.dataset.storage.faults import message_of, s3_attempts
from mbaas.errors import DatasetError
from mbaas.progress import track

IN_SHARD = "#"
"""Separates the shard's name from the member's name in the `uri` of a sample."""

S3_ATTEMPTS = 5
"""Attempts of an S3 client per request when files are looked up."""

_FILES_PER_CALL = 1000  # files looked up per call
_REMOTE_THREADS = 32  # a store needs one request per file


@dataclass(frozen=True)
class Location:
    """A folder or file in a file system.

    Attributes:
        filesystem: its file system.
        base: its path in the file system, without a trailing slash.
        root: its URI or path without credentials or options; for messages.
    """

    filesystem: pyarrow.fs.FileSystem
    base: str
    root: str


def locate(uri: str | os.PathLike[str], filesystem: pyarrow.fs.FileSystem | None) -> Location:
    """Resolve a local path, a URI that `pyarrow.fs` supports, or, with `filesystem`, a path within it.

    Raises:
        DatasetError: the URI is not supported, or its file system cannot be reached.
    """
    text = os.fspath(uri)
    is_local = "://" not in text if filesystem is None else isinstance(filesystem, pyarrow.fs.LocalFileSystem)
    if "\0" in text or not _is_utf8(as_utf8(text) if is_local else text):
        raise DatasetError(f"cannot open {text!a}: expected a path or URI that is UTF-8 text, without null characters")
    if is_local:
        # Absolute, because other processes that read from it have other working directories.
        path = as_utf8(os.path.abspath(os.path.expanduser(text)))  # noqa: PTH100, PTH111  # Path would keep "a/../b"
        return Location(filesystem or pyarrow.fs.LocalFileSystem(), path, path)
    if filesystem is None:
        return _from_uri(text)
    path = text.rstrip("/") or text  # a single slash stays
    return Location(filesystem, path, path or "/")


def as_utf8(path: str) -> str:
    """Return a local path for pyarrow, which treats all names as UTF-8, as most disks do.

    Python decodes names with the locale: in Latin-1, each byte of an accented letter is a character. A name whose bytes
    are not UTF-8 is returned unchanged, because it comes from a text file, such as a feed file.
    """
    return "/".join(map(_name_as_utf8, path.split("/")))


def _name_as_utf8(name: str) -> str:
    try:
        return os.fsencode(name).decode()
    except UnicodeError:
        return name


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # Python's form of a path with other bytes
        return False
    return True


def without_secrets(uri: str) -> str:
    """Return a URI without a key and secret before the @ and without options in its query; it must be valid."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:  # [ without ]
        raise DatasetError(f"cannot open a URI that begins with {uri.partition('://')[0]}://: {error}") from None
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl().rstrip("/")


def _from_uri(uri: str) -> Location:
    shown = without_secrets(uri)
    try:
        filesystem, base = pyarrow.fs.FileSystem.from_uri(uri)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(
            f"cannot open {shown}: expected a local path, or a URI that pyarrow.fs can open (file, s3, gs, "
            f"hdfs, abfs), or a path and filesystem=. pyarrow says: {str(error).replace(uri, shown)}"
        ) from None  # the cause would show the secrets
    return Location(filesystem, base.rstrip("/") or base, shown)


def join(folder: str, name: str) -> str:
    """Join a folder and a name; the empty folder is the top of its file system."""
    return f"{folder.rstrip('/')}/{name}" if folder else name


@contextmanager
def written_whole(filesystem: pyarrow.fs.FileSystem, path: str) -> Iterator[str]:
    """Yield a temporary name to write a file: it is renamed when complete, and deleted after an exception."""
    partial = f"{path}.{uuid.uuid4().hex}.part"
    try:
        yield partial
        filesystem.move(partial, path)
    except BaseException:  # also Ctrl-C: the partial file would remain, under an unknown name
        with suppress(OSError):
            filesystem.delete_file(partial)
        raise


def file_infos(where: Location, names: list[str]) -> list[FileInfo]:
    """Look up files below a folder, including missing ones; raise DatasetError if the file system fails."""
    filesystem = s3_attempts(where.filesystem, S3_ATTEMPTS)
    paths = [join(where.base, name) for name in names]
    parts = [paths[start : start + _FILES_PER_CALL] for start in range(0, len(paths), _FILES_PER_CALL)]

    def look_up(part: list[str]) -> list[FileInfo]:
        infos: list[FileInfo] = filesystem.get_file_info(part)
        return infos

    try:
        if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            return _all(map(look_up, parts), len(paths))
        with ThreadPoolExecutor(_REMOTE_THREADS, thread_name_prefix="mbaas-listing") as pool:
            return _all(pool.map(look_up, parts), len(paths))
    except Exception as error:  # third-party file systems raise any exception
        raise DatasetError(f"cannot look for the files of {where.root}: {message_of(error)}") from error


def missing(info: FileInfo) -> str | None:
    """Return the reason why something is not a file of known size: "is not there" or "is no file"."""
    if info.type == FileType.File and info.size is not None:
        return None
    return "is not there" if info.type == FileType.NotFound else "is no file"


def _all(parts: Iterable[list[FileInfo]], total: int) -> list[FileInfo]:
    return [*chain.from_iterable(track(parts, "files", total, amount=len))]
