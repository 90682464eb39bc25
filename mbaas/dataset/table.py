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
from mbaas.dataset.location import join
from mbaas.dataset.reader import ByteRange, FileReader
from mbaas.fields import LABEL, Arrays, Column, Field, Packed
from mbaas.order import Ids

_DIGEST_BYTES = 16
_CATEGORIES = b"mbaas.categories"  # in a column's metadata, a JSON list of texts

PLACE = pa.schema(
    [
        pa.field("uri", pa.large_string(), nullable=False),  # relative to the root, with /
        pa.field("offset", pa.int64(), nullable=False),  # first byte within the file
        pa.field("length", pa.int64(), nullable=False),  # bytes
    ]
)
"""The first columns of a table of samples: where each lies. `large_string`, because ten million names can pass a
`string`'s 2 GiB."""

SCHEMA = PLACE.append(pa.field(LABEL.name, pa.int64(), nullable=False))
"""Columns of a table of samples of which the class is known, as an index into the names of classes."""


IN_SHARD = "#"
"""Stands in the `uri` of a sample of a shard between the shard's name and the member's."""


@dataclass(frozen=True, eq=False, repr=False)
class TableDataset(Dataset):
    """A dataset of samples that lie in files.

    Attributes:
        table: one row a sample, each column in one chunk: a row is found in constant time, and a pickle has few
            buffers. The columns are those of `PLACE`, and then one for each field: numbers, or lists of them, which
            have a size (`pyarrow.list_` with one) or differ in length; their items are numbers or lists with a size.
            A column's metadata says what numbers of categories stand for.
        filesystem: where the files are.
        base: path of `root` within `filesystem`.
        sources: int64[n], the ids of the rows in the table of which they are a part; None if they are all of it.
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
        return join(self.root, self._name(sample_id))

    def reader(self) -> FileReader:
        return FileReader(self.filesystem, self.byte_range)

    def byte_range(self, sample_id: int) -> ByteRange:
        """Tell where one sample's bytes lie: at the end of its file."""
        name = self._name(sample_id)
        offset, length = self._span(sample_id)
        return ByteRange(join(self.root, name), join(self.base, name), offset, length, file_bytes=offset + length)

    def source_ids(self, sample_ids: Ids) -> Ids:
        return sample_ids if self.sources is None else self.sources[sample_ids]

    def _part(self, ids: Ids, fingerprint: str) -> TableDataset:
        # A table of its own: a feed of a small part would else send the whole one to every node.
        rows = self.table.take(pa.array(ids)).combine_chunks()
        return replace(self, fingerprint=fingerprint, table=rows, sources=self.source_ids(ids))

    def __reduce__(self) -> tuple[Any, ...]:
        # Fields alone: the views below would go along as copies of what the table holds already. And the table as the
        # memory of its columns: Ray would copy the bounds of all names, and import pandas for it, which takes half a
        # second of the program that serves and of the coordinator.
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        columns = [_memory_of(column) for column in self.table.columns]
        return _unpickled, (type(self), given | {"table": (self.table.schema, columns)})

    def _name(self, sample_id: int) -> str:
        return str(self._names[sample_id])

    def _span(self, sample_id: int) -> tuple[int, int]:
        return int(self._offsets[sample_id]), int(self._lengths[sample_id])

    # Views of the table's memory, made once: Arrow takes tens of microseconds to find a column and its chunk.

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
        return {name: numbers(self.table[name].chunk(0)) for name in self.table.column_names[len(PLACE) :]}

    @cached_property
    def _fields(self) -> tuple[Field, ...]:
        schema = self.table.schema
        fields_of = (
            (Field.of(name, values), categories_of(schema.field(name))) for name, values in self._values.items()
        )
        return tuple(replace(field, categories=categories) for field, categories in fields_of)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ShardDataset(TableDataset):
    """A dataset of samples of which many lie in one file, a shard.

    Attributes:
        shards: name below `root` -> size in bytes. The column ``uri`` has names of members: "train-0.tar#cat/1.jpg".
    """

    shards: Mapping[str, int]

    def byte_range(self, sample_id: int) -> ByteRange:
        """Tell where one sample's bytes lie."""
        name = self._name(sample_id)
        shard = name.partition(IN_SHARD)[0]
        offset, length = self._span(sample_id)
        return ByteRange(join(self.root, name), join(self.base, shard), offset, length, file_bytes=self.shards[shard])


_Memory = tuple[int, int, list[pa.Buffer | None]]
"""A column: its rows, the first one's place in the buffers, and the buffers, which a pickle carries out of band."""


def _memory_of(column: pa.ChunkedArray) -> _Memory:
    chunk = column.chunk(0)
    return len(chunk), chunk.offset, chunk.buffers()


def _unpickled(kind: type[TableDataset], given: dict[str, Any]) -> TableDataset:
    schema, memory = given["table"]
    columns = [_column_of(field.type, *parts) for field, parts in zip(schema, memory, strict=True)]
    return kind(**given | {"table": pa.Table.from_arrays(columns, schema=schema)})


def _column_of(kind: pa.DataType, rows: int, offset: int, buffers: list[pa.Buffer | None]) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):  # buffers of the lists, and then of the numbers in them
        own, inner, items = buffers[:1], buffers[1:], (offset + rows) * kind.list_size
    elif pa.types.is_large_list(kind):
        own, inner = buffers[:2], buffers[2:]
        items = int(_view(own[1], np.int64, offset + rows, 1)[0])
    else:
        return pa.Array.from_buffers(kind, rows, buffers, null_count=0, offset=offset)
    values = _column_of(kind.value_type, items, 0, inner)
    return pa.Array.from_buffers(kind, rows, own, null_count=0, offset=offset, children=[values])


def table_of(places: Sequence[pa.Array], known: Mapping[str, pa.Array]) -> pa.Table:
    """Make a table of samples out of the columns of `PLACE`, and the values of fields by name, without nulls.

    Values that are a dictionary's are categories: numbers of texts.
    """
    named = {name: _with_categories(name, array) for name, array in known.items()}
    schema = pa.schema([*PLACE, *(field for field, _ in named.values())])
    return pa.Table.from_arrays([*places, *(values for _, values in named.values())], schema=schema)


def _with_categories(name: str, array: pa.Array) -> tuple[pa.Field, pa.Array]:
    if not pa.types.is_dictionary(array.type):
        return pa.field(name, array.type, nullable=False), array
    told = {_CATEGORIES: json.dumps(array.dictionary.to_pylist())}
    return pa.field(name, array.indices.type, nullable=False, metadata=told), array.indices


def categories_of(column: pa.Field) -> tuple[str, ...]:
    """Return what the numbers in a column of a table stand for; () if they are numbers.

    Raises:
        ValueError: what the column says of that is no list.
    """
    told = (column.metadata or {}).get(_CATEGORIES)
    return () if told is None else tuple(map(str, json.loads(told)))


def fingerprint_of(table: pa.Table, class_names: Iterable[str]) -> str:
    """Compute 32 hex digits that depend on the rows, their order and the class names, and on nothing else.

    How the table is cut in chunks and whether strings have 32- or 64-bit offsets makes no difference.
    This takes 8 bytes of memory for each row of the largest chunk.

    Args:
        table: columns uri (string), offset and length (int64), and those of fields, without nulls.
        class_names: name of each label.
    """
    parts = [_digest_strings(table["uri"].chunks)]
    parts += [_digest_integers(table[name].chunks) for name in ("offset", "length")]
    for field in list(table.schema)[len(PLACE) :]:
        if field.name == LABEL.name and field.type == pa.int64():  # nothing else in tables of older versions
            parts.append(_digest_integers(table[field.name].chunks))
        else:
            parts.append(_digest_field(field, table[field.name].chunks))
    parts.append(_digest_strings([pa.array(list(class_names), pa.string())]))
    return blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).hexdigest()


def _digest_strings(chunks: Iterable[pa.Array]) -> bytes:
    """Digest all bytes and all lengths: together they leave no doubt where a string ends."""
    text, lengths = blake2b(), blake2b()
    for chunk in chunks:
        offsets, data = string_bounds(chunk)
        text.update(data[offsets[0] : offsets[-1]])
        # Little-endian int64, whatever the machine and the width of the offsets are.
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


# Views made by hand: `pyarrow.Array.to_numpy` would do for integers, but its first call imports pandas where that is
# installed: about a second, in each process that uses a dataset.


def integers(chunk: pa.Array) -> NDArray[np.int64]:
    """View the values of an int64 array without nulls: int64[n], read-only."""
    _, data = chunk.buffers()
    return _view(data, np.int64, chunk.offset, len(chunk))


def numbers(chunk: pa.Array) -> Column:
    """View the values of an array of numbers, or of lists of them, without nulls: [n], [n, size], or packed."""
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
    """View the values of an array of strings or of bytes, without nulls: of any type but a view or a dictionary.

    Returns:
        int[n + 1] and bytes: value i lies in bytes [bounds[i], bounds[i + 1]).
    """
    _, offsets, data = chunk.buffers()
    is_large = pa.types.is_large_string(chunk.type) or pa.types.is_large_binary(chunk.type)
    width = np.int64 if is_large else np.int32
    # An empty array may have no buffer of offsets at all.
    bounds = _view(offsets, width, chunk.offset, len(chunk) + 1) if len(chunk) else np.zeros(1, width)
    return bounds, memoryview(data or b"")


def _view(data: pa.Buffer | None, dtype: Any, start: int, count: int) -> NDArray[Any]:
    # No more than is used, because a file may say of a buffer that it ends in the middle of a value.
    end = (start + count) * np.dtype(dtype).itemsize
    return np.frombuffer(memoryview(data or b"")[:end], dtype)[start:]
