"""A dataset around another, for storage that behaves in its own way."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mbaas.dataset.base import Dataset, SampleReader
from mbaas.order import Ids

_Wrapped = TypeVar("_Wrapped", bound="WrappedDataset")


@dataclass(frozen=True, eq=False, repr=False)
class WrappedDataset(Dataset):
    """The samples of another dataset, under the same ids and with the same fingerprint, read in another way.

    Attributes:
        inner: whose samples these are.
    """

    inner: Dataset

    @classmethod
    def around(cls: type[_Wrapped], inner: Dataset, **fields: Any) -> _Wrapped:
        """``inner``, wrapped; ``fields`` are those that a subclass has beside."""
        return cls(root=inner.root, class_names=inner.class_names, fingerprint=inner.fingerprint, inner=inner, **fields)

    def __len__(self) -> int:
        return len(self.inner)

    def labels(self, sample_ids: Ids) -> NDArray[np.int64]:
        return self.inner.labels(sample_ids)

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        return self.inner.lengths(sample_ids)

    @property
    def total_bytes(self) -> int:
        return self.inner.total_bytes

    def uri(self, sample_id: int) -> str:
        return self.inner.uri(sample_id)

    @abstractmethod
    def reader(self) -> SampleReader:
        """Reads them in the subclass's way."""
