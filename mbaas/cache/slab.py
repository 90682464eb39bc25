"""Slabs: many encoded samples in one array of bytes, what is read for a part of a block, and where its rows lie.

A slab is uint8[nbytes], immutable once it is full, and one object of Ray's object store: thousands of small files
become a few large objects that every process of the node reads without a copy. Samples lie end to end, without gaps.
Permanent slabs have positive numbers and stay until all of their samples have moved to other nodes; transient ones have
negative numbers and carry one part of a block; 0 is no slab. No number is used twice.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.cache.directory import Locations
from mbaas.messages import Amount, FetchCounts
from mbaas.order import Ids
from mbaas.placement import PartRequest

Slab: TypeAlias = NDArray[np.uint8]
"""uint8[nbytes]; where it is full, read-only, in the shared memory of the node."""


# Numbers, because the origins of a slab's samples are an int8 array that is filled and compared as a whole.
class Origin(enum.IntEnum):
    """The tier from which the bytes of a sample came into a slab, by its name in `FetchCounts`."""

    STORAGE = 0
    REMOTE = 1
    DISK = 2


class PassingReason(str):
    """Why a sample could not be read, where it is not bad: storage is asked for it again."""

    __slots__ = ()


class OtherForm(PassingReason):
    """Why a sample could not be read, where other nodes have it in another form than was believed, or not at all.

    Attributes:
        decoded_bytes: of the sample, if it is decoded there; 0 if it is to be read as storage has it.
    """

    decoded_bytes: int

    def __new__(cls, decoded_bytes: int) -> OtherForm:
        reason = super().__new__(cls, "the node that kept it has it in another form")
        reason.decoded_bytes = decoded_bytes
        return reason


Failures = Mapping[int, str]
"""Index within a `Load` -> why that sample could not be read: a `PassingReason` if it is not bad."""


@dataclass(frozen=True, eq=False)
class Load:
    """A slab that is to be filled, and the samples that go into it, end to end.

    Attributes:
        slab: its number; positive if permanent, negative if transient.
        request: the part for which it is read; None for samples that move here before anybody asks for them.
        epoch: the epoch of its block; None if it is read for no block.
        peer: the node whose memory may have the samples; None where none has.
        rows: int64[k], which rows of the part these are, ascending.
        sample_ids: int64[k].
        lengths: int64[k], bytes.
        lends: whether ``peer`` goes on keeping them.
        decoded: whether they are read as the pipeline's prefix made them, which only nodes have, and no storage.
        passing: whether they are to be handed in decoded; if that happens, the slab goes as a whole.
    """

    slab: int
    request: PartRequest | None
    epoch: int | None
    peer: str | None
    rows: NDArray[np.int64]
    sample_ids: Ids
    lengths: NDArray[np.int64]
    lends: bool = False
    decoded: bool = False
    passing: bool = False

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """int64[k], where each sample goes, in bytes from the slab's start."""
        return pack(self.lengths)

    @cached_property
    def nbytes(self) -> int:
        """Size of the slab."""
        return int(self.lengths.sum())

    @property
    def permanent(self) -> bool:
        """Whether the slab is to be kept."""
        return self.slab > 0

    def readable(self, failures: Failures) -> NDArray[np.bool_]:
        """Tell which samples could be read: bool[k]."""
        readable = np.ones(len(self.rows), dtype=np.bool_)
        readable[list(failures)] = False
        return readable


class RowLocations(Struct, frozen=True, eq=False):
    """Where the samples of one part of a block lie.

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


def away(sample_ids: Ids, reasons: Mapping[int, str]) -> RowLocations | None:
    """Tell of a part that nothing is read of, because storage does not give samples of it: id -> why.

    Return None if there are no such samples.
    """
    if not reasons:
        return None
    rows = len(sample_ids)
    return RowLocations(
        slab_ids=(),
        slab=np.full(rows, -1, np.int32),
        offset=np.zeros(rows, np.int64),
        length=np.zeros(rows, np.int64),
        errors={row: PassingReason(reasons[i]) for row, i in enumerate(sample_ids.tolist()) if i in reasons},
        counts=FetchCounts(),
    )


NOTHING: Slab = np.empty(0, np.uint8)
"""The view of a sample that could not be read; read-only, as views of slabs are."""
NOTHING.flags.writeable = False


def views(
    slabs: Sequence[Slab] | Mapping[int, Slab],
    slab: NDArray[np.integer[Any]],
    offset: NDArray[np.int64],
    length: NDArray[np.int64],
) -> list[Slab]:
    """View samples in the slabs that they lie in, without a copy.

    Args:
        slabs: by whatever `slab` says.
        slab: int[n], the slab of each sample; below 0 where it could not be read.
        offset: int64[n], bytes from the slab's start.
        length: int64[n], bytes.
    """
    spans = zip(slab.tolist(), offset.tolist(), length.tolist(), strict=True)
    return [slabs[s][o : o + n] if s >= 0 else NOTHING for s, o, n in spans]


def joined(samples: Sequence[Slab]) -> Slab:
    """Copy samples end to end, as `pack` puts them."""
    return np.concatenate([NOTHING, *samples])  # which would not take an empty list


def pack(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Compute the offsets of samples that lie end to end: bytes int64[n] -> int64[n]."""
    return np.cumsum(lengths) - lengths


def squeeze(slab: NDArray[np.uint8], load: Load, failures: Failures) -> NDArray[np.uint8]:
    """Return the slab without the samples that could not be read, the others end to end as `pack` puts them."""
    if not failures:
        return slab
    good = load.readable(failures)
    return joined(views([slab], np.where(good, 0, -1), load.offsets, load.lengths))


@dataclass(eq=False)
class PartPlan:
    """The plan of one scheduled part of a block, fetched or read ahead: what becomes of each of its rows.

    Attributes:
        request: which part of which block.
        sample_ids: int64[n].
        lengths: int64[n], bytes, of what is read for the row; of a hit, as storage has it.
        hit: bool[n]; each row is either a hit or lies in exactly one of `loads`.
        slab: int64[n], the slab that is read for the row.
        offset: int64[n], bytes, where the row lies in that slab.
        origin: int8[n], `Origin` of each row that is no hit.
        decoded: bool[n], whether what is read for the row is decoded.
        loads: the slabs that are read for this part.
        fetches: fetches that wait for it; 0 means that it is read ahead.
        errors: row -> why its sample could not be read, always from a read made for this very part.
        failure: what kept one of its slabs from being filled at all, if anything did.
    """

    request: PartRequest
    sample_ids: Ids
    lengths: NDArray[np.int64]
    hit: NDArray[np.bool_] = field(init=False)
    slab: NDArray[np.int64] = field(init=False)
    offset: NDArray[np.int64] = field(init=False)
    origin: NDArray[np.int8] = field(init=False)
    decoded: NDArray[np.bool_] = field(init=False)
    loads: list[Load] = field(default_factory=list)
    fetches: int = 0
    errors: dict[int, str] = field(default_factory=dict)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.hit = np.ones(len(self.sample_ids), dtype=np.bool_)  # until a load has the row
        self.slab, self.offset = np.zeros((2, len(self.sample_ids)), dtype=np.int64)
        self.origin = np.zeros(len(self.sample_ids), np.int8)
        self.decoded = np.zeros(len(self.sample_ids), np.bool_)

    def transient_slabs(self) -> list[int]:
        """List those of `loads` that go with this plan."""
        return [load.slab for load in self.loads if not load.permanent]

    def add(self, load: Load) -> None:
        """Add a load: its rows are no hits, they are fetched for this part."""
        self.hit[load.rows] = False
        self.slab[load.rows], self.lengths[load.rows] = load.slab, load.lengths
        self.decoded[load.rows] = load.decoded
        self.loads.append(load)

    def filled(self, load: Load, failures: Failures, origins: NDArray[np.int8]) -> None:
        """Note that one of `loads` is full, and squeezed: offsets are those of the samples that could be read.

        What another node has in another form is no error: its rows are hits again, lie nowhere, and are read anew.
        """
        self.origin[load.rows] = origins
        readable = load.readable(failures)
        self.offset[load.rows[readable]] = pack(load.lengths[readable])  # which moved up when the slab was squeezed
        for i, reason in failures.items():
            row = int(load.rows[i])
            if isinstance(reason, OtherForm):
                self.hit[row] = True
            else:
                self.errors[row] = reason

    def lose(self, slabs: Container[int]) -> None:
        """Have rows of ``loads`` that went into these slabs read again: they are hits again, which lie nowhere."""
        for load in self.loads:
            if load.slab in slabs:
                self.hit[load.rows] = True
                self.errors = {row: why for row, why in self.errors.items() if not self.hit[row]}
        self.loads = [load for load in self.loads if load.slab not in slabs]

    def locate(self, kept: Locations) -> RowLocations:
        """Tell where everything lies at last, given where the directory has the samples."""
        # Read for this part; hits lie where the directory says. So does what was handed in decoded since it was read.
        own = ~self.hit & (self.decoded | ~kept["decoded"])
        slab = np.where(own, self.slab, kept["slab"])
        offset = np.where(own, self.offset, kept["offset"])
        length = np.where(own, self.lengths, kept["length"])
        errors = {row: why for row, why in self.errors.items() if own[row]}
        good = np.ones(len(slab), dtype=np.bool_)
        good[list(errors)] = False
        # Slabs are named by their index among those that this part needs: a reader asks Ray for each of them once.
        slab_ids, index = np.unique(slab[good], return_inverse=True)
        column = np.full(len(slab), -1, dtype=np.int32)
        column[good] = index

        def amount(rows: NDArray[np.bool_]) -> Amount:
            """Count the samples of these rows, and the bytes of those that could be read."""
            return Amount(int(rows.sum()), int(length[good & rows].sum()))

        def fetched(origin: Origin) -> Amount:
            return amount(own & (self.origin == origin))

        return RowLocations(
            slab_ids=tuple(slab_ids.tolist()),
            slab=column,
            offset=np.where(good, offset, 0),
            length=np.where(good, length, 0),
            errors=errors,
            counts=FetchCounts(
                local=amount(~own),
                remote=fetched(Origin.REMOTE),
                disk=fetched(Origin.DISK),
                storage=fetched(Origin.STORAGE),
                decoded=amount(np.where(own, self.decoded, kept["decoded"])),
            ),
        )

    def validate(self) -> None:
        """Check that each row is a hit or has a slab, but not both.

        Raises:
            AssertionError: a row lies nowhere, or in two slabs.
        """
        read = [load.rows[~self.hit[load.rows] & (self.slab[load.rows] == load.slab)] for load in self.loads]
        rows = np.concatenate([np.flatnonzero(self.hit), *read])
        assert sorted(rows.tolist()) == list(range(len(self.sample_ids))), f"rows of {self.request}"
        for load, own in zip(self.loads, read, strict=True):  # what is read from storage alone is never read again
            assert len(own) == len(load.rows) or load.decoded or load.peer is not None, load
        assert not self.hit[list(self.errors)].any(), f"{self.request} inherited an error: {self.errors}"
