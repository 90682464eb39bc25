"""Reads Hugging Face datasets: images inside their Arrow files, or in separate files."""

from __future__ import annotations

import io
import json
import mmap
import os
import struct
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs

from mbaas.base.validation import knows_names
from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.encoded_column import Locate, Read, Source, read_encoded
from mbaas.dataset.storage.faults import dataset_errors
from mbaas.dataset.storage.location import IN_SHARD, Location, join, locate, look_up
from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.samples.fields import IMAGE
from mbaas.samples.order import Ids

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_BATCH_ROWS = 64  # rows of a table in memory unpacked at a time


@knows_names
def read_huggingface(
    path: Any,
    *,
    split: str | None = None,
    image_column: str = IMAGE,
    label_column: str | None = None,
    fields: Sequence[str] | None = None,
    filesystem: pyarrow.fs.FileSystem | None = None,
    listing: str | os.PathLike[str] | None = None,
    unpacked: str | os.PathLike[str] | None = None,
) -> Dataset:
    """List the images of a dataset of the package `datasets`, without reading them.

    Images in uncompressed Arrow files are later read directly from these files, in any order. So all nodes must be able
    to read the files. A `datasets.Dataset` has them on this machine, usually in ``~/.cache/huggingface``.
    ``save_to_disk`` writes them to a shared disk or a bucket, and ``unpacked`` writes only the images. If the column
    has file paths, the files are read. The rows and order of `select`, `shuffle` and the like are kept; formats and
    transforms that were set are ignored.

    Args:
        path: a `datasets.Dataset`, a `DatasetDict`, or the local path or `pyarrow.fs` URI of a folder written by
            ``save_to_disk``. A folder does not need the package `datasets`.
        split: name of a split of a `DatasetDict`.
        image_column: column with encoded images or their paths: a feature `Image`, binary, or string.
        label_column: column that becomes ``label`` in minibatches; default: the column "label", if there is one.
            The names of a feature `ClassLabel`, or the sorted distinct values of a string column, are the classes
            (`Dataset.class_names`). Without a label column, minibatches have no ``label``.
        fields: further columns for minibatches, of the types that `read_manifest` accepts; default: all except strings.
            Nested columns are named ``objects.bbox``, as by ``flatten``.
        filesystem: file system of the folder, for credentials or file systems that a URI cannot express.
        listing: path or URI of a Parquet file that caches the result. It is written if it does not exist, or if the
            dataset's fingerprint or the size or time of its files changed. Otherwise it is read.
        unpacked: path or URI of a folder that all nodes can read, into which the images are written once. Needed if
            single images cannot be read, that is, from compressed files or from memory. The folder includes a listing.

    Raises:
        ConfigError: a missing or unknown split, an unknown column, a reserved name, or values that no field can have.
        DatasetError: a folder or file cannot be read or is damaged, single images in it cannot be read, or an image or
            a value is missing. Also if ``listing`` or ``unpacked`` cannot be read or written, or has other options.
    """
    if listing is not None and unpacked is not None:
        raise ConfigError("listing must not be named beside unpacked, where a listing is kept", option="listing")
    source = _source(path, split, filesystem)
    return read_encoded(
        "read_huggingface", source, image_column, label_column, fields, listing=listing, unpacked=unpacked
    )


def _source(dataset: Any, split: str | None, filesystem: pyarrow.fs.FileSystem | None) -> Source:
    if isinstance(dataset, (str, os.PathLike)):
        return _saved(dataset, split, filesystem)
    if isinstance(dataset, Mapping):
        dataset = dataset[_checked_split("the DatasetDict", split, [*map(str, dataset)])]
    elif split is not None:
        raise ConfigError(f"split chooses from a DatasetDict, got {shown(split)} for one dataset", option="split")
    package = sys.modules.get("datasets")
    if package is None or not isinstance(dataset, package.Dataset):
        wanted = "a datasets.Dataset, or a folder that its save_to_disk wrote"
        streamed = "; a streamed one cannot be read in any order" if type(dataset).__name__.startswith("Iter") else ""
        raise ConfigError(f"path must be {wanted}, got {shown(dataset)}{streamed}", option="path")
    return _OpenDataset(dataset, package.table.list_table_cache_files(dataset.data))


def _checked_split(name: str, split: str | None, splits: list[str]) -> str:
    if split not in splits:
        got = "none" if split is None else shown(split)
        raise ConfigError(f"split must name one of {', '.join(splits)}, which {name} has; got {got}", option="split")
    return split


# ---- folders of save_to_disk ----


def _saved(path: str | os.PathLike[str], split: str | None, filesystem: pyarrow.fs.FileSystem | None) -> Source:
    where = locate(path, filesystem).for_listing()
    found = _json_in(where, _SPLITS)
    if found is not None:
        name = _checked_split(where.root, split, _names_in(where, _SPLITS, found.get("splits")))
        where = replace(where, base=join(where.base, name), root=join(where.root, name))
    elif split is not None:
        message = f"split chooses from a DatasetDict, and {where.root} has none; got {shown(split)}"
        raise ConfigError(message, option="split")
    state = _json_in(where, _STATE)
    if state is None:
        hint = "load one of the hub by datasets.load_dataset, and give its result"
        raise DatasetError(f"{where.root} has no {_STATE}, so save_to_disk did not write it; {hint}")
    files = [each.get("filename") if isinstance(each, dict) else None for each in state.get("_data_files") or []]
    names = _names_in(where, _STATE, files)
    if not names:
        raise DatasetError(f"{where.root} has no rows")
    return _SavedDataset(where, names, str(state.get("_fingerprint")))


def _json_in(where: Location, name: str) -> dict[str, Any] | None:
    """Read a JSON object; None if the file does not exist."""
    path = join(where.root, name)
    with dataset_errors(f"cannot read {path}"):
        if not where.filesystem.get_file_info(join(where.base, name)).is_file:
            return None
        with where.filesystem.open_input_file(join(where.base, name)) as file:
            found = json.loads(file.read())
    if not isinstance(found, dict):
        raise DatasetError(f"{path} must be a JSON object, got {shown(found)}")
    return found


def _names_in(where: Location, file: str, names: Any) -> list[str]:
    """Validate names of files or folders, which must be directly below the folder."""
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or not name or "/" in name or IN_SHARD in name or name in (".", ".."):
            raise DatasetError(f"{join(where.root, file)} must name a file next to it, got {shown(name)}")
    return list(names)


class _SavedDataset(Source):
    def __init__(self, where: Location, names: list[str], fingerprint: str) -> None:
        self.where, self.parts = where, names
        self.files = look_up(where, names)
        self.state = [fingerprint, self.files]

    @contextmanager
    def opened(self, part: str) -> Iterator[tuple[pa.Schema, Read]]:
        with dataset_errors(f"{join(self.where.root, part)} is not an Arrow IPC stream, or cannot be read"):
            reader = pa.ipc.open_stream(self.where.filesystem.open_input_stream(join(self.where.base, part)))
        with reader:
            yield reader.schema, lambda columns: (batch.select(columns) for batch in reader)

    def tables(self, columns: Sequence[str], without: str) -> list[tuple[pa.Table, Locate]]:
        return self.where.read_all(
            lambda name: _read_stream(self.where, name, columns=columns, without=without), self.parts, self.kind
        )


# ---- datasets of this process ----


class _OpenDataset(Source):
    """Its tables are mapped from ``files``, or in memory."""

    parts = ("dataset",)

    def __init__(self, dataset: Any, files: Sequence[str]) -> None:
        self._dataset = dataset
        names = sorted({os.path.realpath(file) for file in files})  # as Linux lists mapped files
        folder = os.path.commonpath([os.path.dirname(name) for name in names]) if names else "/"  # noqa: PTH120
        self.where = replace(locate(folder, None), root=folder if names else "a datasets.Dataset in memory")
        self.files = look_up(self.where, [self._name(name) for name in names])
        self.state = [str(dataset._fingerprint), self.files]
        if odd := next((name for name, *_ in self.files if IN_SHARD in name), None):
            raise DatasetError(f"the name of an Arrow file must not have {IN_SHARD!r} in it, got {folder}/{odd}")
        if not len(dataset):
            raise DatasetError(f"the dataset of {self.where.root} has no rows")

    @property
    def indices(self) -> Ids | None:
        mapping = self._dataset._indices
        return None if mapping is None else np.asarray(mapping.column(0)).astype(np.int64)

    @contextmanager
    def opened(self, part: str) -> Iterator[tuple[pa.Schema, Read]]:  # noqa: ARG002
        def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
            chosen = self._dataset.select_columns(list(columns)).with_format("arrow")
            for table in chosen.iter(_BATCH_ROWS):
                yield from table.combine_chunks().to_batches()

        yield self._dataset.data.table.schema.with_metadata(self._dataset.features.arrow_schema.metadata), read

    def name_of(self, part: str) -> str:  # noqa: ARG002
        return self.where.root

    def tables(self, columns: Sequence[str], without: str) -> list[tuple[pa.Table, Locate]]:  # noqa: ARG002
        locate_in = mapped_files()

        def locate_below(address: int, nbytes: int) -> tuple[str, int] | None:
            found = locate_in(address, nbytes)
            return None if found is None else (self._name(found[0]), found[1])

        return [(self._dataset.data.table, locate_below)]

    def _name(self, path: str) -> str:
        return path.removeprefix(self.where.base.rstrip("/") + "/")


def mapped_files() -> Locate:
    """Return a function that finds memory of this process in the files that are mapped now.

    Files that were deleted or replaced are not found. `datasets` knows its files, but not where a value is in them.
    """
    mappings = []
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        # For example "7fae67bd4000-7fae67bfa000 r--p 00000000 fe:00 2557732    /data/train.arrow".
        span, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and path[0].startswith(b"/") and not path[0].endswith(b" (deleted)"):
            start, end = (int(address, 16) for address in span.split(b"-"))
            mappings.append((start, end, int(offset, 16), os.fsdecode(path[0])))
    mappings.sort()

    def locate_in(address: int, nbytes: int) -> tuple[str, int] | None:
        number = bisect_right(mappings, address, key=lambda mapping: mapping[0]) - 1
        if number < 0:
            return None
        start, end, offset, path = mappings[number]
        return (path, offset + address - start) if address + nbytes <= end else None

    return locate_in


# ---- Arrow stream files ----

_CONTINUES = 0xFFFFFFFF  # begins each message
_HEADER, _COMPRESSION = 2, 3  # numbers of fields: a message's header, and a record batch's compression
_BUFFER_BYTES = 16 << 10
"""Bytes read per message: its small columns are read with it and need no further request."""


def _read_stream(where: Location, name: str, *, columns: Sequence[str], without: str) -> tuple[pa.Table, Locate]:
    """Read ``columns`` of an Arrow IPC stream file, and the column ``without`` except for its bytes, which are zeros.

    Only the required byte ranges are read, so it is fast even for a file of large images in a bucket. pyarrow itself
    would read whole messages.

    Args:
        where, name: the file's folder, and its name there.
        columns: columns to read completely.
        without: a binary column, or a struct with a binary field ``bytes``.

    Raises:
        DatasetError: the file is compressed, so single values cannot be located; or it cannot be read, is not an Arrow
            IPC stream, or is truncated or damaged.
    """
    path = join(where.root, name)
    with dataset_errors(f"{path} is not an Arrow IPC stream, or cannot be read"):
        with where.filesystem.open_input_file(join(where.base, name)) as raw:
            file = _Sparse(io.BufferedReader(raw, _BUFFER_BYTES), raw.size())
            if not _read_metadata(file):
                why = "it is compressed; name a folder with unpacked=, into which they are unpacked once"
                raise DatasetError(f"single images of {path} cannot be read: {why}")
            table = pa.ipc.open_stream(file.buffer).read_all()
            for column in (*columns, without):
                table[column].validate()  # pyarrow 26 crashes if nested columns have fewer rows than their parent
            for column in columns:
                for chunk in table[column].chunks:
                    file.fetch_buffers(chunk.buffers())
            for chunk in table[without].chunks:
                file.fetch_buffers(_all_but_bytes(chunk))

    def locate_in(address: int, nbytes: int) -> tuple[str, int] | None:
        offset = address - file.buffer.address
        return (name, offset) if 0 <= offset <= file.nbytes - nbytes else None

    return table, locate_in


class _Sparse:
    # Memory of the file's size; the parts that are never read take no physical memory.

    def __init__(self, file: io.BufferedReader, nbytes: int) -> None:
        self._file, self.nbytes = file, nbytes
        self._memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.buffer = pa.py_buffer(self._memory)

    def fetch(self, start: int, nbytes: int) -> memoryview:
        part = memoryview(self._memory)[start : start + nbytes]
        if nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"it has {self.nbytes:,} bytes, and should have {nbytes:,} from byte {start:,} on")
        self._file.seek(start)
        if self._file.readinto(part) != nbytes:
            raise ValueError(f"it ends in the {nbytes:,} bytes from byte {start:,} on")
        return part

    def fetch_buffers(self, buffers: Sequence[pa.Buffer | None]) -> None:
        for buffer in buffers:
            if buffer is not None and buffer.size:
                self.fetch(buffer.address - self.buffer.address, buffer.size)


def _read_metadata(file: _Sparse) -> bool:
    """Read the metadata of all messages; return False if one is compressed."""
    messages, at = pa.BufferReader(file.buffer), 0
    while at < file.nbytes:
        begins, nbytes = struct.unpack("<Ii", file.fetch(at, 8))
        if begins != _CONTINUES:
            raise ValueError(f"no message is at byte {at:,}")
        if not nbytes:
            break
        file.fetch(at + 8, nbytes)
        message = pa.ipc.read_message(messages)  # verifies the metadata; does not touch the body
        if message.type == "record batch" and _is_compressed(memoryview(message.metadata)):
            return False
        at = messages.tell()
    return True


def _is_compressed(metadata: memoryview) -> bool:
    # pyarrow does not tell. The metadata is a flatbuffer of tables; a position in it is relative to itself.
    (message,) = struct.unpack_from("<I", metadata)
    header = _field(metadata, message, _HEADER)
    (batch,) = struct.unpack_from("<I", metadata, header)
    return _field(metadata, header + batch, _COMPRESSION) != 0


def _field(metadata: memoryview, table: int, number: int) -> int:
    """Return the position of a table's field; 0 if absent."""
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    entry, (nbytes,) = 4 + 2 * number, struct.unpack_from("<H", metadata, fields)
    (offset,) = struct.unpack_from("<H", metadata, fields + entry) if entry < nbytes else (0,)
    return table + offset if offset else 0


def _all_but_bytes(chunk: pa.Array) -> list[pa.Buffer | None]:
    if not pa.types.is_struct(chunk.type):
        return list(chunk.buffers()[:2])
    inner: Any = chunk.field("bytes")
    found = [chunk.buffers()[0], *inner.buffers()[:2]]
    if chunk.null_count or inner.null_count:  # the other fields may name a file
        for number, field in enumerate(chunk.type):
            found += chunk.field(number).buffers() if field.name != "bytes" else []
    return found
