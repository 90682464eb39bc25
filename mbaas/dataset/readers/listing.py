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
from mbaas.dataset.table import PLACE, ShardDataset, TableDataset, categories_of, fingerprint_of, integers, table_of
from mbaas.errors import DatasetError
from mbaas.fields import LABEL, LABELS

VERSION = 1
KEY = b"mbaas.listing"
"""Key of the file's metadata with a JSON description of the rows."""


@dataclass(frozen=True)
class Listing:
    """Listed samples.

    Attributes:
        writer: name of the function that lists them; only the same function reads the listing.
        root: URI or path that contains the samples.
        options: option -> JSON value; a saved listing is only valid for the same options.
        class_names, fingerprint: see `mbaas.Dataset`.
        table: one row per sample, as in a `TableDataset`.
        files: properties of the source files that show whether they changed; None if not needed.
    """

    writer: str
    root: str
    options: Mapping[str, Any]
    class_names: tuple[str, ...]
    fingerprint: str
    table: pa.Table
    files: Any = None

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
        writer, root, options, fields: see `recall_listing`.
        is_current: returns whether a saved listing is still valid.

    Raises:
        DatasetError: the file cannot be read or written, or belongs to other data.
    """
    if path is None:
        return make()
    found = recall_listing(path, writer=writer, root=root, options=options, fields=fields)
    if found is None or not is_current(found):
        found = make()
        keep_listing(found, path)
    return found


def keep_listing(listing: Listing, path: str | os.PathLike[str]) -> None:
    """Write a listing to a file, atomically; raise DatasetError if this fails."""
    from pyarrow import parquet  # here: it takes 0.1 s, and most datasets do not need it

    where = locate(path, None)
    about = {"version": VERSION, "root": listing.root, "class_names": listing.class_names}
    about |= {"fingerprint": listing.fingerprint, "files": listing.files, **listing.options}
    try:
        with written_whole(where.filesystem, where.base) as partial:
            parquet.write_table(
                listing.table.replace_schema_metadata({KEY: json.dumps(about)}),
                partial,
                filesystem=where.filesystem,
                compression="zstd",
            )
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"cannot write the listing {where.root}: {error}") from error


def recall_listing(
    path: str | os.PathLike[str], *, writer: str, root: str, options: Mapping[str, Any], fields: Sequence[str] | None
) -> Listing | None:
    """Read a listing that ``writer`` saved for this root and these options; None if the file does not exist.

    ``fields`` are the required columns after the `PLACE` columns; None: any.

    Raises:
        DatasetError: the file cannot be read, is not a listing, or belongs to other data. The message contains the
            remedy.
    """
    from pyarrow import parquet

    where = locate(path, None)
    try:
        if where.filesystem.get_file_info(where.base).type == pyarrow.fs.FileType.NotFound:
            return None
        table = parquet.read_table(where.base, filesystem=where.filesystem)
    except (OSError, pa.ArrowException) as error:
        raise _refused(where, f"cannot be read: {error}") from error
    about = _about(where, table, writer, options)
    for name, asked in ({"root": root} | dict(options)).items():
        if about[name] != (list(asked) if isinstance(asked, tuple) else asked):
            found = tuple(about[name]) if isinstance(about[name], list) else about[name]
            raise _refused(where, f"is of {name} {found!r}, asked for is {asked!r}")
    class_names = tuple(about["class_names"])
    table = _checked(where, table, class_names, fields, writer)
    # After the other checks: a damaged table also has another fingerprint, but this message is less precise.
    found = fingerprint_of(table, class_names)
    if found != about["fingerprint"]:
        raise _refused(where, f"is damaged: its rows have the fingerprint {found}, it says {about['fingerprint']}")
    return Listing(writer, root, options, class_names, found, table, about.get("files"))


def _about(where: Location, table: pa.Table, writer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    # The file may be from any program.
    try:
        about: dict[str, Any] = json.loads((table.schema.metadata or {})[KEY])
        version, texts = about["version"], [about["root"], about["fingerprint"], *about["class_names"]]
        lacking = options.keys() - about.keys()
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise _foreign(where, writer) from None
    if version != VERSION:
        raise _refused(where, f"has version {version!r}, this mbaas reads {VERSION}")
    if lacking or not all(isinstance(text, str) for text in texts):
        raise _foreign(where, writer)
    return about


def _checked(
    where: Location, table: pa.Table, class_names: tuple[str, ...], fields: Sequence[str] | None, writer: str
) -> pa.Table:
    # Later code uses the rows unchecked.
    try:
        names = table.schema.names
    except UnicodeDecodeError:  # Parquet stores column names as bytes
        raise _foreign(where, writer) from None
    table = table.replace_schema_metadata(None).combine_chunks()
    place = pa.schema(list(table.schema)[: len(PLACE)])
    fields = names[len(PLACE) :] if fields is None else fields
    if not len(table) or names != [*PLACE.names, *fields] or not place.equals(PLACE):
        raise _foreign(where, writer)
    places = [table[name].chunk(0) for name in PLACE.names]
    # Parquet may rename the items of lists, which would change the fingerprint.
    found = {name: as_numbers(table[name].chunk(0), as_typed=True) for name in fields}
    known = {name: values for name, values in found.items() if values is not None}
    if len(known) < len(found) or any(values.null_count for values in [*places, *known.values()]):
        raise _foreign(where, writer)
    least = min(np.min(integers(array)) for array in places[1:])
    if class_names:
        labels = next((known[name] for name in (LABEL.name, LABELS) if name in known), None)
        if labels is not None and pa.types.is_large_list(labels.type):
            labels = labels.flatten()
        if labels is None or labels.type != pa.int64():
            raise _foreign(where, writer)
        least = min(
            least, np.min(integers(labels), initial=0), len(class_names) - 1 - np.max(integers(labels), initial=0)
        )
    for name, values in known.items():
        if categories := _categories_of(where, table.schema.field(name), writer):
            if values.type != pa.int64():
                raise _foreign(where, writer)
            least = min(least, np.min(integers(values)), len(categories) - 1 - np.max(integers(values)))
            known[name] = pa.DictionaryArray.from_arrays(values, pa.array(categories, pa.string()), safe=False)
    if least < 0:
        raise _refused(where, "has an offset, a length or a label that no sample can have")
    return table_of(places, known)


def _categories_of(where: Location, column: pa.Field, writer: str) -> tuple[str, ...]:
    try:
        return categories_of(column)
    except (TypeError, ValueError, RecursionError):
        raise _foreign(where, writer) from None


def _foreign(where: Location, writer: str) -> DatasetError:
    return _refused(where, f"is no listing that {writer} wrote")


def _refused(where: Location, why: str) -> DatasetError:
    return DatasetError(f"the listing {where.root} {why}; remove it to have the data listed anew, or name another file")
