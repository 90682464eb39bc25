"""Selects samples of a dataset: random splits, and filters by expression."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.fields import LABEL, Column, Packed
from mbaas.order import Ids, split_order

# Arrow is imported when filtering: all actors of a feed import this module, but never filter.
if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.compute import Expression

    from mbaas.dataset.base import Dataset

CLASS = "class"
"""The name of a sample's class in expressions."""

_LOOKED_AT = 1_000_000
"""Samples per batch when fields of all samples are read."""

_UNKNOWN = re.compile(r"No match for FieldRef\.Name\((.*)\) in .*")
"""Arrow's message for an unknown column."""

_MOST_SHOWN = 200
"""Characters of an expression in an error message: one may list thousands of values."""


def checked_ids(dataset: Dataset, sample_ids: Any) -> Ids:
    """Return valid sample ids: int64[n], a read-only copy.

    Raises:
        ConfigError: ids that are not integers, are out of range, or do not ascend.
        DatasetError: no ids.
    """
    ids = np.asarray(sample_ids)
    if not ids.size:
        raise DatasetError(f"a part of {dataset.root} must have at least one sample, got none")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"sample_ids must be a list of whole numbers, got {shown(sample_ids)}", option="sample_ids")
    wrong = np.flatnonzero(ids[1:] <= ids[:-1])
    if len(wrong):
        before, after = ids[wrong[0] : wrong[0] + 2].tolist()
        raise ConfigError(f"sample_ids must ascend, each once, got {after} after {before}", option="sample_ids")
    if ids[0] < 0 or ids[-1] >= len(dataset):
        outside = int(ids[0] if ids[0] < 0 else ids[-1])
        raise ConfigError(f"sample_ids must be in [0, {len(dataset)}), got {outside}", option="sample_ids")
    ids = ids.astype(np.int64)
    ids.flags.writeable = False
    return ids


def fingerprint_of_part(fingerprint: str, ids: Ids) -> str:
    """Return the fingerprint of the samples ``ids`` of the dataset with ``fingerprint``."""
    digest = hashlib.blake2b(f"part of {fingerprint} ".encode(), digest_size=16)
    digest.update(ids.astype("<i8", copy=False).data)
    return digest.hexdigest()


def split_of(dataset: Dataset, fraction: Any, seed: int, stratify: str | None) -> tuple[Ids, Ids]:
    """Split the ids of a dataset in two, both ascending; see `Dataset.split`."""
    if not isinstance(fraction, Real) or not 0 < float(fraction) < 1:
        raise ConfigError(f"fraction must be a number above 0 and below 1, got {shown(fraction)}", option="fraction")
    strata = None if stratify is None else strata_of(dataset, stratify, option="stratify")
    is_first = drawn(len(dataset), float(fraction), seed, strata)
    first, second = np.flatnonzero(is_first), np.flatnonzero(~is_first)
    if not len(first) or not len(second):
        which = "second" if len(first) else "first"
        raise ConfigError(
            f"fraction {fraction} of the {len(dataset)} samples of {dataset.root} leaves none for the {which} part",
            option="fraction",
        )
    return first, second


def drawn(count: int, fraction: float, seed: int, strata: NDArray[Any] | None = None) -> NDArray[np.bool_]:
    """Select a fraction of samples at random: bool[count].

    ``count * fraction`` samples are selected, rounded to the nearest integer. With ``strata`` [count], the same
    fraction of each distinct value is selected, to within one sample.
    """
    order = split_order(count, seed)
    bounds = np.array([0, count])
    if strata is not None:
        order = order[np.argsort(strata[order], kind="stable")]  # grouped by stratum, in random order within each
        ends = np.flatnonzero(np.diff(strata[order])) + 1
        bounds = np.concatenate([[0], ends, [count]])
    # Round the bounds of strata, not their sizes, so that the total is right.
    shares = np.floor(bounds * fraction + 0.5).astype(np.int64)
    within = np.arange(count) - np.repeat(bounds[:-1], np.diff(bounds))
    found = np.zeros(count, np.bool_)
    found[order] = within < np.repeat(np.diff(shares), np.diff(bounds))
    return found


def strata_of(dataset: Dataset, name: str, option: str) -> NDArray[Any]:
    """Return the values of an integer field, [number of samples]; errors name it as ``option``."""
    whole = [each.name for each in dataset.fields if not each.shape and np.issubdtype(each.dtype, np.integer)]
    if name not in whole:
        there = ", ".join(whole) or "none"
        raise ConfigError(
            f"{option} must name a field of whole numbers, of which {dataset.root} has {there}, got {shown(name)}",
            option=option,
        )
    return all_values(dataset, name)


def all_values(dataset: Dataset, name: str) -> NDArray[Any]:
    """Return all samples' values of a field: [number of samples, *shape]."""
    return np.concatenate([dataset.values(ids)[name] for ids in _in_steps(dataset)])


def _in_steps(dataset: Dataset) -> Iterator[Ids]:
    for start in range(0, len(dataset), _LOOKED_AT):
        yield np.arange(start, min(start + _LOOKED_AT, len(dataset)))


def matching(dataset: Dataset, expression: Expression) -> Ids:
    """Return the ids of the samples that satisfy an expression, ascending; see `Dataset.filter`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(expression, pc.Expression):
        wanted = 'an expression over fields, such as pyarrow.compute.field("label") < 5'
        raise ConfigError(f"a filter must be {wanted}, got {shown(expression)}", option="expression")
    what, found = textwrap.shorten(str(expression), _MOST_SHOWN), []
    for ids in _in_steps(dataset):
        columns = arrow_columns(dataset, ids)
        # An expression cannot use the empty name, and no field has it.
        table = pa.table([pa.array(ids), *columns.values()], names=["", *columns])
        try:
            kept = table.filter(expression)
        except pa.ArrowException as error:
            said = _UNKNOWN.sub(r"there is no field \1", str(error).partition("\n")[0])
            known = ", ".join(columns) or "none"
            raise ConfigError(
                f"cannot filter {dataset.root} by {what}: {said}; its fields are {known}", option="expression"
            ) from None
        found.append(np.asarray(kept[0]))
    # Arrow evaluates in several threads, without a guaranteed order.
    chosen = np.sort(np.concatenate(found))
    if not len(chosen):
        raise DatasetError(f"none of the {len(dataset)} samples of {dataset.root} passes the filter {what}")
    return chosen


def arrow_columns(dataset: Dataset, ids: Ids) -> dict[str, pa.Array]:
    """Return the columns that expressions can use: fields, with categories as strings, and `CLASS`."""
    import pyarrow as pa

    values = dataset.values(ids)
    columns = {name: _arrow(array) for name, array in values.items()}
    for field in dataset.fields:
        if field.categories:  # expressions use the strings
            names = pa.array(field.categories, pa.string())
            columns[field.name] = pa.DictionaryArray.from_arrays(columns[field.name], names)
    if dataset.class_names and CLASS not in columns and LABEL.name in values:
        names = pa.array(dataset.class_names, pa.string())
        columns[CLASS] = pa.DictionaryArray.from_arrays(columns[LABEL.name], names)
    return columns


def rows_of(dataset: Dataset, ids: Ids) -> list[dict[str, Any]]:
    """Return the uri and the fields of samples, as `Dataset.head` documents."""
    values, fields = dataset.values(ids), dataset.fields
    rows: list[dict[str, Any]] = []
    for number, sample_id in enumerate(ids.tolist()):
        row: dict[str, Any] = {"uri": dataset.uri(sample_id)}
        for field in fields:
            column: Column = values[field.name]
            value = column.value(number) if isinstance(column, Packed) else column[number]
            row[field.name] = value if value.ndim else value.item()
            if field.categories:
                row[field.name] = field.categories[value]
        if dataset.class_names and CLASS not in row and LABEL.name in row:
            row[CLASS] = dataset.class_names[row[LABEL.name]]
        rows.append(row)
    return rows


def _arrow(array: Column) -> pa.Array:
    # One level of lists for each axis after the first.
    import pyarrow as pa

    if isinstance(array, Packed):
        inner, bounds = array.own()
        return pa.LargeListArray.from_arrays(pa.array(bounds), _arrow(inner))
    values = pa.array(np.ascontiguousarray(array).ravel())
    for size in reversed(array.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values
