"""The samples of a part while an engine prepares them: their fields, which Maps change, and their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import shown
from mbaas.prep.decoded import DecodedRows
from mbaas.prep.engines import BadRow, Prepared
from mbaas.prep.header import UndecodableError
from mbaas.samples.fields import Arrays, Column, Packed, bounds_of, value_of
from mbaas.transforms import Map, Pipeline
from mbaas.transforms.arrays import UnfitError

Array = NDArray[Any]


class _Texts(NamedTuple):
    """Words for samples of one kind: their varying axes, what these count, its limit, and how all become equal."""

    axes: tuple[str, ...]
    unit: str
    limit: str
    remedy: str


_IMAGES = _Texts(
    ("height", "width"),
    "pixels",
    " (DecodeImage's max_pixels); a Resize in the pipeline makes images smaller",
    "a Resize, a CenterCrop, a RandomCrop or a RandomResizedCrop in the pipeline gives all the same size, and "
    "DecodeImage's max_pixels lets them differ",
)
_ARRAYS = _Texts(("any",) * 32, "values", "", "a RandomCrop or a CropOrPad in the pipeline gives all the same lengths")


class Results:
    """The results of n samples. Threads may work on different samples at the same time.

    Args:
        out: [n, *shape], memory for the results; see `mbaas.prep.engines.Engine.prepare`. Leading axes whose lengths
            vary (`Pipeline.differing`) are one axis, long enough for their largest product.
        keep: receives decoded samples; those of bad samples are dropped.

    Attributes:
        bad: row -> reason why the sample cannot be prepared.
        column: the results, if their sizes are known; None before `finish` if the samples' own sizes decide.
    """

    def __init__(self, out: Array, pipeline: Pipeline, keep: DecodedRows | None) -> None:
        differing, texts = pipeline.differing, _IMAGES if pipeline.has_images else _ARRAYS
        self.bad: dict[int, str] = {}
        self.keep = DecodedRows((), 0) if keep is None else keep
        self.column: Column | None = None if differing else out
        self._out, self._differing, self._texts = out, differing, texts
        self._shapes = np.zeros((len(out), differing), np.int64)
        wanted = (*texts.axes[:differing], *out.shape[2 if differing else 1 :])
        self._wanted = f"{out.dtype.name} [{', '.join(map(str, wanted))}]"

    @property
    def good(self) -> NDArray[np.bool_]:
        """bool[n], False for bad samples."""
        return ~np.isin(np.arange(len(self._out)), [*self.bad])

    def lay_out(self, shapes: NDArray[np.int64]) -> None:
        """Place samples whose lengths that vary are known before, int64[n, differing], directly end to end."""
        self.column = Packed.within(self._out, shapes)

    def at(self, row: int) -> Array | None:
        """Return memory of the sample's shape, to prepare it in place; None if the shape is not known yet."""
        return None if self.column is None else value_of(self.column, row)

    def attempt(self, row: int, work: Callable[..., object], *given: Any) -> bool:
        """Return whether ``work(*given)`` succeeds for a sample; otherwise the sample is bad."""
        try:
            work(*given)
        except UnfitError as error:
            self.bad[row] = str(error)
            self.keep.drop(row)
            return False
        return True

    def put(self, row: int, sample: Array, made_in: Array | None = None) -> None:
        """Copy a sample to its memory, unless that is ``made_in``, its own; raise UnfitError if it does not fit."""
        if sample is made_in:
            return
        into, lengths = self.at(row), sample.shape[: self._differing]
        if into is None and len(lengths) == self._differing:
            self.check_size(lengths)
            into = self._out[row, : math.prod(lengths)].reshape(*lengths, *self._out.shape[2:])
        if into is None or (sample.shape, sample.dtype) != (into.shape, into.dtype):
            raise UnfitError(
                f"it is prepared to {described(sample)}, but the samples of this feed are {self._wanted}; "
                f"{self._texts.remedy}"
            )
        np.copyto(into, sample)
        self._shapes[row] = lengths

    def check_size(self, lengths: Sequence[int]) -> None:
        """Raise UnfitError if a sample with these varying lengths is too large."""
        values, most = math.prod(lengths), self._out.shape[1]
        if values > most:
            size, limit = "x".join(map(str, reversed(lengths))), f"over the limit of {most:,}{self._texts.limit}"
            raise UnfitError(f"it is prepared to {size}, which is {values:,} {self._texts.unit}, {limit}")

    def finish(self, known: Arrays) -> Prepared:
        """Zero the bad samples; return them in order, with the fields of the good samples out of ``known``."""
        made = self.column
        if made is None:
            shapes = self._shapes if self._differing > 1 else None
            made = Packed.closed_up(self._out, self._shapes.prod(axis=1), shapes)
        if not self.bad:
            return Prepared([], known, made)
        # An engine may have partly written a row before it failed; the content of bad rows must not depend on the
        # engine.
        for row in self.bad:
            value_of(made, row)[...] = 0
        good = np.flatnonzero(self.good)
        bad = [BadRow(row, reason) for row, reason in sorted(self.bad.items())]
        return Prepared(bad, {name: column[good] for name, column in known.items()}, made)


def described(array: Array) -> str:
    """Return an array's dtype and shape, such as "uint8 [480, 640, 3]"."""
    return f"{array.dtype.name} {list(array.shape)}"


class SampleFields:
    """The fields of n samples, modified by Maps. Threads may work on different samples.

    Args:
        sizes: int64[n, 2], (height, width) of the images in pixels; None if samples are not images.

    Attributes:
        on_image: names of fields with image coordinates and of fields that accompany boxes; empty without a Map.
    """

    def __init__(self, known: Arrays, pipeline: Pipeline, sizes: NDArray[np.int64] | None = None) -> None:
        self._known, self._boxes = known, pipeline.boxes
        self.sizes = np.zeros((0, 2), np.int64) if sizes is None else sizes.copy()
        self.on_image = pipeline.fields_on_image if pipeline.maps else ()
        taken = [name for each in pipeline.maps for name in each.fields]
        self._apart = {name: _apart(known[name]) for name in dict.fromkeys((*taken, *self.on_image))}

    def value(self, row: int, name: str) -> Array:
        """Return a copy of a sample's value."""
        return self._apart[name][row].copy()

    def replace(self, row: int, name: str, value: object, longest: int | None = None) -> None:
        """Set a sample's value, anything that NumPy converts to an array.

        A list of varying length may have up to ``longest`` items (None: its current length). Raises UndecodableError if
        shape or dtype do not match the field.
        """
        before = self._apart[name][row]
        try:
            given = np.array(value)
        except Exception as error:  # ragged lists, or any exception of a user's object
            raise UndecodableError(f"field {name!r} is not an array: {error}") from error
        differs, most = isinstance(self._known[name], Packed), len(before) if before.ndim else 0
        if differs and longest is not None:
            most = max(most, longest)
        tail = before.shape[1:]
        if differs and given.size == 0 and given.ndim == 1:
            given = given.astype(before.dtype).reshape(0, *tail)  # an empty list has no dtype of its own
        fits = given.ndim == before.ndim and given.shape[1:] == tail and len(given) <= most if differs else False
        if not (fits or given.shape == before.shape) or not np.can_cast(given.dtype, before.dtype, "same_kind"):
            wanted = f"{before.dtype.name} {list(before.shape)}"
            if differs:
                wanted = f"{before.dtype.name} {[most, *tail]}, or shorter"
            got = f"{given.dtype.name} {list(given.shape)}"
            is_longer = differs and given.ndim == before.ndim and len(given) > most
            more = "; Map's longest lets lists become longer" if is_longer and longest is None else ""
            raise UndecodableError(f"field {name!r} must be {wanted}, got {got}{more}")
        self._apart[name][row] = given.astype(before.dtype)

    def check_boxes(self, row: int) -> None:
        """Raise UndecodableError unless the fields that accompany boxes have one value per box."""
        if self._boxes is None:
            return
        count = len(self._apart[self._boxes.field][row])
        for name in self._boxes.beside:
            if len(self._apart[name][row]) != count:
                has = len(self._apart[name][row])
                raise UndecodableError(f"field {name!r} must have a value for each of its {count} boxes, got {has}")

    def of_sample(self, row: int) -> Arrays:
        """Return one sample's fields with image coordinates, as columns of length 1."""
        return {name: _column([self._apart[name][row]], self._known[name]) for name in self.on_image}

    def put(self, row: int, fields: Arrays) -> None:
        """Set one sample's fields with image coordinates, from columns of length 1."""
        for name, column in fields.items():
            self._apart[name][row] = _apart(column)[0]

    def reset(self, row: int) -> None:
        """Reset a bad sample to its original fields, which are consistent."""
        for name, values in self._apart.items():
            values[row] = _apart(self._known[name][row : row + 1])[0]

    def columns(self) -> Arrays:
        """Return the current values of all fields."""
        return {**self._known, **{name: _column(values, self._known[name]) for name, values in self._apart.items()}}


def _apart(column: Column) -> list[Array]:
    if isinstance(column, Packed):
        values, bounds = column.own()
        return [values[start:end] for start, end in pairwise(bounds)]
    return [column[row, ...] for row in range(len(column))]  # `...` gives arrays, even for scalars


def _column(values: list[Array], before: Column) -> Column:
    if not values:
        return before
    if not isinstance(before, Packed):
        return np.stack(values)
    return Packed(np.concatenate(values), bounds_of([len(value) for value in values]))


def call_map(
    transform: Map, name: str, sample: Array, fields: SampleFields, row: int, rng: Callable[[], np.random.Generator]
) -> Array:
    """Apply a Map's function to a sample, which the function may keep and change.

    Args:
        fields, row: fields of all samples, which receive the function's changes, and the sample's row.
        rng: makes the sample's generator, for a function that is not deterministic.

    Raises:
        UndecodableError: the function raised an exception, returned no array, or returned an unknown or invalid field.
    """
    given: Any = sample
    if transform.fields:
        given = {name: sample, **{each: fields.value(row, each) for each in transform.fields}}
    try:
        result = transform.fn(given) if transform.deterministic else transform.fn(given, rng())
    except Exception as error:  # a user's code may raise anything
        raise UndecodableError(f"{transform.user_code} raised {type(error).__name__}: {error}") from error
    if transform.fields:
        known = [name, *transform.fields]
        if not isinstance(result, Mapping) or not set(known).issuperset(result):
            got = shown([*result]) if isinstance(result, Mapping) else type(result).__name__
            raise UndecodableError(f"{transform!r} must return a dict with some of {', '.join(known)}, got {got}")
        for each in transform.fields:
            if each in result:
                fields.replace(row, each, result[each], transform.longest)
        fields.check_boxes(row)
        result = result.get(name, sample)
    if not isinstance(result, np.ndarray):
        raise UndecodableError(f"{transform!r} must return a NumPy array, got {type(result).__name__}")
    return result
