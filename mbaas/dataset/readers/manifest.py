"""Reads a manifest: a table with a file name and further fields for each sample."""

from __future__ import annotations

import csv
import io
import os
import posixpath
import re
from collections.abc import Collection, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs

from mbaas.base.validation import knows_names
from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.columns import Columns, checked_fields
from mbaas.dataset.readers.listing import Listing
from mbaas.dataset.storage.faults import dataset_errors
from mbaas.dataset.storage.location import Location, NamedFiles, locate
from mbaas.dataset.table import table_of
from mbaas.errors import ConfigError, DatasetError
from mbaas.samples.fields import LABEL

_FORMATS = {".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
"""Extension of a table -> its format."""


@knows_names
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
    uris = columns.strings_of(uri_column)
    if label_column is None and LABEL.name in table.column_names:
        label_column = LABEL.name
    if fields is None:
        fields = columns.default_fields([uri_column, length_column, label_column])
    class_names, known = columns.fields(label_column, fields)
    files = NamedFiles.of(where, uris, root, filesystem)
    spans = files.spans(None if length_column is None else columns.lengths(length_column))
    return Listing.of(class_names, table_of(spans, known)).dataset(files.where)


def _read_table(where: Location, *, texts: Collection[str], encoding: str | None) -> pa.Table:
    ending = posixpath.splitext(where.base)[1].lower()
    if ending not in _FORMATS:
        raise ConfigError(f"a manifest must end in {', '.join(_FORMATS)}, got {where.root}")
    with dataset_errors(f"cannot read the manifest {where.root}"):
        with where.filesystem.open_input_file(where.base) as file:
            table = _parse(file, ending, texts, encoding)
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
        return _parse_json(content, encoding=encoding)
    return _parse_csv(content, delimiter="\t" if ending == ".tsv" else ",", texts=texts, encoding=encoding)


# ---- tables in CSV and JSON ----

_BLOCK_BYTES = 2**31 - 1
"""pyarrow's largest block. A file is parsed in one block, because types are inferred per block."""

_NULL_ROW = re.compile(rb"(?:\A|[\r\n])[ \t]*null")

_INTEGER = r"^-?(0|[1-9][0-9]*)$"
_FLOAT = r"^[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
"""Numbers written in full. Other forms, such as 001, are codes and stay strings."""

_MISSING = ("nan", "NaN", "NA", "N/A", "#N/A", "null", "NULL", "None")
"""Missing values in a numeric column; in a string column they are ordinary strings."""

_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


def _parse_csv(content: bytes, *, delimiter: str, texts: Collection[str], encoding: str | None) -> pa.Table:
    """Parse a CSV file. Columns ``texts`` always stay strings.

    Any other column is numeric or boolean if all of its values are. Empty values are null.

    Raises:
        pa.ArrowException: the contents do not match ``encoding``, a Python codec (None: UTF-8), or cannot be parsed.
    """
    # Here: importing all readers takes longer than reading most tables.
    from pyarrow import csv as arrow_csv

    text = _decoded(content, encoding)
    names = next((row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row), [])
    table = arrow_csv.read_csv(
        pa.BufferReader(text.encode()),
        read_options=arrow_csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.large_string()), strings_can_be_null=True, null_values=[""]
        ),
    ).combine_chunks()
    for number, name in enumerate(table.column_names):
        if name not in texts:
            table = table.set_column(number, name, _typed(table.column(number)))
    return table


def _parse_json(content: bytes, *, encoding: str | None) -> pa.Table:
    """Parse JSON lines, or one array of objects; see `_parse_csv` for ``encoding`` and errors."""
    from pyarrow import json as arrow_json

    lines = _decoded(content, encoding).encode()
    if lines.lstrip()[:1] == b"[":
        try:
            rows = msgspec.json.decode(lines, type=list[msgspec.Raw])
            lines = b"\n".join(msgspec.json.format(bytes(row), indent=-1) for row in rows)  # one line each
        except msgspec.DecodeError as error:
            raise pa.ArrowInvalid(str(error)) from None
    if _NULL_ROW.search(lines):  # pyarrow 26 crashes if a block begins with a null line
        raise pa.ArrowInvalid("a row is null, and must be an object with a value for each column")

    def read(schema: pa.Schema | None) -> pa.Table:
        return arrow_json.read_json(
            pa.BufferReader(lines),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema),
        )

    table = read(None)
    # JSON has no timestamps. pyarrow converts strings that look like timestamps, which would change their form.
    times = [field.name for field in table.schema if pa.types.is_timestamp(field.type)]
    return read(pa.schema([(name, pa.string()) for name in times])) if times else table


def _typed(column: pa.ChunkedArray) -> pa.Array:
    """Return integers, floats or booleans if all values are; otherwise the strings."""
    values = column.combine_chunks()
    is_missing = pc.or_kleene(pc.is_null(values), pc.is_in(values, pa.array(_MISSING, values.type)))
    given = values.filter(pc.invert(is_missing))
    if not len(given):
        return values
    if pc.all(pc.is_in(given, pa.array([*_BOOLEANS], values.type))).as_py():
        return pc.equal(pc.utf8_lower(pc.if_else(is_missing, None, values)), "true")
    for pattern, kind in ((_INTEGER, pa.int64()), (_FLOAT, pa.float64())):
        if pc.all(pc.match_substring_regex(given, pattern)).as_py():
            try:
                return pc.cast(pc.if_else(is_missing, None, values), kind)
            except pa.ArrowInvalid:  # integers beyond 64 bits
                continue
    return values


def _decoded(content: bytes, encoding: str | None) -> str:
    named = encoding or "utf-8"
    if encoding is None and content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise pa.ArrowInvalid("by its byte order mark it is UTF-16, and not UTF-8: read it with encoding='utf-16'")
    try:
        return content.decode(named).removeprefix("\ufeff")
    except LookupError:
        raise pa.ArrowInvalid(f"encoding must be a codec of Python's, such as 'latin-1', got {encoding!r}") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise pa.ArrowInvalid(
            f"line {line} is not {named.upper()}: it has the byte 0x{content[error.start]:02x}; read it with its "
            "encoding, such as encoding='latin-1'"
        ) from None
