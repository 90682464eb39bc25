"""Enforces the size limit of samples: a larger file is a bad sample, and no memory is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mbaas.dataset.base import Dataset, SampleReader, WrappedDataset
from mbaas.dataset.redrawn import Redrawn
from mbaas.errors import BadSampleError
from mbaas.memory.budgets import MAX_SAMPLE_BYTES
from mbaas.order import Ids

_LOOKED_AT = 1_000_000
"""Samples whose lengths are checked together: 8 MB."""


def bounded(dataset: Dataset, most_bytes: int = MAX_SAMPLE_BYTES) -> Dataset:
    """Return a dataset with larger samples marked as bad; the same dataset if all are within the limit."""
    if isinstance(dataset, Redrawn):
        inner = bounded(dataset.inner, most_bytes)
        return dataset if inner is dataset.inner else replace(dataset, inner=inner)
    for first in range(0, len(dataset), _LOOKED_AT):
        ids = np.arange(first, min(first + _LOOKED_AT, len(dataset)))
        if (dataset.lengths(ids) > most_bytes).any():
            return BoundedDataset.around(dataset, most_bytes=most_bytes)
    return dataset


@dataclass(frozen=True, eq=False, repr=False)
class BoundedDataset(WrappedDataset):
    """A dataset in which samples of more than ``most_bytes`` have length 0 and raise `BadSampleError` when read."""

    most_bytes: int

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        lengths = self.inner.lengths(sample_ids)
        return np.where(lengths > self.most_bytes, 0, lengths)

    @cached_property
    def total_bytes(self) -> int:
        parts = range(0, len(self), _LOOKED_AT)
        return sum(int(self.lengths(np.arange(at, min(at + _LOOKED_AT, len(self)))).sum()) for at in parts)

    def reader(self) -> SampleReader:
        return _BoundedReader(self)


class _BoundedReader(SampleReader):
    def __init__(self, dataset: BoundedDataset) -> None:
        self._dataset, self._inner = dataset, dataset.inner.reader()

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        dataset = self._dataset
        nbytes = int(dataset.inner.lengths(np.array([sample_id]))[0])
        if nbytes > dataset.most_bytes:
            raise BadSampleError(
                dataset.uri(sample_id),
                f"it has {nbytes:,} bytes, over the limit of {dataset.most_bytes:,} bytes for a sample",
            )
        self._inner.read_into(sample_id, buffer)
