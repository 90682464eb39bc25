"""Samples encoded in a column of Arrow tables: located in existing files, or unpacked once into plain files.

Hugging Face datasets and Parquet files share this module. Each is a `Source`.
"""

from __future__ import annotations

import json
import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.columns import Columns, KnownFields, checked_fields, gathered, is_text, may_be_numbers
from mbaas.dataset.readers.listing import Listing, listed_once
from mbaas.dataset.storage.faults import dataset_errors, message_of
from mbaas.dataset.storage.location import IN_SHARD, Location, NamedFiles, file_infos, join, locate, written_whole
from mbaas.dataset.table import SPAN, string_bounds, table_of
from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.samples.fields import LABEL
from mbaas.samples.order import Ids

_UNPACK = "name a folder with unpacked=, into which they are unpacked once"
_THREADS = 4  # each holds a record batch, usually a thousand rows
_LISTING = "listing.parquet"  # the listing of a folder of unpacked samples
_ENDING = ".images"  # of files with unpacked samples

Locate: TypeAlias = Callable[[int, int], tuple[str, int] | None]
"""(address, number of bytes) -> (file, offset) of memory; None if it is not memory of a file."""

Read: TypeAlias = Callable[[Sequence[str]], Iterable[pa.RecordBatch]]
"""Names of columns -> the rows of a part, in order."""


class Source(ABC):
    """Tables with a column of encoded samples.

    Attributes:
        kind: name of the files in messages.
        where: the folder of its files.
        files: name below the folder, size and modification time of each file.
        state: JSON value that changes with the contents.
        parts: names of parts that can be read in parallel.
        has_paths: whether a sample without bytes may have a path instead.
    """

    kind = "Arrow files"
    where: Location
    files: list[list[Any]]
    state: Any
    parts: Sequence[str]
    has_paths = True

    @abstractmethod
    def opened(self, part: str) -> AbstractContextManager[tuple[pa.Schema, Read]]:
        """Open a part; return the schema of its rows, with the features in its metadata."""

    def name_of(self, part: str) -> str:
        """Return the name of a part in messages."""
        return join(self.where.root, part)

    def tables(self, columns: Sequence[str], without: str) -> list[tuple[pa.Table, Locate]]:
        """Return tables of columns, and the mapping of their memory to files.

        The bytes of the samples, in the column ``without``, need not be in memory.
        """
        raise NotImplementedError  # this source is always unpacked

    @property
    def indices(self) -> Ids | None:
        """Rows of the `tables` that are samples, in order: int64[n]; None: all rows in order."""
        return None


def read_encoded(
    writer: str,
    source: Source,
    image: str,
    label: str | None,
    fields: Sequence[str] | None,
    *,
    listing: str | os.PathLike[str] | None = None,
    unpacked: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Return the samples of a source; `mbaas.read_huggingface` documents arguments and errors."""
    wanted = _ColumnNames(image, label, checked_fields(fields))
    target = None if unpacked is None else locate(unpacked, None)

    def make() -> Listing:
        return _located(source, wanted) if target is None else _unpacked(source, wanted, target)

    def is_current(saved: Listing) -> bool:
        if not isinstance(saved.files, dict) or saved.files.get("state") != source.state:
            return False
        sizes: dict[str, int] = saved.files["images"]
        return target is None or [info.size for info in file_infos(target, [*sizes])] == [*sizes.values()]

    found = listed_once(
        listing if unpacked is None else _listing_in(unpacked),
        make,
        writer=writer,
        root=source.where.root,
        options=asdict(wanted),
        is_current=is_current,
    )
    if found.files["folder"] is not None:
        return found.dataset(locate(found.files["folder"], None))
    return found.dataset(source.where if target is None else target, found.files["images"])


def _listing_in(folder: str | os.PathLike[str]) -> str:
    text = os.fspath(folder)
    path, *options = text.partition("?") if "://" in text else (text,)
    return f"{path.rstrip('/')}/{_LISTING}" + "".join(options)


@dataclass(frozen=True)
class _ColumnNames:
    """Columns with samples, labels and fields; see `mbaas.read_huggingface`."""

    image_column: str
    label_column: str | None
    fields: tuple[str, ...] | None

    def label_in(self, columns: Sequence[str]) -> str | None:
        """Return the label column: the requested one, or the column "label" if there is one."""
        return LABEL.name if self.label_column is None and LABEL.name in columns else self.label_column


def _listing(
    source: Source, places: list[pa.Array], known: KnownFields, images: dict[str, int], folder: str | None = None
) -> Listing:
    """Describe located samples.

    Args:
        source: its state tells whether a saved listing is still valid.
        places: columns of `SPAN`.
        known: class names, and fields by name.
        images: name of a file with many samples -> size in bytes.
        folder: folder of the samples if each is a separate file; otherwise None.
    """
    class_names, fields = known
    about = {"state": source.state, "folder": folder, "images": images}
    return Listing.of(class_names, table_of(places, fields), about)


# ---- columns ----


class _Selection:
    """The requested columns of a table.

    Attributes:
        name: the table's name in messages.
        image: the column with the samples.
        columns: top-level columns that `values` needs.
    """

    def __init__(self, name: str, schema: pa.Schema, wanted: _ColumnNames, paths: bool) -> None:
        self.name, self.image, self._paths = name, wanted.image_column, paths
        image, label, fields = self.image, wanted.label_column, wanted.fields
        try:
            tops = schema.names
            _require(name, tops, image, "image_column")
            flat = _flattened(schema.remove(tops.index(image)).empty_table()).schema
        except UnicodeDecodeError as error:
            wrong = bytes(error.object)
            raise DatasetError(f"{name} has a column whose name is not UTF-8: {wrong!r}") from None
        kind = schema.field(image).type
        if not (_has_bytes(kind) or (paths and is_text(kind))):
            must = f"must have encoded images{' or their paths' if paths else ''}: a feature Image, binary"
            raise ConfigError(f"column {image!r} of {name} {must}, got {kind}", option="image_column")
        label = wanted.label_in(flat.names)
        if fields is None:
            kinds = {each.name: _storage_type(each.type) for each in flat}
            fields = tuple(each for each, kind in kinds.items() if each != label and may_be_numbers(kind))
        for option, column in [("label_column", label), *(("fields", field) for field in fields)]:
            if column is not None:
                _require(name, flat.names, column, option)
        names = dict.fromkeys([*([label] if label is not None else []), *fields])
        self._kinds = {each: _storage_type(flat.field(each).type) for each in names}
        self.columns = [top for top in tops if any(f"{each}.".startswith(f"{top}.") for each in names) and top != image]

    def values(self, table: pa.Table) -> pa.Table:
        """Return the columns for labels and fields, as a copy: slices would keep the whole file in memory."""
        count, table = len(table), table.select(self.columns)
        self._check("columns", table)
        table = _flattened(table)
        columns = {
            name: pa.chunked_array([getattr(chunk, "storage", chunk) for chunk in table[name].chunks], kind)
            for name, kind in self._kinds.items()
        }
        return pa.table(columns).take(pa.array(np.arange(count))) if columns else pa.table({})

    def encoded(self, column: pa.Array) -> pa.Array:
        """Return the validated bytes of samples; null for samples in separate files."""
        if is_text(column.type):
            return pa.nulls(len(column), pa.binary())
        try:
            column.validate()
        except pa.ArrowException as error:
            raise DatasetError(f"column {self.image!r} of {self.name} is damaged: {message_of(error)}") from error
        found = pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column
        self._check(f"images in column {self.image!r}", found)  # bounds that descend, or exceed the data
        return found

    def paths(self, column: pa.Array) -> list[str | None]:
        """Return the paths of samples. Only valid for samples without bytes: others may have text that is no path."""
        found = column
        if pa.types.is_struct(column.type):
            has_paths = self._paths and column.type.get_field_index("path") >= 0
            found = pc.struct_field(column, "path") if has_paths else pa.nulls(len(column), pa.string())
        self._check(f"paths in column {self.image!r}", found)
        paths: list[str | None] = found.to_pylist() if is_text(found.type) else [None] * len(found)
        return paths

    def lacking(self, row: int) -> DatasetError:
        which = f"row {row} (counted from 0) of {self.name} has no image in column {self.image!r}"
        hint = "leave such rows out" if self._paths else "tables that name files are read by read_manifest"
        return DatasetError(f"{which}: {hint}")

    def _check(self, what: str, values: Any) -> None:
        # Damaged values may point outside their buffers.
        try:
            values.validate(full=True)
        except pa.ArrowException as error:
            raise DatasetError(f"{what} of {self.name} are damaged: {message_of(error)}") from error


def _require(name: str, columns: Sequence[str], column: str, option: str) -> None:
    if columns.count(column) != 1:
        has = "no column" if column not in columns else "more than one column"
        there = ", ".join(columns) or "none beside it"
        raise ConfigError(f"{name} has {has} {shown(column)}; it has {there}", option=option)


def _has_bytes(kind: pa.DataType) -> bool:
    inner = kind.field("bytes").type if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
    return bool(pa.types.is_binary(inner) or pa.types.is_large_binary(inner))


def _flattened(table: pa.Table) -> pa.Table:
    while any(pa.types.is_struct(each.type) for each in table.schema):
        table = table.flatten()
    return table


def _storage_type(kind: pa.DataType) -> pa.DataType:
    # Extension types, such as arrays of several dimensions, are stored as nested lists.
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _known_fields(columns: Columns, wanted: _ColumnNames, metadata: Mapping[bytes, bytes] | None) -> KnownFields:
    """Return class names and fields of samples; by default fields are all numeric columns.

    ``metadata`` of a schema may have the class names of integer labels.
    """
    label = wanted.label_in(columns.table.column_names)
    fields = columns.default_fields([label]) if wanted.fields is None else wanted.fields
    class_names, known = columns.fields(label, fields)
    if label is None or class_names:
        return class_names, known
    class_names, labels = _class_names_in(metadata).get(label, ()), known[LABEL.name]
    if not class_names or not pa.types.is_integer(labels.type):
        return (), known
    least, most = pc.min_max(labels).values()
    if least.as_py() < 0 or most.as_py() >= len(class_names):  # -1 means an unknown label in a test set
        return (), known
    return class_names, known | {LABEL.name: labels.cast(pa.int64())}


def _class_names_in(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    # Hugging Face datasets describe their features in JSON: column -> names in label order.
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return {name: tuple(map(str, found["names"])) for name, found in features.items() if "names" in found}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):  # other programs may use another form
        return {}


# ---- samples in existing files ----


def _located(source: Source, wanted: _ColumnNames) -> Listing:
    root, rows, image = source.where.root, source.indices, wanted.image_column
    with source.opened(source.parts[0]) as (schema, _):
        selection = _Selection(root, schema, wanted, source.has_paths)
    tables = source.tables(selection.columns, image)
    values = pa.concat_tables([selection.values(table) for table, _ in tables], promote_options="permissive")
    chunks = [(chunk, locate_in) for table, locate_in in tables for chunk in table[image].chunks if len(chunk)]
    if not chunks:
        raise DatasetError(f"{root} has no rows")
    if rows is not None and values.num_columns:
        values = values.take(pa.array(rows))
    known = _known_fields(Columns(root, values.combine_chunks()), wanted, schema.metadata)
    encoded = [selection.encoded(chunk) for chunk, _ in chunks]
    has_bytes = np.concatenate([each.is_valid() for each in encoded])
    chosen = np.arange(len(has_bytes)) if rows is None else rows
    if not has_bytes[chosen].all():
        found = [path for chunk, _ in chunks for path in selection.paths(chunk)]
        paths = [found[row] for row in chosen.tolist() if not has_bytes[row]]
        if None in paths:
            raise selection.lacking(next(i for i, row in enumerate(chosen) if not has_bytes[row] and not found[row]))
        if len(paths) < len(chosen):
            raise DatasetError(f"{root} has images in its own files, and others in theirs: {_UNPACK}")
        return _in_separate_files(source, [str(path) for path in paths], known)
    numbers = {name: number for number, (name, *_) in enumerate(source.files)}
    spans = [_spans(root, each, locate_in, numbers) for each, (_, locate_in) in zip(encoded, chunks, strict=True)]
    file, offset, length = np.concatenate(spans, axis=1)[:, chosen]
    member = pa.array(np.arange(len(file))).cast(pa.large_string())
    shard = pa.array([*numbers], pa.large_string()).take(pa.array(file))
    uris = pc.binary_join_element_wise(shard, member, pa.scalar(IN_SHARD, pa.large_string()))
    sizes = {name: nbytes for name, nbytes, _ in source.files}
    return _listing(source, [uris, pa.array(offset), pa.array(length)], known, sizes)


def _spans(root: str, encoded: pa.Array, locate_in: Locate, numbers: Mapping[str, int]) -> NDArray[np.int64]:
    """Return the file number, offset and length of each sample: int64[3, n]."""
    bounds, _ = string_bounds(encoded)
    first, nbytes = int(bounds[0]), int(bounds[-1] - bounds[0])
    data = encoded.buffers()[2]
    found = locate_in(data.address + first, nbytes) if data is not None else (next(iter(numbers), ""), 0)
    if found is None or found[0] not in numbers:
        saved = "save it with save_to_disk where all nodes can read it"
        raise DatasetError(f"images of {root} are in this program's memory: {saved}, or {_UNPACK}")
    name, offset = found
    starts = bounds[:-1].astype(np.int64) - first + offset
    return np.stack([np.full(len(encoded), numbers[name]), starts, np.diff(bounds).astype(np.int64)])


def _in_separate_files(source: Source, paths: list[str], known: KnownFields) -> Listing:
    paths = [path if "://" in path else os.path.abspath(path) for path in paths]  # noqa: PTH100
    is_local = not any("://" in path for path in paths)
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if is_local else None  # noqa: PTH120
    files = NamedFiles.of(source.where, paths, folder, None)
    return _listing(source, files.spans(), known, {}, files.where.root)


# ---- unpacked samples ----


def _unpacked(source: Source, wanted: _ColumnNames, target: Location) -> Listing:
    """Write samples into files, several parts in parallel."""
    found = target.read_all(
        lambda part: _unpack(source, part, wanted, target), source.parts, source.kind, remote=_THREADS, local=_THREADS
    )
    places, columns = gathered(source.where.root, [(place, values) for place, values, _ in found])
    known = _known_fields(columns, wanted, found[0][2])
    sizes = [int(pc.sum(place["length"]).as_py() or 0) for place, *_ in found]
    files = [part + _ENDING for part in source.parts]
    return _listing(source, places, known, dict(zip(files, sizes, strict=True)))


def _unpack(
    source: Source, part: str, wanted: _ColumnNames, target: Location
) -> tuple[pa.Table, pa.Table, Mapping[bytes, bytes] | None]:
    """Return locations as in `SPAN`, the columns for labels and fields, and the schema's metadata."""
    values, lengths = list[pa.Table](), [np.zeros(0, np.int64)]
    file, path = part + _ENDING, join(target.base, part + _ENDING)
    name = source.name_of(part)
    with dataset_errors(f"cannot unpack {name} into {target.root}"):
        with source.opened(part) as (schema, read):
            selection = _Selection(name, schema, wanted, source.has_paths)
            target.filesystem.create_dir(posixpath.dirname(path), recursive=True)
            with written_whole(target.filesystem, path) as partial:
                with target.filesystem.open_output_stream(partial) as out:
                    for batch in read([selection.image, *selection.columns]):
                        encoded = _contents(selection, batch.column(selection.image), sum(map(len, lengths)))
                        values.append(selection.values(pa.Table.from_batches([batch])))
                        bounds, content = string_bounds(encoded)
                        out.write(content[bounds[0] : bounds[-1]])
                        lengths.append(np.diff(bounds).astype(np.int64))
    length = np.concatenate(lengths)
    uris = pa.array([f"{file}{IN_SHARD}{row}" for row in range(len(length))], pa.large_string())
    places = pa.Table.from_arrays([uris, pa.array(np.cumsum(length) - length), pa.array(length)], schema=SPAN)
    return places, pa.concat_tables(values) if values else pa.table({}), schema.metadata


def _contents(selection: _Selection, column: pa.Array, first: int) -> pa.Array:
    # Samples that only have a path are read from their files.
    encoded = selection.encoded(column)
    if not encoded.null_count:
        return encoded
    contents = encoded.to_pylist()
    for row, path in enumerate(selection.paths(column)):
        if contents[row] is None:
            if path is None:
                raise selection.lacking(first + row)
            where = locate(path, None)
            with dataset_errors(f"cannot read {where.root}"), where.filesystem.open_input_file(where.base) as file:
                contents[row] = file.read()
    return pa.array(contents, pa.large_binary())
