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
from mbaas.cli.reader_files import PATHS, DataFile, form
from mbaas.errors import ConfigError, DatasetError
from mbaas.order import MOST_SEED
from mbaas.validation import options

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

_OF_SEVERAL = ("in", "not in")


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


Condition = tuple[str, Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"], Any]
"""A field, a comparison and a value, as in the ``filters`` of `pyarrow.parquet.read_table`."""


@options()
class DataOptions:
    """The keys of a feed's file that say which samples it serves."""

    data: Annotated[Annotated[str, Tag("value")] | Annotated[DataFile, Tag("mapping")], Discriminator(form)]
    """A folder with one folder of images per class: relative to the file, absolute, or a URI such as s3://bucket/train.
    Or ``read_images``, ``read_manifest``, ``read_webdataset``, ``read_tfrecord``, ``read_parquet``, ``read_coco``,
    ``read_audio``, ``read_arrays`` or ``read_huggingface`` with the path of what it reads, or its options."""

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
        if said.filter is not None:
            for condition in top.fields["filter"].items:
                _check(condition)
        if said.resample is not None:
            top.fields["resample"].made(said.resample.check)
        if isinstance(data, str):
            return cls(_from(top.file, data), said, top)
        name, options = top.fields["data"].made(lambda: data.reader)
        if said.listing is not None:
            raise top.fields["listing"].error(f"listing keeps what is in a folder, and data is for {name}")
        where = options if isinstance(options, str) else getattr(options, PATHS[name][0])
        return cls(_from(top.file, where), said, top)

    def read(self) -> Dataset:
        """List or read the data, and choose the samples.

        Raises:
            ConfigError: a column or a field that there is not, or a part that cannot be; says in which line.
            DatasetError: the data is not there, or no sample is left.
        """
        dataset, said, at = self._whole(), self.said, self.top.fields
        if said.filter is not None:
            for condition in at["filter"].items:
                _check_kind(condition, dataset)
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
        first, *others = PATHS[name]
        given.pop(first, None)
        for option in others:
            if given.get(option) is not None:
                given[option] = _from(file, given[option])
        read = getattr(mbaas, name)
        try:
            dataset: Dataset = self.top.fields["data"].fields[name].made(lambda: read(self.where, **given))
        except DatasetError as error:
            raise DatasetError(files.in_yaml(str(error))) from None
        return dataset


def _from(file: Path, named: str) -> str:
    """Return a URI as it is, and a path as seen from the folder of the file that names it."""
    return named if "://" in named else str(file.resolve().parent / Path(named).expanduser())


def _check(condition: files.Located) -> None:
    """Refuse values that a comparison cannot have.

    Raises:
        ConfigError: names the condition's line, and the value as the file has it.
    """
    _, operator, value = condition.items
    several = operator.value in _OF_SEVERAL
    values = value.items if several else (value,)
    kinds = {str if isinstance(each.value, str) else float if _is_number(each.value) else None for each in values}
    if kinds in ({str}, {float}):
        return
    wanted = "a list of numbers, or of texts" if several else "a number or text"
    quoting = next((each.quoting for each in values if isinstance(each.value, bool)), "")
    if len(kinds) > 1:
        quoting = quoting or next(each.quoting for each in values if not isinstance(each.value, str))
    raise value.error(
        f"{condition.name}: what stands after {operator.value!r} must be {wanted}, got {value.written}{quoting}"
    )


def _check_kind(condition: files.Located, dataset: Dataset) -> None:
    """Refuse numbers that a field of texts is compared with: names that were not quoted.

    Raises:
        ConfigError: names the condition's line, and the value as the file has it.
    """
    from mbaas.dataset.parts import CLASS

    field, _, value = condition.items
    texts = {each.name for each in dataset.fields if each.categories} | ({CLASS} if dataset.class_names else set())
    number = next((each for each in value.items or (value,) if _is_number(each.value)), None)
    if field.value in texts and number is not None:
        wrong = f"{field.value} is text, and {number.written} without quotes is a number{number.quoting}"
        raise value.error(f"{condition.name}: {wrong}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _filtered(dataset: Dataset, conditions: Any) -> Dataset:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        expression = parquet.filters_to_expression(list(conditions))
    except (pa.ArrowException, OverflowError) as error:  # a number of more than 64 bits
        raise ConfigError(str(error)) from None
    return dataset.filter(expression)
