"""Calls a user's function for one sample; its errors make that sample bad, not the whole block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import shown
from mbaas.prep.header import UndecodableError
from mbaas.samples.fields import Arrays, Column, Packed
from mbaas.transforms import Map, Pipeline
from mbaas.transforms.function import name_of

Array = NDArray[Any]


class SampleFields:
    """The fields of n samples, modified by Maps. Threads may work on different samples.

    Args:
        known: the fields of the n samples; not modified.
        pipeline: specifies the fields that Maps take, and the fields with image coordinates.
        sizes: int64[n, 2], (height, width) of the images in pixels; None if samples are not images.

    Attributes:
        on_image: names of fields with image coordinates and of fields that accompany boxes; empty without a Map.
        sizes: current sizes of the images.
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
            raise UndecodableError(f"field {name!r} is no array: {error}") from error
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
    bounds = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=bounds[1:])
    return Packed(np.concatenate(values), bounds)


def call_map(
    transform: Map, name: str, sample: Array, fields: SampleFields, row: int, rng: Callable[[], np.random.Generator]
) -> Array:
    """Apply a Map's function to a sample, which the function may keep and change.

    Args:
        name: name of the sample's field, for a function that also takes fields.
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
        raise UndecodableError(f"{name_of(transform.fn)} raised {type(error).__name__}: {error}") from error
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
