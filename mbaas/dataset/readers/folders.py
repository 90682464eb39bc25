"""Readers of files that are one sample each: images, audio, arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.tree import FileKind, list_tree

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

_IMAGES = FileKind("read_images", "images", "cat/1.jpg, dog/2.jpg", IMAGE_EXTENSIONS)
_AUDIO = FileKind("read_audio", "recordings", "yes/1.wav, no/2.wav", AUDIO_EXTENSIONS)
_ARRAYS = FileKind("read_arrays", "arrays", "ill/1.npy, well/2.npy", ARRAY_EXTENSIONS)


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
    folder, then by name.

    Links are followed, except to a folder that contains them. Broken links, hidden files and folders (`.name`), files
    directly below `path`, files with other endings, pipes and devices are left out. Unless `extensions` is given, a
    warning counts files with other endings, except notes and annotations such as ``.txt``. Another warning counts
    images whose names are not UTF-8, because a URI cannot express them.

    A class without images is an error, as in torchvision. It is usually a mistake, and leaving it out would shift the
    labels of later classes.

    Memory: 32 bytes plus the name of each image, with names held twice at the peak, plus the file system's listing of
    one class (eight classes if remote). `tests/dataset/test_scale.py` measures it.

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
        DatasetError: `path` does not exist or is not a folder, there are no class folders, a class has no images, or a
            folder cannot be listed or is reached by links in more than a thousand ways. Also if `listing` cannot be
            read or written, is damaged, or belongs to another root or other endings.
        ConfigError: `extensions` is empty, or an ending lacks its dot.
    """
    return list_tree(_IMAGES, path, filesystem, extensions, listing, classes=classes)


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
        path: a local path, or a URI that `pyarrow.fs` opens; with `filesystem`, a path within it.
        classes: whether the folders directly below `path` are the classes. If not, files may be at any depth, and have
            no label.
        filesystem: file system of `path`, for credentials or file systems that a URI cannot express.
        extensions: endings of audio file names, each with its dot; case does not matter.
        listing: a Parquet file that caches the listing, as in `read_images`.

    Raises:
        DatasetError: as for `read_images`.
        ConfigError: `extensions` is empty, or an ending lacks its dot.
    """
    return list_tree(_AUDIO, path, filesystem, extensions, listing, classes=classes)


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
        path: a local path, or a URI that `pyarrow.fs` opens; with `filesystem`, a path within it.
        classes: whether the folders directly below `path` are the classes. If not, files may be at any depth, and have
            no label.
        filesystem: file system of `path`, for credentials or file systems that a URI cannot express.
        extensions: endings of array file names, each with its dot, such as ".raw" for raw files; case does not matter.
        listing: a Parquet file that caches the listing, as in `read_images`.

    Raises:
        DatasetError: as for `read_images`.
        ConfigError: `extensions` is empty, or an ending lacks its dot.
    """
    return list_tree(_ARRAYS, path, filesystem, extensions, listing, classes=classes)
