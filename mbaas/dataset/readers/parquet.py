"""Reads Parquet files that contain images: they are unpacked once, then read at random."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.fs

from mbaas.base.validation import knows_names
from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.encoded_column import Read, Source, read_encoded
from mbaas.dataset.storage.location import Location, join, locate_shards, look_up
from mbaas.samples.fields import IMAGE

_BATCH_ROWS = 64  # rows unpacked at a time


@knows_names
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
            Nested columns are named ``objects.bbox``.
        filesystem: file system of ``path``, for credentials or file systems that a URI cannot express.

    Raises:
        ConfigError: an unknown column, a reserved name, or values that no field can have.
        DatasetError: a file does not exist, cannot be read, or lacks an image or another value; or ``unpacked`` cannot
            be written, or was written with other options.
    """
    source = _ParquetFiles(*locate_shards(path, filesystem))
    return read_encoded("read_parquet", source, image_column, label_column, fields, unpacked=unpacked)


class _ParquetFiles(Source):
    kind = "Parquet files"
    has_paths = False

    def __init__(self, where: Location, names: list[str]) -> None:
        self.where, self.parts = where.for_listing(), names
        self.state = self.files = look_up(where, names)

    @contextmanager
    def opened(self, part: str) -> Iterator[tuple[pa.Schema, Read]]:
        from pyarrow import parquet  # here: it takes 0.1 s, and most datasets do not need it

        path = join(self.where.base, part)
        with self.where.filesystem.open_input_file(path) as raw, parquet.ParquetFile(raw) as file:
            yield (
                file.schema_arrow,
                lambda columns: file.iter_batches(_BATCH_ROWS, columns=list(columns), use_threads=False),
            )
