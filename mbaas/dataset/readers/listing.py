"""Listings of samples and of shards. Storage is listed once, and later runs read the saved listing in seconds."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.columns import as_numbers, gathered
from mbaas.dataset.storage.faults import dataset_errors, message_of
from mbaas.dataset.storage.location import IN_SHARD, Location, join, locate, locate_shards, look_up, written_whole
from mbaas.dataset.table import SPAN, ShardDataset, TableDataset, categories_of, fingerprint_of, integers, table_of
from mbaas.errors import DatasetError
from mbaas.samples.fields import LABEL, LABELS

KEY = b"mbaas.listing.1"
"""Key of the file's metadata with a JSON description of the rows; the number is the version of the format."""

_FOREIGN = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
"""Exceptions caused by a file of another program. ValueError also comes from column names that are not UTF-8."""


@dataclass(frozen=True)
class Listing:
    """Listed samples.

    Attributes:
        class_names, fingerprint: see `mbaas.Dataset`.
        table: one row per sample, as in a `TableDataset`.
        files: JSON value that shows whether the source files changed; None if not needed.
    """

    class_names: tuple[str, ...]
    fingerprint: str
    table: pa.Table
    files: Any

    @classmethod
    def of(cls, class_names: tuple[str, ...], table: pa.Table, files: Any = None) -> Listing:
        return cls(class_names, fingerprint_of(table, class_names), table, files)

    def dataset(self, where: Location, shards: Mapping[str, int] | None = None) -> TableDataset:
        """Return the samples as a dataset below ``where``.

        ``shards`` maps files with many samples to their sizes in bytes; None: each sample is a file.
        """
        of = (where.root, self.class_names, self.fingerprint, self.table, where.filesystem, where.base)
        return TableDataset(*of) if shards is None else ShardDataset(*of, shards=shards)


def listed_once(
    path: str | os.PathLike[str] | None,
    make: Callable[[], Listing],
    *,
    writer: str,
    root: str,
    options: Mapping[str, Any],
    fields: Sequence[str] | None = None,
    is_current: Callable[[Listing], bool] = lambda _: True,
) -> Listing:
    """Return the listing saved in the file ``path``; make and save it if missing or outdated.

    Args:
        path: None: nothing is saved.
        make: lists the samples.
        writer, root, options: the reader, the location of the samples, and option -> JSON value. A saved listing is
            only valid for the same ones.
        fields: the columns after the `SPAN` columns; None: any.
        is_current: returns whether a saved listing is still valid.

    Raises:
        DatasetError: the file cannot be read or written, is not a listing, or belongs to other data. The message
            contains the remedy.
    """
    if path is None:
        return make()
    where, about = locate(path, None), {"writer": writer, "root": root, **options}
    found = _read(where, about, fields)
    if found is None or not is_current(found):
        found = make()
        _write(where, about, found)
    return found


def _write(where: Location, about: Mapping[str, Any], listing: Listing) -> None:
    from pyarrow import parquet  # here: it takes 0.1 s, and most datasets do not need it

    described = {"class_names": listing.class_names, "fingerprint": listing.fingerprint, "files": listing.files}
    table = listing.table.replace_schema_metadata({KEY: json.dumps({**about, **described})})
    try:
        with written_whole(where.filesystem, where.base) as partial:
            parquet.write_table(table, partial, filesystem=where.filesystem, compression="zstd")
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"cannot write the listing {where.root}: {error}") from error


def _read(where: Location, about: Mapping[str, Any], fields: Sequence[str] | None) -> Listing | None:
    """Return the listing in a file; None if the file does not exist."""
    from pyarrow import parquet

    try:
        if where.filesystem.get_file_info(where.base).type == pyarrow.fs.FileType.NotFound:
            return None
        table = parquet.read_table(where.base, filesystem=where.filesystem)
    except (OSError, pa.ArrowException) as error:
        raise _refused(where, f"cannot be read: {error}") from error
    try:
        found = json.loads(table.schema.metadata[KEY])
        saved, class_names = {name: found[name] for name in about}, tuple(found["class_names"])
        texts = (found["root"], found["fingerprint"], *class_names)
        is_ours = saved["writer"] == about["writer"] and all(isinstance(text, str) for text in texts)
    except _FOREIGN:
        is_ours = False
    foreign = _refused(where, f"is not a listing of {about['writer']}")
    if not is_ours:
        raise foreign
    for name, wanted in about.items():
        if saved[name] != (list(wanted) if isinstance(wanted, tuple) else wanted):
            got = tuple(saved[name]) if isinstance(saved[name], list) else saved[name]
            raise _refused(where, f"was made with {name} {got!r}, not {wanted!r}")
    try:
        rows, least = _checked(table, class_names, fields)
    except _FOREIGN:
        raise foreign from None
    if least < 0:
        raise _refused(where, "has an offset, a length or a label that no sample can have")
    listing = Listing.of(class_names, rows, found.get("files"))
    # After the other checks: a damaged table also has another fingerprint, but this message is less precise.
    if listing.fingerprint != found["fingerprint"]:
        has, wanted = listing.fingerprint, found["fingerprint"]
        raise _refused(where, f"is damaged: its rows have the fingerprint {has}, it should be {wanted}")
    return listing


def _checked(table: pa.Table, class_names: tuple[str, ...], fields: Sequence[str] | None) -> tuple[pa.Table, int]:
    """Return valid rows, which later code uses unchecked, and a number below 0 if a value is out of range.

    A table with other columns raises one of `_FOREIGN`.
    """
    names = table.schema.names
    categories = {field.name: categories_of(field) for field in table.schema}
    table = table.replace_schema_metadata(None).combine_chunks()
    span = pa.schema(list(table.schema)[: len(SPAN)])
    fields = names[len(SPAN) :] if fields is None else fields
    if not len(table) or names != [*SPAN.names, *fields] or not span.equals(SPAN):
        raise ValueError("other columns")
    spans = [table[name].chunk(0) for name in SPAN.names]
    # Parquet may rename the items of lists, which would change the fingerprint.
    known: dict[str, Any] = {name: as_numbers(table[name].chunk(0), as_typed=True) for name in fields}
    counts = [(name, len(categories[name])) for name in fields if categories[name]]
    if class_names:
        counts.append((LABEL.name if LABEL.name in known else LABELS, len(class_names)))
    if any(values is None or values.null_count for values in [*spans, *known.values()]):
        raise ValueError("missing values")
    least = min(int(np.min(integers(array))) for array in spans[1:])
    for name, count in counts:
        codes = known[name].flatten() if pa.types.is_large_list(known[name].type) and name == LABELS else known[name]
        if codes.type != pa.int64():
            raise ValueError("labels of another type")
        values = integers(codes)
        least = min(least, int(np.min(values, initial=0)), count - 1 - int(np.max(values, initial=0)))
    if least < 0:
        return table, least
    for name in fields:
        if strings := categories[name]:
            known[name] = pa.DictionaryArray.from_arrays(known[name], pa.array(strings, pa.string()), safe=False)
    return table_of(spans, known), least


def _refused(where: Location, why: str) -> DatasetError:
    return DatasetError(f"the listing {where.root} {why}; remove it to list the data again, or name another file")


# ---- shards: each is scanned once, so that its samples can be read at random later ----

_CALLER = 7  # stack frames from a warning to the reader's caller, through `indexed_once`, `listed_once` and `make`
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
