"""What the file of `mbaas serve` says of each reader of data: its name, and its options.

::

    data:
      read_manifest: {path: photos.parquet, label: species, fields: [age]}
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from mbaas.errors import ConfigError
from mbaas.validation import options

PATHS = {
    "read_images": ("uri", "listing"),
    "read_manifest": ("path", "root"),
    "read_webdataset": ("shards", "listing"),
    "read_tfrecord": ("shards", "listing"),
    "read_parquet": ("shards", "unpacked"),
    "read_coco": ("annotations", "images", "listing"),
    "read_audio": ("uri", "listing"),
    "read_arrays": ("uri", "listing"),
    "read_huggingface": ("dataset", "listing", "unpacked"),
}
"""What reads data -> its options that are paths; the first one names the data."""


def form(said: Any) -> str:
    """Return whether a file says options, "mapping", or one value."""
    return "mapping" if isinstance(said, dict) else "value"


@options(within="data.read_images")
class ImagesFile:
    """A folder of images."""

    uri: str
    """The folder: relative to this file, absolute, or a URI."""

    classes: bool = True
    """Whether the folders right below it are the classes; if not, images have no label."""

    extensions: tuple[str, ...] = (
        ".jpg", ".jpeg", ".jpe", ".jfif", ".jfi", ".jif", ".pjpeg", ".pjp", ".png", ".apng", ".webp", ".bmp", ".dib",
    )  # fmt: skip
    """Endings of the names of images, each with its dot."""

    listing: str | None = None
    """A Parquet file that keeps the listing, written if it is not there: relative to this file, absolute, or a URI."""


@options(within="data.read_manifest")
class ManifestFile:
    """A table with a row for each sample, which names its file."""

    path: str
    """The table: CSV, JSON lines or Parquet; relative to this file, absolute, or a URI."""

    uri: str = "uri"
    """The column with paths or URIs of the files."""

    label: str | None = None
    """The column that minibatches have as ``label``; default: that of this name, if there is one."""

    fields: tuple[str, ...] | None = None
    """The other columns that minibatches have; default: all but those of texts."""

    length: str | None = None
    """The column with the files' lengths in bytes; default: they are asked for."""

    root: str | None = None
    """Where the files are: relative to this file, absolute, or a URI; default: the folder of the table."""

    encoding: str | None = None
    """The encoding of a CSV or JSON file, such as latin-1; default: UTF-8."""


@options(within="data.read_webdataset")
class WebdatasetFile:
    """Tar shards, in which the members of a sample follow one another."""

    shards: str
    """The shards: a path relative to this file or absolute, or a URI; {000000..000127} stands for a number of each."""

    image: str | tuple[str, ...] = ("jpg", "jpeg", "png", "webp")
    """Endings of the names of images."""

    label: str | None = "cls"
    """The ending of the members with labels, cls, or a key of each sample's .json."""

    fields: tuple[str, ...] = ()
    """Further keys of the .json that minibatches have."""

    listing: str | None = None
    """A Parquet file that keeps what was found, until a shard changes; relative to this file, absolute, or a URI."""


@options(within="data.read_tfrecord")
class TfrecordFile:
    """Files of TensorFlow's records, each with an Example."""

    shards: str
    """The files: a path relative to this file or absolute, or a URI; {00000..00127} stands for a number of each."""

    image: str = "image/encoded"
    """The feature with the bytes of an image."""

    label: str | None = "image/class/label"
    """The feature that minibatches have as ``label``."""

    fields: tuple[str, ...] = ()
    """Further features that minibatches have."""

    listing: str | None = None
    """A Parquet file that keeps what was found, until a file changes; relative to this file, absolute, or a URI."""


@options(within="data.read_parquet")
class ParquetFile:
    """Parquet files with a column of encoded images."""

    shards: str
    """The files: a path relative to this file or absolute, or a URI; {00000..00007} stands for a number of each."""

    unpacked: str
    """A folder that all nodes can read, into which the images are unpacked once: relative to this file, or a URI."""

    image: str = "image"
    """The column with the images."""

    label: str | None = None
    """The column that minibatches have as ``label``; default: that of this name, if there is one."""

    fields: tuple[str, ...] | None = None
    """The other columns that minibatches have; default: all but those of texts."""


@options(within="data.read_coco")
class CocoFile:
    """COCO's annotations: which objects are on images."""

    annotations: str
    """The JSON file of instances or key points: relative to this file, absolute, or a URI."""

    images: str
    """The folder below which the images are: relative to this file, absolute, or a URI."""

    fields: tuple[str, ...] | None = None
    """Those that minibatches have, of boxes, labels, area, iscrowd, keypoints, segmentation and image_id; default: all
    but segmentation, which masks need."""

    keep_empty: bool = True
    """Whether images without annotations are samples, too."""

    listing: str | None = None
    """A Parquet file that keeps what was found, until the JSON file changes; relative to this file, absolute, or a URI.
    """


@options(within="data.read_audio")
class AudioFile:
    """A folder of recordings."""

    uri: str
    """The folder: relative to this file, absolute, or a URI."""

    classes: bool = True
    """Whether the folders right below it are the classes; if not, recordings have no label."""

    extensions: tuple[str, ...] = (
        ".wav", ".wave", ".bwf", ".rf64", ".w64", ".flac", ".mp3", ".mp2", ".mpga", ".ogg", ".oga", ".opus",
        ".aif", ".aiff", ".aifc", ".caf", ".au", ".snd", ".voc", ".sph", ".nist", ".sf", ".ircam",
        ".avr", ".fap", ".iff", ".paf", ".pvf", ".sds", ".svx", ".8svx", ".wve", ".xi",
    )  # fmt: skip
    """Endings of the names of recordings, each with its dot."""

    listing: str | None = None
    """A Parquet file that keeps the listing, written if it is not there: relative to this file, absolute, or a URI."""


@options(within="data.read_arrays")
class ArraysFile:
    """A folder of files of arrays."""

    uri: str
    """The folder: relative to this file, absolute, or a URI."""

    classes: bool = True
    """Whether the folders right below it are the classes; if not, arrays have no label."""

    extensions: tuple[str, ...] = (".npy", ".npz")
    """Endings of the names of arrays, each with its dot."""

    listing: str | None = None
    """A Parquet file that keeps the listing, written if it is not there: relative to this file, absolute, or a URI."""


@options(within="data.read_huggingface")
class HuggingfaceFile:
    """A folder that ``save_to_disk`` of Hugging Face's datasets wrote."""

    dataset: str
    """The folder: relative to this file, absolute, or a URI."""

    split: str | None = None
    """Which one, if the folder has several."""

    image: str = "image"
    """The column with the images, or their paths."""

    label: str | None = None
    """The column that minibatches have as ``label``; default: that of this name, if there is one."""

    fields: tuple[str, ...] | None = None
    """The other columns that minibatches have; default: all but those of texts."""

    listing: str | None = None
    """A Parquet file that keeps what was found, until a file changes; relative to this file, absolute, or a URI."""

    unpacked: str | None = None
    """A folder that all nodes can read, into which the images are unpacked once; needed if the files are compressed."""


@options(within="data")
class DataFile:
    """Data that is not a folder of classes of images: the name of what reads it, and its options."""

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
    """TensorFlow's records: the path of their files, or their options."""

    read_parquet: ParquetFile | None = None
    """Parquet files with images inside."""

    read_coco: CocoFile | None = None
    """Images with COCO's annotations."""

    read_audio: (
        Annotated[Annotated[str, Tag("value")] | Annotated[AudioFile, Tag("mapping")], Discriminator(form)] | None
    ) = None
    """A folder with one folder of recordings per class: its path, or its options."""

    read_arrays: (
        Annotated[Annotated[str, Tag("value")] | Annotated[ArraysFile, Tag("mapping")], Discriminator(form)] | None
    ) = None
    """A folder with one folder of arrays per class: its path, or its options."""

    read_huggingface: (
        Annotated[Annotated[str, Tag("value")] | Annotated[HuggingfaceFile, Tag("mapping")], Discriminator(form)] | None
    ) = None
    """A folder that ``save_to_disk`` of Hugging Face's datasets wrote: its path, or its options."""

    @property
    def reader(self) -> tuple[str, Any]:
        """The name of what reads the data, and what is said of it.

        Raises:
            ConfigError: none is named, or several.
        """
        named = [(each.name, said) for each in fields(self) if (said := getattr(self, each.name)) is not None]
        if len(named) != 1:
            got = " and ".join(name for name, _ in named) or "none"
            raise ConfigError(f"name one of {', '.join(PATHS)}, got {got}")
        return named[0]
