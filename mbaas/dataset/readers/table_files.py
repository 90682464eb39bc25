"""Parses CSV and JSON files into tables, independently of block sizes and the number of threads."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

_BLOCK_BYTES = 2**31 - 1
"""pyarrow's largest block. A file is parsed in one block, because types are inferred per block."""

_NULL_ROW = re.compile(rb"(?:\A|[\r\n])[ \t]*null")

_INTEGER = r"^-?(0|[1-9][0-9]*)$"
_FLOAT = r"^[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
"""Numbers written in full. Other forms, such as 001, are codes and stay strings."""

_MISSING = pa.array(["nan", "NaN", "NA", "N/A", "#N/A", "null", "NULL", "None"])
"""Missing values in a numeric column; in a string column they are ordinary strings."""

_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class TableError(ValueError):
    """A table that cannot be parsed; the message is one clause."""


def parse_csv(content: bytes, *, delimiter: str, texts: Collection[str], encoding: str | None) -> pa.Table:
    """Parse a CSV file. Columns ``texts`` always stay strings.

    Any other column is numeric or boolean if all of its values are. Empty values are null.

    Raises:
        TableError: the contents do not match ``encoding``, a Python codec (None: UTF-8).
        pa.ArrowException: the file cannot be parsed.
    """
    # Here: importing all readers takes longer than reading most tables.
    import pyarrow.csv

    text = _decoded(content, encoding)
    names = next((row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row), [])
    table = pyarrow.csv.read_csv(
        pa.BufferReader(text.encode()),
        read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
        parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.large_string()), strings_can_be_null=True, null_values=[""]
        ),
    ).combine_chunks()
    for number, name in enumerate(table.column_names):
        if name not in texts:
            table = table.set_column(number, name, _typed(table.column(number)))
    return table


def parse_json(content: bytes, *, encoding: str | None) -> pa.Table:
    """Parse JSON lines, or one array of objects; see `parse_csv` for ``encoding`` and errors.

    Raises:
        TableError: also for a row that is not an object.
    """
    import pyarrow.json

    lines = _decoded(content, encoding).encode()
    if lines.lstrip()[:1] == b"[":
        try:
            rows = msgspec.json.decode(lines, type=list[msgspec.Raw])
            lines = b"\n".join(msgspec.json.format(bytes(row), indent=-1) for row in rows)  # one line each
        except msgspec.DecodeError as error:
            raise TableError(str(error)) from None
    if _NULL_ROW.search(lines):  # pyarrow 26 crashes if a block begins with a null line
        raise TableError("a row is null, and must be an object with a value for each column")

    def read(schema: pa.Schema | None) -> pa.Table:
        return pyarrow.json.read_json(
            pa.BufferReader(lines),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=pyarrow.json.ParseOptions(explicit_schema=schema),
        )

    table = read(None)
    # JSON has no timestamps. pyarrow converts strings that look like timestamps, which would change their form.
    times = [field.name for field in table.schema if pa.types.is_timestamp(field.type)]
    return read(pa.schema([(name, pa.string()) for name in times])) if times else table


def _typed(column: pa.ChunkedArray) -> pa.Array:
    """Return integers, floats or booleans if all values are; otherwise the strings."""
    values = column.combine_chunks()
    is_missing = pc.or_kleene(pc.is_null(values), pc.is_in(values, pc.cast(_MISSING, values.type)))
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
        raise TableError("by its byte order mark it is UTF-16, and not UTF-8: read it with encoding='utf-16'")
    try:
        return content.decode(named).removeprefix("\ufeff")
    except LookupError:
        raise TableError(f"encoding must be a codec of Python's, such as 'latin-1', got {encoding!r}") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise TableError(
            f"line {line} is not {named.upper()}: it has the byte 0x{content[error.start]:02x}; read it with its "
            "encoding, such as encoding='latin-1'"
        ) from None
