"""Datasets whose samples are rows of an Arrow table and byte ranges of files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
from numpy.typing import NDArray

from mbaas.dataset.base import Dataset
from mbaas.dataset.storage.location import IN_SHARD, join
from mbaas.dataset.storage.reader import ByteRange, FileReader
from mbaas.samples.fields import Arrays, Column, Field, Packed
from mbaas.samples.order import Ids

_DIGEST_BYTES = 16
_CATEGORIES = b"mbaas.categories"  # key in a column's metadata; the value is a JSON list of strings

SPAN = pa.schema(
    [
        pa.field("uri", pa.large_string(), nullable=False),  # relative to the root, with /
        pa.field("offset", pa.int64(), nullable=False),  # first byte within the file
        pa.field("length", pa.int64(), nullable=False),  # bytes
    ]
)
"""The first columns of a table of samples: the location of each one.

`large_string`, because ten million names can exceed the 2 GiB of a `string` column.
"""


@dataclass(frozen=True, eq=False, repr=False)
class TableDataset(Dataset):
    """A dataset of samples stored in files.

    Attributes:
        table: one row per sample, each column in one chunk, so that a row is found in constant time and a pickle has
            few buffers. The columns of `SPAN` come first, then one per field: numbers, or lists with numbers or
            fixed-size lists as items. Lists are fixed-size (`pyarrow.list_` with a size) or large. Metadata of a column
            lists the strings of integer-encoded categories.
        filesystem: file system of the files.
        base: path of `root` within `filesystem`.
        sources: int64[n], ids of the rows in the table that was divided; None if this dataset is undivided.
    """

    table: pa.Table
    filesystem: pyarrow.fs.FileSystem
    base: str
    sources: Ids | None = None

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def fields(self) -> tuple[Field, ...]:
        return self._fields

    def values(self, sample_ids: Ids) -> Arrays:
        return {name: array[sample_ids] for name, array in self._values.items()}

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        return self._lengths[sample_ids]

    @cached_property
    def total_bytes(self) -> int:
        return int(self._lengths.sum())

    def uri(self, sample_id: int) -> str:
        return join(self.root, str(self._names[sample_id]))

    def reader(self) -> FileReader:
        return FileReader(self.filesystem, self.byte_range)

    def byte_range(self, sample_id: int) -> ByteRange:
        """Return the location of one sample's bytes."""
        name = str(self._names[sample_id])
        offset, length = int(self._offsets[sample_id]), int(self._lengths[sample_id])
        file, nbytes = self._file_of(name, offset + length)
        return ByteRange(join(self.root, name), join(self.base, file), offset, length, file_bytes=nbytes)

    def _file_of(self, name: str, end: int) -> tuple[str, int]:
        # The bytes of a sample are at the end of its file.
        return name, end

    def source_ids(self, sample_ids: Ids) -> Ids:
        return sample_ids if self.sources is None else self.sources[sample_ids]

    def _part(self, ids: Ids, fingerprint: str) -> TableDataset:
        # A copy, because a feed of a small part would otherwise send the whole table to every node.
        rows = self.table.take(pa.array(ids)).combine_chunks()
        return replace(self, fingerprint=fingerprint, table=rows, sources=self.source_ids(ids))

    def __reduce__(self) -> tuple[Any, ...]:
        # Only the dataclass fields: the cached views would be pickled as copies of the table's contents. The table is
        # passed as raw column buffers. Ray's own pickling would copy the bounds of all names, and import pandas, which
        # costs the serving program and the coordinator half a second.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        chunks = [column.chunk(0) for column in self.table.columns]
        # Number of rows, offset of the first one in the buffers, and the buffers, which are pickled out of band.
        columns = [(len(chunk), chunk.offset, chunk.buffers()) for chunk in chunks]
        return _unpickled, (type(self), values | {"table": (self.table.schema, columns)})

    # Cached views of the table's memory: Arrow takes tens of microseconds to find a column and its chunk.

    @cached_property
    def _names(self) -> pa.Array:
        return self.table["uri"].chunk(0)

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return integers(self.table["offset"].chunk(0))

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return integers(self.table["length"].chunk(0))

    @cached_property
    def _values(self) -> dict[str, Column]:
        return {name: numbers(self.table[name].chunk(0)) for name in self.table.column_names[len(SPAN) :]}

    @cached_property
    def _fields(self) -> tuple[Field, ...]:
        schema = self.table.schema
        fields_of = (
            (Field.of(name, values), categories_of(schema.field(name))) for name, values in self._values.items()
        )
        return tuple(replace(field, categories=categories) for field, categories in fields_of)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ShardDataset(TableDataset):
    """A dataset of samples stored in shards, files with many samples each.

    Attributes:
        shards: name below `root` -> size in bytes. The column ``uri`` has member names: "train-0.tar#cat/1.jpg".
    """

    shards: Mapping[str, int]

    def _file_of(self, name: str, end: int) -> tuple[str, int]:  # noqa: ARG002
        shard = name.partition(IN_SHARD)[0]
        return shard, self.shards[shard]


def _unpickled(kind: type[TableDataset], values: dict[str, Any]) -> TableDataset:
    schema, memory = values["table"]
    columns = [_column_of(field.type, *parts) for field, parts in zip(schema, memory, strict=True)]
    return kind(**values | {"table": pa.Table.from_arrays(columns, schema=schema)})


def _column_of(kind: pa.DataType, rows: int, offset: int, buffers: list[pa.Buffer | None]) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):  # buffers of the lists, then buffers of their items
        outer, inner, items = buffers[:1], buffers[1:], (offset + rows) * kind.list_size
    elif pa.types.is_large_list(kind):
        outer, inner = buffers[:2], buffers[2:]
        items = int(_view(outer[1], np.int64, offset + rows, 1)[0])
    else:
        return pa.Array.from_buffers(kind, rows, buffers, null_count=0, offset=offset)
    values = _column_of(kind.value_type, items, 0, inner)
    return pa.Array.from_buffers(kind, rows, outer, null_count=0, offset=offset, children=[values])


def table_of(spans: Sequence[pa.Array], known: Mapping[str, pa.Array]) -> pa.Table:
    """Build a table from the columns of `SPAN` and fields by name, without nulls; dictionaries become categories."""
    named = {name: _with_categories(name, array) for name, array in known.items()}
    schema = pa.schema([*SPAN, *(field for field, _ in named.values())])
    return pa.Table.from_arrays([*spans, *(values for _, values in named.values())], schema=schema)


def _with_categories(name: str, array: pa.Array) -> tuple[pa.Field, pa.Array]:
    if not pa.types.is_dictionary(array.type):
        return pa.field(name, array.type, nullable=False), array
    metadata = {_CATEGORIES: json.dumps(array.dictionary.to_pylist())}
    return pa.field(name, array.indices.type, nullable=False, metadata=metadata), array.indices


def categories_of(column: pa.Field) -> tuple[str, ...]:
    """Return the strings of an integer-encoded column, or (); invalid metadata raises ValueError."""
    metadata = (column.metadata or {}).get(_CATEGORIES)
    return () if metadata is None else tuple(map(str, json.loads(metadata)))


def fingerprint_of(table: pa.Table, class_names: Iterable[str]) -> str:
    """Return 32 hex digits that depend only on the rows, their order and the class names.

    The table has columns uri (string), offset and length (int64), and fields, without nulls. Chunking and the width of
    string offsets (32 or 64 bits) do not matter. This takes 8 bytes of memory per row of the largest chunk.
    """
    parts = [_digest_strings(table["uri"].chunks)]
    parts += [_digest_integers(table[name].chunks) for name in ("offset", "length")]
    for field in list(table.schema)[len(SPAN) :]:
        parts.append(_digest_field(field, table[field.name].chunks))
    parts.append(_digest_strings([pa.array(list(class_names), pa.string())]))
    return blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).hexdigest()


def _digest_strings(chunks: Iterable[pa.Array]) -> bytes:
    # Bytes and lengths together are unambiguous.
    text, lengths = blake2b(), blake2b()
    for chunk in chunks:
        offsets, data = string_bounds(chunk)
        text.update(data[offsets[0] : offsets[-1]])
        # little-endian int64 on every machine, for any width of offsets
        lengths.update(np.diff(offsets).astype("<i8", copy=False).data)
    return text.digest() + lengths.digest()


def _digest_integers(chunks: Iterable[pa.Array]) -> bytes:
    digest = blake2b()
    for chunk in chunks:
        digest.update(integers(chunk).astype("<i8", copy=False).data)
    return digest.digest()


def _digest_field(field: pa.Field, chunks: Iterable[pa.Array]) -> bytes:
    digest = blake2b(f"{field.name} {field.type}".encode())
    digest.update((field.metadata or {}).get(_CATEGORIES, b""))
    lengths = blake2b()
    for chunk in chunks:
        values = numbers(chunk)
        if isinstance(values, Packed):
            lengths.update(values.lengths.astype("<i8", copy=False).data)
            values, _ = values.own()
        digest.update(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data)
    return digest.digest() + (lengths.digest() if pa.types.is_large_list(field.type) else b"")


# Views are built by hand, because the first call of `pyarrow.Array.to_numpy` imports pandas if installed. That takes
# about a second in each process that uses a dataset.


def integers(chunk: pa.Array) -> NDArray[np.int64]:
    """View the values of an int64 array without nulls: int64[n], read-only."""
    _, data = chunk.buffers()
    return _view(data, np.int64, chunk.offset, len(chunk))


def numbers(chunk: pa.Array) -> Column:
    """View the values of a numeric array or a list array without nulls: [n], [n, size], or packed."""
    if pa.types.is_fixed_size_list(chunk.type):
        size, values = chunk.type.list_size, numbers(chunk.values)
        assert isinstance(values, np.ndarray)
        return values.reshape(-1, size, *values.shape[1:])[chunk.offset : chunk.offset + len(chunk)]
    if pa.types.is_large_list(chunk.type):
        _, bounds, *_ = chunk.buffers()
        values = numbers(chunk.values)
        assert isinstance(values, np.ndarray)
        return Packed(values, _view(bounds, np.int64, chunk.offset, len(chunk) + 1))
    _, data = chunk.buffers()
    return _view(data, np.dtype(chunk.type.to_pandas_dtype()), chunk.offset, len(chunk))


def string_bounds(chunk: pa.Array) -> tuple[NDArray[Any], memoryview]:
    """View the values of a string or binary array without nulls; views and dictionaries are not supported.

    Value i is in bytes [bounds[i], bounds[i + 1]) of the second result; bounds are int[n + 1].
    """
    _, offsets, data = chunk.buffers()
    is_large = pa.types.is_large_string(chunk.type) or pa.types.is_large_binary(chunk.type)
    width = np.int64 if is_large else np.int32
    # An empty array may lack a buffer of offsets.
    bounds = _view(offsets, width, chunk.offset, len(chunk) + 1) if len(chunk) else np.zeros(1, width)
    return bounds, memoryview(data or b"")


def _view(data: pa.Buffer | None, dtype: Any, start: int, count: int) -> NDArray[Any]:
    # View only the used part: in a file, a buffer may end in the middle of a value.
    end = (start + count) * np.dtype(dtype).itemsize
    return np.frombuffer(memoryview(data or b"")[:end], dtype)[start:]
