"""Slabs: many raw samples in one array of bytes, and where each of them lies.

A slab is uint8[nbytes], immutable once it is full, and one object of Ray's object store: thousands of small
files become a few large objects that every process of the node reads without a copy. Samples lie end to end,
without gaps. Permanent slabs have positive numbers and stay for life; transient ones have negative numbers
and carry one block; 0 is no slab. No number is used twice.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.messages import FetchCounts
from mbaas.order import Ids
from mbaas.placement import PartRequest


class Origin(enum.IntEnum):
    """The place from which the bytes of a sample came into a slab, by its name in `FetchCounts`."""

    STORAGE = 0
    REMOTE = 1
    DISK = 2


Failures = Mapping[int, str]
"""Which samples of a `Load` could not be read (index within the load), and why."""


@dataclass(frozen=True, eq=False)
class Load:
    """One slab to be filled for one share of a block.

    Attributes:
        slab: its number; positive if permanent, negative if transient.
        wanted: the share for which it is read.
        epoch: the epoch of its block.
        source: the node whose memory may have the samples, or None: storage.
        rows: int64[k], which rows of the share these are, ascending.
        sample_ids: int64[k].
        lengths: int64[k], bytes.
        offsets: int64[k], where each sample goes, bytes from the slab's start.
        nbytes: size of the slab.
    """

    slab: int
    request: PartRequest
    epoch: int
    source: str | None
    rows: NDArray[np.int64]
    sample_ids: Ids
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]
    nbytes: int

    @property
    def permanent(self) -> bool:
        return self.slab > 0

    def kept(self, failures: Failures) -> NDArray[np.bool_]:
        """bool[k], false where the sample could not be read."""
        kept = np.ones(len(self.rows), dtype=np.bool_)
        kept[list(failures)] = False
        return kept


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the samples of one share of a block lie.

    Attributes:
        slab_ids: the numbers of the slabs that hold them, each once.
        slab: int32[n], index into `slab_ids`; -1 where the sample could not be read.
        offset: int64[n], bytes from the slab's start.
        length: int64[n], bytes; 0 where the sample could not be read.
        errors: row -> why its sample could not be read.
        counts: the n samples, by where they came from: local ones were in the cache, or on their way into it for
            another block; remote ones were in the memory of the node that was their home before; those from storage
            were read for this block.
    """

    slab_ids: tuple[int, ...]
    slab: NDArray[np.int32]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    errors: dict[int, str]
    counts: FetchCounts


def pack(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Offsets of samples that lie end to end: bytes int64[n] -> int64[n]."""
    return np.cumsum(lengths) - lengths


def squeeze(slab: NDArray[np.uint8], load: Load, failures: Failures) -> NDArray[np.uint8]:
    """The slab without the samples that could not be read, the others end to end as `pack` puts them."""
    if not failures:
        return slab
    spans = zip(load.offsets.tolist(), load.lengths.tolist(), strict=True)
    parts = [slab[o : o + n] for i, (o, n) in enumerate(spans) if i not in failures]
    return np.concatenate(parts) if parts else slab[:0]
