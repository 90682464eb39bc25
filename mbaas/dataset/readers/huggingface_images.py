"""Locates the images of a Hugging Face dataset: in its Arrow files, in separate files, or unpacked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mbaas.dataset.readers.columns import is_text
from mbaas.dataset.readers.huggingface_columns import WantedColumns, checked
from mbaas.dataset.readers.huggingface_source import Place, Source
from mbaas.dataset.readers.unpacking import ENDING, unpack
from mbaas.dataset.storage.faults import message_of
from mbaas.dataset.storage.files import NamedFiles
from mbaas.dataset.storage.location import IN_SHARD, Location, locate
from mbaas.dataset.table import string_bounds
from mbaas.errors import ConfigError, DatasetError
from mbaas.progress import track

_UNPACK = "name a folder with unpacked=, into which they are unpacked once"
_THREADS = 4  # each holds a record batch, usually a thousand rows


@dataclass(frozen=True)
class Placed:
    """Locations of images, and their fields.

    Attributes:
        places: columns of `PLACE`.
        class_names, known: class names, and fields by name.
        images: name of a file with many images -> size in bytes.
        folder: folder of the images if each is a separate file; otherwise None.
    """

    places: list[pa.Array]
    class_names: tuple[str, ...]
    known: dict[str, pa.Array]
    images: dict[str, int]
    folder: str | None = None


def placed(source: Source, wanted: WantedColumns) -> Placed:
    """Locate images in the existing files."""
    tables = source.tables(wanted.columns, wanted.image)
    values = pa.concat_tables([wanted.values(table) for table, _ in tables], promote_options="permissive")
    chunks = [(chunk, place) for table, place in tables for chunk in table[wanted.image].chunks if len(chunk)]
    if not chunks:
        raise DatasetError(f"{source.where.root} has no rows")
    rows = source.indices
    if rows is not None and len(values.column_names):
        values = values.take(pa.array(rows))
    class_names, known = wanted.known(values)
    encoded = np.concatenate([_bytes_of(source, wanted.image, chunk).is_valid() for chunk, _ in chunks])
    if not (encoded if rows is None else encoded[rows]).all():
        found = [path for chunk, _ in chunks for path in _paths(source, wanted.image, chunk)]
        chosen = range(len(found)) if rows is None else rows.tolist()
        paths = [found[row] for row in chosen if not encoded[row]]
        if None in paths:
            row = next(number for number, row in enumerate(chosen) if not encoded[row] and found[row] is None)
            raise _no_image(wanted.image, f"row {row} (counted from 0) of {source.where.root}")
        if len(paths) < len(chosen):
            raise DatasetError(f"{source.where.root} has images in its own files, and others in theirs: {_UNPACK}")
        return _in_files(source, [path for path in paths if path is not None], class_names, known)
    names = {name: number for number, (name, *_) in enumerate(source.files)}
    spans = np.concatenate([_spans(source, wanted.image, chunk, place, names) for chunk, place in chunks], axis=1)
    file, offset, length = spans if rows is None else spans[:, rows]
    number = pa.array(np.arange(len(file))).cast(pa.large_string())
    texts = pa.array([*names], pa.large_string()).take(pa.array(file))
    uris = pc.binary_join_element_wise(texts, number, pa.scalar(IN_SHARD, pa.large_string()))
    sizes = {name: nbytes for name, nbytes, _ in source.files}
    return Placed([uris, pa.array(offset), pa.array(length)], class_names, known, sizes)


def _spans(source: Source, image: str, chunk: pa.Array, place: Place, names: dict[str, int]) -> NDArray[np.int64]:
    """Return the file number, offset and length of each image of a chunk: int64[3, n]."""
    encoded = _bytes_of(source, image, chunk)
    bounds, _ = string_bounds(encoded)
    first, nbytes = int(bounds[0]), int(bounds[-1] - bounds[0])
    data = encoded.buffers()[2]
    found = place(data.address + first, nbytes) if data is not None else (next(iter(names), ""), 0)
    if found is None or found[0] not in names:
        saved = "save it with save_to_disk where all nodes can read it"
        raise DatasetError(f"images of {source.where.root} are in this program's memory: {saved}, or {_UNPACK}")
    name, offset = found
    start = bounds[:-1].astype(np.int64) - first + offset
    return np.stack([np.full(len(encoded), names[name]), start, np.diff(bounds).astype(np.int64)])


def _in_files(source: Source, paths: list[str], class_names: tuple[str, ...], known: dict[str, pa.Array]) -> Placed:
    paths = [path if "://" in path else os.path.abspath(path) for path in paths]  # noqa: PTH100
    is_local = not any("://" in path for path in paths)
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if is_local else None  # noqa: PTH120
    files = NamedFiles.of(source.where, paths, folder, None)
    lengths = files.lengths()
    names = pa.array(files.names, pa.large_string())
    places = [names, pa.array(np.zeros(len(paths), np.int64)), lengths]
    return Placed(places, class_names, known, {}, files.where.root)


def unpacked_images(source: Source, wanted: WantedColumns, target: Location) -> Placed:
    """Write images into files, several parts in parallel."""

    def unpack_part(part: str) -> tuple[pa.Table, int, pa.Table]:
        values = []

        def images() -> Iterator[pa.Array]:
            for batch in source.batches(part, [wanted.image, *wanted.columns]):
                values.append(wanted.values(pa.Table.from_batches([batch])))
                yield _contents(source, wanted.image, batch.column(wanted.image))

        try:
            return *unpack(images(), target, part), pa.concat_tables(values) if values else pa.table({})
        except (ConfigError, DatasetError):
            raise
        except Exception as error:  # third-party file systems raise any exception
            what = f"cannot unpack {part} of {source.where.root} into {target.root}"
            raise DatasetError(f"{what}: {message_of(error)}") from error

    parts = source.parts()
    with ThreadPoolExecutor(min(_THREADS, len(parts)), thread_name_prefix="mbaas-listing") as pool:
        found = [*track(pool.map(unpack_part, parts), "Arrow files", len(parts))]
    places = pa.concat_tables([place for place, *_ in found]).combine_chunks()
    if not len(places):
        raise DatasetError(f"{source.where.root} has no rows")
    known_of = [each for *_, each in found if each.num_columns] or [pa.table({})]
    values = pa.concat_tables(known_of, promote_options="permissive")
    class_names, known = wanted.known(values)
    images = {part + ENDING: nbytes for part, (_, nbytes, _) in zip(parts, found, strict=True)}
    return Placed([column.chunk(0) for column in places.columns], class_names, known, images)


def _contents(source: Source, image: str, column: pa.Array) -> pa.Array:
    # Images that only have a path are read from their files.
    encoded = _bytes_of(source, image, column)
    if not encoded.null_count:
        return encoded
    contents = encoded.to_pylist()
    for row, path in enumerate(_paths(source, image, column)):
        if contents[row] is None:
            if path is None:
                raise _no_image(image, f"a row of {source.where.root}")
            contents[row] = _read(path)
    return pa.array(contents, pa.large_binary())


def _no_image(image: str, row: str) -> DatasetError:
    return DatasetError(f"{row} has no image in column {image!r}: leave such rows out, with the dataset's filter")


def _read(path: str) -> bytes:
    where = locate(path, None)
    try:
        with where.filesystem.open_input_file(where.base) as file:
            content: bytes = file.read()
            return content
    except OSError as error:
        raise DatasetError(f"cannot read {where.root}: {message_of(error)}") from error


def _bytes_of(source: Source, image: str, column: pa.Array) -> pa.Array:
    """Return the validated bytes of a column's images; null for images in separate files."""
    if is_text(column.type):
        return pa.nulls(len(column), pa.binary())
    try:
        column.validate()
    except pa.ArrowException as error:
        raise DatasetError(f"column {image!r} of {source.where.root} is damaged: {message_of(error)}") from error
    found = pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column
    checked(source, f"images in column {image!r}", found)  # bounds that descend, or exceed the data
    return found


def _paths(source: Source, image: str, column: pa.Array) -> list[str | None]:
    # Only valid for images without bytes: others may have text that is not a path.
    found = column
    if pa.types.is_struct(column.type):
        has_paths = column.type.get_field_index("path") >= 0
        found = pc.struct_field(column, "path") if has_paths else pa.nulls(len(column), pa.string())
    checked(source, f"paths in column {image!r}", found)
    paths: list[str | None] = found.to_pylist()
    return paths
