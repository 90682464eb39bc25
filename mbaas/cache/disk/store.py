"""Samples on a local disk, kept across restarts and checked on every read.

Samples are stored end to end in large segment files, and the index file has one row per sample, with its location and
checksum. Both only grow. A sample counts once its row exists, which is written after its bytes.

Writes are never synced, because checksums detect torn, truncated or flipped data: of rows when the folder is opened, of
samples when they are read. Damaged samples are dropped, counted and read from storage again.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.cache.directory import MinIO
from mbaas.cache.disk.folder import VERSION, folder_bytes, is_locked_by, open_folder, remove_stale, stale_folders
from mbaas.cache.slab import Slab, extract, pack
from mbaas.dataset.storage.reader import advise_random
from mbaas.errors import ConfigError, StateError
from mbaas.samples.order import Ids

ROW = np.dtype(
    [
        ("sample", "<i8"),
        ("address", "<i8"),  # segment number * 2^32 + offset in the segment; segments are numbered from 1
        ("length", "<u4"),  # bytes, at least 1
        ("crc", "<u4"),  # of the sample's bytes, seeded with its id
        ("check", "<u8"),  # of the other columns
    ]
)
"""A row of the index file. No torn row, and no row of another dataset or version, matches its checksum."""

SPOT = np.dtype([("address", "<i8"), ("length", "<u4"), ("crc", "<u4")])
"""Location of a sample in memory: as in `ROW`, or address `ABSENT` or `COMING`."""

_SPOT_COLUMNS = [*(SPOT.names or ())]

Rows = NDArray[np.void]
Addresses = NDArray[np.int64]

ABSENT = 0
COMING = 1  # its bytes are being written; smaller than any address

# Samples are in several segments. File systems limit the size of a file, and some block its reads during a write.
SEGMENT_SHIFT = 32
SEGMENT_BYTES = 1 << SEGMENT_SHIFT
_OFFSET = SEGMENT_BYTES - 1
_CHUNK_ROWS = 1 << 18  # 8 MiB: bounds the extra memory while the index is read or written
_MAX_VIEWS = 1024  # the kernel's limit for one preadv (IOV_MAX)


class DiskStats(Struct, frozen=True):
    """Statistics of a disk store."""

    budget_bytes: int  # limit for this dataset's folder and stale folders together
    used_bytes: int  # bytes charged for this dataset's folder, including damaged samples
    stale_bytes: int  # bytes of unused folders of other datasets, which are removed, oldest first, when space is needed
    samples: int  # readable samples
    # samples with wrong or unreadable bytes since the folder was opened. Above 0 means a failing disk, or another
    # program writing to the folder.
    damaged_samples: int
    write_failure: str  # error that stopped all writing, or ""
    removal_failure: str  # error of a stale folder's removal; its bytes are permanently taken from the budget

    @property
    def free_bytes(self) -> int:
        """Bytes left for further samples."""
        return max(0, self.budget_bytes - self.used_bytes - self.stale_bytes)


class DiskStore:
    """A cache of a dataset's samples in local files. Admits until full, never evicts (`MinIO`).

    All methods except `close` are thread-safe. Takes 16 bytes of memory per sample of the dataset.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget_bytes: int,
        fingerprint: str,
        *,
        num_samples: int,
        segment_bytes: int = SEGMENT_BYTES,
        lock_wait_s: float = 2.0,
        volume: str | None = None,
    ) -> None:
        """
        Args:
            path: folder on a local disk, created if missing; each dataset gets a subfolder.
            budget_bytes: limit for the files of this dataset and of unused datasets. A folder filled under a larger
                budget loses whole segments, newest first.
            fingerprint: fingerprint of the dataset; samples stored under the same fingerprint are reused.
            num_samples: samples of the dataset; ids are in [0, num_samples).
            segment_bytes: largest size of a segment file, at most `SEGMENT_BYTES`; larger samples are not cached.
            lock_wait_s: seconds to wait for another process to unlock the folder.
            volume: the subfolder's name, if several stores of the dataset share ``path`` (`shared`). Then others find
                samples once `flush` was called, and folders of other datasets stay. Default: the fingerprint.

        Raises:
            ConfigError: the path cannot be used.
            ResourceError: another process has locked the dataset's folder.
        """
        self._budget_bytes, self._segment_bytes = budget_bytes, segment_bytes
        # Start value of the checksums of rows.
        self._salt = salt_of(fingerprint)
        self._is_shared = volume is not None
        self._unpublished: list[Rows] = []  # until the next `flush`; only if the folder is shared
        self._table = np.zeros(num_samples, SPOT)  # by sample; its pages are allocated on first use
        self._minio = MinIO(budget_bytes)
        self._lock = threading.Lock()
        self._room_lock = threading.Lock()  # held while stale folders are removed; acquired before `_lock`
        self._damaged_samples = 0
        self._write_failure = self._removal_failure = ""
        self._stuck_bytes = 0  # bytes of stale folders that cannot be removed
        self._files: dict[int, int] = {}  # segment number -> descriptor
        self._index_file = -1  # descriptor; -1 when closed
        self._folder = open_folder(Path(path), volume or fingerprint, wait_s=lock_wait_s)
        try:
            self._open()
        except BaseException as error:  # including interrupts: the lock would otherwise last as long as this process
            self._folder.release()
            if isinstance(error, OSError):
                raise ConfigError(f"the disk cache cannot use {self._folder.path}: {error}") from error
            raise

    def has(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples are stored: bool[n]. Their bytes are only checked by a read."""
        with self._lock:
            return self._table["address"][sample_ids] > COMING

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the bytes of stored samples, 0 for others: int64[n]."""
        with self._lock:
            spots = self._table[sample_ids]
        return np.where(spots["address"] > COMING, spots["length"], 0).astype(np.int64)

    def set_budget(self, budget_bytes: int) -> None:
        """Set the budget. Stored samples are never dropped, so usage may stay above it."""
        self._budget_bytes = budget_bytes
        self._make_room(0)

    def put(self, sample_ids: Ids, lengths: NDArray[np.int64], data: Slab) -> NDArray[np.bool_]:
        """Store samples that are not stored yet, up to the budget. ``data`` contains the samples end to end.

        If the disk rejects a write, nothing more is stored, and `stats` contains the reason.

        Returns:
            bool[n], true if this call stored the sample; false if it is already stored or does not fit.
        """
        self._check_open()
        self._make_room(int(lengths.sum()) + ROW.itemsize * len(lengths))
        chosen, addresses = self._reserve(sample_ids, lengths)
        if not len(addresses):
            return chosen
        rows = np.zeros(len(addresses), ROW)
        rows["sample"], rows["length"], rows["address"] = sample_ids[chosen], lengths[chosen], addresses
        try:
            # Without the lock: each call writes only to the space it has reserved.
            self._write(rows, extract(data, lengths, chosen).data)
            with self._lock:
                if self._is_shared:
                    self._unpublished.append(rows)
                else:
                    self._append(rows)
                self._enter(rows)
                self._samples += len(rows)
        except OSError as error:
            with self._lock:
                # Their bytes stay charged, because parts of them may be on disk.
                self._table["address"][rows["sample"]] = ABSENT
                self._fail(error)
            return np.zeros(len(chosen), np.bool_)
        return chosen

    def get(
        self, sample_ids: Ids, lengths: NDArray[np.int64], *, buffer: Slab, offsets: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Read samples into their ranges of a writable buffer.

        A sample stored with another length than in ``lengths`` counts as damaged.

        Returns:
            bool[n], true if the sample was read and passed its check. The ranges of other samples are undefined.
        """
        self._check_open()
        with self._lock:
            spots = self._table[sample_ids]
        # Without the lock from here: files only grow, so spots stay valid.
        stored = spots["address"] > COMING
        good = stored & (spots["length"] == lengths)
        rows = np.flatnonzero(good)
        rows = rows[np.argsort(spots["address"][rows], kind="stable")]
        spans = zip(offsets[rows].tolist(), lengths[rows].tolist(), strict=True)
        targets = [buffer.data[start : start + length] for start, length in spans]
        read_samples(self._files.__getitem__, spots["address"][rows], targets)
        good[rows] = are_whole(sample_ids[rows], targets, spots["crc"][rows])
        if (bad := stored & ~good).any():
            self._drop(sample_ids[bad], spots["address"][bad])
        return good

    def flush(self) -> None:
        """Publish the samples written to a shared folder, after their bytes have reached the disk."""
        with self._lock:
            batches, self._unpublished = self._unpublished, []
            files = [*self._files.values()]
        if not batches:
            return
        rows = np.concatenate(batches)
        try:
            for file in files:
                os.fdatasync(file)
            with self._lock:
                self._append(rows)
            os.fdatasync(self._index_file)
        except OSError as error:
            with self._lock:
                self._fail(error)

    @property
    def path(self) -> Path:
        """The dataset's folder."""
        return self._folder.path

    def is_there(self) -> bool:
        """Return whether the folder still exists under its path."""
        return is_locked_by(self._folder)

    def stats(self) -> DiskStats:
        with self._lock:
            return DiskStats(
                budget_bytes=self._budget_bytes,
                used_bytes=self._minio.used_bytes,
                stale_bytes=sum(self._stale.values()),
                samples=self._samples,
                damaged_samples=self._damaged_samples,
                write_failure=self._write_failure,
                removal_failure=self._removal_failure,
            )

    def close(self) -> None:
        """Unlock the folder; its content stays. No other call may be in progress. May be repeated."""
        if self._index_file >= 0:
            self.flush()
            for file in (*self._files.values(), self._index_file):
                os.close(file)
            self._index_file = -1
            self._folder.release()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _open(self) -> None:
        """Load the folder's valid content, and trim its files to match."""
        folder = self._folder
        ends, stored = self._load_index(), self._table["address"]
        while (used := int(ends.sum()) + ROW.itemsize * int((stored > COMING).sum())) > self._budget_bytes:
            newest = int(np.flatnonzero(ends)[-1])
            ends[newest], stored[stored >> SEGMENT_SHIFT == newest] = 0, ABSENT  # its file is removed below
        self._samples = int((stored > COMING).sum())
        self._index_bytes = self._samples * ROW.itemsize
        # The index first: after a crash between the two steps, the files still contain everything in the index.
        if folder.index.stat().st_size != self._index_bytes:  # it has damaged rows, or several of one sample
            folder.replace(folder.index, self._write_index)
        for number in folder.segments():
            if ends[number]:
                # Leftovers of a crash after the last sample take space that is not charged to the budget.
                os.truncate(folder.segment(number), ends[number])
                self._files[number] = os.open(folder.segment(number), os.O_RDWR | os.O_CLOEXEC)
                advise_random(self._files[number])
            else:
                folder.segment(number).unlink()
        newest = max(self._files, default=1)
        self._end = (newest << SEGMENT_SHIFT) + (int(ends[newest]) if self._files else 0)  # address of the next sample
        self._index_file = os.open(folder.index, os.O_RDWR | os.O_CLOEXEC)
        self._minio.used_bytes = used
        stale = [] if self._is_shared else stale_folders(folder)
        self._stale = {path: folder_bytes(path) for path in stale}  # oldest first
        self._make_room(0)  # the budget may have shrunk: stale folders go first

    def _load_index(self) -> NDArray[np.int64]:
        """Enter the index file's valid rows into the table. Return the valid bytes of each segment, by number."""
        sizes = self._folder.segments()
        limits, ends = np.zeros((2, max(sizes, default=0) + 1), np.int64)  # a missing segment accepts no row
        limits[[*sizes]] = [*sizes.values()]
        self._folder.index.touch()
        with self._folder.index.open("rb") as file:
            while len(rows := np.fromfile(file, ROW, _CHUNK_ROWS)):
                segments = rows["address"] >> SEGMENT_SHIFT
                row_ends = (rows["address"] & _OFFSET) + rows["length"]
                valid = are_valid(rows, self._salt, len(self._table)) & (segments < len(limits))
                valid &= row_ends <= limits[np.where(valid, segments, 0)]
                np.maximum.at(ends, segments[valid], row_ends[valid])
                self._enter(rows[valid])
        return ends

    def _write_index(self, file: BinaryIO) -> None:
        ids = np.flatnonzero(self._table["address"] > COMING)
        for start in range(0, len(ids), _CHUNK_ROWS):
            part = ids[start : start + _CHUNK_ROWS]
            rows, spots = np.zeros(len(part), ROW), self._table[part]
            rows["sample"] = part
            rows[_SPOT_COLUMNS] = spots
            rows["check"] = _check_of(rows, self._salt)
            file.write(rows.tobytes())

    def _enter(self, rows: Rows) -> None:
        """Add rows to the table; if a sample has several, the last one counts."""
        self._table[rows["sample"]] = rows[_SPOT_COLUMNS]

    def _make_room(self, nbytes: int) -> None:
        """Remove stale folders, oldest first, until ``nbytes`` are free or none is left."""
        with self._room_lock:
            while self._stale and self._usable_bytes() - self._minio.used_bytes < nbytes:
                oldest, failure = next(iter(self._stale)), ""
                try:
                    remove_stale(oldest)
                except OSError as error:  # for example another user's folder; it stays, and so do its bytes
                    failure = f"removing {oldest}, which nobody uses, failed: {error}"
                with self._lock:
                    stale_bytes = self._stale.pop(oldest)
                    self._stuck_bytes += stale_bytes if failure else 0
                    self._removal_failure = self._removal_failure or failure
            with self._lock:
                self._minio.budget_bytes = max(self._usable_bytes(), self._minio.used_bytes)

    def _usable_bytes(self) -> int:
        return self._budget_bytes - sum(self._stale.values()) - self._stuck_bytes

    def _reserve(self, sample_ids: Ids, lengths: NDArray[np.int64]) -> tuple[NDArray[np.bool_], Addresses]:
        """Choose the samples to store, bool[n], and reserve their addresses: end to end, none across two segments."""
        with self._lock:
            new = (self._table["address"][sample_ids] == ABSENT) & (lengths > 0) & (lengths <= self._segment_bytes)
            # No writes after a failure: on a full disk, every later call would waste its writes.
            new &= _first_of_each(sample_ids) & (not self._write_failure)
            chosen = self._minio.admit(np.where(new, lengths + ROW.itemsize, 0))
            self._table["address"][sample_ids[chosen]] = COMING  # so that no other call writes them
            addresses = []
            for length in lengths[chosen].tolist():
                if (self._end & _OFFSET) + length > self._segment_bytes:
                    self._end = (self._end >> SEGMENT_SHIFT) + 1 << SEGMENT_SHIFT
                addresses.append(self._end)
                self._end += length
            return chosen, np.array(addresses, np.int64)

    def _write(self, rows: Rows, content: memoryview) -> None:
        lengths = rows["length"].astype(np.int64)
        starts, ends = pack(lengths).tolist(), np.cumsum(lengths).tolist()
        spans = zip(rows["sample"].tolist(), starts, ends, strict=True)
        rows["crc"] = [_crc(sample_id, content[start:end]) for sample_id, start, end in spans]
        for first, stop in _runs(rows["address"], lengths, most=len(rows)):
            segment, offset = divmod(int(rows["address"][first]), SEGMENT_BYTES)
            _write_all(self._file(segment), content[starts[first] : ends[stop - 1]], offset)

    def _file(self, segment: int) -> int:
        with self._lock:
            if segment not in self._files:
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._files[segment] = os.open(self._folder.segment(segment), flags, 0o644)
                advise_random(self._files[segment])
            return self._files[segment]

    def _append(self, rows: Rows) -> None:
        """Append rows to the index file. Call it with the lock held: each call appends after the last row."""
        rows["check"] = _check_of(rows, self._salt)
        content = memoryview(rows.tobytes())
        _write_all(self._index_file, content, self._index_bytes)
        self._index_bytes += len(content)

    def _fail(self, error: OSError) -> None:
        """Write nothing more. Call it with the lock held."""
        self._write_failure = self._write_failure or f"writing to {self._folder.path} failed: {error}"

    def _drop(self, sample_ids: Ids, addresses: Addresses) -> None:
        """Forget samples that are damaged at these addresses, unless another thread already did."""
        with self._lock:
            still = (self._table["address"][sample_ids] == addresses) & _first_of_each(sample_ids)
            self._table["address"][sample_ids[still]] = ABSENT
            self._damaged_samples += int(still.sum())
            self._samples -= int(still.sum())

    def _check_open(self) -> None:
        if self._index_file < 0:
            raise StateError(f"the disk cache {self._folder.path} is closed")


def salt_of(fingerprint: str) -> int:
    """Return the start value of the checksums of a dataset's rows."""
    return int.from_bytes(blake2b(f"{VERSION} {fingerprint}".encode(), digest_size=8).digest(), "little")


def are_valid(rows: Rows, salt: int, num_samples: int) -> NDArray[np.bool_]:
    """Return which rows of an index file are undamaged, and of this dataset: bool[n]."""
    valid = (rows["check"] == _check_of(rows, salt)) & (rows["length"] > 0)
    return valid & (rows["sample"] >= 0) & (rows["sample"] < num_samples) & (rows["address"] >= SEGMENT_BYTES)


def read_samples(file_of: Callable[[int], int], addresses: Addresses, targets: list[memoryview]) -> None:
    """Read samples, sorted by address, as far as possible. ``file_of`` returns a segment's descriptor, or raises
    OSError.
    """
    lengths = np.array([len(target) for target in targets], np.int64)
    for first, stop in _runs(addresses, lengths, most=_MAX_VIEWS):
        segment, offset = divmod(int(addresses[first]), SEGMENT_BYTES)
        with suppress(OSError):
            file = file_of(segment)
            with suppress(OSError):
                if os.preadv(file, targets[first:stop], offset) == int(lengths[first:stop].sum()):
                    continue
            # One by one, so that an unreadable place costs only the samples there.
            for i in range(first, stop):
                with suppress(OSError):
                    _read_all(file, targets[i], int(addresses[i]) & _OFFSET)


def are_whole(sample_ids: Ids, targets: list[memoryview], crcs: NDArray[np.uint32]) -> list[bool]:
    """Return which samples have the bytes that were written."""
    samples = zip(sample_ids.tolist(), targets, crcs.tolist(), strict=True)
    return [_crc(sample_id, content) == crc for sample_id, content, crc in samples]


def _crc(sample_id: int, content: memoryview) -> int:
    """Return a sample's checksum, seeded with its id, so that another sample's bytes do not match."""
    return zlib.crc32(content, sample_id & 0xFFFFFFFF)


def _check_of(rows: Rows, salt: int) -> NDArray[np.uint64]:
    """Return the checksum of each row's other columns, as in splitmix64 (NumPy has no vectorized CRC): uint64[n]."""
    words = np.ascontiguousarray(rows).view("<u8").reshape(len(rows), -1)
    mixed = np.full(len(rows), salt, np.uint64)
    for column in range(words.shape[1] - 1):  # the last word is the checksum
        mixed ^= words[:, column]
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _runs(addresses: Addresses, lengths: NDArray[np.int64], *, most: int) -> Iterator[tuple[int, int]]:
    """Split samples into ranges [start, stop) that lie end to end in one segment, each of at most ``most`` samples."""
    follows = addresses[:-1] + lengths[:-1] == addresses[1:]
    follows &= addresses[:-1] >> SEGMENT_SHIFT == addresses[1:] >> SEGMENT_SHIFT
    cuts = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(addresses)]
    for begin, end in pairwise(cuts):
        for start in range(begin, end, most):
            yield start, min(start + most, end)


def _write_all(file: int, content: memoryview, offset: int) -> None:
    while len(content):
        count = os.pwrite(file, content, offset)
        content, offset = content[count:], offset + count


def _read_all(file: int, target: memoryview, offset: int) -> None:
    """Read until the target is full or the file ends."""
    while len(target) and (count := os.preadv(file, [target], offset)):
        target, offset = target[count:], offset + count


def _first_of_each(sample_ids: Ids) -> NDArray[np.bool_]:
    first = np.zeros(len(sample_ids), np.bool_)
    first[np.unique(sample_ids, return_index=True)[1]] = True
    return first
