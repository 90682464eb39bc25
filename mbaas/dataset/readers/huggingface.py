"""Reads Hugging Face datasets: images inside their Arrow files, or in separate files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.huggingface_columns import WantedColumns
from mbaas.dataset.readers.huggingface_images import placed, unpacked_images
from mbaas.dataset.readers.huggingface_source import source_of
from mbaas.dataset.readers.listing import Listing, listed_once
from mbaas.dataset.readers.unpacking import is_there, listing_in
from mbaas.dataset.storage.location import locate
from mbaas.dataset.table import fingerprint_of, table_of
from mbaas.errors import ConfigError
from mbaas.fields import IMAGE

_WRITER = "read_huggingface"


def read_huggingface(
    path: Any,
    *,
    split: str | None = None,
    image_column: str = IMAGE,
    label_column: str | None = None,
    fields: Sequence[str] | None = None,
    filesystem: pyarrow.fs.FileSystem | None = None,
    listing: str | os.PathLike[str] | None = None,
    unpacked: str | os.PathLike[str] | None = None,
) -> Dataset:
    """List the images of a dataset of the package `datasets`, without reading them.

    Images in uncompressed Arrow files are later read directly from these files, in any order. So all nodes must be able
    to read the files. A `datasets.Dataset` has them on this machine, usually in ``~/.cache/huggingface``.
    ``save_to_disk`` writes them to a shared disk or a bucket, and ``unpacked`` writes only the images. If the column
    has file paths, the files are read. The rows and order of `select`, `shuffle` and the like are kept; formats and
    transforms that were set are ignored.

    Args:
        path: a `datasets.Dataset`, a `DatasetDict`, or the local path or `pyarrow.fs` URI of a folder written by
            ``save_to_disk``. A folder does not need the package `datasets`.
        split: name of a split of a `DatasetDict`.
        image_column: column with encoded images or their paths: a feature `Image`, binary, or string.
        label_column: column that becomes ``label`` in minibatches; default: the column "label", if there is one.
            The names of a feature `ClassLabel`, or the sorted distinct values of a string column, are the classes
            (`Dataset.class_names`). Without a label column, minibatches have no ``label``.
        fields: further columns for minibatches, of the types that `read_manifest` accepts; default: all except strings.
            Nested columns are named ``objects.bbox``, as by ``flatten``.
        filesystem: file system of the folder, for credentials or file systems that a URI cannot express.
        listing: path or URI of a Parquet file that caches the result. It is written if it does not exist, or if the
            dataset's fingerprint or the size or time of its files changed. Otherwise it is read.
        unpacked: path or URI of a folder that all nodes can read, into which the images are written once. Needed if
            single images cannot be read, that is, from compressed files or from memory. The folder includes a listing.

    Raises:
        ConfigError: a missing or unknown split, an unknown column, a reserved name, or values that no field can have.
        DatasetError: a folder or file cannot be read or is damaged, single images in it cannot be read, or an image or
            a value is missing. Also if ``listing`` or ``unpacked`` cannot be read or written, or has other options.
    """
    if isinstance(fields, str):
        raise ConfigError(f"fields must be a list of columns, such as [{fields!r}], got {fields!r}", option="fields")
    if listing is not None and unpacked is not None:
        raise ConfigError("listing must not be named beside unpacked, where a listing is kept", option="listing")
    source = source_of(path, split, filesystem)
    wanted = WantedColumns(source, image_column, label_column, fields)
    asked = {
        "image_column": image_column,
        "label_column": label_column,
        "fields": None if fields is None else tuple(fields),
    }
    state = [source.fingerprint, source.files]
    target = None if unpacked is None else locate(unpacked, None)

    def make() -> Listing:
        found = unpacked_images(source, wanted, target) if target is not None else placed(source, wanted)
        table = table_of(found.places, found.known)
        about = {"state": state, "folder": found.folder, "images": found.images}
        fingerprint = fingerprint_of(table, found.class_names)
        return Listing(_WRITER, source.where.root, asked, found.class_names, fingerprint, table, about)

    def is_current(kept: Listing) -> bool:
        is_same = isinstance(kept.files, dict) and kept.files.get("state") == state
        return is_same and (target is None or is_there(target, kept.files["images"]))

    found = listed_once(
        listing if unpacked is None else listing_in(unpacked),
        make,
        writer=_WRITER,
        root=source.where.root,
        options=asked,
        fields=None,
        is_current=is_current,
    )
    if found.files["folder"] is not None:
        return found.dataset(locate(found.files["folder"], None))
    return found.dataset(source.where if target is None else target, found.files["images"])
