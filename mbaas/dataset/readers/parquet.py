"""Reads Parquet files that contain images: they are unpacked once, then read at random."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.class_labels import class_names_in, with_classes
from mbaas.dataset.readers.columns import gathered, may_be_numbers
from mbaas.dataset.readers.listing import Listing, listed_once
from mbaas.dataset.readers.unpacking import ENDING, is_there, listing_in, unpack
from mbaas.dataset.storage.faults import message_of, s3_attempts
from mbaas.dataset.storage.files import locate_shards, look_up
from mbaas.dataset.storage.location import S3_ATTEMPTS, Location, join, locate
from mbaas.dataset.table import fingerprint_of, table_of
from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.fields import IMAGE, LABEL
from mbaas.progress import track

_WRITER = "read_parquet"
_THREADS = 4  # each holds a row group
_BATCH_ROWS = 64  # rows unpacked at a time


def read_parquet(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    unpacked: str | os.PathLike[str],
    image_column: str = IMAGE,
    label_column: str | None = None,
    fields: Sequence[str] | None = None,
    filesystem: pyarrow.fs.FileSystem | None = None,
) -> Dataset:
    """Unpack the images in Parquet files into plain files once, and list them there.

    Single values of a Parquet file cannot be read, because they are compressed and encoded in pages. Reading one image
    means reading a whole row group, usually 100 to 1,000 rows. Random access would therefore read hundreds of images
    for each one. So the first call reads all files once, in order, and writes the bytes of the images into files in the
    folder ``unpacked``, which takes as much space as the images. Later calls take a second, unless the size or time of
    a Parquet file, or the list of files, changed.

    Args:
        path: a local path, or a URI that `pyarrow.fs` opens; a pattern with braces for several files, such as
            ``train-{00000..00007}-of-00008.parquet``; or a list of both. All are in one file system.
        unpacked: path or URI of a folder that all nodes can read: on a shared disk or in a bucket, or on a local disk
            if the cluster is one machine. It is created if it does not exist.
        image_column: column with encoded images: binary, or a struct with a binary field ``bytes``, as in Hugging Face
            datasets. For audio and array pipelines, the column with the encoded files.
        label_column: column that becomes ``label`` in minibatches; default: the column "label", if there is one.
            The distinct values of a string column, sorted, become the classes (`Dataset.class_names`), and labels are
            int64 indices into them. Hugging Face class labels keep their names, too. Without a label column,
            minibatches have no ``label``.
        fields: further columns for minibatches, of the types that `read_manifest` accepts; default: all except strings.
        filesystem: file system of ``path``, for credentials or file systems that a URI cannot express.

    Raises:
        ConfigError: an unknown column, a reserved name, or values that no field can have.
        DatasetError: a file does not exist, cannot be read, or lacks an image or another value; or ``unpacked`` cannot
            be written, or was written with other options.
    """
    if isinstance(fields, str):
        raise ConfigError(f"fields must be a list of columns, such as [{fields!r}], got {fields!r}", option="fields")
    where, names = locate_shards(path, filesystem)
    target = locate(unpacked, None)
    files = look_up(where, names)
    asked = {
        "image_column": image_column,
        "label_column": label_column,
        "fields": None if fields is None else tuple(fields),
    }
    found = listed_once(
        listing_in(unpacked),
        lambda: _unpack(where, files, target, asked),
        writer=_WRITER,
        root=where.root,
        options=asked,
        fields=None,
        is_current=lambda kept: _is_still(kept.files, files, target),
    )
    return found.dataset(target, {name + ENDING: nbytes for name, *_, nbytes in found.files})


def _is_still(kept: list[list[Any]], files: list[list[Any]], target: Location) -> bool:
    if [entry[:-1] for entry in kept] != files:
        return False
    return is_there(target, {name + ENDING: nbytes for name, *_, nbytes in kept})


def _unpack(where: Location, files: list[list[Any]], target: Location, asked: dict[str, Any]) -> Listing:
    source = replace(where, filesystem=s3_attempts(where.filesystem, S3_ATTEMPTS))
    with ThreadPoolExecutor(min(_THREADS, len(files)), thread_name_prefix="mbaas-listing") as pool:
        unpacking = pool.map(lambda file: _unpack_one(source, file[0], target, asked), files)
        parts = [*track(unpacking, "Parquet files", len(files))]
    places, columns = gathered(where.root, [(part.places, part.values) for part in parts])
    label, fields = asked["label_column"], asked["fields"]
    if label is None and LABEL.name in columns.table.column_names:
        label = LABEL.name
    if fields is None:
        fields = [name for name in columns.table.column_names if name != label and columns.has_numbers(name)]
    class_names, known = columns.fields(label, fields)
    if label is not None and not class_names:
        class_names, known = with_classes(parts[0].class_names.get(label, ()), known)
    table = table_of(places, known)
    kept = [[*file, part.nbytes] for file, part in zip(files, parts, strict=True)]
    return Listing(_WRITER, where.root, asked, class_names, fingerprint_of(table, class_names), table, kept)


@dataclass(frozen=True)
class _Unpacked:
    """The contents of one file.

    Attributes:
        places: locations of its images in the unpacked file, with the columns of `PLACE`.
        values: the columns for labels and fields.
        class_names: column -> class names, for class labels with names in the file.
        nbytes: total size of the images.
    """

    places: pa.Table
    values: pa.Table
    class_names: dict[str, tuple[str, ...]]
    nbytes: int


def _unpack_one(where: Location, name: str, target: Location, asked: dict[str, Any]) -> _Unpacked:
    from pyarrow import parquet  # here: it takes 0.1 s, and most datasets do not need it

    shard, values = join(where.root, name), list[pa.RecordBatch]()
    try:
        with where.filesystem.open_input_file(join(where.base, name)) as raw, parquet.ParquetFile(raw) as file:
            known = _columns_of(shard, file.schema_arrow, asked)
            batches = file.iter_batches(_BATCH_ROWS, columns=[asked["image_column"], *known], use_threads=False)

            def images() -> Iterator[pa.Array]:
                for number, batch in enumerate(batches):
                    values.append(batch.select(known))
                    yield _encoded(shard, batch, asked["image_column"], number * _BATCH_ROWS)

            places, nbytes = unpack(images(), target, name)
            schema = pa.schema([file.schema_arrow.field(column) for column in known])
            class_names = class_names_in(file.schema_arrow.metadata)
    except (ConfigError, DatasetError):
        raise
    except Exception as error:  # third-party file systems raise any exception
        raise DatasetError(f"cannot unpack {shard} into {target.root}: {message_of(error)}") from error
    return _Unpacked(places, pa.Table.from_batches(values, schema), class_names, nbytes)


def _columns_of(shard: str, schema: pa.Schema, asked: dict[str, Any]) -> list[str]:
    """Return the columns to read; by default the label and all columns that may be numeric."""
    image, label, fields = asked["image_column"], asked["label_column"], asked["fields"]
    for option, column in [
        ("image_column", image),
        ("label_column", label),
        *(("fields", field) for field in fields or ()),
    ]:
        if column is not None and schema.names.count(column) != 1:
            has = "no column" if column not in schema.names else "more than one column"
            raise ConfigError(f"{shard} has {has} {shown(column)}; it has {', '.join(schema.names)}", option=option)
    kind = schema.field(image).type
    inner = kind.field("bytes").type if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
    if not (pa.types.is_binary(inner) or pa.types.is_large_binary(inner)):
        wanted = "must have bytes, or a struct with bytes in its field 'bytes'"
        raise ConfigError(f"column {image!r} of {shard} {wanted}, got {kind}", option="image_column")
    if label is None and schema.names.count(LABEL.name) == 1:
        label = LABEL.name
    if fields is None:
        fields = [field.name for field in schema if field.name not in (image, label) and may_be_numbers(field.type)]
    return list(dict.fromkeys([*([label] if label is not None else []), *fields]))


def _encoded(shard: str, batch: pa.RecordBatch, image: str, first: int) -> pa.Array:
    """Return the images of a batch as large_binary without nulls; ``first`` is the batch's first row in the file."""
    found = batch.column(image)
    encoded = pc.struct_field(found, "bytes") if pa.types.is_struct(found.type) else found
    if encoded.null_count:
        row = first + pc.index(pc.is_null(encoded), True).as_py()
        hint = "; tables that name files are read by read_manifest" if pa.types.is_struct(found.type) else ""
        raise DatasetError(f"column {image!r} of {shard} has no bytes in row {row} (counted from 0){hint}")
    return encoded.cast(pa.large_binary())
