"""Which file system, and which path in it, a user means by a path or a URI."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs

from mbaas.errors import DatasetError


@dataclass(frozen=True)
class Location:
    """A folder of a file system.

    Attributes:
        filesystem: where it is.
        base: its path there, without a slash at the end.
        root: its URI or path without credentials or options; for messages.
    """

    filesystem: pyarrow.fs.FileSystem
    base: str
    root: str


def locate(uri: str | os.PathLike[str], filesystem: pyarrow.fs.FileSystem | None) -> Location:
    """Find the file system of a URI or path.

    Args:
        uri: a local path, a URI that `pyarrow.fs` knows, or, with `filesystem`, a path within that.
        filesystem: where the path is; None to tell from the URI.

    Raises:
        DatasetError: no file system is known for the URI, or it cannot be reached.
    """
    text = os.fspath(uri)
    is_local = "://" not in text if filesystem is None else isinstance(filesystem, pyarrow.fs.LocalFileSystem)
    if "\0" in text or not _is_utf8(as_utf8(text) if is_local else text):
        raise DatasetError(f"cannot open {text!a}: expected a path or URI that is UTF-8 text, without null characters")
    if is_local:
        # Absolute, because other processes that will read from it have other working directories.
        path = as_utf8(os.path.abspath(os.path.expanduser(text)))  # noqa: PTH100, PTH111  # Path would keep "a/../b"
        return Location(filesystem or pyarrow.fs.LocalFileSystem(), path, path)
    if filesystem is None:
        return _from_uri(text)
    path = text.rstrip("/") or text  # a lone slash stays one
    return Location(filesystem, path, path or "/")


def as_utf8(path: str) -> str:
    """Return a local path as pyarrow has it, which takes all names for UTF-8, as on most disks.

    Python decodes names by the locale: where that is Latin-1, each byte of an accented letter is a character. A name
    whose bytes are not UTF-8 stays as it is: it is from a file of text, such as a feed's.
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
    except UnicodeEncodeError:  # Python's way to hold a path of other bytes
        return False
    return True


def without_secrets(uri: str) -> str:
    """Return what a message may say of a URI: it may carry a key and its secret before the @, and options in its query.

    Raises:
        DatasetError: it is no URI.
    """
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
        ) from None  # the cause would show what is left out here
    return Location(filesystem, base.rstrip("/") or base, shown)


def join(folder: str, name: str) -> str:
    """Make a path or URI below a folder; the empty folder is the top of its file system."""
    return f"{folder.rstrip('/')}/{name}" if folder else name


@contextmanager
def written_whole(filesystem: pyarrow.fs.FileSystem, path: str) -> Iterator[str]:
    """Give the name under which to write a file: it gets its own when it is whole, and is removed if it is not."""
    partial = f"{path}.{uuid.uuid4().hex}.part"
    try:
        yield partial
        filesystem.move(partial, path)
    except BaseException:  # Ctrl-C, too: half a file would stay for ever, for nobody knows its name
        with suppress(OSError):
            filesystem.delete_file(partial)
        raise
