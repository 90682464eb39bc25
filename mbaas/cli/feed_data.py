"""What the file of `mbaas serve` says of its data: where it is, how it is read, and which part of it is served.

::

    data:
      read_manifest: {path: photos.parquet, label: species, fields: [age]}
    filter: [[age, ">=", 18], [class, in, [cat, dog]]]    # of these samples ...
    split: {part: train, fraction: 0.8, stratify: label}  # ... this part, ...
    take: 1000                                            # ... of that the first ones, ...
    resample: {balance: label}                            # ... and of these each class equally often
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import Discriminator, Tag

from mbaas import files
from mbaas.errors import ConfigError, shown
from mbaas.order import MOST_SEED
from mbaas.validation import Checked, options

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

_OF_SEVERAL = ("in", "not in")

_PATHS = {
    "read_manifest": ("path", "root"),
    "read_webdataset": ("shards", "listing"),
    "read_parquet": ("shards", "unpacked"),
    "read_coco": ("annotations", "images", "listing"),
    "read_audio": ("uri", "listing"),
    "read_arrays": ("uri", "listing"),
    "read_huggingface": ("dataset", "listing", "unpacked"),
}
"""What reads data -> its options that are paths; the first one names the data."""


def _form(said: Any) -> str:
    return "mapping" if isinstance(said, dict) else "value"


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
    """The other columns that minibatches have; default: all of numbers."""

    length: str | None = None
    """The column with the files' lengths in bytes; default: they are asked for."""

    root: str | None = None
    """Where the files are: relative to this file, absolute, or a URI; default: the folder of the table."""


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
    """The other columns that minibatches have; default: all of numbers."""


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

    extensions: tuple[str, ...] = (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".au")
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
    """The other columns that minibatches have; default: all of numbers."""

    listing: str | None = None
    """A Parquet file that keeps what was found, until a file changes; relative to this file, absolute, or a URI."""

    unpacked: str | None = None
    """A folder that all nodes can read, into which the images are unpacked once; needed if the files are compressed."""


@options(within="data")
class DataFile:
    """Data that is not a folder of classes of images: the name of what reads it, and its options."""

    read_manifest: (
        Annotated[Annotated[str, Tag("value")] | Annotated[ManifestFile, Tag("mapping")], Discriminator(_form)] | None
    ) = None
    """A table that names a file for each sample: its path, or its options."""

    read_webdataset: (
        Annotated[Annotated[str, Tag("value")] | Annotated[WebdatasetFile, Tag("mapping")], Discriminator(_form)] | None
    ) = None
    """Tar shards: their path, or their options."""

    read_parquet: ParquetFile | None = None
    """Parquet files with images inside."""

    read_coco: CocoFile | None = None
    """Images with COCO's annotations."""

    read_audio: (
        Annotated[Annotated[str, Tag("value")] | Annotated[AudioFile, Tag("mapping")], Discriminator(_form)] | None
    ) = None
    """A folder with one folder of recordings per class: its path, or its options."""

    read_arrays: (
        Annotated[Annotated[str, Tag("value")] | Annotated[ArraysFile, Tag("mapping")], Discriminator(_form)] | None
    ) = None
    """A folder with one folder of arrays per class: its path, or its options."""

    read_huggingface: (
        Annotated[Annotated[str, Tag("value")] | Annotated[HuggingfaceFile, Tag("mapping")], Discriminator(_form)]
        | None
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
            raise ConfigError(f"name one of {', '.join(_PATHS)}, got {got}")
        return named[0]


@options(within="split")
class SplitFile:
    """A part of the data: one feed serves that for training, and another the rest, for validation."""

    part: Literal["train", "validation"]
    """Which of the two this feed serves."""

    fraction: Annotated[float, Gt(0), Lt(1)]
    """How much of the data is for training, above 0 and below 1."""

    seed: Annotated[int, Ge(0), Le(MOST_SEED)] = 0
    """Chooses the samples of each part. It must be the same in both files, as ``fraction`` must be."""

    stratify: str | None = None
    """A field of whole numbers, such as label: each of its values has the same fraction for training."""


@options(within="resample")
class ResampleFile:
    """Samples that are drawn by weights, with replacement; one that is drawn twice comes twice in each epoch."""

    balance: str | None = None
    """A field of whole numbers, such as label: each of its values comes equally often."""

    weights: str | None = None
    """A field with the weights of samples, in place of ``balance``."""

    samples: Annotated[int, Ge(1)] | None = None
    """How many are drawn; default: as many as there are."""

    seed: Annotated[int, Ge(0), Le(MOST_SEED)] = 0
    """Chooses which are drawn."""

    each_epoch: bool = True
    """Whether each epoch draws anew."""

    def of(self, dataset: Dataset) -> Dataset:
        """Draw the samples.

        Raises:
            ConfigError: a field that there is not, or weights that cannot be.
        """
        if self.balance is not None:
            return dataset.balanced(self.balance, self.samples, self.seed, each_epoch=self.each_epoch)
        assert self.weights is not None
        return dataset.resampled(self.weights, self.samples, self.seed, each_epoch=self.each_epoch)

    def check(self) -> None:
        """Refuse what names no weights, or two kinds of them.

        Raises:
            ConfigError: it does.
        """
        if (self.balance is None) == (self.weights is None):
            got = "none" if self.balance is None else "both"
            raise ConfigError(f"name one of balance, weights, got {got}")


def _condition(said: tuple[str, str, Any]) -> tuple[str, str, Any]:
    _, operator, value = said
    values = value if isinstance(value, list) else [value]
    one_kind = all(isinstance(each, str) for each in values) or all(
        isinstance(each, (int, float)) and not isinstance(each, bool) for each in values
    )
    if not one_kind or not values or isinstance(value, list) != (operator in _OF_SEVERAL):
        wanted = "a list of numbers, or of texts" if operator in _OF_SEVERAL else "a number or text"
        raise ConfigError(f"what stands after {operator!r} must be {wanted}, got {shown(value)}")
    return said


Condition = Annotated[
    tuple[str, Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"], Any],
    Checked(_condition),
]
"""A field, a comparison and a value, as in the ``filters`` of `pyarrow.parquet.read_table`."""


@options()
class DataOptions:
    """The keys of a feed's file that say which samples it serves."""

    data: Annotated[Annotated[str, Tag("value")] | Annotated[DataFile, Tag("mapping")], Discriminator(_form)]
    """A folder with one folder of images per class: relative to the file, absolute, or a URI such as s3://bucket/train.
    Or ``read_manifest``, ``read_webdataset``, ``read_parquet``, ``read_coco``, ``read_audio``, ``read_arrays`` or
    ``read_huggingface`` with the path of what it reads, or its options."""

    listing: str | None = None
    """A Parquet file that keeps the listing of a folder, relative to the file, absolute, or a URI: written if it is not
    there, else read instead of listing. Default: the folder is listed each time."""

    filter: Annotated[tuple[Condition, ...], MinLen(1)] | None = None
    """Conditions, all of which hold for the samples that are served: field, comparison, value. A field is label or
    another one that is known of samples, or class, the name of the label's class."""

    split: SplitFile | None = None
    """A part of the data, of what passes the filter."""

    take: Annotated[int, Ge(1)] | None = None
    """How many samples are served at most: the first ones, of what is left."""

    resample: ResampleFile | None = None
    """Samples drawn by weights, with replacement, from what is left."""


@dataclass(frozen=True)
class FeedData:
    """The samples of a feed as a file describes them.

    Attributes:
        where: the folder, or the table: a URI, or an absolute path.
        said: what the file says.
        top: the file, which knows the line of each key.
    """

    where: str
    said: DataOptions
    top: files.Located

    @classmethod
    def of(cls, top: files.Located, said: DataOptions) -> FeedData:
        """Check what is said of the data without looking at it.

        Raises:
            ConfigError: a key does not fit the kind of data.
        """
        data = said.data
        if said.resample is not None:
            top.fields["resample"].made(said.resample.check)
        if isinstance(data, str):
            return cls(_from(top.file, data), said, top)
        name, options = top.fields["data"].made(lambda: data.reader)
        if said.listing is not None:
            raise top.fields["listing"].error(f"listing keeps what is in a folder, and data is for {name}")
        where = options if isinstance(options, str) else getattr(options, _PATHS[name][0])
        return cls(_from(top.file, where), said, top)

    def read(self) -> Dataset:
        """List or read the data, and choose the samples.

        Raises:
            ConfigError: a column or a field that there is not, or a part that cannot be; says in which line.
            DatasetError: the data is not there, or no sample is left.
        """
        dataset, said, at = self._whole(), self.said, self.top.fields
        if said.filter is not None:
            dataset = at["filter"].made(lambda: _filtered(dataset, said.filter))
        if (split := said.split) is not None:
            parts = at["split"].made(lambda: dataset.split(split.fraction, split.seed, stratify=split.stratify))
            dataset = parts[("train", "validation").index(split.part)]
        if (count := said.take) is not None:
            dataset = at["take"].made(lambda: dataset.take(count))
        if (drawn := said.resample) is not None:
            dataset = at["resample"].made(lambda: drawn.of(dataset))
        return dataset

    def _whole(self) -> Dataset:
        import mbaas

        file, data = self.top.file, self.said.data
        if isinstance(data, str):
            listing = self.said.listing
            return mbaas.read_images(self.where, listing=None if listing is None else _from(file, listing))
        name, said = data.reader
        given = {} if isinstance(said, str) else {each.name: getattr(said, each.name) for each in fields(said)}
        first, *others = _PATHS[name]
        given.pop(first, None)
        for option in others:
            if given.get(option) is not None:
                given[option] = _from(file, given[option])
        read = getattr(mbaas, name)
        dataset: Dataset = self.top.fields["data"].fields[name].made(lambda: read(self.where, **given))
        return dataset


def _from(file: Path, named: str) -> str:
    """Return a URI as it is, and a path as seen from the folder of the file that names it."""
    return named if "://" in named else str(file.resolve().parent / Path(named).expanduser())


def _filtered(dataset: Dataset, conditions: Any) -> Dataset:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        expression = parquet.filters_to_expression(list(conditions))
    except (pa.ArrowException, OverflowError) as error:  # a number of more than 64 bits
        raise ConfigError(str(error)) from None
    return dataset.filter(expression)
