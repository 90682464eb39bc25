"""A dataset whose samples are rows of an Arrow table and byte ranges of files."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
from numpy.typing import NDArray

from mbaas.dataset.base import Dataset
from mbaas.dataset.columns import integers
from mbaas.dataset.location import join
from mbaas.dataset.reader import ByteRange, FileReader
from mbaas.order import Ids

SCHEMA = pa.schema(
    [
        pa.field("uri", pa.large_string(), nullable=False),  # relative to the root, with /
        pa.field("offset", pa.int64(), nullable=False),  # first byte within the file
        pa.field("length", pa.int64(), nullable=False),  # bytes
        pa.field("label", pa.int64(), nullable=False),  # index into class_names
    ]
)
"""Columns of a table of samples; `large_string`, because ten million names can pass a `string`'s 2 GiB."""


@dataclass(frozen=True, eq=False, repr=False)
class TableDataset(Dataset):
    """A dataset of samples that lie in files.

    Attributes:
        table: one row a sample, of `SCHEMA`, each column in one chunk: a row is found in constant time, and a
            pickle has few buffers.
        filesystem: where the files are.
        base: path of `root` within `filesystem`.
        whole_files: each sample ends where its file ends, so a longer file is not the one that was listed.
    """

    table: pa.Table
    filesystem: pyarrow.fs.FileSystem
    base: str
    whole_files: bool = True

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def labels(self, sample_ids: Ids) -> NDArray[np.int64]:
        return self._labels[sample_ids]

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        return self._lengths[sample_ids]

    @cached_property
    def total_bytes(self) -> int:
        return int(pc.sum(self.table["length"]).as_py())

    def uri(self, sample_id: int) -> str:
        return join(self.root, self._name(sample_id))

    def reader(self) -> FileReader:
        return FileReader(self.filesystem, self.byte_range)

    def byte_range(self, sample_id: int) -> ByteRange:
        """The place of one sample's bytes."""
        name = self._name(sample_id)
        return ByteRange(
            uri=join(self.root, name),
            path=join(self.base, name),
            offset=int(self._offsets[sample_id]),
            length=int(self._lengths[sample_id]),
            whole_file=self.whole_files,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def _name(self, sample_id: int) -> str:
        return str(self._names[sample_id])

    # Views of the table's memory, made once: Arrow takes tens of microseconds to find a column and its chunk.

    @cached_property
    def _names(self) -> pa.Array:
        return self.table["uri"].chunk(0)

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return integers(self.table["offset"].chunk(0))

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return integers(self.table["length"].chunk(0))

    @cached_property
    def _labels(self) -> NDArray[np.int64]:
        return integers(self.table["label"].chunk(0))
