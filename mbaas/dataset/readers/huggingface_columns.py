"""Selects the columns of a Hugging Face dataset that a feed needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mbaas.dataset.readers.class_labels import class_names_in, with_classes
from mbaas.dataset.readers.columns import Columns, is_text, may_be_numbers
from mbaas.dataset.readers.huggingface_source import Source
from mbaas.dataset.storage.faults import message_of
from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.fields import LABEL


class WantedColumns:
    """The columns to read.

    Attributes:
        source: the dataset's tables.
        image, label, fields: column names; ``label`` is None if there is no label.
        columns: the top-level columns that `values` needs.
    """

    def __init__(self, source: Source, image: str, label: str | None, fields: Sequence[str] | None) -> None:
        self.source, self.image = source, image
        try:
            names = source.schema.names
            leaves = {name: leaf for each in source.schema if each.name != image for name, leaf in _leaves(each)}
        except UnicodeDecodeError as error:
            wrong = bytes(error.object)
            raise DatasetError(f"{source.where.root} has a column whose name is not UTF-8: {wrong!r}") from None
        if names.count(image) != 1:
            has = "no column" if image not in names else "more than one column"
            raise ConfigError(
                f"{source.where.root} has {has} {shown(image)}; it has {', '.join(names)}", option="image_column"
            )
        kind = source.schema.field(image).type
        if not (_has_bytes(kind) or is_text(kind)):
            wanted = "must have encoded images or their paths: a feature Image, binary or text"
            raise ConfigError(f"column {image!r} of {source.where.root} {wanted}, got {kind}", option="image_column")
        self.label = LABEL.name if label is None and LABEL.name in leaves else label
        self._by_default = fields is None
        if fields is None:
            fields = [name for name, leaf in leaves.items() if name != self.label and may_be_numbers(_stored(leaf))]
        self.fields = tuple(fields)
        for option, column in [("label_column", self.label), *(("fields", name) for name in self.fields)]:
            if column is not None and column not in leaves:
                there = ", ".join(leaves) or "none beside it"
                raise ConfigError(f"{source.where.root} has no column {shown(column)}; it has {there}", option=option)
        self._leaves = list(dict.fromkeys([*([self.label] if self.label is not None else []), *self.fields]))
        tops = [each.name for each in source.schema if each.name != image]
        self.columns = [top for top in tops if any(leaf == top or leaf.startswith(f"{top}.") for leaf in self._leaves)]

    def values(self, table: pa.Table) -> pa.Table:
        """Return the columns for labels and fields, as a copy: slices would keep the whole file in memory."""
        count, table = len(table), table.select(self.columns)
        checked(self.source, "columns", table)
        while any(pa.types.is_struct(each.type) for each in table.schema):
            table = table.flatten()
        kinds = {name: _stored(table.schema.field(name).type) for name in self._leaves}
        columns = {name: pa.chunked_array(map(_storage, table[name].chunks), kind) for name, kind in kinds.items()}
        return pa.table(columns).take(pa.array(np.arange(count))) if columns else pa.table({})

    def known(self, values: pa.Table) -> tuple[tuple[str, ...], dict[str, pa.Array]]:
        """Return class names and the fields of samples."""
        columns = Columns(self.source.where.root, values.combine_chunks())
        fields = [name for name in self.fields if not self._by_default or columns.has_numbers(name)]
        class_names, known = columns.fields(self.label, fields)
        if self.label is not None and not class_names:
            names = class_names_in(self.source.schema.metadata)
            class_names, known = with_classes(names.get(self.label, ()), known)
        return class_names, known


def checked(source: Source, what: str, values: Any) -> None:
    """Raise DatasetError for damaged values, which may point outside their buffers."""
    try:
        values.validate(full=True)
    except pa.ArrowException as error:
        raise DatasetError(f"{what} of {source.where.root} are damaged: {message_of(error)}") from error


def _has_bytes(kind: pa.DataType) -> bool:
    inner = kind.field("bytes").type if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
    return bool(pa.types.is_binary(inner) or pa.types.is_large_binary(inner))


def _leaves(field: pa.Field) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the name and type of a column, or of each column nested in it."""
    if not pa.types.is_struct(field.type):
        yield field.name, field.type
        return
    for inner in field.type:
        yield from _leaves(inner.with_name(f"{field.name}.{inner.name}"))


def _stored(kind: pa.DataType) -> pa.DataType:
    # Extension types, such as arrays of several dimensions, are stored as nested lists.
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _storage(chunk: pa.Array) -> pa.Array:
    return chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk
