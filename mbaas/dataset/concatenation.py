"""Concatenates datasets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mbaas.base.units import some
from mbaas.dataset.base import Dataset, SampleReader
from mbaas.errors import ConfigError, shown
from mbaas.samples.fields import Arrays, Field, concatenated
from mbaas.samples.order import Ids


def concat(datasets: Iterable[Dataset]) -> Dataset:
    """Concatenate datasets: the samples of the first one, then the samples of the second one, and so on.

    They may be in different file systems, and may be parts of other datasets. A sample of the second dataset has its
    old id plus the number of samples of the first.

    Raises:
        ConfigError: no datasets, different fields or class names, or samples that are drawn again for each epoch.
    """
    if isinstance(datasets, Dataset) or not isinstance(datasets, Iterable):
        raise ConfigError(f"concat needs a list of datasets, got {shown(datasets)}")
    parts = tuple(datasets)
    if not parts:
        raise ConfigError("concat needs at least one dataset, got none")
    for part in parts:
        if not isinstance(part, Dataset):
            raise ConfigError(f"concat needs a list of datasets, got one with {shown(part)} in it")
        _check_same(parts[0], part)
    if len(parts) == 1:
        return parts[0]
    for part in parts:
        if part.stored is not part:
            raise ConfigError(
                f"the samples of {part.root} are drawn again in each epoch: concatenate datasets before you draw, or "
                "draw with each_epoch=False"
            )
    fingerprints = " + ".join(part.fingerprint for part in parts)
    roots = list(dict.fromkeys(part.root for part in parts))
    return ConcatDataset(
        root=" + ".join(roots[:3]) + (f" + {len(roots) - 3} more" if len(roots) > 3 else ""),
        class_names=parts[0].class_names,
        fingerprint=hashlib.blake2b(fingerprints.encode(), digest_size=16).hexdigest(),
        parts=parts,
    )


def _check_same(first: Dataset, other: Dataset) -> None:
    if _shapes_of(other) != _shapes_of(first):
        what, has, others = "fields", _fields_of(first), _fields_of(other)
    elif other.class_names != first.class_names:
        what, has, others = "class names", *(", ".join(each.class_names) or "none" for each in (first, other))
    else:
        return
    raise ConfigError(
        f"datasets that are joined must have the same {what}: {first.root} has {has}, and {other.root} has {others}"
    )


def _shapes_of(dataset: Dataset) -> list[Field]:
    # Without the length of the longest value, which may differ.
    return [replace(field, longest=0) for field in dataset.fields]


def _fields_of(dataset: Dataset) -> str:
    # Categories are listed, because they may be the difference.
    kinds = {
        field.name: f"one of {some(field.categories)}" if field.categories else field.kind for field in dataset.fields
    }
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "none"


@dataclass(frozen=True, eq=False, repr=False)
class ConcatDataset(Dataset):
    """The samples of several datasets ``parts``, in order.

    ``sources`` has the ids of the samples in the dataset that was divided, int64[n]; None if this one is undivided.
    """

    parts: tuple[Dataset, ...]
    sources: Ids | None = None

    def __len__(self) -> int:
        return int(self._bounds[-1])

    @property
    def fields(self) -> tuple[Field, ...]:
        each = zip(*(part.fields for part in self.parts), strict=True)
        return tuple(replace(same[0], longest=max(field.longest for field in same)) for same in each)

    def values(self, sample_ids: Ids) -> Arrays:
        pieces = [(rows, part.values(ids)) for part, rows, ids in self._by_part(sample_ids)]
        if not pieces:
            return {field.name: field.zeros(0) for field in self.fields}
        order = np.argsort(np.concatenate([rows for rows, _ in pieces]))
        names = [field.name for field in self.fields]
        return {name: concatenated([values[name] for _, values in pieces])[order] for name in names}

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        found = np.empty(len(sample_ids), np.int64)
        for part, rows, ids in self._by_part(sample_ids):
            found[rows] = part.lengths(ids)
        return found

    @property
    def total_bytes(self) -> int:
        return sum(part.total_bytes for part in self.parts)

    def uri(self, sample_id: int) -> str:
        number, inner = self.part_of(sample_id)
        return self.parts[number].uri(inner)

    def reader(self) -> SampleReader:
        return _ConcatReader(self)

    def source_ids(self, sample_ids: Ids) -> Ids:
        return sample_ids if self.sources is None else self.sources[sample_ids]

    def part_of(self, sample_id: int) -> tuple[int, int]:
        """Return the index of the part that contains a sample, and the sample's id within that part."""
        number = int(np.searchsorted(self._bounds, sample_id, side="right")) - 1
        return number, int(sample_id - self._bounds[number])

    def _by_part(self, sample_ids: Ids) -> Iterator[tuple[Dataset, Ids, Ids]]:
        """Yield each part with requested samples, their positions in ``sample_ids``, and their ids within the part."""
        numbers = np.searchsorted(self._bounds, sample_ids, side="right") - 1
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            yield self.parts[number], rows, sample_ids[rows] - self._bounds[number]

    def _part(self, ids: Ids, fingerprint: str) -> ConcatDataset:
        parts = tuple(part._chosen(inner) for part, _, inner in self._by_part(ids))
        return replace(self, fingerprint=fingerprint, parts=parts, sources=self.source_ids(ids))

    @cached_property
    def _bounds(self) -> Ids:
        """First id of each part, then the total number of samples: int64[parts + 1], ascending."""
        return np.cumsum([0, *map(len, self.parts)])


class _ConcatReader(SampleReader):
    def __init__(self, dataset: ConcatDataset) -> None:
        self._dataset, self._readers = dataset, [part.reader() for part in dataset.parts]

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        number, inner = self._dataset.part_of(sample_id)
        self._readers[number].read_into(inner, buffer)
