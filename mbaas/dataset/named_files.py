"""Finding the files that a table names: the folder that all of them are in, and how long they are."""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs
from pyarrow.fs import FileType

from mbaas.dataset.file_infos import file_infos
from mbaas.dataset.location import Location, join, locate
from mbaas.errors import DatasetError


@dataclass(frozen=True)
class NamedFiles:
    """Files below one folder, or one top of a file system.

    Attributes:
        where: that folder.
        names: of the files, relative to it.
        table: what messages call the table that names them.
    """

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
        """Find the folder of files, and their names below it.

        Args:
            table: names the files, and is beside them if neither ``root`` nor their names tell otherwise.
            uris: of the files, one for each row; ``file://`` URIs are percent-encoded, and relative paths may lead out
                of the folder by ``..``.
            root: the folder of the files.
            filesystem: where ``root`` is; None to tell from it.

        Raises:
            DatasetError: a file is not below that folder.
        """
        if root is not None:
            where = locate(root, filesystem)
        elif "://" in uris[0] or uris[0].startswith("/"):
            scheme, _, rest = uris[0].rpartition("://")
            is_local = scheme in ("", "file")
            where = locate("/" if is_local else f"{scheme}://{rest.partition('/')[0]}", filesystem)
        else:
            where = replace(table, base=posixpath.dirname(table.base), root=posixpath.dirname(table.root))
        names, most_up = [], where.base.rstrip("/").count("/")  # a bucket, the first part of a path in a store, stays
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
        """Ask the file system how long the files are.

        Raises:
            DatasetError: one is not there, or is no file.
        """
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
    """Return the name of a file relative to a folder, with ``..`` only in front; None if it cannot be there."""
    path = unquote(urlsplit(uri).path) if uri.startswith("file://") else uri
    if ".." in path.split("/"):
        path = posixpath.normpath(path)
    folder = where.base if path.startswith("/") else where.root
    name = path.removeprefix(f"{folder.rstrip('/')}/")
    return None if "://" in name or name.startswith("/") or not name else name


def _raised(where: Location, names: list[str]) -> tuple[Location, list[str]]:
    """Return a folder above all files, of which some are reached by ``..``, and their names below it."""
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
