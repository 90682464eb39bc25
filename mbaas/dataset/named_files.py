"""Finding the files that a table names: the folder that all of them are in, and how long they are."""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass, replace

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
            uris: of the files, one for each row.
            root: the folder of the files.
            filesystem: where ``root`` is; None to tell from it.

        Raises:
            DatasetError: a file is not below that folder.
        """
        if root is not None:
            where = locate(root, filesystem)
        elif "://" in uris[0] or uris[0].startswith("/"):
            scheme, _, rest = uris[0].rpartition("://")
            where = locate(f"{scheme}://{rest.partition('/')[0]}" if scheme else "/", filesystem)
        else:
            where = replace(table, base=posixpath.dirname(table.base), root=posixpath.dirname(table.root))
        top = f"{where.root.rstrip('/')}/"
        names = [uri.removeprefix(top) if uri.startswith(top) else uri for uri in uris]
        for row, name in enumerate(names):
            if "://" in name or name.startswith("/") or ".." in name.split("/") or not name:
                raise DatasetError(
                    f"{table.root}: the file of row {row} (counted from 0) must be below {where.root}, got "
                    f"{uris[row]!r}"
                )
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
