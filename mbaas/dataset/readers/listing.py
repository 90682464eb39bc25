"""Listings in Parquet files: storage is listed once, and later runs read the listing in seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs

from mbaas.dataset.readers.columns import as_numbers
from mbaas.dataset.storage.location import Location, locate, written_whole
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
    least = min(np.min(integers(array)) for array in spans[1:])
    for name, count in counts:
        codes = known[name].flatten() if pa.types.is_large_list(known[name].type) and name == LABELS else known[name]
        if codes.type != pa.int64():
            raise ValueError("labels of another type")
        least = min(least, np.min(integers(codes), initial=0), count - 1 - np.max(integers(codes), initial=0))
    if least < 0:
        return table, least
    for name in fields:
        if strings := categories[name]:
            known[name] = pa.DictionaryArray.from_arrays(known[name], pa.array(strings, pa.string()), safe=False)
    return table_of(spans, known), least


def _refused(where: Location, why: str) -> DatasetError:
    return DatasetError(f"the listing {where.root} {why}; remove it to list the data again, or name another file")
