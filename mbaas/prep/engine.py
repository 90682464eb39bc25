"""What an engine is: it turns encoded samples into prepared ones.

The result is a pure function of (seed, epoch, sample id, encoded bytes):
it does not depend on the block that a sample comes in, the number of threads, or earlier calls. Nor does it depend on
whether a sample comes encoded or decoded: what the engine kept of it when it prepared it before (`mbaas.prep.decoded`).
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
"""The bytes of one sample, a file or the container of a decoded one; read-only for engines."""

EngineOf = Callable[[NDArray[np.int64], int], NDArray[np.bool_]]
"""Tells of samples, int64[n], in an epoch which are one engine's and not the other's: bool[n]."""

DEFAULT_MAX_PIXELS = MOST_PIXELS
"""Pixels of the largest image that is prepared, unless an engine is told otherwise."""

DEFAULT_MAX_BYTES = 1 << 30
"""The same for sound and other arrays, in bytes once they are decoded: as many as a file may have."""


class BadRow(Struct, frozen=True):
    """A sample of a block that could not be prepared.

    Attributes:
        row: its index in the block.
        reason: one clause that says what is wrong with it.
    """

    row: int
    reason: str


class Prepared(Struct, frozen=True):
    """What became of n samples, beside the field that an engine made of their bytes.

    Attributes:
        bad: those that could not be prepared, in order of row.
        known: the dataset's fields of all others, in order of row: as the engine was given them, except those that lie
            on the image, which are where its pixels are now, and those that a Map changes.
        made: what was made of the n samples, in the memory in which the engine was told to make it: that itself, or
            packed where samples differ in size; there bad samples have no values, or zeros.
    """

    bad: list[BadRow]
    known: Arrays
    made: Column


class Engine(Protocol):
    """A way to prepare blocks of samples. Not thread-safe: one call at a time."""

    name: EngineName

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        """Tell what is made of a sample, shape and dtype; decode ``encoded`` where the pipeline alone does not tell.

        Args:
            encoded: its bytes.
            uri: where it is, for messages.
            known: its fields, as the dataset has them: of one sample.

        Raises:
            BadSampleError: ``encoded`` had to be decoded and cannot be.
            ConfigError: Normalize is to follow, but samples are not uint8 [height, width, 3]; or they are no numbers.
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
            encoded: their bytes.
            sample_ids: int64[n], their ids.
            epoch: on which random transforms depend.
            known: their fields, as the dataset has them; none of them changes in place.
            out: [n, *field.shape], where what is made of them goes; the rows of bad samples become zero. Where samples
                differ in size it is contiguous memory for as many of the largest (`Field.empty`), in which they come to
                lie end to end.
            keep: takes the decoded form of the samples that are to be kept, as far as it has room: of those that come
                encoded and are good; but not of all that are good in this epoch alone, such as a recording that is
                damaged outside of the window that the epoch reads.

        Raises:
            DatasetError: a field that lies on the image, or beside one that does, does not fit it.
        """

    def set_threads(self, threads: int) -> None:
        """Work with ``threads`` threads, at least 1, from the next call on."""

    def close(self) -> None:
        """Release threads and device memory."""
