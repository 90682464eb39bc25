"""Locates the files named in a table: their common folder and their lengths."""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs
from pyarrow.fs import FileType

from mbaas.dataset.storage.file_infos import file_infos
from mbaas.dataset.storage.location import Location, join, locate
from mbaas.errors import DatasetError


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

    def lengths(self) -> pa.Array:
        """Return the lengths of the files in bytes, int64[n]; raise DatasetError if one is missing."""
        where = self.where
        infos = file_infos(where, self.names)
        gone = [row for row, info in enumerate(infos) if info.type != FileType.File or info.size is None]
        if gone:
            what = "is not there" if infos[gone[0]].type == FileType.NotFound else "is no file"
            raise DatasetError(
                f"{len(gone)} of {len(infos)} files that {self.table} names cannot be read; the first, of row "
                f"{gone[0]} (counted from 0), {what}: {join(where.root, self.names[gone[0]])}"
            )
        return pa.array([info.size for info in infos], pa.int64())


def _below(where: Location, uri: str) -> str | None:
    """Return a file's name below the folder, with ``..`` only in front; None if it cannot be there."""
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
    base, root = where.base, where.root
    steps = []
    for _ in range(up):
        steps.append(posixpath.basename(base))
        base, root = posixpath.dirname(base), posixpath.dirname(root)
    beside = "/".join(reversed(steps))
    return replace(where, base=base, root=root), [posixpath.normpath(f"{beside}/{name}") for name in names]
