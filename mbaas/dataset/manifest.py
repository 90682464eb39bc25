"""Reading a manifest: a table that names a file for each sample, and says what else is known of it."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
from pyarrow.fs import FileInfo, FileType

from mbaas.dataset.base import Dataset
from mbaas.dataset.faults import s3_attempts, said
from mbaas.dataset.location import Location, join, locate
from mbaas.dataset.table import PLACE, TableDataset, fingerprint_of
from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.fields import IMAGE, LABEL, SAMPLE_ID

_TAKEN = (IMAGE, SAMPLE_ID.name, "row")
"""Names that a minibatch has for other things."""

_ASKED_AT_ONCE = 1000  # files whose lengths are asked for in one call
_REMOTE_THREADS = 32  # a store answers for each file by itself
_S3_ATTEMPTS = 5


_FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
}
"""Ending of a table's name -> how it is read."""


_NULL_ROW = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|[\r\n])[ \t]*null")


def read_manifest(
    path: str | os.PathLike[str],
    *,
    uri: str = "uri",
    label: str | None = None,
    fields: Sequence[str] | None = None,
    length: str | None = None,
    root: str | os.PathLike[str] | None = None,
    filesystem: pyarrow.fs.FileSystem | None = None,
) -> Dataset:
    """Read a table with a row for each sample, which names its file; read none of the files.

    The table is a CSV (``.csv``, ``.tsv``), JSON lines (``.jsonl``, ``.ndjson``, ``.json``) or Parquet (``.parquet``)
    file. Its columns of numbers become `Dataset.fields`: minibatches have them beside the image, as they are in the
    table, integers, floats or booleans (as uint8) of the same width. Lists of numbers that are equally long become
    arrays, so a list of zeros and ones can say which labels of many a sample has. A row may name the same file as
    another one does: it is another sample.

    Args:
        path: of the table: a local path, or a URI that `pyarrow.fs` opens.
        uri: the column with paths or URIs of the files; relative ones are below ``root``.
        label: the column that minibatches have as ``label``; default: that of this name, if there is one. If it is
            text, its distinct values, sorted, are the classes (`Dataset.class_names`), and labels int64 indices into
            them. Without it minibatches have no ``label``.
        fields: the other columns that minibatches have; default: all of numbers.
        length: the column with the files' lengths in bytes; default: they are asked for, a thousand at a time.
        root: where the files are; default: the folder of the table, or what all absolute paths or URIs begin with.
        filesystem: where the table and ``root`` are, for credentials or file systems that a URI cannot express.

    Raises:
        ConfigError: a column that there is not, of a name that is taken, or whose values no field can have.
        DatasetError: the table cannot be read, has no rows, or lacks a value; a file is not there, or is no file, or is
            not below ``root``.
    """
    if isinstance(fields, str):
        raise ConfigError(f"fields must be a list of columns, such as [{fields!r}], got {fields!r}", option="fields")
    where = locate(path, filesystem)
    table = _read_table(where)
    columns = _Columns(where.root, table)
    uris = columns.text(uri)
    taken = {uri, *([length] if length is not None else [])}
    label = label if label is not None else LABEL.name if LABEL.name in table.column_names else None
    if fields is None:
        fields = [name for name in table.column_names if name not in {*taken, label} and columns.has_numbers(name)]
    class_names, known = columns.label(label) if label is not None else ((), {})
    for name in fields:
        if name in (*_TAKEN, *known):
            raise ConfigError(f"a field must not be called {name!r}, which minibatches have already", option="fields")
        known[name] = columns.numbers(name, "fields")
    files = _located(where, uris, root, filesystem)
    lengths = _lengths_of(files) if length is None else columns.lengths(length)
    places = [pa.array(files.names, pa.large_string()), pa.array(np.zeros(len(uris), np.int64)), lengths]
    schema = pa.schema([*PLACE, *(pa.field(name, array.type, nullable=False) for name, array in known.items())])
    whole = pa.Table.from_arrays([*places, *known.values()], schema=schema)
    return TableDataset(
        root=files.where.root,
        class_names=class_names,
        fingerprint=fingerprint_of(whole, class_names),
        table=whole,
        filesystem=files.where.filesystem,
        base=files.where.base,
    )


def _read_table(where: Location) -> pa.Table:
    ending = posixpath.splitext(where.base)[1].lower()
    if ending not in _FORMATS:
        raise ConfigError(f"a manifest must end in {', '.join(_FORMATS)}, got {where.root}")
    try:
        with where.filesystem.open_input_file(where.base) as file:
            table = _parse(file, ending)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"cannot read the manifest {where.root}: {said(error)}") from error
    if not len(table):
        raise DatasetError(f"the manifest {where.root} has no rows")
    try:
        names = table.column_names
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"the manifest {where.root} has a column whose name is not UTF-8: {bytes(error.object)!r}"
        ) from None
    if len(set(names)) < len(names):
        raise DatasetError(f"the manifest {where.root} has two columns of one name: {', '.join(names)}")
    return table.combine_chunks()


def _parse(file: pa.NativeFile, ending: str) -> pa.Table:
    # Each here: to import all readers takes longer than to read most tables.
    if _FORMATS[ending] == "parquet":
        import pyarrow.parquet as pq

        return pq.read_table(file)
    if _FORMATS[ending] == "json":
        import pyarrow.json

        rows = file.read_buffer()
        if _NULL_ROW.search(rows):  # pyarrow 26 crashes if a block of lines begins with one
            raise pa.ArrowInvalid("a row is null, and must be an object with a value for each column")
        return pyarrow.json.read_json(pa.BufferReader(rows))
    import pyarrow.csv

    return pyarrow.csv.read_csv(
        file, parse_options=pyarrow.csv.ParseOptions(delimiter="\t" if ending == ".tsv" else ",")
    )


@dataclass(frozen=True)
class _Columns:
    """The columns of a manifest, of which each use has its own conditions.

    Attributes:
        name: of the manifest; for messages.
        table: its rows.
    """

    name: str
    table: pa.Table

    def text(self, column: str) -> list[str]:
        """Return the values of a column of texts."""
        found = self._of(column, "uri")
        if not _is_text(found.type):
            raise ConfigError(f"column {column!r} of {self.name} must be text, got {found.type}", option="uri")
        return [str(value) for value in found.to_pylist()]

    def label(self, column: str) -> tuple[tuple[str, ...], dict[str, pa.Array]]:
        """Return the names of classes, if the labels are texts, and the labels."""
        found = self._of(column, "label")
        if not _is_text(found.type):
            return (), {LABEL.name: self.numbers(column, "label")}
        names = sorted(pc.unique(found).to_pylist())
        return tuple(names), {LABEL.name: pc.index_in(found, pa.array(names, found.type)).cast(pa.int64())}

    def lengths(self, column: str) -> pa.Array:
        """Return the lengths of files."""
        found = self._of(column, "length")
        if not pa.types.is_integer(found.type) or pc.min(found).as_py() < 0:
            wanted = "must have whole numbers of bytes, at least 0"
            least = f"the least is {pc.min(found)}" if pa.types.is_integer(found.type) else f"they are {found.type}"
            raise ConfigError(f"column {column!r} of {self.name} {wanted}: {least}", option="length")
        return found.cast(pa.int64())

    def has_numbers(self, column: str) -> bool:
        """Whether a column can be a field."""
        return _as_numbers(self.table[column].chunk(0)) is not None

    def numbers(self, column: str, option: str) -> pa.Array:
        """Return a column of numbers, or of lists of numbers that are equally long."""
        found = self._of(column, option)
        numbers = _as_numbers(found)
        if numbers is None:
            wanted = "must have numbers, or lists of numbers that are equally long"
            raise ConfigError(f"column {column!r} of {self.name} {wanted}, got {found.type}", option=option)
        return numbers

    def _of(self, column: str, option: str) -> pa.Array:
        if column not in self.table.column_names:
            there = ", ".join(self.table.column_names)
            raise ConfigError(f"{self.name} has no column {shown(column)}; it has {there}", option=option)
        found = self.table[column].chunk(0)
        if pa.types.is_dictionary(found.type):
            found = found.dictionary_decode()
        if found.null_count:
            row = pc.index(pc.is_null(found), True).as_py()
            raise DatasetError(f"column {column!r} of {self.name} has no value in row {row} (counted from 0)")
        try:
            found.validate(full=True)  # a file may say that its bytes are UTF-8
        except pa.ArrowException as error:
            raise DatasetError(f"column {column!r} of {self.name} is damaged: {said(error)}") from error
        return found


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _as_numbers(found: pa.Array) -> pa.Array | None:
    """Return an array as a field can have it; None if it is none of numbers."""
    kind = found.type
    if pa.types.is_boolean(kind):
        return found.cast(pa.uint8())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return found
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return None
    lengths, values = pc.list_value_length(found), _as_numbers(found.flatten())
    if found.null_count or values is None or values.null_count or pa.types.is_fixed_size_list(values.type):
        return None
    least, most = pc.min(lengths).as_py(), pc.max(lengths).as_py()
    return pa.FixedSizeListArray.from_arrays(values, most) if least == most and most else None


@dataclass(frozen=True)
class _Files:
    """Files below one folder, or one top of a file system.

    Attributes:
        where: that folder.
        names: of the files, relative to it.
    """

    where: Location
    names: list[str]


def _located(
    manifest: Location, uris: list[str], root: str | os.PathLike[str] | None, filesystem: pyarrow.fs.FileSystem | None
) -> _Files:
    """Find the folder of the files, and their names below it."""
    if root is not None:
        where = locate(root, filesystem)
    elif "://" in uris[0] or uris[0].startswith("/"):
        scheme, _, rest = uris[0].rpartition("://")
        where = locate(f"{scheme}://{rest.partition('/')[0]}" if scheme else "/", filesystem)
    else:
        where = replace(manifest, base=posixpath.dirname(manifest.base), root=posixpath.dirname(manifest.root))
    top = f"{where.root.rstrip('/')}/"
    names = [uri.removeprefix(top) if uri.startswith(top) else uri for uri in uris]
    for row, name in enumerate(names):
        if "://" in name or name.startswith("/") or ".." in name.split("/") or not name:
            raise DatasetError(
                f"{manifest.root}: the file of row {row} (counted from 0) must be below {where.root}, got {uris[row]!r}"
            )
    return _Files(where, names)


def _lengths_of(files: _Files) -> pa.Array:
    """Ask the file system how long the files are."""
    where = files.where
    filesystem = s3_attempts(where.filesystem, _S3_ATTEMPTS)
    paths = [join(where.base, name) for name in files.names]
    parts = [paths[start : start + _ASKED_AT_ONCE] for start in range(0, len(paths), _ASKED_AT_ONCE)]

    def ask(part: list[str]) -> list[FileInfo]:
        infos: list[FileInfo] = filesystem.get_file_info(part)
        return infos

    try:
        if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            infos = [*chain.from_iterable(map(ask, parts))]
        else:
            with ThreadPoolExecutor(_REMOTE_THREADS, thread_name_prefix="mbaas-listing") as pool:
                infos = [*chain.from_iterable(pool.map(ask, parts))]
    except Exception as error:  # a file system of somebody else's raises what it likes
        raise DatasetError(f"cannot look for the files of {where.root}: {said(error)}") from error
    gone = [row for row, info in enumerate(infos) if info.type != FileType.File or info.size is None]
    if gone:
        what = "is not there" if infos[gone[0]].type == FileType.NotFound else "is no file"
        raise DatasetError(
            f"{len(gone)} of {len(infos)} files of the manifest cannot be read; the first, of row {gone[0]} (counted "
            f"from 0), {what}: {join(where.root, files.names[gone[0]])}"
        )
    return pa.array([info.size for info in infos], pa.int64())
