"""Listing the images of a tree with one folder per class."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.fs
from numpy.typing import NDArray
from pyarrow.fs import FileSelector, FileType

from mbaas.dataset.base import Dataset
from mbaas.dataset.faults import s3_attempts, said
from mbaas.dataset.kept_listing import Listing, listed_once
from mbaas.dataset.location import Location, join, locate
from mbaas.dataset.table import SCHEMA, TableDataset, fingerprint_of
from mbaas.errors import ConfigError, DatasetError
from mbaas.fields import LABEL
from mbaas.progress import track

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
"""What `read_images` takes for images unless told otherwise: what the engines decode."""

# Images to others, but not to our engines: to leave them out in silence could halve somebody's dataset.
_OTHER_IMAGES = (".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".gif", ".avif", ".heic", ".jxl")
_WRITER = "read_images"
_REMOTE_THREADS = 8  # they wait for a server most of the time; local disks gain nothing
_MOST_WAYS = 1000  # from a class to one and the same folder: twenty folders with two links each can make a million
_CALLER = 5  # frames from a warning to the line that called `read_images`: through its `make`, which is called for it
_S3_ATTEMPTS = 5  # of each request; a class of a million images is listed by a thousand of them


def read_images(
    uri: str | os.PathLike[str],
    *,
    filesystem: pyarrow.fs.FileSystem | None = None,
    extensions: Sequence[str] = IMAGE_EXTENSIONS,
    listing: str | os.PathLike[str] | None = None,
) -> Dataset:
    """List the images of a class-per-folder tree; read none of them.

    As torchvision's `ImageFolder` does: the folders right below `uri` are the classes, labelled in the
    order of their sorted names; an image may lie at any depth below its class; images of a class are
    ordered by folder, then by name. Links are followed, except to a folder that they lie in, which would never
    end. Left out are links that lead nowhere, hidden files and folders (`.name`), files right below `uri`, files
    with other endings, and what is no file (pipes, devices). A warning counts files that others take for images,
    and images whose names are not UTF-8, which a URI cannot name.

    A class without images is an error, as in torchvision: it is a slip more often than a wish, and leaving it
    out would shift the labels of the classes after it.

    Memory: 32 bytes and the name for each image, the names twice at the peak, and the file system's own
    listing of one class at a time (of eight at a time if it is remote); `tests/dataset/test_scale.py`
    measures it.

    Args:
        uri: a local path, or a URI that `pyarrow.fs` opens (`s3://bucket/train`, `gs://`, `hdfs://`, `file://`);
            with `filesystem`, a path within that.
        filesystem: where `uri` is, for credentials or file systems that a URI cannot express.
        extensions: endings of the names of images, in any case, each with its dot.
        listing: a Parquet file, by its path or URI, in which the listing is kept: written if it is not there, else
            read instead of listing anything, which takes a second for a million images. It knows nothing of what
            changed since: an image that is gone or has another length is a bad sample. Remove the file to list anew.

    Raises:
        DatasetError: nothing at `uri`, not a folder, no class folders, a class without images, a folder
            that cannot be listed, or one that links lead to in more than a thousand ways; or `listing` cannot be
            read or written, is damaged, or of another root or other endings.
        ConfigError: `extensions` is empty, or an ending lacks its dot.
    """
    endings = _checked_endings(extensions)
    where = locate(uri, filesystem)
    where = replace(where, filesystem=s3_attempts(where.filesystem, _S3_ATTEMPTS))
    asked = {"extensions": endings}

    def make() -> Listing:
        class_names = _class_folders(where, endings)
        classes = _list_classes(where, class_names, endings)
        _warn_of_unnamed_images(where, classes)  # first: a class of which nothing is left is then no riddle
        _refuse_empty_classes(where, classes, endings)
        _warn_of_other_images(where, classes, endings)
        table = _table_of(classes)
        return Listing(_WRITER, where.root, asked, class_names, fingerprint_of(table, class_names), table)

    found = listed_once(listing, make, writer=_WRITER, root=where.root, options=asked, fields=[LABEL.name])
    return TableDataset(
        root=where.root,
        class_names=found.class_names,
        fingerprint=found.fingerprint,
        table=found.table,
        filesystem=where.filesystem,
        base=where.base,
    )


@dataclass(frozen=True)
class _ClassListing:
    """The images of one class, in order.

    Attributes:
        name: of the class.
        uris: large_string[n], relative to the root.
        lengths: int64[n], bytes.
        left_out: number of images in formats that were not asked for.
        unnamed: the names of images that are not UTF-8.
    """

    name: str
    uris: pa.Array
    lengths: NDArray[np.int64]
    left_out: int
    unnamed: tuple[bytes, ...]


def _checked_endings(extensions: Sequence[str]) -> tuple[str, ...]:
    endings = (extensions,) if isinstance(extensions, str) else tuple(extensions)
    if not endings:
        raise ConfigError("extensions must name at least one ending, such as '.jpg', got none")
    for ending in endings:
        if not ending.startswith("."):
            raise ConfigError(f"each of extensions must begin with a dot, as '.jpg' does, got {ending!r}")
    return tuple(ending.lower() for ending in endings)


def _class_folders(where: Location, endings: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sorted names of the folders right below the root."""
    expected = "expected a folder with a folder of images for each class, as in cat/1.jpg, dog/2.jpg"
    with _blaming(where.root):
        kind = where.filesystem.get_file_info(where.base).type
        if kind != FileType.Directory:
            problem = "does not exist" if kind == FileType.NotFound else "is a file"
            raise DatasetError(f"{where.root} {problem}; {expected}")
        found = where.filesystem.get_file_info(FileSelector(where.base))
    # A file beside the classes is none of ours, whatever its name; a folder would be a class.
    named = [(entry, _decoded(entry)) for entry in found]
    for entry, name in named:
        if isinstance(name, bytes) and entry.type == FileType.Directory:
            raise DatasetError(f"{where.root}: the name of the class folder {name!r} is not UTF-8; rename it")
    entries = [entry for entry, name in named if isinstance(name, str) and not entry.base_name.startswith(".")]
    # Each once, and none without a name, whatever the file system answers.
    folders = sorted({entry.base_name for entry in entries if entry.type == FileType.Directory} - {""})
    if not folders:
        images = [entry.base_name for entry in entries if entry.base_name.lower().endswith(endings)]
        held = f"images, for instance {images[0]}, but no folders" if images else "no folders"
        raise DatasetError(f"{where.root} holds {held}; {expected}")
    return tuple(folders)


def _list_classes(where: Location, names: Sequence[str], endings: tuple[str, ...]) -> list[_ClassListing]:
    list_one = partial(_list_class, where, endings)
    if isinstance(where.filesystem, pyarrow.fs.LocalFileSystem):
        return [*track(map(list_one, names), "classes", len(names))]
    with ThreadPoolExecutor(_REMOTE_THREADS, thread_name_prefix="mbaas-listing") as pool:
        return [*track(pool.map(list_one, names), "classes", len(names))]


def _list_class(where: Location, endings: tuple[str, ...], name: str) -> _ClassListing:
    """List one class; the file system's own, bulky listing lives no longer than this call."""
    folder = join(where.base, name)
    # Some file systems answer with a leading slash that they were not asked with, or without one.
    top = f"{folder.lstrip('/')}/"
    rows: list[tuple[str, int]] = []
    left_out, unnamed = 0, []
    with _blaming(join(where.root, name)):
        for entry in _entries(where, folder):
            whole = _decoded(entry)
            if isinstance(whole, bytes):
                if entry.type == FileType.File and whole.lower().endswith(tuple(map(str.encode, endings))):
                    unnamed.append(whole)
                continue
            path = f"{name}/{whole.lstrip('/').removeprefix(top)}"
            if entry.type != FileType.File or "/." in path:
                continue
            if not whole.lstrip("/").startswith(top):
                raise DatasetError(
                    f"cannot list {join(where.root, name)}: its file system says that {whole!r} is in it"
                )
            if path.lower().endswith(endings):
                rows.append((path, _known_size(where, path, entry.size)))
            elif path.lower().endswith(_OTHER_IMAGES):
                left_out += 1
    # By folder, then by name, as torchvision: whole paths would put "cat/a-b/1.jpg" before "cat/a/1.jpg".
    rows.sort(key=lambda row: row[0].rpartition("/"))
    if twice := next((path for (path, _), (following, _) in pairwise(rows) if path == following), None):
        raise DatasetError(f"cannot list {join(where.root, name)}: its file system names {twice!r} twice")
    uris = pa.array([path for path, _ in rows], pa.large_string())
    return _ClassListing(name, uris, np.array([size for _, size in rows], np.int64), left_out, tuple(unnamed))


def _entries(where: Location, folder: str) -> Iterator[pyarrow.fs.FileInfo]:
    """Find what lies at any depth below a folder."""
    if not isinstance(where.filesystem, pyarrow.fs.LocalFileSystem):  # without links
        yield from where.filesystem.get_file_info(FileSelector(folder, recursive=True))
        return
    ways: Counter[bytes] = Counter()
    top = folder.encode()  # as bytes, because names below it may be no text
    outer = frozenset((os.path.realpath(where.base.encode()), os.path.realpath(top)))
    ahead = [(top, outer)]  # each with the folders that it lies in, links resolved
    while ahead:
        path, within = ahead.pop()
        for entry in where.filesystem.get_file_info(FileSelector(path)):
            yield entry
            name = _decoded(entry)
            below = name if isinstance(name, bytes) else name.encode()
            if entry.type != FileType.Directory or os.path.basename(below).startswith(b"."):  # noqa: PTH119 (bytes)
                continue
            real = os.path.realpath(below)
            ways[real] += 1
            if ways[real] > _MOST_WAYS:
                raise DatasetError(f"{folder}: links lead to {os.fsdecode(real)!r} in more than {_MOST_WAYS:,} ways")
            if real not in within:
                ahead.append((below, within | {real}))


def _decoded(entry: pyarrow.fs.FileInfo) -> str | bytes:
    """Return the path of an entry; its bytes if they are not UTF-8, as a name of an old disk or archive may be."""
    try:
        return str(entry.path)
    except UnicodeDecodeError as error:
        return bytes(error.object)


def _known_size(where: Location, path: str, size: int | None) -> int:
    if size is None or size < 0:  # of which pyarrow only takes -1 for None
        raise DatasetError(f"{join(where.root, path)}: its file system does not tell how long the file is")
    return size


@contextmanager
def _blaming(folder: str) -> Iterator[None]:
    """Turn what a file system raises into a DatasetError that names the folder."""
    try:
        yield
    except DatasetError:
        raise
    except PermissionError as error:
        raise DatasetError(f"cannot list {folder}: expected a folder that may be read; {said(error)}") from error
    except Exception as error:  # a file system of somebody else's raises what it likes
        raise DatasetError(f"cannot list {folder}: {said(error)}") from error


def _refuse_empty_classes(where: Location, classes: list[_ClassListing], endings: tuple[str, ...]) -> None:
    empty = [listing.name for listing in classes if not len(listing.uris)]
    if empty:
        some = ", ".join(map(repr, empty[:5])) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        raise DatasetError(
            f"{where.root}: {len(empty)} of {len(classes)} class folders hold no file that ends in "
            f"{' or '.join(endings)}: {some}; remove them, or name other endings with extensions="
        )


def _warn_of_other_images(where: Location, classes: list[_ClassListing], endings: tuple[str, ...]) -> None:
    left_out = sum(listing.left_out for listing in classes)
    if left_out:
        first = next(listing.name for listing in classes if listing.left_out)
        warnings.warn(
            f"{where.root}: left out {left_out} images that do not end in {' or '.join(endings)}, "
            f"the first of them in class {first!r}",
            stacklevel=_CALLER,
        )


def _warn_of_unnamed_images(where: Location, classes: list[_ClassListing]) -> None:
    unnamed = [path for listing in classes for path in listing.unnamed]
    if unnamed:
        warnings.warn(
            f"{where.root}: left out {len(unnamed)} images whose names are not UTF-8, for instance {unnamed[0]!r}; "
            "rename them to train on them, too",
            stacklevel=_CALLER,
        )


def _table_of(classes: list[_ClassListing]) -> pa.Table:
    """Make one table of all classes, each column in one chunk."""
    counts = [len(listing.uris) for listing in classes]
    columns = [
        pa.concat_arrays([listing.uris for listing in classes]),
        pa.array(np.zeros(sum(counts), np.int64)),  # each image is a file of its own and begins at its first byte
        pa.array(np.concatenate([listing.lengths for listing in classes])),
        pa.array(np.repeat(np.arange(len(classes)), counts)),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)
