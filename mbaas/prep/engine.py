"""The engine protocol: an engine turns encoded samples into prepared ones.

The result is a pure function of (seed, epoch, sample id, encoded bytes). It does not depend on the block, the number of
threads, or earlier calls, nor on whether a sample arrives encoded or in its cached decoded form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.fields import Arrays, Column, Field
from mbaas.messages import EngineName
from mbaas.prep.decoded import KeptRows
from mbaas.transforms.decoders import MOST_PIXELS

Encoded = bytes | memoryview | NDArray[np.uint8]
"""The bytes of one sample: a file, or the container of a decoded sample. Engines must not modify them."""

EngineOf = Callable[[NDArray[np.int64], int], NDArray[np.bool_]]
"""Selects the samples of one of two engines: (sample ids int64[n], epoch) -> bool[n]."""

DEFAULT_MAX_PIXELS = MOST_PIXELS
"""Default limit of the size of an image, in pixels."""

DEFAULT_MAX_BYTES = 1 << 30
"""Default limit of the decoded size of audio and other arrays, in bytes; equal to the limit of a file."""


class BadRow(Struct, frozen=True):
    """A sample of a block (``row`` is its index) that could not be prepared, and the reason, as one clause."""

    row: int
    reason: str


class Prepared(Struct, frozen=True):
    """The result of preparing n samples.

    Attributes:
        bad: samples that could not be prepared, in order of row.
        known: the dataset's fields of the good samples, in order of row. Fields with image coordinates follow the
            transformed pixels, and a Map may change fields; all other fields are the input's.
        made: the prepared field of all n samples, either ``out`` itself, or packed if samples differ in size. Bad
            samples are zero; packed ones may also be empty.
    """

    bad: list[BadRow]
    known: Arrays
    made: Column


class Engine(Protocol):
    """Prepares blocks of samples. Not thread-safe: one call at a time."""

    name: EngineName

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        """Return the shape and dtype of a prepared sample. Decode it only if the pipeline does not determine them.

        Args:
            encoded: the sample's bytes.
            uri: the sample's location, for error messages.
            known: the dataset's fields of this one sample.

        Raises:
            BadSampleError: ``encoded`` had to be decoded and cannot be.
            ConfigError: Normalize follows, but samples are not uint8 [height, width, 3]; or samples are not numeric.
        """

    def prepare(
        self,
        encoded: Sequence[Encoded],
        sample_ids: NDArray[np.int64],
        epoch: int,
        known: Arrays,
        out: NDArray[Any],
        keep: KeptRows | None = None,
    ) -> Prepared:
        """Prepare n samples.

        Args:
            encoded, sample_ids: the samples' bytes, and their ids, int64[n].
            epoch: seeds the random transforms.
            known: the samples' fields, as in the dataset; not modified in place.
            out: [n, *field.shape], receives the prepared samples; rows of bad samples become zero. If samples differ in
                size, it is contiguous memory for n samples of the largest size (`Field.empty`), filled end to end.
            keep: receives the decoded form of its wanted rows, if these are encoded and good, up to its capacity.
                Samples that are good in this epoch only are not kept, such as audio that is damaged outside the epoch's
                window.

        Raises:
            DatasetError: a field with image coordinates, or a field that must match one, does not fit the image.
        """

    def set_threads(self, threads: int) -> None:
        """Use ``threads`` threads (at least 1) from the next call on."""

    def close(self) -> None:
        """Release threads and device memory."""
