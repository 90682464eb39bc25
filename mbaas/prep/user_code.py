"""Calls a user's function for one sample: whatever it does wrong is that sample's affair, not the block's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import shown
from mbaas.fields import Arrays, Column, Packed
from mbaas.prep.header import UndecodableError
from mbaas.transforms import Map, Transform
from mbaas.transforms.function import name_of

Array = NDArray[Any]


class SampleFields:
    """The dataset's fields of n samples, in which Maps change values. Each sample may be worked on by another thread.

    Args:
        known: the fields of the n samples, which stay as they are.
        transforms: of the pipeline.
    """

    def __init__(self, known: Arrays, transforms: Iterable[Transform]) -> None:
        names = dict.fromkeys(name for each in transforms if isinstance(each, Map) for name in each.fields)
        self._known = known
        self._apart = {name: _apart(known[name]) for name in names}

    def value(self, row: int, name: str) -> Array:
        """Return a copy of a sample's value."""
        return self._apart[name][row].copy()

    def replace(self, row: int, name: str, value: object) -> None:
        """Give a sample another value.

        Raises:
            UndecodableError: it has another form than values of that field.
        """
        before = self._apart[name][row]
        try:
            given = np.array(value)
        except Exception as error:  # lists that are not equally long, or whatever an object of the user's raises
            raise UndecodableError(f"field {name!r} is no array: {error}") from error
        shape = before.shape
        if isinstance(self._known[name], Packed) and given.ndim == before.ndim and len(given) <= len(before):
            shape = (len(given), *shape[1:])
        if given.shape != shape or not np.can_cast(given.dtype, before.dtype, "same_kind"):
            wanted = f"{before.dtype.name} {list(before.shape)}"
            if isinstance(self._known[name], Packed):
                wanted += ", or shorter"
            raise UndecodableError(f"field {name!r} must be {wanted}, got {given.dtype.name} {list(given.shape)}")
        self._apart[name][row] = given.astype(before.dtype)

    def columns(self) -> Arrays:
        """Return all fields, as they are now."""
        return {**self._known, **{name: _together(values, self._known[name]) for name, values in self._apart.items()}}


def _apart(column: Column) -> list[Array]:
    if isinstance(column, Packed):
        values, bounds = column.own()
        return [values[start:end] for start, end in pairwise(bounds)]
    return [column[row, ...] for row in range(len(column))]  # arrays, also of numbers


def _together(values: list[Array], before: Column) -> Column:
    if not values:
        return before
    if not isinstance(before, Packed):
        return np.stack(values)
    bounds = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=bounds[1:])
    return Packed(np.concatenate(values), bounds)


def call_map(
    transform: Map, name: str, sample: Array, fields: SampleFields, row: int, rng: np.random.Generator
) -> Array:
    """Return what a Map's function makes of a sample.

    Args:
        transform: the Map.
        name: of the sample, for a function that takes fields, too.
        sample: which the function may keep and change.
        fields: of all samples; the function's changes go there.
        row: of the sample in them.
        rng: of the sample.

    Raises:
        UndecodableError: it raised something, returned no array, or a field that there is not or of another form.
    """
    given: Any = sample
    if transform.fields:
        given = {name: sample, **{each: fields.value(row, each) for each in transform.fields}}
    try:
        result = transform.fn(given, rng)
    except Exception as error:  # a user's code may raise anything
        raise UndecodableError(f"{name_of(transform.fn)} raised {type(error).__name__}: {error}") from error
    if transform.fields:
        known = [name, *transform.fields]
        if not isinstance(result, Mapping) or not set(known).issuperset(result):
            got = shown([*result]) if isinstance(result, Mapping) else type(result).__name__
            raise UndecodableError(f"{transform!r} must return a dict with some of {', '.join(known)}, got {got}")
        for each in transform.fields:
            if each in result:
                fields.replace(row, each, result[each])
        result = result.get(name, sample)
    if not isinstance(result, np.ndarray):
        raise UndecodableError(f"{transform!r} must return a NumPy array, got {type(result).__name__}")
    return result
