"""The data section of a feed's file: location, reader, and the samples to serve.

Sections for readers, and for boxes and transforms (`mbaas.cli.feed_file`), are made from the signatures and docstrings
of the functions and classes.

::

    data:
      read_manifest: {path: photos.parquet, label_column: species, fields: [age]}
    exclude: bad.txt                                      # without the samples that `mbaas check` found bad,
    filter: [[age, ">=", 18], [class, in, [cat, dog]]]    # matching samples only,
    split: {part: train, fraction: 0.8, stratify: label}  # then one part,
    limit: 1000                                           # then at most the first 1,000,
    resample: {balance: label}                            # then drawn so that classes are equally frequent
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import Discriminator, Field, Tag, TypeAdapter

import mbaas
from mbaas.base import files
from mbaas.base.progress import watched
from mbaas.base.units import count
from mbaas.base.validation import options
from mbaas.cli import excluded
from mbaas.cli.console import described, progress_bar
from mbaas.errors import ConfigError, DatasetError
from mbaas.samples.order import MOST_SEED

if TYPE_CHECKING:
    from mbaas.dataset import Dataset
    from mbaas.samples.order import Ids

NOT_IN_FILES = ("filesystem",)
"""Parameters whose values are Python objects."""

RELATIVE = "Relative paths begin at the folder of this file."


def parameters_of(call: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters that a file may contain, and their types."""
    found = inspect.signature(call).parameters
    annotations = {name: each.annotation for name, each in found.items() if name not in NOT_IN_FILES}
    # not of the function itself: types of the others are imported for type checkers only
    return get_type_hints(SimpleNamespace(__annotations__=annotations), vars(inspect.getmodule(call)), None, True)


def path_parameters(call: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameters that are paths or URIs; the first one names the data."""
    first, *others = parameters_of(call).items()
    return (first[0], *(name for name, kind in others if os.PathLike in map(_plain, _alternatives(kind))))


def section(call: Callable[..., Any], *, within: str) -> type:
    """Return a class for the parameters of a reader or a class as a section of a file, at the path ``within``."""
    paths = path_parameters(call) if inspect.isfunction(call) else ()
    descriptions, defaults = described(call), inspect.signature(call).parameters
    members: dict[str, Any] = {"__doc__": summary(call), "__annotations__": {}, "__module__": __name__}
    for name, kind in parameters_of(call).items():
        known = f"{descriptions.get(name, '')} {RELATIVE}" if name in paths else descriptions.get(name)
        annotation = str if paths and name == paths[0] else _in_file(kind)
        members["__annotations__"][name] = Annotated[annotation, Field(description=known)]
        if defaults[name].default is not inspect.Parameter.empty:
            members[name] = defaults[name].default
    return options(within=within)(type(call.__name__, (), members))


def reader_key(read: Callable[..., Any]) -> Any:
    """Return the type of a reader's key: a path or a section, and only a section if the reader needs more."""
    kind = section(read, within=f"data.{read.__name__}")
    required = [each for each in kind.__dataclass_fields__.values() if each.default is MISSING]  # type: ignore[attr-defined]
    if len(required) > 1:
        return Annotated[kind | None, Field(description=f"{summary(read)} Its options.")]
    either: Any = Annotated[Annotated[str, Tag("value")] | Annotated[kind, Tag("mapping")], Discriminator(form)]
    return Annotated[either | None, Field(description=f"{summary(read)} Its path, or its options.")]


def form(said: Any) -> str:
    """Return "mapping" for options, or "value"."""
    return "mapping" if isinstance(said, dict) else "value"


def schema_of(step: type) -> dict[str, Any]:
    """Return the JSON schema of a transform's parameters: the first one alone, or all by name."""
    descriptions, defaults = described(step), inspect.signature(step).parameters
    parts = {
        name: {**_schema(kind), "description": descriptions.get(name, "")} for name, kind in parameters_of(step).items()
    }
    if not parts:
        return {"type": "null"}
    whole = {
        "type": "object",
        "properties": parts,
        "required": [name for name in parts if defaults[name].default is inspect.Parameter.empty],
        "additionalProperties": False,
    }
    return {"anyOf": [next(iter(parts.values())), whole, {"type": "null"}]}


def _schema(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is Callable or kind is Any:
        return {"type": "string"}
    return TypeAdapter(_in_file(kind)).json_schema()


def summary(call: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((inspect.getdoc(call) or "").partition("\n\n")[0].split())


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _plain(kind: Any) -> Any:
    return get_origin(kind) or kind


def _in_file(kind: Any) -> Any:
    """Return a type as files have it: paths are strings, and lists are tuples."""
    kept = [each for each in _alternatives(kind) if _plain(each) is not os.PathLike]
    if len(kept) > 1 or kept[0] is not kind:
        return functools.reduce(operator.or_, map(_in_file, kept))
    if _plain(kind) is Sequence:
        return tuple[(_in_file(get_args(kind)[0]), ...)]  # type: ignore[misc]
    return kind


READERS = {name: getattr(mbaas, name) for name in mbaas.__all__ if name.startswith("read_")}
"""Readers of datasets, which are keys of ``data``."""

DataFile = options(within="data")(
    type(
        "DataFile",
        (),
        {
            "__doc__": "A reader and its options, for data other than a folder with image folders per class.",
            "__annotations__": {name: reader_key(read) for name, read in READERS.items()},
            "__module__": __name__,
            **dict.fromkeys(READERS),
        },
    )
)

if TYPE_CHECKING:
    Data = Any
else:
    Data = Annotated[Annotated[str, Tag("value")] | Annotated[DataFile, Tag("mapping")], Discriminator(form)]

_OF_SEVERAL = ("in", "not in")


@options(within="split")
class SplitFile:
    """A part of the data: one feed serves the training part, another the validation part."""

    part: Literal["train", "validation"]
    """The part that this feed serves."""

    fraction: Annotated[float, Gt(0), Lt(1)]
    """The fraction of the data for training, above 0 and below 1."""

    seed: Annotated[int, Ge(0), Le(MOST_SEED)] = 0
    """Selects the samples of each part. ``seed`` and ``fraction`` must be the same in both files."""

    stratify: str | None = None
    """An integer field, such as label: the fraction for training is the same for each of its values."""


@options(within="resample")
class ResampleFile:
    """Samples drawn by weights, with replacement; a sample drawn twice occurs twice in each epoch."""

    balance: str | None = None
    """An integer field, such as label: each of its values is equally frequent."""

    weights: str | None = None
    """A field with the weights of samples, instead of ``balance``."""

    samples: Annotated[int, Ge(1)] | None = None
    """Number of samples to draw; default: the size of the dataset."""

    seed: Annotated[int, Ge(0), Le(MOST_SEED)] = 0
    """Selects the drawn samples."""

    each_epoch: bool = True
    """Draw again in each epoch."""

    def __post_init__(self) -> None:
        if (self.balance is None) == (self.weights is None):
            got = "none" if self.balance is None else "both"
            raise ConfigError(f"name one of balance, weights, got {got}")

    def of(self, dataset: Dataset) -> Dataset:
        """Draw the samples; raise ConfigError for an unknown field or invalid weights."""
        if self.balance is not None:
            return dataset.balance(self.balance, self.samples, self.seed, each_epoch=self.each_epoch)
        assert self.weights is not None
        return dataset.resample(self.weights, self.samples, self.seed, each_epoch=self.each_epoch)


Condition = tuple[str, Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"], Any]
"""A field, a comparison and a value, as in the ``filters`` of `pyarrow.parquet.read_table`."""


@options()
class DataOptions:
    """The keys of a feed's file that select its samples."""

    data: Data
    """A folder with one folder of images per class: relative to the file, absolute, or a URI such as s3://bucket/train.
    Or a reader such as ``read_manifest``, with its path or its options."""

    listing: str | None = None
    """A Parquet file that stores the listing of a folder; relative to the file, absolute, or a URI. It is written if it
    is missing, and otherwise read instead of listing. Default: list the folder each time."""

    exclude: str | None = None
    """A file of samples that are left out before the other steps, as written by ``mbaas check --exclude``; relative to
    this file, or absolute."""

    filter: Annotated[tuple[Condition, ...], MinLen(1)] | None = None
    """Conditions that all served samples meet: field, comparison, value. The field is label, another field of the
    dataset, or class, the name of the label's class."""

    split: SplitFile | None = None
    """A part of the data, after the filter."""

    limit: Annotated[int, Ge(1)] | None = None
    """Upper bound on the number of samples: the first ones, after the split."""

    resample: ResampleFile | None = None
    """Samples drawn by weights, with replacement, after the other steps."""


@dataclass(frozen=True)
class FeedData:
    """The samples of a feed as described in a file.

    Attributes:
        where: the folder or table: a URI, or an absolute path.
        said: the parsed options.
        top: the file with the line of each key.
    """

    where: str
    said: DataOptions
    top: files.Located

    @classmethod
    def of(cls, top: files.Located, said: DataOptions) -> FeedData:
        """Check, without reading the data, that each key fits the kind of data; raise ConfigError otherwise."""
        data = said.data
        if said.filter is not None:
            for condition in top.fields["filter"].items:
                _check(condition)
        if isinstance(data, str):
            return cls(_from(top.file, data), said, top)
        name, options = top.fields["data"].made(lambda: _reader_of(data))
        if said.listing is not None:
            raise top.fields["listing"].error(f"listing is an option of a folder, but data is read by {name}")
        where = options if isinstance(options, str) else getattr(options, path_parameters(READERS[name])[0])
        return cls(_from(top.file, where), said, top)

    @property
    def unpacks(self) -> bool:
        """True if reading the data first writes a copy with random access."""
        data = self.said.data
        return not isinstance(data, str) and getattr(_reader_of(data)[1], "unpacked", None) is not None

    def read(self) -> Dataset:
        """List or read the data, and select the samples.

        Raises:
            ConfigError: an unknown column or field, or an invalid selection; contains the line.
            DatasetError: the data are missing, or no sample is left.
        """
        return self.selected(self.whole())

    def selected(self, whole: Dataset, *, drawn: bool = True) -> Dataset:
        """Select samples of the ``whole`` data as `read` does; without ``drawn``, do not draw them by weights."""
        dataset, said, at = whole, self.said, self.top.fields
        if said.exclude is not None:
            excluded = at["exclude"].made(lambda: self.excluded_ids(dataset))
            dataset = dataset.select(np.setdiff1d(np.arange(len(dataset)), excluded))
        if said.filter is not None:
            for condition in at["filter"].items:
                _check_kind(condition, dataset)
            dataset = at["filter"].made(lambda: _filtered(dataset, said.filter))
        if (split := said.split) is not None:
            parts = at["split"].made(lambda: dataset.split(split.fraction, split.seed, stratify=split.stratify))
            dataset = parts[("train", "validation").index(split.part)]
        if (count := said.limit) is not None:
            dataset = at["limit"].made(lambda: dataset.limit(count))
        if drawn and (draws := said.resample) is not None:
            dataset = at["resample"].made(lambda: draws.of(dataset))
        return dataset

    def excluded_ids(self, whole: Dataset) -> Ids:
        """Return the ids of the samples that the key ``exclude`` leaves out of the ``whole`` data: int64[k]."""
        if self.said.exclude is None:
            return np.zeros(0, np.int64)
        return excluded.read(Path(_from(self.top.file, self.said.exclude)), whole)

    def whole(self) -> Dataset:
        """List or read the data, without selecting samples; raises as `read` does."""
        file, data = self.top.file, self.said.data
        if isinstance(data, str):
            listing = self.said.listing
            return mbaas.read_images(self.where, listing=None if listing is None else _from(file, listing))
        name, said = _reader_of(data)
        given = {} if isinstance(said, str) else {each.name: getattr(said, each.name) for each in fields(said)}
        first, *others = path_parameters(READERS[name])
        given.pop(first, None)
        for option in others:
            if given.get(option) is not None:
                given[option] = _from(file, given[option])
        try:
            dataset: Dataset = self.top.fields["data"].fields[name].made(lambda: READERS[name](self.where, **given))
        except DatasetError as error:
            raise DatasetError(files.in_yaml(str(error))) from None
        return dataset


def _reader_of(data: Any) -> tuple[str, Any]:
    named = [(name, said) for name in READERS if (said := getattr(data, name)) is not None]
    if len(named) != 1:
        got = " and ".join(name for name, _ in named) or "none"
        raise ConfigError(f"name one of {', '.join(READERS)}, got {got}")
    return named[0]


def _from(file: Path, named: str) -> str:
    """Return a URI unchanged, and a path relative to the folder of the file that contains it."""
    return named if "://" in named else str(file.resolve().parent / Path(named).expanduser())


def _check(condition: files.Located) -> None:
    _, operator, value = condition.items
    several = operator.value in _OF_SEVERAL
    values = value.items if several else (value,)
    kinds = {str if isinstance(each.value, str) else float if _is_number(each.value) else None for each in values}
    if kinds in ({str}, {float}):
        return
    wanted = "a list of numbers or of strings" if several else "a number or a string"
    quoting = next((each.quoting for each in values if isinstance(each.value, bool)), "")
    if len(kinds) > 1:
        quoting = quoting or next(each.quoting for each in values if not isinstance(each.value, str))
    raise value.error(
        f"{condition.name}: the value after {operator.value!r} must be {wanted}, got {value.written}{quoting}"
    )


def _check_kind(condition: files.Located, dataset: Dataset) -> None:
    # Catches unquoted names, which YAML reads as numbers, in comparisons with a string field.
    from mbaas.dataset.subsets import CLASS

    field, _, value = condition.items
    texts = {each.name for each in dataset.fields if each.categories} | ({CLASS} if dataset.class_names else set())
    number = next((each for each in value.items or (value,) if _is_number(each.value)), None)
    if field.value in texts and number is not None:
        wrong = f"{field.value} contains strings, but {number.written} without quotes is a number{number.quoting}"
        raise value.error(f"{condition.name}: {wrong}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _filtered(dataset: Dataset, conditions: Any) -> Dataset:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        expression = parquet.filters_to_expression(list(conditions))
    except (pa.ArrowException, OverflowError) as error:  # a number with more than 64 bits
        raise ConfigError(str(error)) from None
    return dataset.filter(expression)


def listed(data: FeedData) -> Dataset:
    """Return the result of `FeedData.read`, with a progress bar on a terminal."""
    with _shown_listing(data):
        return data.read()


def whole_and_listed(data: FeedData) -> tuple[Dataset, Dataset]:
    """Return the whole data of one listing, and the selected samples without draws, which repeat samples."""
    with _shown_listing(data):
        whole = data.whole()
        return whole, data.selected(whole, drawn=False)


@contextmanager
def _shown_listing(data: FeedData) -> Iterator[None]:
    with progress_bar(f"listing {data.where}") as show:

        def tell(things: str, done: int, total: int) -> None:
            show(done, total, f"{count(done)} of {count(total)} {things}")

        with watched(tell):
            yield
