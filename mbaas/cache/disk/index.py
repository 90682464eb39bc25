"""The index of the disk tier: the location of each sample, in memory and in a file, with validation.

The file is a list of 32-byte rows and only grows. Each row has a checksum that no torn row and no row of another
dataset or version matches, so rows are validated independently of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.cache.disk.folder import VERSION
from mbaas.order import Ids

ROW = np.dtype(
    [
        ("sample", "<i8"),
        ("offset", "<i8"),  # bytes from the segment's start
        ("length", "<u4"),  # bytes, at least 1
        ("segment", "<u4"),  # number, from 1
        ("crc", "<u4"),  # of the sample's bytes, seeded with the sample's id
        ("check", "<u4"),  # of the other columns
    ]
)

SPOT = np.dtype([("address", "<u8"), ("length", "<u4"), ("crc", "<u4")])
"""Location of a sample: `address` is segment * 2^32 + offset, or `ABSENT` or `COMING`."""

Rows = NDArray[np.void]
Spots = NDArray[np.void]

ABSENT = 0
COMING = 1  # being written; smaller than any address
SEGMENT_SHIFT = np.uint64(32)
MAX_SEGMENT_BYTES = 1 << 32

_OFFSET = np.uint64(MAX_SEGMENT_BYTES - 1)
_CHUNK_ROWS = 1 << 18  # 8 MiB: bounds the extra memory of a checksum or rewrite


class SpotTable:
    """The spot of each sample of the dataset: 16 bytes per sample, in pages allocated on first use."""

    def __init__(self, num_samples: int) -> None:
        self._spots: Spots = np.zeros(num_samples, SPOT)

    def lookup(self, sample_ids: Ids) -> Spots:
        """Return the spots of samples: SPOT[n]."""
        return self._spots[sample_ids]

    def held(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples are in a segment: bool[n]."""
        return self._spots["address"][sample_ids] > COMING

    def absent(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples are neither in a segment nor being written to one: bool[n]."""
        return self._spots["address"][sample_ids] == ABSENT

    def mark(self, sample_ids: Ids, state: int) -> None:
        """Set samples to `ABSENT` or `COMING`."""
        self._spots["address"][sample_ids] = state

    def enter(self, rows: Rows) -> None:
        """Add rows; if a sample has several, the last one counts."""
        spots = np.zeros(len(rows), SPOT)
        spots["address"] = rows["segment"].astype(np.uint64) << SEGMENT_SHIFT | rows["offset"].astype(np.uint64)
        spots["length"], spots["crc"] = rows["length"], rows["crc"]
        self._spots[rows["sample"]] = spots

    def held_ids(self) -> Ids:
        """Return the samples that are in a segment, ascending."""
        return np.flatnonzero(self._spots["address"] > COMING)

    def ids_in(self, segment: int) -> Ids:
        """Return the samples of one segment, ascending."""
        return np.flatnonzero(self._spots["address"] >> SEGMENT_SHIFT == segment)

    def rows(self, sample_ids: Ids) -> Rows:
        """Return the rows of samples that are in a segment, with `check` not set."""
        spots, rows = self._spots[sample_ids], np.zeros(len(sample_ids), ROW)
        rows["sample"], rows["length"], rows["crc"] = sample_ids, spots["length"], spots["crc"]
        rows["segment"], rows["offset"] = split(spots["address"])
        return rows


class Extent(Struct, frozen=True):
    """The valid part of a segment: number of samples, and bytes up to the end of the last one."""

    samples: int
    end: int


class Recovered(Struct, frozen=True):
    """The valid content of a folder, according to its index.

    Attributes:
        table: samples with valid rows.
        live: segment number -> its valid part; only segments with samples.
        file_rows: rows in the file, including a torn one at its end.
        damaged_rows: rows that are invalid or point outside their segment.
    """

    table: SpotTable
    live: dict[int, Extent]
    file_rows: int
    damaged_rows: int


def split(addresses: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Split addresses into segment numbers and offsets."""
    return addresses >> SEGMENT_SHIFT, addresses & _OFFSET


def salt_of(fingerprint: str) -> int:
    """Return the start value of row checksums: 64 bits derived from layout version and dataset."""
    return int.from_bytes(blake2b(f"{VERSION} {fingerprint}".encode(), digest_size=8).digest(), "little")


def check_of(rows: Rows, salt: int) -> NDArray[np.uint32]:
    """Return the checksum of each row's other columns, as in splitmix64 (NumPy has no vectorized CRC): uint32[n]."""
    words = np.ascontiguousarray(rows).view("<u4").reshape(len(rows), ROW.itemsize // 4)
    mixed = np.full(len(rows), salt, np.uint64)
    for column in range(words.shape[1] - 1):  # the last column is the checksum
        mixed ^= words[:, column]
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def sealed(rows: Rows, salt: int) -> Rows:
    """Set the checksums of rows, and return the rows."""
    rows["check"] = check_of(rows, salt)
    return rows


def recover(index: Path, salt: int, *, num_samples: int, sizes: Mapping[int, int]) -> Recovered:
    """Read an index file, which may be missing, and keep its valid rows.

    ``salt`` is from `salt_of`; ``sizes`` are the bytes of each segment file.
    """
    table = SpotTable(num_samples)
    limits = np.zeros(max(sizes, default=0) + 1, np.int64)  # by segment; 0 for missing ones, which accept no row
    limits[list(sizes)] = list(sizes.values())
    file_rows, damaged = 0, 0
    for rows, torn in _chunks(index):
        sound = _sound(rows, salt, num_samples, limits)
        file_rows += len(rows) + torn
        damaged += len(rows) - int(sound.sum()) + torn
        table.enter(rows[sound])
    return Recovered(table, _live(table, limits), file_rows, damaged)


def write_index(file: BinaryIO, table: SpotTable, salt: int) -> None:
    """Write one row for each sample that is in a segment."""
    ids = table.held_ids()
    file.writelines(
        sealed(table.rows(ids[start : start + _CHUNK_ROWS]), salt).tobytes()
        for start in range(0, len(ids), _CHUNK_ROWS)
    )


def _chunks(index: Path) -> Iterator[tuple[Rows, int]]:
    """Yield the file's rows in chunks, each with 1 if a torn row follows at the end of the file, or 0."""
    if not index.exists():
        return
    with index.open("rb") as file:
        while content := file.read(_CHUNK_ROWS * ROW.itemsize):
            whole, rest = divmod(len(content), ROW.itemsize)
            yield np.frombuffer(content, ROW, whole), int(rest > 0)


def _sound(rows: Rows, salt: int, num_samples: int, limits: NDArray[np.int64]) -> NDArray[np.bool_]:
    sound = (rows["check"] == check_of(rows, salt)) & (rows["sample"] >= 0) & (rows["sample"] < num_samples)
    sound &= (rows["segment"] > 0) & (rows["segment"] < len(limits)) & (rows["offset"] >= 0) & (rows["length"] > 0)
    # Invalid rows may contain anything: exclude them as indices, and from sums that could overflow.
    end = np.where(sound, rows["offset"], 0) + rows["length"]
    limit = limits[np.where(sound, rows["segment"], 0)]
    return sound & (end <= limit) & (end <= MAX_SEGMENT_BYTES)


def _live(table: SpotTable, limits: NDArray[np.int64]) -> dict[int, Extent]:
    ids = table.held_ids()
    samples, ends = np.zeros(len(limits), np.int64), np.zeros(len(limits), np.int64)
    for start in range(0, len(ids), _CHUNK_ROWS):
        spots = table.lookup(ids[start : start + _CHUNK_ROWS])
        numbers, offsets = (part.astype(np.int64) for part in split(spots["address"]))
        samples += np.bincount(numbers, minlength=len(limits))
        np.maximum.at(ends, numbers, offsets + spots["length"])
    return {number: Extent(int(samples[number]), int(ends[number])) for number in np.flatnonzero(samples).tolist()}
