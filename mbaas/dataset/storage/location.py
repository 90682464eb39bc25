"""Locations of files: paths, URIs and patterns as a file system and names in it; sizes and times of many files."""

from __future__ import annotations

import math
import os
import posixpath
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs
from pyarrow.fs import FileInfo, FileType

from mbaas.base.progress import track
from mbaas.dataset.storage.faults import dataset_errors, s3_attempts
from mbaas.errors import ConfigError, DatasetError, shown

IN_SHARD = "#"
"""Separates the shard's name from the member's name in the `uri` of a sample."""

_S3_ATTEMPTS = 5  # per request; listing a class of a million images takes a thousand requests
_FILES_PER_CALL = 1000  # files looked up per call
_REMOTE_THREADS, _LOCAL_THREADS = 32, 4  # a store needs one request after another for each file

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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

    @property
    def is_local(self) -> bool:
        """True for files of this machine."""
        return isinstance(self.filesystem, pyarrow.fs.LocalFileSystem)

    def for_listing(self) -> Location:
        """Return the location with a client that retries by itself; see `s3_attempts`."""
        return replace(self, filesystem=s3_attempts(self.filesystem, _S3_ATTEMPTS))

    def read_all(
        self,
        read: Callable[[_Item], _Result],
        files: Sequence[_Item],
        kind: str,
        *,
        remote: int = _REMOTE_THREADS,
        local: int = _LOCAL_THREADS,
        amount: Callable[[Any], int] = lambda _: 1,
        total: int | None = None,
    ) -> list[_Result]:
        """Call ``read`` for each of many files, and show the progress.

        Args:
            read, files: the function and its arguments.
            kind, amount, total: name and number of things for the progress; see `mbaas.base.progress.track`.
            remote, local: most threads for a remote and for a local file system; with 1, the caller does the work.
        """
        threads, total = min(local if self.is_local else remote, len(files)), len(files) if total is None else total
        if threads <= 1:
            return [*track(map(read, files), kind, total, amount=amount)]
        with ThreadPoolExecutor(threads, thread_name_prefix="mbaas-listing") as pool:
            return [*track(pool.map(read, files), kind, total, amount=amount)]


def locate(uri: str | os.PathLike[str], filesystem: pyarrow.fs.FileSystem | None) -> Location:
    """Resolve a local path, a URI that `pyarrow.fs` supports, or, with `filesystem`, a path within it.

    Raises:
        ConfigError: it is neither text nor a path.
        DatasetError: the URI is not supported, or its file system cannot be reached.
    """
    given: object = uri  # or type checkers would report the check below as unnecessary
    if not isinstance(given, str | os.PathLike):
        hint = "; mbaas.read_manifest reads a table of files" if isinstance(given, list | tuple) else ""
        raise ConfigError(f"expected a path or URI, got {shown(given)}{hint}")
    text = os.fspath(uri)
    is_local = "://" not in text if filesystem is None else isinstance(filesystem, pyarrow.fs.LocalFileSystem)
    # Surrogates are Python's form of a path with other bytes.
    if re.search("[\0\ud800-\udfff]", as_utf8(text) if is_local else text):
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

    def decoded(name: str) -> str:
        try:
            return os.fsencode(name).decode()
        except UnicodeError:
            return name

    return "/".join(map(decoded, path.split("/")))


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
    where = where.for_listing()
    paths = [join(where.base, name) for name in names]
    parts = [paths[start : start + _FILES_PER_CALL] for start in range(0, len(paths), _FILES_PER_CALL)]
    with dataset_errors(f"cannot look for the files of {where.root}"):
        found = where.read_all(where.filesystem.get_file_info, parts, "files", local=1, amount=len, total=len(paths))
    return [*chain.from_iterable(found)]


def missing(info: FileInfo) -> str | None:
    """Return the reason why something is not a file of known size: "is not there" or "is not a file"."""
    if info.type == FileType.File and info.size is not None:
        return None
    return "is not there" if info.type == FileType.NotFound else "is not a file"


# ---- files named by a table ----


@dataclass(frozen=True)
class NamedFiles:
    """Files below one folder: the folder, their names there, and for messages the table that lists them."""

    where: Location
    names: list[str]
    table: str

    @classmethod
    def of(
        cls,
        table: Location,
        uris: list[str],
        root: str | os.PathLike[str] | None,
        filesystem: pyarrow.fs.FileSystem | None,
    ) -> NamedFiles:
        """Return the files with the folder that contains them.

        Args:
            table: location of the table; its folder is the default for relative names.
            uris: one file per row. ``file://`` URIs are percent-encoded, and relative paths may leave the folder with
                ``..``.
            root, filesystem: the folder of the files, and its file system; None: determined by the other arguments.

        Raises:
            DatasetError: a file is not below the folder.
        """
        if root is not None:
            where = locate(root, filesystem)
        elif "://" in uris[0] or uris[0].startswith("/"):
            scheme, _, rest = uris[0].rpartition("://")
            is_local = scheme in ("", "file")
            where = locate("/" if is_local else f"{scheme}://{rest.partition('/')[0]}", filesystem)
        else:
            where = replace(table, base=posixpath.dirname(table.base), root=posixpath.dirname(table.root))
        # The first part of an object store's path, the bucket, must stay.
        names, most_up = [], where.base.rstrip("/").count("/")
        for row, uri in enumerate(uris):
            name = _below(where, uri)
            if name is None or name.split("/").count("..") > most_up:
                raise DatasetError(
                    f"{table.root}: the file of row {row} (counted from 0) must be below {where.root}, got {uri!r}"
                )
            names.append(name)
        where, names = _raised(where, names)
        return cls(where, names, table.root)

    def spans(self, lengths: pa.Array | None = None) -> list[pa.Array]:
        """Return the columns of `mbaas.dataset.table.SPAN` for samples that are whole files; ``lengths`` if known."""
        names, offsets = pa.array(self.names, pa.large_string()), pa.repeat(pa.scalar(0, pa.int64()), len(self.names))
        return [names, offsets, self._lengths() if lengths is None else lengths]

    def _lengths(self) -> pa.Array:
        """Return the lengths of the files in bytes, int64[n]; raise DatasetError if one is missing."""
        where = self.where
        infos = file_infos(where, self.names)
        if gone := [row for row, info in enumerate(infos) if missing(info)]:
            raise DatasetError(
                f"{len(gone)} of {len(infos)} files that {self.table} names cannot be read; the first, of row "
                f"{gone[0]} (counted from 0), {missing(infos[gone[0]])}: {join(where.root, self.names[gone[0]])}"
            )
        return pa.array([info.size for info in infos], pa.int64())


def _below(where: Location, uri: str) -> str | None:
    """Return a file's name below the folder, with ``..`` only in front; None if it is elsewhere."""
    path = unquote(urlsplit(uri).path) if uri.startswith("file://") else uri
    if ".." in path.split("/"):
        path = posixpath.normpath(path)
    folder = where.base if path.startswith("/") else where.root
    name = path.removeprefix(f"{folder.rstrip('/')}/")
    return None if "://" in name or name.startswith("/") or not name else name


def _raised(where: Location, names: list[str]) -> tuple[Location, list[str]]:
    """Move the folder up until no name contains ``..``."""
    up = max((name.split("/").count("..") for name in names), default=0)
    if not up:
        return where, names
    base, *steps = where.base.rsplit("/", up)
    raised = replace(where, base=base or "/", root=where.root.rsplit("/", up)[0] or "/")
    return raised, [posixpath.normpath("/".join([*steps, name])) for name in names]


# ---- files named by patterns ----

_MOST_SHARDS = 1_000_000
_BRACES = re.compile(r"(\{[^{}]*\})")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def locate_shards(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], filesystem: pyarrow.fs.FileSystem | None
) -> tuple[Location, list[str]]:
    """Return the folder that contains all shards, and their names below it.

    Args:
        shards: a local path or a URI; a pattern with braces for several shards, such as ``{000..127}.tar`` or
            ``{a,b}.tar``; or a list of paths and patterns.
        filesystem: file system of the shards; None: determined by the URI.

    Raises:
        ConfigError: no shards, too many, or an invalid pattern.
        DatasetError: several file systems, a duplicate shard, or an invalid name.
    """
    given = [shards] if isinstance(shards, (str, os.PathLike)) else shards
    texts = [text for each in given for text in _expanded(os.fspath(each))]
    if not texts:
        raise ConfigError("path must name at least one shard, got none", option="path")
    if filesystem is None:
        # Absolute, because names below the current folder may be mixed with others.
        texts = [text if "://" in text else os.path.abspath(os.path.expanduser(text)) for text in texts]  # noqa: PTH100, PTH111
    # In a URI, options of the file system follow a question mark.
    starts = [len(text.partition("?")[0]) if "://" in text else len(text) for text in texts]
    paths = [text[:at] for text, at in zip(texts, starts, strict=True)]
    options = {text[at:] for text, at in zip(texts, starts, strict=True)}
    common = os.path.commonprefix(paths)  # noqa: RUF071 (also URIs; cut at the last slash)
    folder = common[: common.rfind("/") + 1]
    if len(options) > 1 or folder.endswith("://") or any(("://" in text) != ("://" in folder) for text in texts):
        first, last = (without_secrets(text) if "://" in text else text for text in (min(texts), max(texts)))
        raise DatasetError(f"all shards must be in one file system, got {first} and {last}")
    where = locate(folder + options.pop(), filesystem)
    names = [path.removeprefix(folder) for path in paths]
    if where.is_local:
        names = [*map(as_utf8, names)]
    twice, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise DatasetError(f"each shard must be named once, got {join(where.root, twice)} {times} times")
    if odd := next((name for name in names if IN_SHARD in name), None):
        raise DatasetError(f"the name of a shard must not have {IN_SHARD!r} in it, got {join(where.root, odd)}")
    return where, names


def look_up(where: Location, names: list[str]) -> list[list[Any]]:
    """Return name, size in bytes, and modification time in ns since 1970 (if known) of each shard.

    Raises:
        DatasetError: a shard does not exist or is not a regular file.
    """
    files = []
    for name, info in zip(names, file_infos(where, names), strict=True):
        if why := missing(info):
            raise DatasetError(f"the shard {join(where.root, name)} {why}")
        files.append([name, info.size, info.mtime_ns])
    return files


def _expanded(pattern: str) -> Iterator[str]:
    # Like a shell, but without nested braces.
    *parts, rest = _BRACES.split(pattern)
    texts, choices = [*parts[::2], rest], [_choices(pattern, part[1:-1]) for part in parts[1::2]]
    if math.prod(map(len, choices)) > _MOST_SHARDS:
        raise ConfigError(f"a pattern must name at most {_MOST_SHARDS:,} shards, got {pattern!r}", option="path")
    for chosen in product(*choices):
        yield texts[0] + "".join(part + text for part, text in zip(map(str, chosen), texts[1:], strict=True))


def _choices(pattern: str, inside: str) -> Sequence[str]:
    if bounds := _RANGE.fullmatch(inside):
        first, last = bounds.groups()
        width = max(len(first), len(last)) if re.match("0.", first) or re.match("0.", last) else 0
        count = abs(int(last) - int(first)) + 1
        if count > _MOST_SHARDS:
            raise ConfigError(f"a pattern must name at most {_MOST_SHARDS:,} shards, got {pattern!r}", option="path")
        step = 1 if int(last) >= int(first) else -1
        return [f"{number:0{width}}" for number in range(int(first), int(last) + step, step)]
    if "," in inside:
        return inside.split(",")
    wanted = "braces must hold a range such as {000..127} or a list such as {a,b}"
    raise ConfigError(f"{wanted}, got {{{inside}}} in {pattern!r}", option="path")
