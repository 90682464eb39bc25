"""Slabs: many samples in one byte array. Also the reads of a block part, and the locations of its rows.

A slab is uint8[nbytes], immutable once full, and one object in Ray's object store, which all processes of a node read
without a copy. Permanent slabs have positive numbers and stay until they contain no live sample; what is left of a slab
may be copied into another one (`Compaction`). Transient slabs have negative numbers and serve one block part. 0 means
no slab. Numbers are never reused.
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
from mbaas.samples.order import Ids
from mbaas.samples.placement import ENCODED, PartRequest
from mbaas.wire.samples import Amount, FetchCounts

Slab: TypeAlias = NDArray[np.uint8]
"""uint8[nbytes]; once full, read-only and in the node's shared memory."""


# Integers, because a slab's origins are an int8 array that is filled and compared as a whole.
class Origin(enum.IntEnum):
    """The tier that a sample's bytes came from, named as in `FetchCounts`."""

    STORAGE = 0
    REMOTE = 1
    DISK = 2


class TemporaryReason(str):
    """Reason of a temporary read failure: the sample is not bad, and storage will be read again."""

    __slots__ = ()


class OtherForm(TemporaryReason):
    """Reason for a sample that another node has in another form than expected, or no longer has.

    ``form`` and ``nbytes`` are those that it has there if it is decoded; both 0 if it must be read encoded.
    """

    form: int
    nbytes: int

    def __new__(cls, form: int = ENCODED, nbytes: int = 0) -> OtherForm:
        reason = super().__new__(cls, "the node that kept it has it in another form")
        reason.form, reason.nbytes = form, nbytes
        return reason

    def __reduce__(self) -> tuple[type[OtherForm], tuple[int, int]]:
        return OtherForm, (self.form, self.nbytes)


Failures = Mapping[int, str]
"""Index within a `Load` -> reason why the sample could not be read; a `TemporaryReason` if it is not bad."""


@dataclass(frozen=True, eq=False)
class Load:
    """A slab to fill, and the samples to store in it end to end."""

    slab: int  # slab number; positive if permanent, negative if transient
    request: PartRequest | None  # the part that it is read for; None for samples moved here before they are requested
    epoch: int | None  # the epoch of its block; None if it is not read for a block
    peer: str | None  # another node that may have the samples in memory, or None
    rows: NDArray[np.int64]  # int64[k], their rows within the part, ascending
    # sample_ids, lengths: int64[k], lengths in bytes
    sample_ids: Ids
    lengths: NDArray[np.int64]
    lends: bool = False  # ``peer`` keeps its copies
    form: int = ENCODED  # form in which the samples are read; only cache nodes have decoded ones
    # True if the samples give way to others: decoded ones that are handed in, or samples that are drawn more often. The
    # slab is then dropped as a whole.
    interim: bool = False

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """int64[k], offset of each sample in bytes from the slab's start."""
        return pack(self.lengths)

    @cached_property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    @property
    def permanent(self) -> bool:
        return self.slab > 0

    def readable(self, failures: Failures) -> NDArray[np.bool_]:
        """Return which samples could be read: bool[k]."""
        readable = np.ones(len(self.rows), dtype=np.bool_)
        readable[list(failures)] = False
        return readable


@dataclass(frozen=True, eq=False)
class Compaction:
    """A copy of the remaining samples of some slabs into the new ``slab``, which frees the bytes of withdrawn samples.

    ``sample_ids``, int64[k], are all samples left in the old slabs, and ``locations``, LOCATION[k], their places there.
    The new slab stores them end to end.
    """

    slab: int
    sample_ids: Ids
    locations: Locations
    form: int

    @property
    def nbytes(self) -> int:
        return int(self.locations["length"].sum())


class RowLocations(Struct, frozen=True, eq=False):
    """Locations of the samples of one block part."""

    slab_ids: tuple[int, ...]  # numbers of the slabs that contain them, each once
    slab: NDArray[np.int32]  # int32[n], index into `slab_ids`; -1 if the sample could not be read
    # offset, length: int64[n], bytes; length 0 if the sample could not be read
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    errors: dict[int, str]  # row -> reason why its sample could not be read
    counts: FetchCounts  # the n samples by source; samples being read for another block count as local


def unreadable_part(sample_ids: Ids, reasons: Mapping[int, str]) -> RowLocations | None:
    """Return locations without data for a part with unreadable samples (id -> reason), or None without any."""
    if not reasons:
        return None
    rows = len(sample_ids)
    return RowLocations(
        slab_ids=(),
        slab=np.full(rows, -1, np.int32),
        offset=np.zeros(rows, np.int64),
        length=np.zeros(rows, np.int64),
        errors={row: TemporaryReason(reasons[i]) for row, i in enumerate(sample_ids.tolist()) if i in reasons},
        counts=FetchCounts(),
    )


NOTHING: Slab = np.empty(0, np.uint8)
"""View of a sample that could not be read; read-only, like views of slabs."""
NOTHING.flags.writeable = False


def views(
    slabs: Sequence[Slab] | Mapping[int, Slab],
    slab: NDArray[np.integer[Any]],
    offset: NDArray[np.int64],
    length: NDArray[np.int64],
) -> list[Slab]:
    """Return views of samples in their slabs, without a copy; ``slab`` is int[n], below 0 for unreadable samples."""
    spans = zip(slab.tolist(), offset.tolist(), length.tolist(), strict=True)
    return [slabs[s][o : o + n] if s >= 0 else NOTHING for s, o, n in spans]


def joined(samples: Sequence[Slab]) -> Slab:
    """Concatenate samples into one array, with offsets as computed by `pack`."""
    return np.concatenate([NOTHING, *samples])  # NOTHING, because concatenate rejects an empty list


def pack(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offsets of samples stored end to end: bytes int64[n] -> int64[n]."""
    return np.cumsum(lengths) - lengths


def extract(packed: Slab, lengths: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Slab:
    """Return only the chosen samples, bool[n], of ``packed``, which has samples of these lengths end to end."""
    if chosen.all():
        return packed
    return joined(views([packed], np.where(chosen, 0, -1), pack(lengths), lengths))


@dataclass(eq=False)
class PartPlan:
    """The plan of one block part, fetched or read ahead: the source of each row."""

    # request, sample_ids: the part, and its samples, int64[n]
    request: PartRequest
    sample_ids: Ids
    lengths: NDArray[np.int64]  # int64[n], bytes to read for the row; for a hit, bytes in storage
    hit: NDArray[np.bool_] = field(init=False)  # bool[n]; each row is either a hit or in exactly one of `loads`
    # slab, offset: int64[n], slab that is read for the row, and the row's offset in bytes
    slab: NDArray[np.int64] = field(init=False)
    offset: NDArray[np.int64] = field(init=False)
    origin: NDArray[np.int8] = field(init=False)  # int8[n], `Origin` of each row that is not a hit
    form: NDArray[np.int32] = field(init=False)  # int32[n], form in which the row is read
    loads: list[Load] = field(default_factory=list)  # slabs read for this part
    fetches: int = 0  # number of waiting fetches; 0 if the part is read ahead
    # row -> reason why its sample could not be read, always from a read for this part
    errors: dict[int, str] = field(default_factory=dict)
    pipeline: str = ""  # the pipeline that it was planned for
    failure: Exception | None = None  # error that prevented one of its slabs from being filled, or None

    def __post_init__(self) -> None:
        self.hit = np.ones(len(self.sample_ids), dtype=np.bool_)  # until a load contains the row
        self.slab, self.offset = np.zeros((2, len(self.sample_ids)), dtype=np.int64)
        self.origin = np.zeros(len(self.sample_ids), np.int8)
        self.form = np.zeros(len(self.sample_ids), np.int32)

    def transient_slabs(self) -> list[int]:
        """Return the slabs in `loads` that are dropped with this plan."""
        return [load.slab for load in self.loads if not load.permanent]

    def add(self, load: Load) -> None:
        """Add a load; its rows are no longer hits."""
        self.hit[load.rows] = False
        self.slab[load.rows], self.lengths[load.rows] = load.slab, load.lengths
        self.form[load.rows] = load.form
        self.loads.append(load)

    def filled(self, load: Load, failures: Failures, origins: NDArray[np.int8]) -> None:
        """Record that a load is full, without unreadable samples. Rows in the other form become hits again."""
        self.origin[load.rows] = origins
        readable = load.readable(failures)
        self.offset[load.rows[readable]] = pack(load.lengths[readable])  # they moved up
        for i, reason in failures.items():
            row = int(load.rows[i])
            if isinstance(reason, OtherForm):
                self.hit[row] = True
            else:
                self.errors[row] = reason

    def forget_slabs(self, slabs: Container[int]) -> None:
        """Forget loads that went into these slabs. Their rows become hits again, without a location."""
        for load in self.loads:
            if load.slab in slabs:
                # A row that was not there in the expected form is in a later load.
                self.hit[load.rows[self.slab[load.rows] == load.slab]] = True
                self.errors = {row: why for row, why in self.errors.items() if not self.hit[row]}
        self.loads = [load for load in self.loads if load.slab not in slabs]

    def locate(self, kept: Locations) -> RowLocations:
        """Return the final locations of all rows, given their entries in the directory."""
        # Rows read for this part. Hits are in the directory, and so are samples handed in decoded since the read.
        is_handed_in = (kept["form"] != ENCODED) & self.request.takes(kept["form"])
        own = ~self.hit & ((self.form != ENCODED) | ~is_handed_in)
        slab = np.where(own, self.slab, kept["slab"])
        offset = np.where(own, self.offset, kept["offset"])
        length = np.where(own, self.lengths, kept["length"])
        errors = {row: why for row, why in self.errors.items() if own[row]}
        good = np.ones(len(slab), dtype=np.bool_)
        good[list(errors)] = False
        # Indices into slab_ids, because a reader gets each slab from Ray once.
        slab_ids, index = np.unique(slab[good], return_inverse=True)
        column = np.full(len(slab), -1, dtype=np.int32)
        column[good] = index

        length = np.where(good, length, 0)
        is_decoded = np.where(own, self.form, kept["form"]) != ENCODED
        local = len(Origin)  # stands for hits, which no origin does
        origin = np.where(own, self.origin, local)
        samples = np.bincount(origin, minlength=local + 1).tolist()
        nbytes = np.bincount(origin, weights=length, minlength=local + 1).tolist()
        read = [Amount(number, int(size)) for number, size in zip(samples, nbytes, strict=True)]
        return RowLocations(
            slab_ids=tuple(slab_ids.tolist()),
            slab=column,
            offset=np.where(good, offset, 0),
            length=length,
            errors=errors,
            counts=FetchCounts(
                local=read[local],
                remote=read[Origin.REMOTE],
                disk=read[Origin.DISK],
                storage=read[Origin.STORAGE],
                decoded=Amount(int(is_decoded.sum()), int(length[is_decoded].sum())),
            ),
        )

    def validate(self) -> None:
        """Raise AssertionError unless each row is either a hit or in one slab."""
        read = [load.rows[~self.hit[load.rows] & (self.slab[load.rows] == load.slab)] for load in self.loads]
        rows = np.concatenate([np.flatnonzero(self.hit), *read])
        assert sorted(rows.tolist()) == list(range(len(self.sample_ids))), f"rows of {self.request}"
        for load, own in zip(self.loads, read, strict=True):  # rows read from storage alone are never read again
            assert len(own) == len(load.rows) or load.form != ENCODED or load.peer is not None, load
        assert not self.hit[list(self.errors)].any(), f"{self.request} inherited an error: {self.errors}"
