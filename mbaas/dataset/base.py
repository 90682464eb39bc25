"""A dataset, the reader of its bytes, and datasets made of another: all that the rest of mbaas sees of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mbaas import units
from mbaas.dataset.parts import checked_ids, fingerprint_of_part, matching, split_of
from mbaas.dataset.resampling import Draws, balanced_draws, draws_by_weight
from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.fields import LABEL, Arrays, Field
from mbaas.notebook import some, table
from mbaas.order import Ids

if TYPE_CHECKING:
    from pyarrow.compute import Expression


class SampleReader(ABC):
    """Reads the encoded bytes of samples. Threads may share one."""

    @abstractmethod
    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        """Fill `buffer` with the bytes of one sample.

        Args:
            sample_id: in [0, len(dataset)).
            buffer: writable, one-dimensional, of exactly the sample's length in bytes.

        Raises:
            BadSampleError: the bytes cannot be read, or their number is not the one that was listed. It is a
                `StorageError` if a later read may get them.
            ConfigError: the buffer has another length.
        """


def exact_view(buffer: memoryview | NDArray[np.uint8], length: int, uri: str) -> memoryview:
    """Return the memory of a buffer that is to take `length` bytes.

    Raises:
        ConfigError: it has another length.
    """
    if len(buffer) != length:
        raise ConfigError(f"the buffer for {uri} must have {length} bytes, got {len(buffer)}")
    return buffer if isinstance(buffer, memoryview) else buffer.data


# Not compared field by field, which may be millions of rows: the fingerprint tells whether two are the same.
@dataclass(frozen=True, eq=False, repr=False)
class Dataset(ABC):
    """An immutable list of samples: where the bytes of each are and what else is known of it, but no bytes.

    What is known without reading a sample, such as its label, are its `fields`: minibatches have them beside what prep
    makes of the bytes. A sample's id is its index in the list. A pickle (protocol 5) carries the columns out of band,
    so all processes of a Ray node read one copy, in the object store.

    Attributes:
        root: the URI or path that was listed, without credentials; for messages.
        class_names: name of each label, in the order of the labels; none if labels are not the classes of a list.
        fingerprint: 32 hex digits, a hash of what is listed: names below the root, lengths, labels, class
            names. A copy elsewhere has the same one. It does not look inside the files.
    """

    root: str
    class_names: tuple[str, ...]
    fingerprint: str

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples, at least 1."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """What is known of each sample; by default its label."""
        return (LABEL,)

    @abstractmethod
    def values(self, sample_ids: Ids) -> Arrays:
        """Return the values of all `fields` of samples: name -> [n, *shape]."""

    def labels(self, sample_ids: Ids) -> NDArray[Any]:
        """Return the labels of samples: [n], of classes int64, each an index into `class_names`.

        Raises:
            DatasetError: the samples have none.
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
        """Say where one sample's bytes lie, for messages."""

    @abstractmethod
    def reader(self) -> SampleReader:
        """Make a reader of the samples' bytes; one for each process, whose threads share it."""

    def split(self, fraction: float, seed: int = 0, *, stratify: str | None = None) -> tuple[Dataset, Dataset]:
        """Divide the samples at random in two datasets, such as one for training and one for validation.

        Each sample is in one of the two. Which one follows from the number of samples, the fraction, the seed and, if
        it is stratified, the field's values, and from nothing else: the same data is split in the same way on every
        machine. Without strata the first part with a smaller fraction lies within that with a larger one.

        The parts are datasets like any other, as those of `take`, `filter` and `select` are. They keep the order of
        this one, and its class names, also those of which no sample is left, so that a label means the same in all
        of them. A sample's id, which minibatches have as ``sample_id``, is its index in the part: `source_ids` leads
        back from it.

        Args:
            fraction: of the samples that are in the first part, above 0 and below 1; their number is rounded.
            seed: chooses which, in [0, 2**63).
            stratify: a field of whole numbers, such as "label": each of its values has the fraction of its samples in
                the first part, to within one sample.

        Raises:
            ConfigError: a fraction that leaves one part without samples, a seed out of range, or no such field.
        """
        first, second = split_of(self, fraction, seed, stratify)
        return self.select(first), self.select(second)

    def take(self, count: int) -> Dataset:
        """Return the first ``count`` samples; in a dataset of folders these are of the first classes.

        Raises:
            ConfigError: it is no whole number from 1 to the number of samples.
        """
        is_whole = isinstance(count, (int, np.integer)) and not isinstance(count, bool)
        if not is_whole or not 1 <= count <= len(self):
            wanted = f"a whole number in [1, {len(self)}], the number of samples of {self.root}"
            raise ConfigError(f"count must be {wanted}, got {shown(count)}", option="count")
        return self.select(np.arange(count))

    def filter(self, expression: Expression) -> Dataset:
        """Return the samples of which an expression is true.

        It is one of `pyarrow.compute`, as `pyarrow.dataset` and Ray Data have them: ``pc.field("age") >= 18``,
        ``pc.field("class").isin(["cat", "dog"])``. It may name each of the `fields`, and ``class``, the name of the
        label's class, where there are such names and no field is called so.

        Raises:
            ConfigError: it is no expression, or one that cannot be evaluated over these fields.
            DatasetError: it is true of no sample.
        """
        return self.select(matching(self, expression))

    def select(self, sample_ids: Ids) -> Dataset:
        """Return the samples with these ids: for parts that are chosen in another way, such as folds.

        Args:
            sample_ids: int64[n], ascending.

        Raises:
            ConfigError: they do not ascend, or a sample is not there.
            DatasetError: there are none.
        """
        return self._chosen(checked_ids(self, sample_ids))

    def resampled(
        self, weights: str | NDArray[Any], samples: int | None = None, seed: int = 0, *, each_epoch: bool = True
    ) -> Dataset:
        """Draw samples by weights, with replacement: a dataset of ``samples`` draws.

        A sample that is drawn several times is as many samples, each with an id, the number of the draw, and with
        random transforms of its own; so an epoch has each draw once, and its ledger counts draws. What is drawn follows
        from the weights, the number, the seed and the epoch, and from nothing else. A sample comes as often as is
        expected of its weight, but for rounding, up or down at random: of equal weights, and as many draws as samples,
        each comes once. Those of weight 0 never come.

        Each epoch draws anew. So of a class that is cut down, other samples come in each epoch, and in the end all of
        them. Minibatches have the field ``source_id``, the drawn sample's id in the dataset that was read. Caches keep
        each sample once, however often it is drawn. Draws are the last thing that is made of a dataset: split and
        filter before.

        Drawn once instead (``each_epoch=False``), all epochs have the same draws, as a dataset like any other, of which
        `source_ids` tells what was drawn. Its caches keep the bytes of each draw.

        Args:
            weights: of the samples, at least 0, in any unit: float[n], or the name of a field of numbers.
            samples: how many are drawn; default: as many as there are.
            seed: chooses which, in [0, 2**63).
            each_epoch: whether each epoch draws anew.

        Raises:
            ConfigError: weights that are no such numbers or all 0, no such field, or a number out of range; or each
                epoch is to draw anew, and the samples are draws already or have a field ``source_id``.
        """
        return self._drawn(draws_by_weight(self, weights, samples, seed), each_epoch)

    def balanced(
        self, field: str = LABEL.name, samples: int | None = None, seed: int = 0, *, each_epoch: bool = True
    ) -> Dataset:
        """Draw samples as `resampled` does, so that each value of a field comes equally often, to within one.

        Within a value all samples have the same weight. Values of which there is no sample cannot come.

        Args:
            field: of whole numbers, such as the label.
            samples, seed, each_epoch: as `resampled` has them.

        Raises:
            ConfigError: no such field, or a number out of range; or as `resampled`.
        """
        return self._drawn(balanced_draws(self, field, samples, seed), each_epoch)

    def _drawn(self, draws: Draws, each_epoch: bool) -> Dataset:
        if not each_epoch:
            return self._chosen(draws.once())
        from mbaas.dataset.redrawn import Redrawn  # which is a dataset itself

        return Redrawn.of(self, draws)

    def _chosen(self, ids: Ids) -> Dataset:
        """Return the dataset of samples whose ids ascend, some of which may come several times."""
        if len(ids) == len(self) and (ids == np.arange(len(self))).all():
            return self
        ids.flags.writeable = False
        return self._part(ids, fingerprint_of_part(self.fingerprint, ids))

    # ---- what is stored, where that is not what is listed ----

    @property
    def stored(self) -> Dataset:
        """The samples whose bytes are read and kept: these, unless they are draws, which may be of the same sample."""
        return self

    def stored_ids(self, sample_ids: Ids, epoch: int) -> Ids:  # noqa: ARG002
        """Return the ids among the `stored` samples of samples of an epoch: int64[n]."""
        return sample_ids

    def values_in(self, epoch: int, sample_ids: Ids) -> Arrays:  # noqa: ARG002
        """Return the values of all `fields` of samples of an epoch: name -> [n, *shape]."""
        return self.values(sample_ids)

    def source_ids(self, sample_ids: Ids) -> Ids:
        """Return the ids of samples in the dataset of which this is a part, however often it was divided: int64[n].

        That is the one which was read, or which `mbaas.concat` made. In a dataset that is no part they are the same.
        """
        return sample_ids

    def _part(self, ids: Ids, fingerprint: str) -> Dataset:
        """Make the dataset of some samples: of ids that ascend; one may come several times."""
        return Subset(self.root, self.class_names, fingerprint, inner=self, ids=ids)

    def __repr__(self) -> str:
        return (
            f"Dataset({self.root!r}, samples={len(self)}, classes={len(self.class_names)}, "
            f"bytes={self.total_bytes}, fingerprint={self.fingerprint!r})"
        )

    def _repr_html_(self) -> str:
        """Return what notebooks show: a table."""
        rows = {
            "samples": units.count(len(self)),
            "size": units.size(self.total_bytes),
            "fields": some([field.text for field in self.fields]) or "none",
            "fingerprint": self.fingerprint,
        }
        if self.class_names:
            rows["classes"] = f"{units.count(len(self.class_names))}: {some(self.class_names)}"
        return table(f"Dataset {self.root}", rows)


_Wrapped = TypeVar("_Wrapped", bound="WrappedDataset")


@dataclass(frozen=True, eq=False, repr=False)
class WrappedDataset(Dataset):
    """The samples of another dataset, under the same ids and with the same fingerprint, read in another way.

    A subclass says in which way: it has a `reader`.

    Attributes:
        inner: whose samples these are.
    """

    inner: Dataset

    @classmethod
    def around(cls: type[_Wrapped], inner: Dataset, **fields: Any) -> _Wrapped:
        """Wrap ``inner``; ``fields`` are those that a subclass has beside."""
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

    def values_in(self, epoch: int, sample_ids: Ids) -> Arrays:
        return self.inner.values_in(epoch, sample_ids)

    def source_ids(self, sample_ids: Ids) -> Ids:
        return self.inner.source_ids(sample_ids)


@dataclass(frozen=True, eq=False, repr=False)
class Subset(Dataset):
    """Some samples of another dataset, under new ids, for datasets that cannot leave out samples themselves.

    Attributes:
        inner: whose samples these are.
        ids: int64[n], their ids there, ascending.
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
