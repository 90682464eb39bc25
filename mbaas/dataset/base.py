"""The dataset interface, the reader of its bytes, and datasets derived from others."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mbaas.base import units
from mbaas.base.notebook import table
from mbaas.dataset.subsets import (
    Draws,
    arrow_columns,
    balanced_draws,
    checked_ids,
    drawn_ids,
    fingerprint_of_part,
    id_batches,
    is_whole,
    matching_ids,
    rows_of,
    split_ids,
    weighted_draws,
)
from mbaas.errors import BadSampleError, ConfigError, DatasetError, shown
from mbaas.memory.budgets import MAX_SAMPLE_BYTES
from mbaas.samples.fields import LABEL, Arrays, Field
from mbaas.samples.order import Ids

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.compute import Expression


class SampleReader(ABC):
    """Reads the encoded bytes of samples. Safe to share between threads."""

    @abstractmethod
    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        """Fill `buffer` with the bytes of one sample.

        Args:
            sample_id: in [0, len(dataset)).
            buffer: writable, one-dimensional, exactly as long as the sample in bytes.

        Raises:
            BadSampleError: the bytes cannot be read, or their number differs from the listed one. It is a
                `StorageError` if a later read may succeed.
            ConfigError: the buffer has another length.
        """


def exact_view(buffer: memoryview | NDArray[np.uint8], length: int, uri: str) -> memoryview:
    """Return the memory of a buffer for `length` bytes.

    Raises:
        ConfigError: the buffer has another length.
    """
    if len(buffer) != length:
        raise ConfigError(f"the buffer for {uri} must have {length} bytes, got {len(buffer)}")
    return buffer if isinstance(buffer, memoryview) else buffer.data


def read_encoded(dataset: Dataset, reader: SampleReader, sample_id: int) -> NDArray[np.uint8]:
    """Return the encoded bytes of a sample, in memory of their own; raises as `SampleReader.read_into` does."""
    encoded = np.empty(int(dataset.lengths(np.array([sample_id]))[0]), np.uint8)
    reader.read_into(sample_id, encoded)
    return encoded


# Not compared field by field, which may be millions of rows: equal fingerprints mean equal datasets.
@dataclass(frozen=True, eq=False, repr=False)
class Dataset(ABC):
    """An immutable list of samples: the location of each one's bytes and its known fields, but no bytes.

    Values known without reading a sample, such as its label, are its `fields`. Minibatches contain them next to the
    output of the pipeline. A sample's id is its index in the list.

    Attributes:
        root: the listed URI or path, without credentials; for messages.
        class_names: name of each label, in label order; empty if labels are not classes.
        fingerprint: 32 hex digits, a hash of names below the root, lengths, labels and class names, but not of file
            contents. A copy at another location has the same fingerprint.
    """

    root: str
    class_names: tuple[str, ...]
    fingerprint: str

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples, at least 1."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields known for each sample; by default its label."""
        return (LABEL,)

    @abstractmethod
    def values(self, sample_ids: Ids) -> Arrays:
        """Return the values of all `fields` for the given samples: name -> [n, *shape]."""

    def labels(self, sample_ids: Ids) -> NDArray[Any]:
        """Return the labels of samples: [n]. Labels of classes are int64 indices into `class_names`.

        Raises:
            DatasetError: the samples have no labels.
        """
        values = self.values(sample_ids)
        if LABEL.name not in values:
            raise DatasetError(f"the samples of {self.root} have no field 'label', but {', '.join(values) or 'none'}")
        return values[LABEL.name]

    @abstractmethod
    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the encoded sizes of samples in bytes: int64[n]."""

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Encoded size of all samples together, in bytes."""

    @abstractmethod
    def uri(self, sample_id: int) -> str:
        """Return the location of one sample's bytes, for messages."""

    @abstractmethod
    def reader(self) -> SampleReader:
        """Create a reader of the samples' bytes. Each process needs one; its threads share it."""

    @property
    def schema(self) -> pa.Schema:
        """Names and Arrow types of all `fields`, and of ``class``, the name of the label's class, if there are any."""
        import pyarrow as pa

        return pa.table(arrow_columns(self, np.arange(1))).schema

    def head(self, n: int = 5) -> list[dict[str, Any]]:
        """Return ``uri`` and the `fields` of the first ``n`` samples, or of all if there are fewer.

        Labels of classes come with the name, ``class``. Categories are strings. A field called ``uri`` replaces it.

        Raises:
            ConfigError: ``n`` is not an integer of at least 0.
        """
        if not is_whole(n) or n < 0:
            raise ConfigError(f"n must be a whole number of at least 0, got {shown(n)}", option="n")
        return rows_of(self, np.arange(min(n, len(self))))

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        """Return one sample: a row as from `head`, and its encoded content in ``bytes``, unless a field has that name.

        A negative id counts from the end, as for lists. One attempt is made to read the sample.

        Raises:
            BadSampleError: the sample cannot be read.
            IndexError: there is no such sample.
        """
        number = operator.index(sample_id)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} is not in the dataset of {len(self)} samples")
        number %= len(self)
        content = read_encoded(self, self.reader(), number)
        return {"bytes": content.tobytes(), **rows_of(self, np.array([number]))[0]}

    def split(self, fraction: float, seed: int = 0, *, stratify: str | None = None) -> tuple[Dataset, Dataset]:
        """Divide the samples at random into two datasets, for example for training and validation.

        The split depends only on the number of samples, the fraction, the seed and, if stratified, the field's values.
        Without `stratify`, the first part for a smaller fraction is a subset of the first part for a larger one.

        Both parts are ordinary datasets, as are the results of `limit`, `filter` and `select`. They keep the order and
        all class names of this dataset, so a label has the same meaning in all of them. A sample's id (``sample_id`` in
        minibatches) is its index in the part. `source_ids` maps it back.

        Args:
            fraction: fraction of the samples in the first part, above 0 and below 1.
            seed: selects the split, in [0, 2**63).
            stratify: an integer field, such as "label": each of its values is split by the same fraction, to within one
                sample.

        Raises:
            ConfigError: a fraction that leaves one part without samples, a seed out of range, or an unknown field.
        """
        first, second = split_ids(self, fraction, seed, stratify)
        return self.select(first), self.select(second)

    def limit(self, count: int) -> Dataset:
        """Return the first ``count`` samples; in a class-per-folder dataset these belong to the first classes.

        Raises:
            ConfigError: ``count`` is not an integer from 1 to the number of samples.
        """
        if not is_whole(count) or not 1 <= count <= len(self):
            wanted = f"a whole number in [1, {len(self)}], the number of samples of {self.root}"
            raise ConfigError(f"count must be {wanted}, got {shown(count)}", option="count")
        return self.select(np.arange(count))

    def filter(self, expression: Expression) -> Dataset:
        """Return the samples that satisfy an expression.

        It is a `pyarrow.compute` expression, as in `pyarrow.dataset` and Ray Data: ``pc.field("age") >= 18``,
        ``pc.field("class").isin(["cat", "dog"])``. It may use all columns of `schema`.

        Raises:
            ConfigError: not an expression, or one that cannot be evaluated over these fields.
            DatasetError: no sample satisfies it.
        """
        return self.select(matching_ids(self, expression))

    def select(self, sample_ids: Ids) -> Dataset:
        """Return the samples with the given ids, for example of a cross-validation fold.

        Args:
            sample_ids: int64[n], ascending.

        Raises:
            ConfigError: the ids do not ascend, or are out of range.
            DatasetError: no ids.
        """
        return self._chosen(checked_ids(self, sample_ids))

    def resample(
        self, weights: str | NDArray[Any], samples: int | None = None, seed: int = 0, *, each_epoch: bool = True
    ) -> Dataset:
        """Draw samples by weight, with replacement; the result is a dataset of ``samples`` draws.

        A sample drawn several times counts as several samples, each augmented independently. Its id is the number of
        the draw, and an epoch contains every draw exactly once. Draws depend only on the weights, their number, the
        seed and the epoch. Each sample is drawn its expected number of times, rounded up or down at random. Samples of
        weight 0 are never drawn.

        By default, each epoch makes new draws. Minibatches have the field ``source_id``, the sample's id in the dataset
        that was read. Caches store each sample once. Such a dataset cannot be drawn from again or concatenated, so
        split, filter and concatenate first. With ``each_epoch=False``, all epochs have the same draws, and the result
        is an ordinary dataset whose caches store each draw separately.

        Args:
            weights: weight of each sample, at least 0, in any unit: float[n], or the name of a numeric field.
            samples: number of draws; default: the number of samples.
            seed: selects the draws, in [0, 2**63).
            each_epoch: whether each epoch makes new draws.

        Raises:
            ConfigError: invalid or all-zero weights, an unknown field, or a number out of range. With ``each_epoch``,
                also samples that are per-epoch draws already or have a field ``source_id``.
        """
        return self._drawn(weighted_draws(self, weights, samples, seed), each_epoch)

    def balance(
        self, field: str = LABEL.name, samples: int | None = None, seed: int = 0, *, each_epoch: bool = True
    ) -> Dataset:
        """Draw samples as `resample` does, with each value of a field equally often, to within one draw.

        All samples with the same value have the same weight. Values without samples cannot be drawn.

        Args:
            field: an integer field, such as the label.
            samples, seed, each_epoch: see `resample`.

        Raises:
            ConfigError: an unknown field, a number out of range, or as for `resample`.
        """
        return self._drawn(balanced_draws(self, field, samples, seed), each_epoch)

    def _drawn(self, draws: Draws, each_epoch: bool) -> Dataset:
        if not each_epoch:
            return self._chosen(drawn_ids(draws))
        return RedrawnDataset.of(self, draws)

    def _chosen(self, ids: Ids) -> Dataset:
        # Ids ascend, but may repeat.
        if len(ids) == len(self) and (ids == np.arange(len(self))).all():
            return self
        ids.flags.writeable = False
        return self._part(ids, fingerprint_of_part(self.fingerprint, ids))

    # ---- stored samples: differ from the listed ones if these are per-epoch draws ----

    @property
    def stored(self) -> Dataset:
        """The samples that are read and cached. Differs from this dataset only if it consists of per-epoch draws."""
        return self

    def stored_ids(self, sample_ids: Ids, epoch: int) -> Ids:  # noqa: ARG002
        """Return the ids among the `stored` samples for samples of an epoch: int64[n]."""
        return sample_ids

    @property
    def stored_draws(self) -> NDArray[np.float64] | None:
        """Expected draws of each `stored` sample in an epoch, float64[len(stored)]; None if each occurs once."""
        return None

    def values_in(self, epoch: int, sample_ids: Ids) -> Arrays:  # noqa: ARG002
        """Return the values of all `fields` for samples of an epoch: name -> [n, *shape]."""
        return self.values(sample_ids)

    def source_ids(self, sample_ids: Ids) -> Ids:
        """Return the samples' ids in the dataset that was read, or that `mbaas.concat` returned: int64[n].

        However often that dataset was divided since, ids always refer to it.
        """
        return sample_ids

    def _part(self, ids: Ids, fingerprint: str) -> Dataset:
        # Ids ascend, but may repeat.
        return Subset(self.root, self.class_names, fingerprint, inner=self, ids=ids)

    def __repr__(self) -> str:
        return (
            f"Dataset({self.root!r}, samples={len(self)}, classes={len(self.class_names)}, "
            f"bytes={self.total_bytes}, fingerprint={self.fingerprint!r})"
        )

    def _repr_html_(self) -> str:
        rows = {
            "samples": units.count(len(self)),
            "size": units.size(self.total_bytes),
            "fields": units.some([field.text for field in self.fields]) or "none",
            "fingerprint": self.fingerprint,
        }
        if self.class_names:
            rows["classes"] = f"{units.count(len(self.class_names))}: {units.some(self.class_names)}"
        return table(f"Dataset {self.root}", rows)


_Wrapped = TypeVar("_Wrapped", bound="WrappedDataset")


@dataclass(frozen=True, eq=False, repr=False)
class WrappedDataset(Dataset):
    """The samples of another dataset with the same ids and fingerprint. Subclasses replace the `reader`.

    Attributes:
        inner: the wrapped dataset.
    """

    inner: Dataset

    @classmethod
    def around(cls: type[_Wrapped], inner: Dataset, **fields: Any) -> _Wrapped:
        """Wrap ``inner``; ``fields`` are the subclass's additional fields."""
        return cls(root=inner.root, class_names=inner.class_names, fingerprint=inner.fingerprint, inner=inner, **fields)

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.inner.fields

    def values(self, sample_ids: Ids) -> Arrays:
        return self.inner.values(sample_ids)

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        return self.inner.lengths(sample_ids)

    @property
    def total_bytes(self) -> int:
        return self.inner.total_bytes

    def uri(self, sample_id: int) -> str:
        return self.inner.uri(sample_id)

    @cached_property
    def stored(self) -> Dataset:
        inner = self.inner.stored
        return self if inner is self.inner else replace(self, inner=inner, fingerprint=inner.fingerprint)

    def stored_ids(self, sample_ids: Ids, epoch: int) -> Ids:
        return self.inner.stored_ids(sample_ids, epoch)

    @property
    def stored_draws(self) -> NDArray[np.float64] | None:
        return self.inner.stored_draws

    def values_in(self, epoch: int, sample_ids: Ids) -> Arrays:
        return self.inner.values_in(epoch, sample_ids)

    def source_ids(self, sample_ids: Ids) -> Ids:
        return self.inner.source_ids(sample_ids)


@dataclass(frozen=True, eq=False, repr=False)
class Subset(Dataset):
    """Some samples of a dataset that cannot select samples in its own columns.

    Attributes:
        inner: the dataset with all samples.
        ids: int64[n], the samples' ids in ``inner``, ascending.
    """

    inner: Dataset
    ids: Ids

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.inner.fields

    def values(self, sample_ids: Ids) -> Arrays:
        return self.inner.values(self.ids[sample_ids])

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        return self.inner.lengths(self.ids[sample_ids])

    @cached_property
    def total_bytes(self) -> int:
        return int(self.inner.lengths(self.ids).sum())

    def uri(self, sample_id: int) -> str:
        return self.inner.uri(int(self.ids[sample_id]))

    def reader(self) -> SampleReader:
        return _SubsetReader(self.inner.reader(), self.ids)

    def source_ids(self, sample_ids: Ids) -> Ids:
        return self.inner.source_ids(self.ids[sample_ids])

    def _part(self, ids: Ids, fingerprint: str) -> Dataset:
        return Subset(self.root, self.class_names, fingerprint, inner=self.inner, ids=self.ids[ids])


class _SubsetReader(SampleReader):
    def __init__(self, inner: SampleReader, ids: Ids) -> None:
        self._inner, self._ids = inner, ids

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        self._inner.read_into(int(self._ids[sample_id]), buffer)


SOURCE_ID = Field("source_id", (), "int64")
"""Id of the drawn sample in the dataset that was read."""


@dataclass(frozen=True, eq=False, repr=False)
class RedrawnDataset(Subset):
    """Draws from another dataset, with the numbers of the draws as ids; each epoch draws other samples.

    Methods without an epoch refer to epoch 0. All samples of ``inner`` have a positive weight in ``draws``.
    """

    draws: Draws

    @classmethod
    def of(cls, dataset: Dataset, draws: Draws) -> RedrawnDataset:
        """Draw from a dataset.

        Raises:
            ConfigError: its samples are per-epoch draws already, or have a field ``source_id``.
        """
        if dataset.stored is not dataset:
            raise ConfigError(
                f"the samples of {dataset.root} are drawn again in each epoch already; draw once, by one set of weights"
            )
        if SOURCE_ID.name in [field.name for field in dataset.fields]:
            raise ConfigError(
                f"the samples of {dataset.root} have a field {SOURCE_ID.name!r}, which draws need for the sample's id; "
                "read it under another name, or draw with each_epoch=False"
            )
        there = np.flatnonzero(draws.weights > 0)
        fingerprint, draws = draws.fingerprint(dataset.fingerprint), draws.part(there)
        # Samples that are never drawn should not take part in cache planning.
        inner = dataset if len(there) == len(dataset) else dataset.select(there)
        return cls(dataset.root, dataset.class_names, fingerprint, inner=inner, ids=drawn_ids(draws, 0), draws=draws)

    @property
    def fields(self) -> tuple[Field, ...]:
        return (*self.inner.fields, SOURCE_ID)

    def values(self, sample_ids: Ids) -> Arrays:
        return self.values_in(0, sample_ids)

    @property
    def stored(self) -> Dataset:
        return self.inner

    def stored_ids(self, sample_ids: Ids, epoch: int) -> Ids:
        return drawn_ids(self.draws, epoch)[sample_ids]

    @property
    def stored_draws(self) -> NDArray[np.float64]:
        return self.draws.expected

    def values_in(self, epoch: int, sample_ids: Ids) -> Arrays:
        drawn = self.stored_ids(sample_ids, epoch)
        return {**self.inner.values(drawn), SOURCE_ID.name: self.inner.source_ids(drawn)}

    @property
    def total_bytes(self) -> int:
        return self.inner.total_bytes

    def in_epoch_0(self) -> Dataset:
        """Return the draws of epoch 0 as an ordinary dataset."""
        return Subset(self.root, self.class_names, self.fingerprint, inner=self.inner, ids=self.ids)

    def _part(self, ids: Ids, fingerprint: str) -> Dataset:  # noqa: ARG002
        raise ConfigError(
            f"the samples of {self.root} are drawn again in each epoch: split, filter and limit before you draw, or "
            "draw with each_epoch=False"
        )


def bounded(dataset: Dataset, most_bytes: int = MAX_SAMPLE_BYTES) -> Dataset:
    """Return a dataset with larger samples marked as bad, so that no memory is allocated for them.

    It is the same dataset if all samples are within the limit.
    """
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
