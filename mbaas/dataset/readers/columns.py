"""Converts table columns to strings, lengths, labels and fields of samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from mbaas.base.units import counted
from mbaas.dataset.storage.faults import message_of
from mbaas.dataset.table import integers
from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.samples.fields import IMAGE, LABEL, RESERVED, bounds_of

MOST_CATEGORIES = 1 << 16
"""Most distinct strings of a field: every consumer receives them all."""


KnownFields: TypeAlias = tuple[tuple[str, ...], dict[str, pa.Array]]
"""Class names, and fields by name."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table with one row per sample; each method validates a column for one use.

    ``name`` is the table's name in messages. Each column of ``table`` has one chunk.
    """

    name: str
    table: pa.Table

    def strings_of(self, column: str) -> list[str]:
        found = self._decoded(column, "uri_column")
        if not is_text(found.type):
            raise self._unfit(column, f"must be text, got {found.type}", "uri_column")
        return [str(value) for value in found.to_pylist()]

    def lengths(self, column: str) -> pa.Array:
        found = self._of(column, "length_column")
        if not pa.types.is_integer(found.type) or pc.min(found).as_py() < 0:
            wanted = "must have whole numbers of bytes, at least 0"
            least = f"the least is {pc.min(found)}" if pa.types.is_integer(found.type) else f"they are {found.type}"
            raise self._unfit(column, f"{wanted}: {least}", "length_column")
        return found.cast(pa.int64())

    def default_fields(self, but: Collection[str | None]) -> list[str]:
        """Return the names of all numeric columns that are not in ``but``."""
        return [name for name in self.table.column_names if name not in but and self._has_numbers(name)]

    def fields(self, label: str | None, names: Iterable[str]) -> KnownFields:
        """Return class names, and the fields by name: column ``label``, unless None, as "label"; columns ``names``.

        A field is an array of numbers, of lists of numbers, or a dictionary array of strings. Class names are empty
        unless the labels are strings.
        """
        class_names: tuple[str, ...] = ()
        known: dict[str, pa.Array] = {}
        if label is not None:
            known[LABEL.name] = self._field(label, "label_column")
            if pa.types.is_dictionary(known[LABEL.name].type):
                class_names = tuple(known[LABEL.name].dictionary.to_pylist())
                known[LABEL.name] = known[LABEL.name].indices
        for name in names:
            if name in (IMAGE, *RESERVED, *known):
                raise ConfigError(
                    f"a field must not be called {name!r}, which minibatches have already", option="fields"
                )
            known[name] = self._field(name, "fields")
            if pa.types.is_dictionary(known[name].type) and (count := len(known[name].dictionary)) > MOST_CATEGORIES:
                most = f"at most {MOST_CATEGORIES:,} distinct strings to be a field of categories"
                raise self._unfit(name, f"must have {most}, got {count:,}", "fields")
        return class_names, known

    def _field(self, column: str, option: str) -> pa.Array:
        found = self._decoded(column, option)
        if is_text(found.type):
            # Integer codes follow the sorted order of the distinct strings.
            names = pa.array(sorted(pc.unique(found).to_pylist()), found.type)
            return pa.DictionaryArray.from_arrays(pc.index_in(found, names).cast(pa.int64()), names.cast(pa.string()))
        numbers = as_numbers(found)
        if numbers is None and (row := _first_null(found)) is not None:
            raise self._damaged(column, f"lacks a value in the list of row {row} (counted from 0)")
        if numbers is None:
            wanted = "must have numbers, lists of numbers or of equally long lists of numbers, or strings"
            raise self._unfit(column, f"{wanted}, got {found.type}", option)
        return numbers

    def with_single_values(self) -> Columns:
        """Return the same columns, with lists replaced by their values where every list of a column has one value."""
        columns = [column.chunk(0) for column in self.table.columns]
        single = [
            pa.types.is_list(each.type) and pc.all(pc.equal(pc.list_value_length(each), 1)).as_py() for each in columns
        ]
        flat = [each.flatten() if is_single else each for each, is_single in zip(columns, single, strict=True)]
        return Columns(self.name, pa.table(flat, names=self.table.column_names))

    def _has_numbers(self, column: str) -> bool:
        """Return whether a column can be a field. Missing values count as valid here; `fields` reports them."""
        found = self.table[column].chunk(0)
        return as_numbers(found) is not None or (may_be_numbers(found.type) and _first_null(found) is not None)

    def _unfit(self, column: str, why: str, option: str) -> ConfigError:
        return ConfigError(f"column {column!r} of {self.name} {why}", option=option)

    def _damaged(self, column: str, why: str) -> DatasetError:
        return DatasetError(f"column {column!r} of {self.name} {why}")

    def _decoded(self, column: str, option: str) -> pa.Array:
        # Some writers declare strings as bytes. Other columns are returned unchanged.
        found = self._of(column, option)
        if not (is_binary(found.type) or pa.types.is_fixed_size_binary(found.type)):
            return found
        try:
            return found.cast(pa.binary()).cast(pa.string())
        except pa.ArrowInvalid as error:
            raise self._damaged(column, f"has bytes that are not UTF-8: {message_of(error)}") from None

    def _of(self, column: str, option: str) -> pa.Array:
        if column not in self.table.column_names:
            there = ", ".join(self.table.column_names)
            raise ConfigError(f"{self.name} has no column {shown(column)}; it has {there}", option=option)
        found = self.table[column].chunk(0)
        if pa.types.is_dictionary(found.type):
            found = found.dictionary_decode()
        if pa.types.is_string_view(found.type):
            found = found.cast(pa.large_string())
        if found.null_count:
            row = pc.index(pc.is_null(found), True).as_py()
            raise self._damaged(column, f"has no value in row {row} (counted from 0)")
        try:
            found.validate(full=True)  # a file may declare bytes as UTF-8 that are not
        except pa.ArrowException as error:
            raise self._damaged(column, f"is damaged: {message_of(error)}") from error
        return found


def _first_null(found: pa.Array) -> int | None:
    """Return the row of the first missing value, at any depth of lists."""
    if found.null_count:
        return int(pc.index(pc.is_null(found), True).as_py())
    if not is_list(found.type):
        return None
    at = _first_null(found.flatten())
    return None if at is None else int(pc.list_parent_indices(found)[at].as_py())


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def may_be_numbers(kind: pa.DataType) -> bool:
    """Return whether a type fits a field, provided that nested lists are equally long."""
    while is_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def as_numbers(found: pa.Array, *, as_typed: bool = False) -> pa.Array | None:
    """Return an array in the form of a field; None if it is not numeric.

    Equally long lists become fixed-size lists; ``as_typed`` leaves large lists unchanged.
    """
    kind = found.type
    if pa.types.is_boolean(kind):
        return found.cast(pa.uint8())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return found
    if not is_list(kind):
        return None
    lengths, values = pc.list_value_length(found), as_numbers(found.flatten(), as_typed=as_typed)
    if found.null_count or values is None or values.null_count or pa.types.is_large_list(values.type):
        return None
    if pa.types.is_fixed_size_list(kind) and kind.list_size:  # even an empty array
        return pa.FixedSizeListArray.from_arrays(values, kind.list_size)
    least, most = pc.min(lengths).as_py(), pc.max(lengths).as_py()
    if least == most and most and not (as_typed and pa.types.is_large_list(kind)):
        return pa.FixedSizeListArray.from_arrays(values, most)
    bounds = bounds_of(integers(lengths.cast(pa.int64())))
    return pa.LargeListArray.from_arrays(pa.array(bounds), values)


def checked_fields(fields: Sequence[str] | None, of: str = "columns") -> tuple[str, ...] | None:
    """Return field names as a tuple; raise ConfigError for a single string."""
    if isinstance(fields, str):
        raise ConfigError(f"fields must be a list of {of}, such as [{fields!r}], got {fields!r}", option="fields")
    return None if fields is None else tuple(fields)


def gathered(name: str, parts: Sequence[tuple[pa.Table, pa.Table]]) -> tuple[list[pa.Array], Columns]:
    """Concatenate the results of all shards: the columns of `SPAN`, and the value columns.

    ``name`` is the dataset's name in messages. ``parts`` has two tables per shard, with one row per sample.

    Raises:
        DatasetError: no samples, or a column with different types in two shards.
    """
    spans = pa.concat_tables([span for span, _ in parts]).combine_chunks()
    if not len(spans):
        raise DatasetError(f"{name}: no sample is in {counted(len(parts), 'shard')}")
    try:
        # One shard may have 1 where another has 1.5.
        values = pa.concat_tables([value for _, value in parts], promote_options="permissive").combine_chunks()
    except pa.ArrowException as error:
        raise DatasetError(
            f"{name}: a column has values of another kind in another shard: {message_of(error)}"
        ) from error
    return [column.chunk(0) for column in spans.columns], Columns(name, values)
