"""Fields: the named, typed values of which a sample consists.

An image and its label are the usual ones. A dataset knows some fields of a sample without reading it, such as its
label; prep makes another one of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]
"""The fields of n samples by name: arrays [n, *shape], in the same order of samples."""


@dataclass(frozen=True)
class Field:
    """What the values of one field look like.

    Attributes:
        name: under which a minibatch has them.
        shape: of one sample's value; () for a number.
        dtype: NumPy's name of the element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size of one sample's value in bytes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def empty(self, rows: int) -> NDArray[Any]:
        """Make an array for the values of ``rows`` samples, whatever is in it."""
        return np.empty((rows, *self.shape), self.dtype)


IMAGE = "image"
"""Name of the field that prep makes of a sample's bytes."""

LABEL = Field("label", (), "int64")
"""The class of a sample, as an index into the names of classes."""

SAMPLE_ID = Field("sample_id", (), "int64")
"""The number of a sample in its dataset, which every minibatch has."""
