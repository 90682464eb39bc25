"""Opens the tables of a Hugging Face dataset: files written by `save_to_disk`, or tables of this process."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs

from mbaas.dataset.readers.arrow_stream import read_stream
from mbaas.dataset.readers.mapped_files import MappedFiles
from mbaas.dataset.storage.faults import message_of, s3_attempts
from mbaas.dataset.storage.files import look_up
from mbaas.dataset.storage.location import IN_SHARD, S3_ATTEMPTS, Location, join, locate
from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.order import Ids
from mbaas.progress import track

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_BATCH_ROWS = 64  # rows of a table in memory unpacked at a time
_REMOTE_THREADS = 32  # each reads one message after another
_LOCAL_THREADS = 4

Place = Callable[[int, int], tuple[str, int] | None]
"""(address, number of bytes) -> (file, offset) of the memory; None if no file is mapped there."""


class Source(ABC):
    """The tables of a dataset.

    Attributes:
        where: the folder of its files.
        files: name below the folder, size and modification time of each file.
        fingerprint: the one assigned by the package `datasets`.
        schema: schema of its rows, with the features in its metadata.
    """

    where: Location
    files: list[list[Any]]
    fingerprint: str
    schema: pa.Schema

    @property
    def indices(self) -> Ids | None:
        """Table rows of the samples, in order: int64[n]; None: all rows in order."""
        return None

    @abstractmethod
    def tables(self, columns: Sequence[str], image: str) -> list[tuple[pa.Table, Place]]:
        """Return tables of columns, and the mapping of their memory to files. Image bytes need not be in memory."""

    @abstractmethod
    def parts(self) -> list[str]:
        """Return names of parts that can be read in parallel."""

    @abstractmethod
    def batches(self, part: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Read columns of the samples of a part, in order."""


def source_of(dataset: Any, split: str | None, filesystem: pyarrow.fs.FileSystem | None) -> Source:
    """Open the tables of a dataset or folder; arguments and errors are those of `mbaas.read_huggingface`."""
    if isinstance(dataset, (str, os.PathLike)):
        return _saved(dataset, split, filesystem)
    if isinstance(dataset, Mapping):
        dataset = dataset[_checked_split("the DatasetDict", split, [*map(str, dataset)])]
    elif split is not None:
        raise ConfigError(f"split chooses from a DatasetDict, got {shown(split)} for one dataset", option="split")
    package = sys.modules.get("datasets")
    if package is None or not isinstance(dataset, package.Dataset):
        wanted = "a datasets.Dataset, or a folder that its save_to_disk wrote"
        streamed = "; one that is streamed has no places" if type(dataset).__name__.startswith("Iterable") else ""
        raise ConfigError(f"path must be {wanted}, got {shown(dataset)}{streamed}", option="path")
    return _Mapped(dataset, package.table.list_table_cache_files(dataset.data))


def _checked_split(what: str, split: str | None, splits: list[str]) -> str:
    if split not in splits:
        got = "none" if split is None else shown(split)
        raise ConfigError(f"split must name one of {', '.join(splits)}, which {what} has; got {got}", option="split")
    return split


def _saved(path: str | os.PathLike[str], split: str | None, filesystem: pyarrow.fs.FileSystem | None) -> Source:
    where = locate(path, filesystem)
    where = replace(where, filesystem=s3_attempts(where.filesystem, S3_ATTEMPTS))
    found = _json_in(where, _SPLITS)
    if found is not None:
        name = _checked_split(where.root, split, _texts(where, _SPLITS, found.get("splits")))
        where = replace(where, base=join(where.base, name), root=join(where.root, name))
    elif split is not None:
        message = f"split chooses from a DatasetDict, and {where.root} has none; got {shown(split)}"
        raise ConfigError(message, option="split")
    state = _json_in(where, _STATE)
    if state is None:
        hint = "load one of the hub by datasets.load_dataset, and give what that returns"
        raise DatasetError(f"{where.root} has no {_STATE}, so it is no folder that save_to_disk wrote; {hint}")
    files = state.get("_data_files")
    named = [each.get("filename") if isinstance(each, dict) else None for each in files or []]
    names = _texts(where, _STATE, named)
    if not names:
        raise DatasetError(f"{where.root} has no rows")
    return _Saved(where, names, str(state.get("_fingerprint")))


def _json_in(where: Location, name: str) -> dict[str, Any] | None:
    """Read a JSON object; None if the file does not exist."""
    path = join(where.root, name)
    try:
        if not where.filesystem.get_file_info(join(where.base, name)).is_file:
            return None
        with where.filesystem.open_input_file(join(where.base, name)) as file:
            found = json.loads(file.read())
    except Exception as error:  # third-party file systems raise any exception
        raise DatasetError(f"cannot read {path}: {message_of(error)}") from error
    if not isinstance(found, dict):
        raise DatasetError(f"{path} must be a JSON object, got {shown(found)}")
    return found


def _texts(where: Location, file: str, names: Any) -> list[str]:
    """Validate names of files or folders, which must be directly below the folder."""
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or not name or "/" in name or IN_SHARD in name or name in (".", ".."):
            raise DatasetError(f"{join(where.root, file)} must name a file next to it, got {shown(name)}")
    return list(names)


class _Saved(Source):
    def __init__(self, where: Location, names: list[str], fingerprint: str) -> None:
        self.where, self.fingerprint = where, fingerprint
        self.files = look_up(where, names)
        with self._opened(names[0]) as reader:
            self.schema = reader.schema

    def tables(self, columns: Sequence[str], image: str) -> list[tuple[pa.Table, Place]]:
        is_local = isinstance(self.where.filesystem, pyarrow.fs.LocalFileSystem)
        threads = min(_LOCAL_THREADS if is_local else _REMOTE_THREADS, len(self.files))
        with ThreadPoolExecutor(threads, thread_name_prefix="mbaas-listing") as pool:
            tables = pool.map(lambda file: self._table(file[0], columns, image), self.files)
            return [*track(tables, "Arrow files", len(self.files))]

    def _table(self, name: str, columns: Sequence[str], image: str) -> tuple[pa.Table, Place]:
        found = read_stream(self.where, name, columns=columns, without=image)
        if found is None:
            why = "it is compressed; name a folder with unpacked=, into which they are unpacked once"
            raise DatasetError(f"single images of {join(self.where.root, name)} cannot be read: {why}")

        def place(address: int, nbytes: int) -> tuple[str, int] | None:
            at = address - found.base
            return (name, at) if 0 <= at <= found.nbytes - nbytes else None

        return found.table, place

    def parts(self) -> list[str]:
        return [name for name, *_ in self.files]

    def batches(self, part: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with self._opened(part) as reader:
            for batch in reader:
                yield batch.select(columns)

    def _opened(self, name: str) -> Any:
        path = join(self.where.root, name)
        try:
            return pa.ipc.open_stream(self.where.filesystem.open_input_stream(join(self.where.base, name)))
        except Exception as error:  # third-party file systems raise any exception
            raise DatasetError(f"{path} is no Arrow IPC stream, or cannot be read: {message_of(error)}") from error


class _Mapped(Source):
    """A dataset of this process; its tables are mapped from files or in memory."""

    def __init__(self, dataset: Any, files: Sequence[str]) -> None:
        self._dataset, self.fingerprint = dataset, str(dataset._fingerprint)
        names = sorted({os.path.realpath(file) for file in files})  # as Linux lists mapped files
        folder = os.path.commonpath([os.path.dirname(name) for name in names]) if names else "/"  # noqa: PTH120
        self.where = replace(locate(folder, None), root=folder if names else "a datasets.Dataset in memory")
        self.files = look_up(self.where, [self._name(name) for name in names])
        if odd := next((name for name, *_ in self.files if IN_SHARD in name), None):
            raise DatasetError(f"the name of an Arrow file must not have {IN_SHARD!r} in it, got {folder}/{odd}")
        self.schema = dataset.data.table.schema.with_metadata(dataset.features.arrow_schema.metadata)
        if not len(dataset):
            raise DatasetError(f"the dataset of {self.where.root} has no rows")

    @property
    def indices(self) -> Ids | None:
        mapping = self._dataset._indices
        return None if mapping is None else np.asarray(mapping.column(0)).astype(np.int64)

    def tables(self, columns: Sequence[str], image: str) -> list[tuple[pa.Table, Place]]:  # noqa: ARG002
        mapped = MappedFiles()

        def place(address: int, nbytes: int) -> tuple[str, int] | None:
            found = mapped.place(address, nbytes)
            return None if found is None else (self._name(found[0]), found[1])

        return [(self._dataset.data.table, place)]

    def parts(self) -> list[str]:
        return ["dataset"]

    def batches(self, part: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        chosen = self._dataset.select_columns(list(columns)).with_format("arrow")
        for table in chosen.iter(_BATCH_ROWS):
            yield from table.combine_chunks().to_batches()

    def _name(self, path: str) -> str:
        return path.removeprefix(self.where.base.rstrip("/") + "/")
