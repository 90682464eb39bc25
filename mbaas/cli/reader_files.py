"""The readers in a feed's file: names and options.

::

    data:
      read_manifest: {path: photos.parquet, label_column: species, fields: [age]}
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from mbaas.errors import ConfigError
from mbaas.validation import options

PATHS = {
    "read_images": ("path", "listing"),
    "read_manifest": ("path", "root"),
    "read_webdataset": ("path", "listing"),
    "read_tfrecord": ("path", "listing"),
    "read_parquet": ("path", "unpacked"),
    "read_coco": ("path", "images", "listing"),
    "read_audio": ("path", "listing"),
    "read_arrays": ("path", "listing"),
    "read_huggingface": ("path", "listing", "unpacked"),
}
"""Reader -> its options that are paths; the first one names the data."""


def form(said: Any) -> str:
    """Return "mapping" for options, or "value"."""
    return "mapping" if isinstance(said, dict) else "value"


@options(within="data.read_images")
class ImagesFile:
    """A folder of images."""

    path: str
    """The folder: relative to this file, absolute, or a URI."""

    classes: bool = True
    """Use the top-level folders as classes; otherwise images have no label."""

    extensions: tuple[str, ...] = (
        ".jpg", ".jpeg", ".jpe", ".jfif", ".jfi", ".jif", ".pjpeg", ".pjp", ".png", ".apng", ".webp", ".bmp", ".dib",
    )  # fmt: skip
    """Extensions of image files, each with its dot."""

    listing: str | None = None
    """A Parquet file that stores the listing, written if it is missing: relative to this file, absolute, or a URI."""


@options(within="data.read_manifest")
class ManifestFile:
    """A table with a row for each sample, which names its file."""

    path: str
    """The table: CSV, JSON lines or Parquet; relative to this file, absolute, or a URI."""

    uri_column: str = "uri"
    """The column with paths or URIs of the files."""

    label_column: str | None = None
    """The column for ``label`` in minibatches; default: the column with this name, if it exists."""

    fields: tuple[str, ...] | None = None
    """The other columns in minibatches; default: all except string columns."""

    length_column: str | None = None
    """The column with the files' lengths in bytes; default: lengths are read from storage."""

    root: str | None = None
    """Base folder of the files: relative to this file, absolute, or a URI; default: the folder of the table."""

    encoding: str | None = None
    """The encoding of a CSV or JSON file, such as latin-1; default: UTF-8."""


@options(within="data.read_webdataset")
class WebdatasetFile:
    """Tar shards, in which the members of a sample are adjacent."""

    path: str
    """The shards: a path relative to this file or absolute, or a URI; {000000..000127} stands for a range of shard
    numbers."""

    image_column: str | tuple[str, ...] = ("jpg", "jpeg", "png", "webp")
    """Extensions of image members."""

    label_column: str | None = "cls"
    """The extension of label members, cls, or a key of each sample's .json."""

    fields: tuple[str, ...] = ()
    """Further keys of the .json to include in minibatches."""

    listing: str | None = None
    """A Parquet file that stores the index until a shard changes; relative to this file, absolute, or a URI."""


@options(within="data.read_tfrecord")
class TfrecordFile:
    """TFRecord files, with an Example in each record."""

    path: str
    """The files: a path relative to this file or absolute, or a URI; {00000..00127} stands for a range of file
    numbers."""

    image_column: str = "image/encoded"
    """The feature with the bytes of an image."""

    label_column: str | None = "image/class/label"
    """The feature for ``label`` in minibatches."""

    fields: tuple[str, ...] = ()
    """Further features to include in minibatches."""

    listing: str | None = None
    """A Parquet file that stores the index until a file changes; relative to this file, absolute, or a URI."""


@options(within="data.read_parquet")
class ParquetFile:
    """Parquet files with a column of encoded images."""

    path: str
    """The files: a path relative to this file or absolute, or a URI; {00000..00007} stands for a range of file
    numbers."""

    unpacked: str
    """A folder readable from all nodes, into which the images are unpacked once: relative to this file, or a URI."""

    image_column: str = "image"
    """The column with the images."""

    label_column: str | None = None
    """The column for ``label`` in minibatches; default: the column with this name, if it exists."""

    fields: tuple[str, ...] | None = None
    """The other columns in minibatches; default: all except string columns."""


@options(within="data.read_coco")
class CocoFile:
    """COCO annotations: the objects on images."""

    path: str
    """The JSON file of instances or key points: relative to this file, absolute, or a URI."""

    images: str
    """The base folder of the images: relative to this file, absolute, or a URI."""

    fields: tuple[str, ...] | None = None
    """The fields in minibatches, from boxes, labels, area, iscrowd, keypoints, segmentation and image_id; default: all
    except segmentation, which masks need."""

    keep_empty: bool = True
    """Include images without annotations."""

    listing: str | None = None
    """A Parquet file that stores the index until the JSON file changes; relative to this file, absolute, or a URI."""


@options(within="data.read_audio")
class AudioFile:
    """A folder of audio files."""

    path: str
    """The folder: relative to this file, absolute, or a URI."""

    classes: bool = True
    """Use the top-level folders as classes; otherwise audio files have no label."""

    extensions: tuple[str, ...] = (
        ".wav", ".wave", ".bwf", ".rf64", ".w64", ".flac", ".mp3", ".mp2", ".mpga", ".ogg", ".oga", ".opus",
        ".aif", ".aiff", ".aifc", ".caf", ".au", ".snd", ".voc", ".sph", ".nist", ".sf", ".ircam",
        ".avr", ".fap", ".iff", ".paf", ".pvf", ".sds", ".svx", ".8svx", ".wve", ".xi",
    )  # fmt: skip
    """Extensions of audio files, each with its dot."""

    listing: str | None = None
    """A Parquet file that stores the listing, written if it is missing: relative to this file, absolute, or a URI."""


@options(within="data.read_arrays")
class ArraysFile:
    """A folder of array files."""

    path: str
    """The folder: relative to this file, absolute, or a URI."""

    classes: bool = True
    """Use the top-level folders as classes; otherwise arrays have no label."""

    extensions: tuple[str, ...] = (".npy", ".npz")
    """Extensions of array files, each with its dot."""

    listing: str | None = None
    """A Parquet file that stores the listing, written if it is missing: relative to this file, absolute, or a URI."""


@options(within="data.read_huggingface")
class HuggingfaceFile:
    """A folder written by ``save_to_disk`` of Hugging Face datasets."""

    path: str
    """The folder: relative to this file, absolute, or a URI."""

    split: str | None = None
    """Name of the split, if the folder has several."""

    image_column: str = "image"
    """The column with the images, or their paths."""

    label_column: str | None = None
    """The column for ``label`` in minibatches; default: the column with this name, if it exists."""

    fields: tuple[str, ...] | None = None
    """The other columns in minibatches; default: all except string columns."""

    listing: str | None = None
    """A Parquet file that stores the index until a file changes; relative to this file, absolute, or a URI."""

    unpacked: str | None = None
    """A folder readable from all nodes, into which the images are unpacked once; needed if the files are compressed."""


@options(within="data")
class DataFile:
    """A reader and its options, for data other than a folder with image folders per class."""

    read_images: (
        Annotated[Annotated[str, Tag("value")] | Annotated[ImagesFile, Tag("mapping")], Discriminator(form)] | None
    ) = None
    """A folder of images: its path, or its options."""

    read_manifest: (
        Annotated[Annotated[str, Tag("value")] | Annotated[ManifestFile, Tag("mapping")], Discriminator(form)] | None
    ) = None
    """A table that names a file for each sample: its path, or its options."""

    read_webdataset: (
        Annotated[Annotated[str, Tag("value")] | Annotated[WebdatasetFile, Tag("mapping")], Discriminator(form)] | None
    ) = None
    """Tar shards: their path, or their options."""

    read_tfrecord: (
        Annotated[Annotated[str, Tag("value")] | Annotated[TfrecordFile, Tag("mapping")], Discriminator(form)] | None
    ) = None
    """TFRecord files: their path, or their options."""

    read_parquet: ParquetFile | None = None
    """Parquet files that contain images."""

    read_coco: CocoFile | None = None
    """Images with COCO annotations."""

    read_audio: (
        Annotated[Annotated[str, Tag("value")] | Annotated[AudioFile, Tag("mapping")], Discriminator(form)] | None
    ) = None
    """A folder with one folder of audio files per class: its path, or its options."""

    read_arrays: (
        Annotated[Annotated[str, Tag("value")] | Annotated[ArraysFile, Tag("mapping")], Discriminator(form)] | None
    ) = None
    """A folder with one folder of arrays per class: its path, or its options."""

    read_huggingface: (
        Annotated[Annotated[str, Tag("value")] | Annotated[HuggingfaceFile, Tag("mapping")], Discriminator(form)] | None
    ) = None
    """A folder written by ``save_to_disk`` of Hugging Face datasets: its path, or its options."""

    @property
    def reader(self) -> tuple[str, Any]:
        """Name and options of the reader.

        Raises:
            ConfigError: no reader is named, or several.
        """
        named = [(each.name, said) for each in fields(self) if (said := getattr(self, each.name)) is not None]
        if len(named) != 1:
            got = " and ".join(name for name, _ in named) or "none"
            raise ConfigError(f"name one of {', '.join(PATHS)}, got {got}")
        return named[0]
