"""Which samples of a dataset are a part of it: those of a split, and those of which an expression is true."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.fields import LABEL, Column, Packed
from mbaas.order import Ids, split_order

# Arrow is imported when something is filtered: every actor of a feed imports this module, and none of them filters.
if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.compute import Expression

    from mbaas.dataset.base import Dataset

CLASS = "class"
"""What an expression calls the name of a sample's class."""

_LOOKED_AT = 1_000_000
"""Samples whose fields are looked at together."""

_UNKNOWN = re.compile(r"No match for FieldRef\.Name\((.*)\) in .*")
"""What Arrow says of a name that is none of a table's columns."""

_MOST_SHOWN = 200
"""Characters of an expression in an error: one may list thousands of values."""


def checked_ids(dataset: Dataset, sample_ids: Any) -> Ids:
    """Return ids of samples that a part can have: int64[n], a copy that nobody can write to.

    Raises:
        ConfigError: they are no whole numbers, not below the number of samples, or do not ascend.
        DatasetError: there are none.
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
    """Compute the fingerprint of the samples ``ids`` of the dataset that has ``fingerprint``."""
    digest = hashlib.blake2b(f"part of {fingerprint} ".encode(), digest_size=16)
    digest.update(ids.astype("<i8", copy=False).data)
    return digest.hexdigest()


def split_of(dataset: Dataset, fraction: Any, seed: int, stratify: str | None) -> tuple[Ids, Ids]:
    """Divide the ids of a dataset in two, both ascending; see `Dataset.split`."""
    if not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
        raise ConfigError(f"fraction must be a number above 0 and below 1, got {shown(fraction)}", option="fraction")
    strata = None if stratify is None else strata_of(dataset, stratify, option="stratify")
    is_first = drawn(len(dataset), fraction, seed, strata)
    first, second = np.flatnonzero(is_first), np.flatnonzero(~is_first)
    if not len(first) or not len(second):
        which = "second" if len(first) else "first"
        raise ConfigError(
            f"fraction {fraction} of the {len(dataset)} samples of {dataset.root} leaves none for the {which} part",
            option="fraction",
        )
    return first, second


def drawn(count: int, fraction: float, seed: int, strata: NDArray[Any] | None = None) -> NDArray[np.bool_]:
    """Draw a fraction of samples at random: bool[count], which of them.

    Args:
        count: number of samples.
        fraction: in [0, 1]; ``count * fraction`` samples are drawn, rounded to the nearest whole number.
        seed: chooses which.
        strata: [count], values, of each of which the fraction is drawn, to within one sample.
    """
    order = split_order(count, seed)
    bounds = np.array([0, count])
    if strata is not None:
        order = order[np.argsort(strata[order], kind="stable")]  # one stratum after the other, each at random
        ends = np.flatnonzero(np.diff(strata[order])) + 1
        bounds = np.concatenate([[0], ends, [count]])
    # Where a stratum begins and ends is rounded, not its size: so all together are as many as they should be.
    shares = np.floor(bounds * fraction + 0.5).astype(np.int64)
    within = np.arange(count) - np.repeat(bounds[:-1], np.diff(bounds))
    found = np.zeros(count, np.bool_)
    found[order] = within < np.repeat(np.diff(shares), np.diff(bounds))
    return found


def strata_of(dataset: Dataset, name: str, option: str) -> NDArray[Any]:
    """Return the values of a field of whole numbers, which ``option`` names: [number of samples].

    Raises:
        ConfigError: there is no such field.
    """
    whole = [each.name for each in dataset.fields if not each.shape and np.issubdtype(each.dtype, np.integer)]
    if name not in whole:
        there = ", ".join(whole) or "none"
        raise ConfigError(
            f"{option} must name a field of whole numbers, of which {dataset.root} has {there}, got {shown(name)}",
            option=option,
        )
    return all_values(dataset, name)


def all_values(dataset: Dataset, name: str) -> NDArray[Any]:
    """Return the values that all samples have of a field: [number of samples, *shape]."""
    return np.concatenate([dataset.values(ids)[name] for ids in _in_steps(dataset)])


def _in_steps(dataset: Dataset) -> Iterator[Ids]:
    """Yield the ids of all samples, as many at a time as may have the values of all their fields in memory."""
    for start in range(0, len(dataset), _LOOKED_AT):
        yield np.arange(start, min(start + _LOOKED_AT, len(dataset)))


def matching(dataset: Dataset, expression: Expression) -> Ids:
    """Return the ids of the samples of which an expression is true, ascending; see `Dataset.filter`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(expression, pc.Expression):
        wanted = 'an expression over fields, such as pyarrow.compute.field("label") < 5'
        raise ConfigError(f"a filter must be {wanted}, got {shown(expression)}", option="expression")
    what, found = textwrap.shorten(str(expression), _MOST_SHOWN), []
    for ids in _in_steps(dataset):
        table = _columns(dataset, ids)
        try:
            kept = table.filter(expression)
        except pa.ArrowException as error:
            said = _UNKNOWN.sub(r"there is no field \1", str(error).partition("\n")[0])
            known = ", ".join(table.column_names[1:]) or "none"
            raise ConfigError(
                f"cannot filter {dataset.root} by {what}: {said}; its fields are {known}", option="expression"
            ) from None
        found.append(np.asarray(kept[0]))
    # Arrow promises no order of what it evaluates in several threads.
    chosen = np.sort(np.concatenate(found))
    if not len(chosen):
        raise DatasetError(f"none of the {len(dataset)} samples of {dataset.root} passes the filter {what}")
    return chosen


def _columns(dataset: Dataset, ids: Ids) -> pa.Table:
    """Return ids as the first column, and after them what an expression may name."""
    import pyarrow as pa

    values = dataset.values(ids)
    columns = {name: _arrow(array) for name, array in values.items()}
    for field in dataset.fields:
        if field.categories:  # an expression names them
            names = pa.array(field.categories, pa.string())
            columns[field.name] = pa.DictionaryArray.from_arrays(columns[field.name], names)
    if dataset.class_names and CLASS not in columns and LABEL.name in values:
        names = pa.array(dataset.class_names, pa.string())
        columns[CLASS] = pa.DictionaryArray.from_arrays(columns[LABEL.name], names)
    # An empty name cannot be meant by an expression, and is none of a field's.
    return pa.table([pa.array(ids), *columns.values()], names=["", *columns])


def _arrow(array: Column) -> pa.Array:
    """Make an array, of lists if each value is an array, for each axis in lists."""
    import pyarrow as pa

    if isinstance(array, Packed):
        inner, bounds = array.own()
        return pa.LargeListArray.from_arrays(pa.array(bounds), _arrow(inner))
    values = pa.array(np.ascontiguousarray(array).ravel())
    for size in reversed(array.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values
