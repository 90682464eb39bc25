"""Reads a manifest: a table with a file name and further fields for each sample."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.columns import Columns, checked_fields
from mbaas.dataset.readers.listing import Listing
from mbaas.dataset.readers.table_files import TableError, parse_csv, parse_json
from mbaas.dataset.storage.faults import message_of
from mbaas.dataset.storage.files import NamedFiles
from mbaas.dataset.storage.location import Location, locate
from mbaas.dataset.table import table_of
from mbaas.errors import ConfigError, DatasetError
from mbaas.fields import LABEL

_FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
}
"""Extension of a table -> its format."""


def read_manifest(
    path: str | os.PathLike[str],
    *,
    uri_column: str = "uri",
    label_column: str | None = None,
    fields: Sequence[str] | None = None,
    length_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    encoding: str | None = None,
    filesystem: pyarrow.fs.FileSystem | None = None,
) -> Dataset:
    """Read a table with one row per sample that names the sample's file; the files are not read.

    The table is a CSV (``.csv``, ``.tsv``), JSON (``.jsonl``, ``.ndjson``, ``.json``: one object per line, or an array
    of objects) or Parquet (``.parquet``) file. A CSV
    column is numeric or boolean if all of its values are, written in full. Codes such as 001, dates and times are
    strings. An empty value is missing.

    Numeric columns become `Dataset.fields`. Minibatches contain them unchanged: integers, floats or booleans (as uint8)
    of the same width. Lists of numbers become arrays. For example, a list of zeros and ones can hold multiple labels,
    and a list of lists of four numbers can hold boxes. If lists differ in length, ``collate`` of `mbaas.join` controls
    how they are batched. Several rows may name the same file; each row is a sample.

    Args:
        path: the table: a local path, or a URI that `pyarrow.fs` opens.
        uri_column: column with paths or URIs of the files; relative ones begin at ``root``.
        label_column: column that becomes ``label`` in minibatches; default: the column "label", if there is one.
            The distinct values of a string column, sorted, become the classes (`Dataset.class_names`), and labels are
            int64 indices into them. Without a label column, minibatches have no ``label``.
        fields: further columns for minibatches; default: all numeric ones. String columns are integer-encoded as int64;
            `Field.categories` and `Loader.categories` list their distinct strings, sorted.
        length_column: column with the files' lengths in bytes; default: they are looked up, a thousand at a time.
        root: folder of the files; default: the table's folder or, for absolute paths and URIs, their common prefix.
        encoding: of a CSV or JSON file, such as "latin-1"; default: UTF-8.
        filesystem: file system of the table and ``root``, for credentials or file systems that a URI cannot express.

    Raises:
        ConfigError: an unknown column, a reserved name, or values that no field can have.
        DatasetError: the table cannot be read, has no rows, or lacks a value; or a file does not exist, is not a
            regular file, or is not below ``root``.
    """
    fields = checked_fields(fields)
    where = locate(path, filesystem)
    table = _read_table(where, texts={uri_column}, encoding=encoding)
    columns = Columns(where.root, table)
    uris = columns.text(uri_column)
    taken = {uri_column, length_column}
    if label_column is None and LABEL.name in table.column_names:
        label_column = LABEL.name
    if fields is None:
        fields = [
            name for name in table.column_names if name not in {*taken, label_column} and columns.has_numbers(name)
        ]
    class_names, known = columns.fields(label_column, fields)
    files = NamedFiles.of(where, uris, root, filesystem)
    lengths = files.lengths() if length_column is None else columns.lengths(length_column)
    names = pa.array(files.names, pa.large_string())
    places = [names, pa.array(np.zeros(len(uris), np.int64)), lengths]
    return Listing.of(class_names, table_of(places, known)).dataset(files.where)


def _read_table(where: Location, *, texts: Collection[str], encoding: str | None) -> pa.Table:
    ending = posixpath.splitext(where.base)[1].lower()
    if ending not in _FORMATS:
        raise ConfigError(f"a manifest must end in {', '.join(_FORMATS)}, got {where.root}")
    try:
        with where.filesystem.open_input_file(where.base) as file:
            table = _parse(file, ending, texts, encoding)
    except TableError as error:
        raise DatasetError(f"cannot read the manifest {where.root}: {error}") from None
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"cannot read the manifest {where.root}: {message_of(error)}") from error
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


def _parse(file: pa.NativeFile, ending: str, texts: Collection[str], encoding: str | None) -> pa.Table:
    if _FORMATS[ending] == "parquet":
        import pyarrow.parquet as pq  # here: importing all readers takes longer than reading most tables

        return pq.read_table(file)
    content = file.read()
    if _FORMATS[ending] == "json":
        return parse_json(content, encoding=encoding)
    return parse_csv(content, delimiter="\t" if ending == ".tsv" else ",", texts=texts, encoding=encoding)
