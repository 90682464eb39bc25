"""The index of the disk tier: where each sample lies, in memory and in a file, and what of it can be trusted.

The file is rows of 32 bytes, appended. Each row carries a checksum of itself that no other dataset's, version's
or torn row has, so rows are judged one by one, in NumPy, without any order between them.
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
        ("crc", "<u4"),  # of the sample's bytes, begun with the sample's id
        ("check", "<u4"),  # of the other columns
    ]
)

SPOT = np.dtype([("address", "<u8"), ("length", "<u4"), ("crc", "<u4")])
"""Where a sample lies, in memory: `address` is segment * 2^32 + offset; `ABSENT` or `COMING` if nowhere."""

Rows = NDArray[np.void]
Spots = NDArray[np.void]

ABSENT = 0
COMING = 1  # being written; below the first address of segment 1
SEGMENT_SHIFT = np.uint64(32)
MAX_SEGMENT_BYTES = 1 << 32

_OFFSET = np.uint64(MAX_SEGMENT_BYTES - 1)
_CHUNK_ROWS = 1 << 18  # 8 MiB: bounds what a checksum or a rewrite takes on top of the table


class SpotTable:
    """The spot of each sample, an array over all samples of the dataset: 16 bytes a sample, touched as samples come.

    Args:
        num_samples: of the dataset.
    """

    def __init__(self, num_samples: int) -> None:
        self._spots: Spots = np.zeros(num_samples, SPOT)

    def lookup(self, sample_ids: Ids) -> Spots:
        """Look up the spots of samples: SPOT[n]."""
        return self._spots[sample_ids]

    def held(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Tell which samples lie in a segment: bool[n]."""
        return self._spots["address"][sample_ids] > COMING

    def absent(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Tell which samples lie in no segment and are not on their way into one: bool[n]."""
        return self._spots["address"][sample_ids] == ABSENT

    def mark(self, sample_ids: Ids, state: int) -> None:
        """Set samples `ABSENT` or `COMING`."""
        self._spots["address"][sample_ids] = state

    def enter(self, rows: Rows) -> None:
        """Take up rows; of several rows for one sample the last one counts."""
        spots = np.zeros(len(rows), SPOT)
        spots["address"] = rows["segment"].astype(np.uint64) << SEGMENT_SHIFT | rows["offset"].astype(np.uint64)
        spots["length"], spots["crc"] = rows["length"], rows["crc"]
        self._spots[rows["sample"]] = spots

    def held_ids(self) -> Ids:
        """List the samples that lie in a segment, ascending."""
        return np.flatnonzero(self._spots["address"] > COMING)

    def ids_in(self, segment: int) -> Ids:
        """List the samples that lie in one segment, ascending."""
        return np.flatnonzero(self._spots["address"] >> SEGMENT_SHIFT == segment)

    def rows(self, sample_ids: Ids) -> Rows:
        """Make the rows of samples that lie in a segment, still without `check`."""
        spots, rows = self._spots[sample_ids], np.zeros(len(sample_ids), ROW)
        rows["sample"], rows["length"], rows["crc"] = sample_ids, spots["length"], spots["crc"]
        rows["segment"], rows["offset"] = split(spots["address"])
        return rows


class Extent(Struct, frozen=True):
    """The part of a segment that counts.

    Attributes:
        samples: that lie in it.
        end: bytes from its start to the end of the last of them.
    """

    samples: int
    end: int


class Recovered(Struct, frozen=True):
    """What can be true of what a folder's index says.

    Attributes:
        table: the samples whose rows are sound and lie within their segments.
        live: segment number -> what of it counts; only segments with samples.
        file_rows: rows in the file, a torn one at its end included.
        damaged_rows: those that are not sound, or lie outside of their segment.
    """

    table: SpotTable
    live: dict[int, Extent]
    file_rows: int
    damaged_rows: int


def split(addresses: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Split addresses into segment numbers and offsets."""
    return addresses >> SEGMENT_SHIFT, addresses & _OFFSET


def salt_of(fingerprint: str) -> int:
    """Compute what every row's checksum begins with: 64 bits of this layout and this dataset."""
    return int.from_bytes(blake2b(f"{VERSION} {fingerprint}".encode(), digest_size=8).digest(), "little")


def check_of(rows: Rows, salt: int) -> NDArray[np.uint32]:
    """Compute the checksum of each row's other columns: uint32[n].

    It multiplies and shifts, as splitmix64 does, because NumPy can do that for all rows at once, and has no CRC.
    """
    words = np.ascontiguousarray(rows).view("<u4").reshape(len(rows), ROW.itemsize // 4)
    mixed = np.full(len(rows), salt, np.uint64)
    for column in range(words.shape[1] - 1):  # the last one is the checksum
        mixed ^= words[:, column]
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def sealed(rows: Rows, salt: int) -> Rows:
    """Set the checksums of rows, and return the rows."""
    rows["check"] = check_of(rows, salt)
    return rows


def recover(index: Path, salt: int, *, num_samples: int, sizes: Mapping[int, int]) -> Recovered:
    """Read an index file and believe what can be believed of it.

    Args:
        index: may be missing.
        salt: see `salt_of`.
        num_samples: of the dataset.
        sizes: bytes of each segment file.
    """
    table = SpotTable(num_samples)
    limits = np.zeros(max(sizes, default=0) + 1, np.int64)  # by segment; 0, so that nothing fits, where there is none
    limits[list(sizes)] = list(sizes.values())
    file_rows, damaged = 0, 0
    for rows, torn in _chunks(index):
        sound = _sound(rows, salt, num_samples, limits)
        file_rows += len(rows) + torn
        damaged += len(rows) - int(sound.sum()) + torn
        table.enter(rows[sound])
    return Recovered(table, _live(table, limits), file_rows, damaged)


def write_index(file: BinaryIO, table: SpotTable, salt: int) -> None:
    """Write one row for each sample that lies in a segment."""
    ids = table.held_ids()
    file.writelines(
        sealed(table.rows(ids[start : start + _CHUNK_ROWS]), salt).tobytes()
        for start in range(0, len(ids), _CHUNK_ROWS)
    )


def _chunks(index: Path) -> Iterator[tuple[Rows, int]]:
    """Read the rows of a file in turn, with a 1 where bytes of a torn row follow them, at the file's end."""
    if not index.exists():
        return
    with index.open("rb") as file:
        while content := file.read(_CHUNK_ROWS * ROW.itemsize):
            whole, rest = divmod(len(content), ROW.itemsize)
            yield np.frombuffer(content, ROW, whole), int(rest > 0)


def _sound(rows: Rows, salt: int, num_samples: int, limits: NDArray[np.int64]) -> NDArray[np.bool_]:
    sound = (rows["check"] == check_of(rows, salt)) & (rows["sample"] >= 0) & (rows["sample"] < num_samples)
    sound &= (rows["segment"] > 0) & (rows["segment"] < len(limits)) & (rows["offset"] >= 0) & (rows["length"] > 0)
    # Of rows that are not sound every column may be anything: no index, and no summand that might overflow.
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
