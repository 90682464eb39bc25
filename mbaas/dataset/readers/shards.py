"""Indexes shards: each is scanned once, so that its samples can be read at random later."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.columns import gathered
from mbaas.dataset.readers.listing import Listing, listed_once
from mbaas.dataset.storage.faults import dataset_errors, message_of
from mbaas.dataset.storage.location import IN_SHARD, Location, join, locate_shards, look_up
from mbaas.dataset.table import SPAN, table_of
from mbaas.errors import DatasetError
from mbaas.samples.fields import LABEL

_CALLER = 6  # stack frames from a warning to the reader's caller, through `indexed_once`, `listed_once` and `make`
_BUFFER_BYTES = 16 << 10
"""Bytes read per header: small images are read with it and need no further request."""


class ShardSample(NamedTuple):
    """A sample of a shard: its name and bytes there, and the values of columns for labels and fields."""

    name: str
    offset: int
    length: int
    values: Mapping[str, Any]


class Omission(NamedTuple):
    """A part of a shard that cannot be read; the reason is shown in a warning."""

    reason: str


Find: TypeAlias = Callable[[BinaryIO, int, str], Iterator[ShardSample | Omission]]
"""(file at its start, size in bytes, name for messages) -> samples of a shard, and parts that are left out."""


def indexed_once(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    filesystem: pyarrow.fs.FileSystem | None,
    listing: str | os.PathLike[str] | None,
    *,
    writer: str,
    options: Mapping[str, Any],
    label: str | None,
    fields: Sequence[str],
    columns: Sequence[str],
    find: Find,
    single_values: bool = False,
) -> Dataset:
    """Return the samples of shards, from a saved listing if it is still valid.

    Args:
        shards, filesystem, listing: see `mbaas.read_webdataset`, also for errors.
        writer: name of the function that reads this kind of shards.
        options: options that a saved listing must match.
        label: column that becomes the field ``label``, or None.
        fields: columns that become further fields.
        columns: columns with values from ``find``.
        find: finds the samples of a shard.
        single_values: whether ``find`` returns lists even for single values.
    """
    where, names = locate_shards(shards, filesystem)
    files = look_up(where, names)

    def make() -> Listing:
        spans, found = gathered(where.root, _index_all(where, files, columns, find))
        found = found.with_single_values() if single_values else found
        class_names, known = found.fields(label, fields)
        return Listing.of(class_names, table_of(spans, known), files)

    found = listed_once(
        listing,
        make,
        writer=writer,
        root=where.root,
        options=options,
        fields=[*([LABEL.name] if label is not None else []), *fields],
        is_current=lambda saved: bool(saved.files == files),
    )
    return found.dataset(where, {name: nbytes for name, nbytes, _ in files})


def _index_all(
    where: Location, files: list[list[Any]], columns: Sequence[str], find: Find
) -> list[tuple[pa.Table, pa.Table]]:
    where = where.for_listing()
    shards = where.read_all(lambda file: _index_one(where, file[0], file[1], columns, find), files, "shards")
    left_out = [each for *_, of_shard in shards for each in of_shard]
    if left_out:
        more = f" (and {len(left_out) - 1:,} more)" if len(left_out) > 1 else ""
        warnings.warn(f"left out: {left_out[0].reason}{more}", stacklevel=_CALLER)
    return [(spans, found) for spans, found, _ in shards]


def _index_one(
    where: Location, name: str, nbytes: int, columns: Sequence[str], find: Find
) -> tuple[pa.Table, pa.Table, list[Omission]]:
    """Return locations as in `SPAN`, the values of labels and fields, and parts that are left out."""
    shard = join(where.root, name)
    uris: list[str] = []
    ranges: list[tuple[int, int]] = []
    values: dict[str, list[Any]] = {column: [] for column in columns}
    left_out: list[Omission] = []
    with dataset_errors(f"cannot read {shard}"), where.filesystem.open_input_file(join(where.base, name)) as raw:
        for sample in find(io.BufferedReader(raw, _BUFFER_BYTES), nbytes, shard):
            if isinstance(sample, Omission):
                left_out.append(sample)
                continue
            uris.append(f"{name}{IN_SHARD}{sample.name}")
            ranges.append((sample.offset, sample.length))
            for column, value in sample.values.items():
                values[column].append(value)
    offsets, lengths = zip(*ranges, strict=True) if ranges else ((), ())
    spans = [pa.array(column, each.type) for column, each in zip((uris, offsets, lengths), SPAN, strict=True)]
    found = pa.table({column: _array_of(shard, column, each) for column, each in values.items()})
    return pa.Table.from_arrays(spans, schema=SPAN), found, left_out


def _array_of(shard: str, column: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DatasetError(f"{shard}: the values of {column!r} cannot be one column: {message_of(error)}") from None
