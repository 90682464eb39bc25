"""Enforces the size limit of samples: a larger file is a bad sample, and no memory is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mbaas.dataset.base import Dataset, RedrawnDataset, SampleReader, WrappedDataset
from mbaas.dataset.subsets import id_batches
from mbaas.errors import BadSampleError
from mbaas.memory.budgets import MAX_SAMPLE_BYTES
from mbaas.samples.order import Ids


def bounded(dataset: Dataset, most_bytes: int = MAX_SAMPLE_BYTES) -> Dataset:
    """Return a dataset with larger samples marked as bad; the same dataset if all are within the limit."""
    if isinstance(dataset, RedrawnDataset):
        inner = bounded(dataset.inner, most_bytes)
        return dataset if inner is dataset.inner else replace(dataset, inner=inner)
    if any((dataset.lengths(ids) > most_bytes).any() for ids in id_batches(len(dataset))):
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
        return sum(int(self.lengths(ids).sum()) for ids in id_batches(len(self)))

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
