"""A dataset, the reader of its bytes, and a dataset around another: all that the rest of mbaas sees of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError, DatasetError
from mbaas.fields import LABEL, Arrays, Field
from mbaas.order import Ids


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

    def __repr__(self) -> str:
        return (
            f"Dataset({self.root!r}, samples={len(self)}, classes={len(self.class_names)}, "
            f"bytes={self.total_bytes}, fingerprint={self.fingerprint!r})"
        )


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
