"""A listing in a Parquet file: what lies in storage is listed once, and known in seconds the next time."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs

from mbaas.dataset.location import Location, locate
from mbaas.dataset.table import SCHEMA, fingerprint_of, integers
from mbaas.errors import DatasetError

VERSION = 1
KEY = b"mbaas.listing"
"""The key of the file's metadata under which stands, as JSON, what the rows are."""


@dataclass(frozen=True)
class Listing:
    """Images that were listed.

    Attributes:
        root: the URI or path below which they lie.
        extensions: the endings that were taken for images.
        class_names: name of each label.
        fingerprint: see `mbaas.Dataset`.
        table: a row for each, of `SCHEMA`, each column in one chunk.
    """

    root: str
    extensions: tuple[str, ...]
    class_names: tuple[str, ...]
    fingerprint: str
    table: pa.Table


def keep_listing(listing: Listing, path: str | os.PathLike[str]) -> None:
    """Write a listing to a file, whole or not at all.

    Raises:
        DatasetError: it cannot be written.
    """
    from pyarrow import parquet  # here: it takes 0.1 s, and most datasets have no such file

    where = locate(path, None)
    about = {"version": VERSION, "root": listing.root, "extensions": listing.extensions}
    about |= {"class_names": listing.class_names, "fingerprint": listing.fingerprint}
    partial = f"{where.base}.{uuid.uuid4().hex}.part"
    try:
        parquet.write_table(
            listing.table.replace_schema_metadata({KEY: json.dumps(about)}),
            partial,
            filesystem=where.filesystem,
            compression="zstd",
        )
        where.filesystem.move(partial, where.base)
    except BaseException as error:  # Ctrl-C, too: half a file would stay for ever, for nobody knows its name
        with contextlib.suppress(OSError):
            where.filesystem.delete_file(partial)
        if isinstance(error, (OSError, pa.ArrowException)):
            raise DatasetError(f"cannot write the listing {where.root}: {error}") from error
        raise


def recall_listing(path: str | os.PathLike[str], *, root: str, extensions: tuple[str, ...]) -> Listing | None:
    """Read a listing of some root and endings; None if the file is not there.

    Raises:
        DatasetError: it cannot be read, is none, or is of something else; the message says how to go on.
    """
    from pyarrow import parquet

    where = locate(path, None)
    try:
        if where.filesystem.get_file_info(where.base).type == pyarrow.fs.FileType.NotFound:
            return None
        table = parquet.read_table(where.base, filesystem=where.filesystem)
    except (OSError, pa.ArrowException) as error:
        raise _refused(where, f"cannot be read: {error}") from error
    found = _checked(where, table)
    for name, asked in (("root", root), ("extensions", extensions)):
        if getattr(found, name) != asked:
            raise _refused(where, f"is of {name} {getattr(found, name)!r}, asked for is {asked!r}")
    return found


def _checked(where: Location, table: pa.Table) -> Listing:
    """Check what a file holds, whoever wrote it: every row is used as it is from here on."""
    try:
        said: dict[str, Any] = json.loads((table.schema.metadata or {})[KEY])
        version, class_names = said["version"], tuple(said["class_names"])
        texts = said["root"], said["fingerprint"], *said["extensions"], *class_names
    except (KeyError, TypeError, ValueError, RecursionError):
        raise _refused(where, "is no listing that read_images wrote") from None
    if version != VERSION:
        raise _refused(where, f"has version {version!r}, this mbaas reads {VERSION}")
    if not all(isinstance(text, str) for text in texts) or not table.schema.equals(SCHEMA) or not len(table):
        raise _refused(where, "is no listing that read_images wrote")
    table = table.replace_schema_metadata(None).combine_chunks()
    # Numbers first: the fingerprint of a damaged table would be another one, too, but say less.
    offsets, lengths, labels = (integers(table[name].chunk(0)) for name in ("offset", "length", "label"))
    if min(np.min(offsets), np.min(lengths), np.min(labels)) < 0 or np.max(labels) >= len(class_names):
        raise _refused(where, "has an offset, a length or a label that no sample can have")
    found = fingerprint_of(table, class_names)
    if found != said["fingerprint"]:
        raise _refused(where, f"is damaged: its rows have the fingerprint {found}, it says {said['fingerprint']}")
    return Listing(said["root"], tuple(said["extensions"]), class_names, found, table)


def _refused(where: Location, why: str) -> DatasetError:
    return DatasetError(f"the listing {where.root} {why}; remove it to have the data listed anew, or name another file")
