"""Listing files of which each is a sample: images, recordings, arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.tree import FileKind, list_tree

IMAGE_EXTENSIONS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".jfi", ".jif", ".pjpeg", ".pjp", ".png", ".apng", ".webp", ".bmp", ".dib",
)  # fmt: skip
"""What `read_images` takes for images unless told otherwise: what the engines decode."""

AUDIO_EXTENSIONS = (
    ".wav", ".wave", ".bwf", ".rf64", ".w64", ".flac", ".mp3", ".mp2", ".mpga", ".ogg", ".oga", ".opus",
    ".aif", ".aiff", ".aifc", ".caf", ".au", ".snd", ".voc", ".sph", ".nist", ".sf", ".ircam",
    ".avr", ".fap", ".iff", ".paf", ".pvf", ".sds", ".svx", ".8svx", ".wve", ".xi",
)  # fmt: skip
"""What `read_audio` takes for recordings unless told otherwise: all that libsndfile decodes, by their usual endings."""

ARRAY_EXTENSIONS = (".npy", ".npz")
"""What `read_arrays` takes for arrays unless told otherwise."""

_IMAGES = FileKind("read_images", "images", "cat/1.jpg, dog/2.jpg", IMAGE_EXTENSIONS)
_AUDIO = FileKind("read_audio", "recordings", "yes/1.wav, no/2.wav", AUDIO_EXTENSIONS)
_ARRAYS = FileKind("read_arrays", "arrays", "ill/1.npy, well/2.npy", ARRAY_EXTENSIONS)


def read_images(
    uri: str | os.PathLike[str],
    *,
    classes: bool = True,
    filesystem: pyarrow.fs.FileSystem | None = None,
    extensions: Sequence[str] = IMAGE_EXTENSIONS,
    listing: str | os.PathLike[str] | None = None,
) -> Dataset:
    """List the images of a class-per-folder tree, or of any tree; read none of them.

    As torchvision's `ImageFolder` does: the folders right below `uri` are the classes, labelled in the
    order of their sorted names; an image may lie at any depth below its class; images of a class are
    ordered by folder, then by name. Links are followed, except to a folder that they lie in, which would never
    end. Left out are links that lead nowhere, hidden files and folders (`.name`), files right below `uri`, files
    with other endings, and what is no file (pipes, devices). Unless `extensions` is given, a warning counts the
    files with other endings, except notes and annotations such as ``.txt``. Another warning counts images whose
    names are not UTF-8, which a URI cannot name.

    A class without images is an error, as in torchvision: it is a slip more often than a wish, and leaving it
    out would shift the labels of the classes after it.

    Memory: 32 bytes and the name for each image, the names twice at the peak, and the file system's own
    listing of one class at a time (of eight at a time if it is remote); `tests/dataset/test_scale.py`
    measures it.

    Args:
        uri: a local path, or a URI that `pyarrow.fs` opens (`s3://bucket/train`, `gs://`, `hdfs://`, `file://`);
            with `filesystem`, a path within that.
        classes: whether the folders right below `uri` are the classes. If not, images lie at any depth below `uri`,
            also right below it, and have no label.
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
    # A listing that earlier versions kept says nothing of classes, which it has.
    asked = None if classes else {"classes": False}
    return list_tree(_IMAGES, uri, filesystem, extensions, listing, classes=classes, asked=asked)


def read_audio(
    uri: str | os.PathLike[str],
    *,
    classes: bool = True,
    filesystem: pyarrow.fs.FileSystem | None = None,
    extensions: Sequence[str] = AUDIO_EXTENSIONS,
    listing: str | os.PathLike[str] | None = None,
) -> Dataset:
    """List recordings, files of sound, for a pipeline that begins with `DecodeAudio`; read none of them.

    Which files of a tree are samples, and in which order, is as `read_images` says.

    Args:
        uri: a local path, or a URI that `pyarrow.fs` opens; with `filesystem`, a path within that.
        classes: whether the folders right below `uri` are the classes. If not, recordings lie at any depth below `uri`,
            and have no label.
        filesystem: where `uri` is, for credentials or file systems that a URI cannot express.
        extensions: endings of the names of recordings, in any case, each with its dot.
        listing: a Parquet file in which the listing is kept, as `read_images` keeps it.

    Raises:
        DatasetError: as `read_images`, of recordings.
        ConfigError: `extensions` is empty, or an ending lacks its dot.
    """
    return list_tree(_AUDIO, uri, filesystem, extensions, listing, classes=classes, asked={"classes": classes})


def read_arrays(
    uri: str | os.PathLike[str],
    *,
    classes: bool = True,
    filesystem: pyarrow.fs.FileSystem | None = None,
    extensions: Sequence[str] = ARRAY_EXTENSIONS,
    listing: str | os.PathLike[str] | None = None,
) -> Dataset:
    """List files of arrays, for a pipeline that begins with `DecodeArray`, which says what they are; read none of them.

    Which files of a tree are samples, and in which order, is as `read_images` says.

    Args:
        uri: a local path, or a URI that `pyarrow.fs` opens; with `filesystem`, a path within that.
        classes: whether the folders right below `uri` are the classes. If not, arrays lie at any depth below `uri`, and
            have no label.
        filesystem: where `uri` is, for credentials or file systems that a URI cannot express.
        extensions: endings of the names of arrays, in any case, each with its dot; of raw files such as ".raw".
        listing: a Parquet file in which the listing is kept, as `read_images` keeps it.

    Raises:
        DatasetError: as `read_images`, of arrays.
        ConfigError: `extensions` is empty, or an ending lacks its dot.
    """
    return list_tree(_ARRAYS, uri, filesystem, extensions, listing, classes=classes, asked={"classes": classes})
