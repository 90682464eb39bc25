"""Reading the datasets of Hugging Face: images in Arrow files by their places there, or in files of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.huggingface_columns import WantedColumns
from mbaas.dataset.huggingface_images import placed, unpacked_images
from mbaas.dataset.huggingface_source import source_of
from mbaas.dataset.kept_listing import Listing, listed_once
from mbaas.dataset.location import locate
from mbaas.dataset.table import fingerprint_of, table_of
from mbaas.dataset.unpacking import is_there, listing_in
from mbaas.errors import ConfigError
from mbaas.fields import IMAGE

_WRITER = "read_huggingface"


def read_huggingface(
    dataset: Any,
    *,
    split: str | None = None,
    image: str = IMAGE,
    label: str | None = None,
    fields: Sequence[str] | None = None,
    filesystem: pyarrow.fs.FileSystem | None = None,
    listing: str | os.PathLike[str] | None = None,
    unpacked: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Find the images of a dataset of the package `datasets`; read none of them.

    Where the images are in the dataset's Arrow files, which are not compressed, each is read later by its place there,
    in any order. So all nodes must be able to read these files: those of a `datasets.Dataset` are on this machine,
    usually in ``~/.cache/huggingface``; ``save_to_disk`` writes them to a shared disk or a bucket, and ``unpacked`` the
    images alone. Where the column has paths of files, these are read. Whatever `select`, `shuffle` and the like have
    chosen comes in that order; formats and transforms that were set are not applied.

    Args:
        dataset: a `datasets.Dataset`, a `DatasetDict`, or a folder that ``save_to_disk`` wrote, by its local path or a
            URI that `pyarrow.fs` opens. To read a folder the package `datasets` is not needed.
        split: which one, of a `DatasetDict`.
        image: the column with encoded images or their paths: a feature `Image`, binary, or text.
        label: the column that minibatches have as ``label``; default: that of this name, if there is one. The names of
            a feature `ClassLabel` are the classes (`Dataset.class_names`); if it is text, its distinct values, sorted,
            are. Without it minibatches have no ``label``.
        fields: the other columns that minibatches have, of numbers, or of lists or texts as `read_manifest` takes them;
            default: all but those of texts. Columns within a column are called ``objects.bbox``, as ``flatten`` calls
            them.
        filesystem: where the folder is, for credentials or file systems that a URI cannot express.
        listing: a Parquet file, by its path or URI, in which is kept what was found: written if it is not there, or if
            the dataset has another fingerprint by now or its files another size or time; else read.
        unpacked: a folder, by its path or URI, that all nodes can read, into which the images are written once, one
            after the other. It is needed where single images cannot be read: from files that are compressed, and from
            memory. It has a listing of its own.

    Raises:
        ConfigError: a split that is not named, or there is not; a column that there is not, of a name that is taken, or
            whose values no field can have.
        DatasetError: a folder or file cannot be read or is damaged, or single images in it cannot; an image or a value
            is missing; ``listing`` or ``unpacked`` cannot be read or written, or is of other options.
    """
    if isinstance(fields, str):
        raise ConfigError(f"fields must be a list of columns, such as [{fields!r}], got {fields!r}", option="fields")
    if listing is not None and unpacked is not None:
        raise ConfigError("listing must not be named beside unpacked, where a listing is kept", option="listing")
    source = source_of(dataset, split, filesystem)
    wanted = WantedColumns(source, image, label, fields)
    asked = {"image": image, "label": label, "fields": None if fields is None else tuple(fields)}
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
