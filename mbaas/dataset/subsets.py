"""Selects samples of a dataset: random splits, filters by expression, and weighted draws."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.samples.fields import LABEL, Arrays, Column, Field, Packed, value_of
from mbaas.samples.order import Ids, check_seed, drawing_chance, split_order

# Arrow is imported when filtering: all actors of a feed import this module, but never filter.
if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.compute import Expression

CLASS = "class"
"""The name of a sample's class in expressions."""

_BATCH_SAMPLES = 1_000_000
"""Samples whose fields are read together."""

_UNKNOWN = re.compile(r"No match for FieldRef\.Name\((.*)\) in .*")
"""Arrow's message for an unknown column."""

_MOST_SHOWN = 200
"""Characters of an expression in an error message: one may list thousands of values."""


class Samples(Protocol):
    """The part of a `Dataset` by which samples are selected. The class itself imports this module."""

    @property
    def root(self) -> str: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...
    @property
    def fields(self) -> tuple[Field, ...]: ...
    def __len__(self) -> int: ...
    def values(self, sample_ids: Ids, /) -> Arrays: ...
    def uri(self, sample_id: int, /) -> str: ...


def is_whole(number: Any) -> bool:
    """Return whether a value is an integer, not a boolean."""
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def id_batches(count: int) -> Iterator[Ids]:
    """Yield the ids in [0, count), at most a million at a time."""
    for start in range(0, count, _BATCH_SAMPLES):
        yield np.arange(start, min(start + _BATCH_SAMPLES, count))


def checked_ids(dataset: Samples, sample_ids: Any) -> Ids:
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


# ---- splits ----


def split_ids(dataset: Samples, fraction: Any, seed: int, stratify: str | None) -> tuple[Ids, Ids]:
    """Split the ids of a dataset in two, both ascending; see `Dataset.split`."""
    if not isinstance(fraction, Real) or not 0 < float(fraction) < 1:
        raise ConfigError(f"fraction must be a number above 0 and below 1, got {shown(fraction)}", option="fraction")
    strata = None if stratify is None else _integers(dataset, stratify, option="stratify")
    is_first = random_share(len(dataset), float(fraction), seed, strata)
    first, second = np.flatnonzero(is_first), np.flatnonzero(~is_first)
    if not len(first) or not len(second):
        which = "second" if len(first) else "first"
        raise ConfigError(
            f"fraction {fraction} of the {len(dataset)} samples of {dataset.root} leaves none for the {which} part",
            option="fraction",
        )
    return first, second


def random_share(count: int, fraction: float, seed: int, strata: NDArray[Any] | None = None) -> NDArray[np.bool_]:
    """Select ``count * fraction`` samples at random, rounded to the nearest integer: bool[count].

    With ``strata`` [count], the same fraction of each distinct value is selected, to within one sample.
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


def _integers(dataset: Samples, name: str, option: str) -> NDArray[Any]:
    """Return the values of an integer field, [number of samples]; errors name it as ``option``."""
    whole = [each.name for each in dataset.fields if not each.shape and np.issubdtype(each.dtype, np.integer)]
    if name not in whole:
        there = ", ".join(whole) or "none"
        raise ConfigError(
            f"{option} must name a field of whole numbers ({dataset.root} has {there}), got {shown(name)}",
            option=option,
        )
    return _all_values(dataset, name)


def _all_values(dataset: Samples, name: str) -> NDArray[Any]:
    return np.concatenate([dataset.values(ids)[name] for ids in id_batches(len(dataset))])


# ---- rows and filters ----


def rows_of(dataset: Samples, ids: Ids) -> list[dict[str, Any]]:
    """Return the uri and the fields of samples, as `Dataset.head` documents."""
    values, fields = dataset.values(ids), dataset.fields
    rows: list[dict[str, Any]] = []
    for number, sample_id in enumerate(ids.tolist()):
        row: dict[str, Any] = {"uri": dataset.uri(sample_id)}
        for field in fields:
            value = value_of(values[field.name], number)
            row[field.name] = value if value.ndim else value.item()
            if field.categories:
                row[field.name] = field.categories[value]
        if dataset.class_names and CLASS not in row and LABEL.name in row:
            row[CLASS] = dataset.class_names[row[LABEL.name]]
        rows.append(row)
    return rows


def arrow_columns(dataset: Samples, ids: Ids) -> dict[str, pa.Array]:
    """Return the columns that expressions can use: fields, with categories as strings, and `CLASS`."""
    import pyarrow as pa

    values = dataset.values(ids)
    columns = {name: arrow_array(array) for name, array in values.items()}
    for field in dataset.fields:
        if field.categories:
            names = pa.array(field.categories, pa.string())
            columns[field.name] = pa.DictionaryArray.from_arrays(columns[field.name], names)
    if dataset.class_names and CLASS not in columns and LABEL.name in values:
        names = pa.array(dataset.class_names, pa.string())
        columns[CLASS] = pa.DictionaryArray.from_arrays(columns[LABEL.name], names)
    return columns


def arrow_array(array: Column) -> pa.Array:
    """Return a column as an Arrow array, with one level of lists for each axis after the first."""
    import pyarrow as pa

    if isinstance(array, Packed):
        inner, bounds = array.own()
        return pa.LargeListArray.from_arrays(pa.array(bounds), arrow_array(inner))
    values = pa.array(np.ascontiguousarray(array).ravel())
    for size in reversed(array.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values


def matching_ids(dataset: Samples, expression: Expression) -> Ids:
    """Return the ids of the samples that satisfy an expression, ascending; see `Dataset.filter`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(expression, pc.Expression):
        wanted = 'an expression over fields, such as pyarrow.compute.field("label") < 5'
        raise ConfigError(f"a filter must be {wanted}, got {shown(expression)}", option="expression")
    text, found = textwrap.shorten(str(expression), _MOST_SHOWN), []
    for ids in id_batches(len(dataset)):
        columns = arrow_columns(dataset, ids)
        # An expression cannot use the empty name, and no field has it.
        table = pa.table([pa.array(ids), *columns.values()], names=["", *columns])
        try:
            matching = table.filter(expression)
        except pa.ArrowException as error:
            reason = _UNKNOWN.sub(r"there is no field \1", str(error).partition("\n")[0])
            known = ", ".join(columns) or "none"
            raise ConfigError(
                f"cannot filter {dataset.root} by {text}: {reason}; its fields are {known}", option="expression"
            ) from None
        found.append(np.asarray(matching[0]))
    # Arrow evaluates in several threads, without a guaranteed order.
    chosen = np.sort(np.concatenate(found))
    if not len(chosen):
        raise DatasetError(f"none of the {len(dataset)} samples of {dataset.root} passes the filter {text}")
    return chosen


# ---- weighted draws ----


@dataclass(frozen=True, eq=False)
class Draws:
    """Parameters of draws from a dataset.

    Attributes:
        weights: float64[n], at least 0, not all 0.
        samples: number of draws, at least 1.
        seed: selects the draws, in [0, 2**63).
        strata: [n]; each distinct value gets its expected number of draws, to within one. None: no strata.
    """

    weights: NDArray[np.float64]
    samples: int
    seed: int
    strata: NDArray[Any] | None = None

    @property
    def expected(self) -> NDArray[np.float64]:
        """Expected number of draws of each sample: float64[n]."""
        return self.weights / self.weights.sum() * self.samples

    def part(self, ids: Ids) -> Draws:
        """Return the same draws for a dataset of only the samples ``ids``, which include all with positive weight."""
        return Draws(self.weights[ids], self.samples, self.seed, None if self.strata is None else self.strata[ids])

    def fingerprint(self, of: str) -> str:
        """Return 32 hex digits that identify these draws from a dataset with fingerprint ``of``."""
        digest = hashlib.blake2b(f"{self.samples} draws, seed {self.seed}, of {of} ".encode(), digest_size=16)
        digest.update(self.weights.astype("<f8", copy=False).data)
        if self.strata is not None:
            digest.update(self.strata.astype("<i8").data)
        return digest.hexdigest()


@lru_cache(maxsize=4)  # epochs in flight at the same time; a million draws take 8 MB and a third of a second
def drawn_ids(draws: Draws, epoch: int | None = None) -> Ids:
    """Return the draws of an epoch, or (None) those that hold for all epochs: int64[samples], ascending, read-only.

    This is systematic sampling (Madow, "On the theory of systematic sampling, II", 1949). The weights are laid end to
    end on a line, in random order. Evenly spaced points with a random start then select samples. A sample with ``e``
    expected draws is drawn floor(e) or ceil(e) times. Independent draws would leave out a third of all samples at equal
    weights.
    """
    there = np.flatnonzero(draws.weights > 0)
    order, start = drawing_chance(len(there), draws.seed, epoch)
    ids = there[order]
    if draws.strata is not None:
        ids = ids[np.argsort(draws.strata[ids], kind="stable")]  # grouped by stratum, in random order within each
    ends = np.cumsum(draws.weights[ids])
    # The number of points before the end of each weight. Rounding moves no point beyond the last weight.
    passed = np.minimum(np.floor(ends / ends[-1] * draws.samples + start), draws.samples).astype(np.int64)
    drawn = np.sort(np.repeat(ids, np.diff(passed, prepend=0)))
    drawn.flags.writeable = False
    return drawn


def weighted_draws(dataset: Samples, weights: Any, samples: int | None, seed: int) -> Draws:
    """Return the draws of `Dataset.resample`."""
    count = _checked_count(dataset, samples, seed)
    return Draws(_checked_weights(dataset, weights), count, seed)


def balanced_draws(dataset: Samples, field: str, samples: int | None, seed: int) -> Draws:
    """Return the draws of `Dataset.balance`."""
    count = _checked_count(dataset, samples, seed)
    strata = _integers(dataset, field, option="field")
    _, which, times = np.unique(strata, return_inverse=True, return_counts=True)
    return Draws(1.0 / times[which], count, seed, strata)


def _checked_count(dataset: Samples, samples: Any, seed: int) -> int:
    if samples is not None and (not is_whole(samples) or samples < 1):
        raise ConfigError(f"samples must be a whole number of at least 1, got {shown(samples)}", option="samples")
    check_seed(seed)
    return len(dataset) if samples is None else int(samples)


def _checked_weights(dataset: Samples, weights: Any) -> NDArray[np.float64]:
    wanted = "weights must have"
    if isinstance(weights, str):
        numbers = [each.name for each in dataset.fields if not each.shape]
        if weights not in numbers:
            there = ", ".join(numbers) or "none"
            message = f"weights must name a field of numbers ({dataset.root} has {there}), got {weights!r}"
            raise ConfigError(message, option="weights")
        wanted, weights = f"the field {weights!r} must have", _all_values(dataset, weights)
    try:
        found = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        message = f"weights must be numbers or the name of a numeric field, got {shown(weights)}"
        raise ConfigError(message, option="weights") from None
    if found.shape != (len(dataset),):
        got = f"an array of shape {found.shape}"
        raise ConfigError(f"{wanted} a number for each of {len(dataset)} samples, got {got}", option="weights")
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        got = f"{found[wrong[0]]} for sample {wrong[0]}"
        raise ConfigError(f"{wanted} finite numbers of at least 0, got {got}", option="weights")
    if not found.any():
        raise ConfigError(f"{wanted} at least one number above 0, got none", option="weights")
    return found / found.max()  # prevents an infinite sum
