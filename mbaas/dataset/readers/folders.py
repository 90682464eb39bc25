"""Reads files that are one sample each: images, audio or arrays, with or without one folder per class."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.fs
from numpy.typing import NDArray
from pyarrow.fs import FileSelector, FileType

from mbaas.base.units import counted, some
from mbaas.base.validation import knows_names
from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.listing import Listing, listed_once
from mbaas.dataset.storage.faults import dataset_errors, message_of
from mbaas.dataset.storage.location import Location, join, locate
from mbaas.dataset.table import table_of
from mbaas.errors import ConfigError, DatasetError
from mbaas.samples.fields import LABEL

IMAGE_EXTENSIONS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".jfi", ".jif", ".pjpeg", ".pjp", ".png", ".apng", ".webp", ".bmp", ".dib",
)  # fmt: skip
"""Default extensions of `read_images`: all formats that the engines decode."""

AUDIO_EXTENSIONS = (
    ".wav", ".wave", ".bwf", ".rf64", ".w64", ".flac", ".mp3", ".mp2", ".mpga", ".ogg", ".oga", ".opus",
    ".aif", ".aiff", ".aifc", ".caf", ".au", ".snd", ".voc", ".sph", ".nist", ".sf", ".ircam",
    ".avr", ".fap", ".iff", ".paf", ".pvf", ".sds", ".svx", ".8svx", ".wve", ".xi",
)  # fmt: skip
"""Default extensions of `read_audio`: the usual ones of all formats that libsndfile decodes."""

ARRAY_EXTENSIONS = (".npy", ".npz")
"""Default extensions of `read_arrays`."""


@dataclass(frozen=True)
class _FileKind:
    """The kind of files in a tree.

    Attributes:
        writer: name of the function that lists them; a saved listing contains it.
        plural: the files' name in messages.
        example: names of two classes and of a file in each, for messages.
        endings: the default extensions.
    """

    writer: str
    plural: str
    example: str
    endings: tuple[str, ...]


_IMAGES = _FileKind("read_images", "images", "cat/1.jpg, dog/2.jpg", IMAGE_EXTENSIONS)
_AUDIO = _FileKind("read_audio", "audio files", "yes/1.wav, no/2.wav", AUDIO_EXTENSIONS)
_ARRAYS = _FileKind("read_arrays", "arrays", "ill/1.npy, well/2.npy", ARRAY_EXTENSIONS)


@knows_names
def read_images(
    path: str | os.PathLike[str],
    *,
    classes: bool = True,
    filesystem: pyarrow.fs.FileSystem | None = None,
    extensions: Sequence[str] = IMAGE_EXTENSIONS,
    listing: str | os.PathLike[str] | None = None,
) -> Dataset:
    """List the images of a class-per-folder tree, or of any tree, without reading them.

    The rules follow torchvision's `ImageFolder`. The folders directly below `path` are the classes, labelled in
    the order of their sorted names. An image may be at any depth below its class. The images of a class are ordered by
    folder, then by name. A class without images is an error, because leaving it out would shift later labels.

    Links are followed, except to a folder that contains them. Broken links, hidden files and folders (`.name`), files
    directly below `path`, files with other endings, pipes and devices are left out. Unless `extensions` is given, a
    warning counts files with other endings, except notes and annotations such as ``.txt``. Another warning counts
    images whose names are not UTF-8, because a URI cannot express them.

    Args:
        path: a local path, or a URI that `pyarrow.fs` opens (`s3://bucket/train`, `gs://`, `hdfs://`, `file://`); with
            `filesystem`, a path within it.
        classes: whether the folders directly below `path` are the classes. If not, images may be at any depth, also
            directly below `path`, and have no label.
        filesystem: file system of `path`, for credentials or file systems that a URI cannot express.
        extensions: endings of image names, each with its dot; case does not matter.
        listing: path or URI of a Parquet file that caches the listing. It is written if it does not exist. Otherwise it
            is read instead of listing the tree, which takes a second for a million images. Later changes go unnoticed:
            an image that was removed or changed its length is a bad sample. Delete the file to list again.

    Raises:
        DatasetError: `path` is not a folder, there are no class folders, a class has no images, or a folder cannot be
            listed. Also if `listing` cannot be read or written, is damaged, or belongs to another root or other
            options.
        ConfigError: `extensions` is empty, or an ending lacks its dot.
    """
    return _list_tree(_IMAGES, path, filesystem, extensions, listing, classes=classes)


@knows_names
def read_audio(
    path: str | os.PathLike[str],
    *,
    classes: bool = True,
    filesystem: pyarrow.fs.FileSystem | None = None,
    extensions: Sequence[str] = AUDIO_EXTENSIONS,
    listing: str | os.PathLike[str] | None = None,
) -> Dataset:
    """List audio files, for a pipeline that begins with `DecodeAudio`, without reading them.

    `read_images` documents the selection and order of files.

    Args:
        path, filesystem, listing: as for `read_images`.
        classes: whether the folders directly below `path` are the classes. If not, samples have no label.
        extensions: endings of file names, each with its dot; case does not matter.

    Raises:
        ConfigError, DatasetError: as for `read_images`.
    """
    return _list_tree(_AUDIO, path, filesystem, extensions, listing, classes=classes)


@knows_names
def read_arrays(
    path: str | os.PathLike[str],
    *,
    classes: bool = True,
    filesystem: pyarrow.fs.FileSystem | None = None,
    extensions: Sequence[str] = ARRAY_EXTENSIONS,
    listing: str | os.PathLike[str] | None = None,
) -> Dataset:
    """List files of arrays, for a pipeline that begins with `DecodeArray`, without reading them.

    The options of `DecodeArray` describe their format. `read_images` documents the selection and order of files.

    Args:
        path, filesystem, listing: as for `read_images`.
        classes: whether the folders directly below `path` are the classes. If not, samples have no label.
        extensions: endings of file names, each with its dot; case does not matter.

    Raises:
        ConfigError, DatasetError: as for `read_images`.
    """
    return _list_tree(_ARRAYS, path, filesystem, extensions, listing, classes=classes)


# ---- trees ----

_REMOTE_THREADS = 8  # they mostly wait for the server; local disks gain nothing
_COMPANIONS = (
    ".txt", ".md", ".rst", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".yaml", ".yml", ".html", ".pdf", ".py", ".sh",
    ".log", ".lab", ".textgrid", ".srt", ".vtt", ".md5", ".sha1", ".sha256", ".db", ".ini", ".lnk", ".url",
)  # fmt: skip
"""Endings of notes, annotations, checksums and desktop files that are left out without a warning."""

_MOST_WAYS = 1000  # paths from a class to one folder: twenty folders with two links each can make a million
_CALLER = 7  # stack frames from a warning to the reader's caller, through `_list_tree`, `listed_once` and `make`


def _list_tree(
    kind: _FileKind,
    path: str | os.PathLike[str],
    filesystem: pyarrow.fs.FileSystem | None,
    extensions: Sequence[str],
    listing: str | os.PathLike[str] | None,
    *,
    classes: bool,
) -> Dataset:
    """List the files of a tree; `mbaas.read_images` documents the rules, the arguments and the errors."""
    endings = _checked_endings(extensions)
    where = locate(path, filesystem).for_listing()
    options = {"extensions": endings, "classes": classes}

    def make() -> Listing:
        names = _class_folders(kind, where, endings) if classes else ("",)
        list_one, things = partial(_list_folder, kind, where, endings), "classes" if classes else "folders"
        folders = where.read_all(list_one, names, things, remote=_REMOTE_THREADS, local=1)
        _refuse_or_warn(kind, where, folders, endings)
        counts = [len(listing.uris) for listing in folders]
        spans = [
            pa.concat_arrays([listing.uris for listing in folders]),
            pa.array(np.zeros(sum(counts), np.int64)),  # each sample is a whole file and begins at its first byte
            pa.array(np.concatenate([listing.lengths for listing in folders])),
        ]
        labels = {LABEL.name: pa.array(np.repeat(np.arange(len(folders)), counts))} if classes else {}
        return Listing.of(names if classes else (), table_of(spans, labels))

    fields = [LABEL.name] if classes else []
    found = listed_once(listing, make, writer=kind.writer, root=where.root, options=options, fields=fields)
    return found.dataset(where)


@dataclass(frozen=True)
class _FolderListing:
    """The files of one class, or of the whole tree (name ""), in order.

    Attributes:
        uris: large_string[n], relative to the root.
        lengths: int64[n], bytes.
        left_out: number of files with other endings.
        example: the first of these by name, or "".
        unnamed: file names that are not UTF-8.
    """

    name: str
    uris: pa.Array
    lengths: NDArray[np.int64]
    left_out: int
    example: str
    unnamed: tuple[bytes, ...]


def _checked_endings(extensions: Sequence[str]) -> tuple[str, ...]:
    endings = (extensions,) if isinstance(extensions, str) else tuple(extensions)
    if not endings:
        raise ConfigError("extensions must name at least one ending, such as '.jpg', got none")
    for ending in endings:
        if not ending.startswith("."):
            raise ConfigError(f"each of extensions must begin with a dot, as '.jpg' does, got {ending!r}")
    return tuple(ending.lower() for ending in endings)


def _check_folder(where: Location, expected: str) -> None:
    what = where.filesystem.get_file_info(where.base).type
    if what != FileType.Directory:
        problem = "does not exist" if what == FileType.NotFound else "is a file"
        raise DatasetError(f"{where.root} {problem}; {expected}")


def _class_folders(kind: _FileKind, where: Location, endings: tuple[str, ...]) -> tuple[str, ...]:
    expected = f"expected a folder with a folder of {kind.plural} for each class, as in {kind.example}"
    with _blaming(where.root):
        _check_folder(where, expected)
        found = where.filesystem.get_file_info(FileSelector(where.base))
    # Files next to the class folders are ignored, whatever their names; a folder would be a class.
    named = [(entry, _decoded(entry)) for entry in found]
    for entry, name in named:
        if isinstance(name, bytes) and entry.type == FileType.Directory:
            raise DatasetError(f"{where.root}: the name of the class folder {name!r} is not UTF-8; rename it")
    entries = [entry for entry, name in named if isinstance(name, str) and not entry.base_name.startswith(".")]
    # Some file systems list a folder twice, or one without a name.
    folders = sorted({entry.base_name for entry in entries if entry.type == FileType.Directory} - {""})
    if not folders:
        files = [entry.base_name for entry in entries if entry.base_name.lower().endswith(endings)]
        held = f"{kind.plural}, for instance {files[0]}, but no folders" if files else "no folders"
        hint = "; classes=False reads them without labels" if files else ""
        raise DatasetError(f"{where.root} holds {held}; {expected}{hint}")
    return tuple(folders)


def _list_folder(kind: _FileKind, where: Location, endings: tuple[str, ...], name: str) -> _FolderListing:
    # The name of the whole tree is "". The file system's bulky listing is freed at the end of this call.
    folder, shown = (join(where.base, name), join(where.root, name)) if name else (where.base, where.root)
    # Some file systems add or drop a leading slash in their answers.
    top = f"{folder.strip('/')}/".lstrip("/")
    rows: list[tuple[str, int]] = []
    left_out, example = 0, ""
    unnamed: list[bytes] = []
    with _blaming(shown):
        if not name:
            _check_folder(where, f"expected a folder of {kind.plural}")
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
                raise DatasetError(f"cannot list {shown}: its file system says that {whole!r} is in it")
            path = path.lstrip("/")
            if path.lower().endswith(endings):
                if entry.size is None or entry.size < 0:  # pyarrow only maps -1 to None
                    raise DatasetError(f"{join(where.root, path)}: its file system does not tell how long the file is")
                rows.append((path, entry.size))
            elif not path.lower().endswith(_COMPANIONS):
                left_out, example = left_out + 1, min(example or path, path)
    # By folder, then by name, like torchvision: whole paths would put "cat/a-b/1.jpg" before "cat/a/1.jpg".
    rows.sort(key=lambda row: row[0].rpartition("/"))
    if twice := next((path for (path, _), (following, _) in pairwise(rows) if path == following), None):
        raise DatasetError(f"cannot list {shown}: its file system names {twice!r} twice")
    uris = pa.array([path for path, _ in rows], pa.large_string())
    lengths = np.array([size for _, size in rows], np.int64)
    return _FolderListing(name, uris, lengths, left_out, example, tuple(unnamed))


def _entries(where: Location, folder: str) -> Iterator[pyarrow.fs.FileInfo]:
    if not where.is_local:  # these have no links
        yield from where.filesystem.get_file_info(FileSelector(folder, recursive=True))
        return
    ways: Counter[bytes] = Counter()
    top = folder.encode()  # bytes, because names below may not be valid text
    outer = frozenset((os.path.realpath(where.base.encode()), os.path.realpath(top)))
    ahead = [(top, outer)]  # each with its parent folders, links resolved
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
    # Names on old disks or in archives may not be UTF-8; these are returned as bytes.
    try:
        return str(entry.path)
    except UnicodeDecodeError as error:
        return bytes(error.object)


@contextmanager
def _blaming(folder: str) -> Iterator[None]:
    """Convert an exception of a file system to a DatasetError that names the folder."""
    with dataset_errors(f"cannot list {folder}"):
        try:
            yield
        except PermissionError as error:
            wanted = "expected a folder that may be read"
            raise DatasetError(f"cannot list {folder}: {wanted}; {message_of(error)}") from error


def _refuse_or_warn(kind: _FileKind, where: Location, folders: list[_FolderListing], endings: tuple[str, ...]) -> None:
    """Raise DatasetError if a folder is empty; warn of files that are left out, first of those that explain it."""
    if unnamed := [path for listing in folders for path in listing.unnamed]:
        warnings.warn(
            f"{where.root}: left out {len(unnamed)} {kind.plural} whose names are not UTF-8, for instance "
            f"{unnamed[0]!r}; rename them to train on them, too",
            stacklevel=_CALLER,
        )
    if empty := [listing.name for listing in folders if not len(listing.uris)]:
        named = some([*map(repr, empty)], 5)
        lack, remedy = f"{len(empty)} of {len(folders)} class folders hold no file", f": {named}; remove them, or"
        if empty == [""]:
            lack, remedy = "it holds no file", ";"
        raise DatasetError(
            f"{where.root}: {lack} that ends in {' or '.join(endings)}{remedy} name other endings with extensions="
        )
    left_out = [listing for listing in folders if listing.left_out]
    if left_out and endings == kind.endings:  # explicit endings mean that the others are left out on purpose
        example, count = min(listing.example for listing in left_out), sum(listing.left_out for listing in left_out)
        warnings.warn(
            f"{where.root}: left out {counted(count, 'file')} whose names do not end as {kind.plural} do, for "
            f"instance {example!r}; name the endings to read with extensions=",
            stacklevel=_CALLER,
        )
