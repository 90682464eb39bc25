"""Samples on a local disk, kept across restarts and checked on every read.

Samples are stored end to end in large segment files that only grow, with an index file, in one folder per dataset. A
sample counts once its index row exists, which is written after its bytes.

Writes are never synced, because checksums detect torn, truncated or flipped data: of rows when the folder is opened, of
samples when they are read. Damaged samples are dropped, counted and read from storage again.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas import units
from mbaas.cache.directory import MinIO
from mbaas.cache.disk.folder import folder_bytes, open_folder, remove_stale, stale_folders
from mbaas.cache.disk.index import (
    ABSENT,
    COMING,
    MAX_SEGMENT_BYTES,
    ROW,
    Recovered,
    Rows,
    recover,
    salt_of,
    sealed,
    write_index,
)
from mbaas.cache.disk.segments import Run, Segments, write_all
from mbaas.cache.slab import pack
from mbaas.errors import ConfigError, StateError, WaitTimeoutError
from mbaas.order import Ids


class DiskStats(Struct, frozen=True):
    """Statistics of a disk tier.

    Attributes:
        budget_bytes: limit for this dataset's folder and stale folders together.
        used_bytes: bytes charged for this dataset's folder, including damaged samples.
        stale_bytes: bytes of unused folders of other datasets, which are removed, oldest first, when space is needed.
        samples, segments: readable samples, and their files.
        damaged_rows: invalid index rows found when the folder was opened.
        damaged_samples: samples with wrong or unreadable bytes since then. Above 0 means a failing disk, or another
            program writing to the folder.
        removed_folders: stale folders removed since then.
        write_failure: error that stopped all writing, or "".
        removal_failure: error of a stale folder's removal; its bytes are permanently taken from the budget.
    """

    budget_bytes: int
    used_bytes: int
    stale_bytes: int
    samples: int
    segments: int
    damaged_rows: int
    damaged_samples: int
    removed_folders: int
    write_failure: str
    removal_failure: str


class DiskStore:
    """A cache of a dataset's samples in local files. Admits until full, never evicts (`MinIO`).

    All methods are blocking and thread-safe. Takes 16 bytes of memory per sample of the dataset.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget_bytes: int,
        fingerprint: str,
        *,
        num_samples: int,
        segment_bytes: int = MAX_SEGMENT_BYTES,
        lock_wait_s: float = 2.0,
    ) -> None:
        """
        Args:
            path: folder on a local disk, created if missing; each dataset gets a subfolder.
            budget_bytes: limit for the files of this dataset and of unused datasets. A folder filled under a larger
                budget loses whole segments, newest first.
            fingerprint: fingerprint of the dataset; samples stored under the same fingerprint are reused.
            num_samples: samples of the dataset; ids are in [0, num_samples).
            segment_bytes: largest size of a segment file; larger samples are not cached.
            lock_wait_s: seconds to wait for another process to unlock the folder.

        Raises:
            ConfigError: an unusable path, a negative budget, or a segment size out of range.
            ResourceError: another process has locked the dataset's folder.
        """
        if not 0 < segment_bytes <= MAX_SEGMENT_BYTES:
            raise ConfigError(f"segment_bytes must be in [1, {MAX_SEGMENT_BYTES}], got {segment_bytes}")
        if budget_bytes < 0:
            raise ConfigError(f"the disk cache's budget_bytes must be at least 0, got {budget_bytes}")
        self._budget_bytes = budget_bytes
        self._segment_bytes = segment_bytes
        self._salt = salt_of(fingerprint)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._busy = 0  # calls in progress; files are closed at 0
        self._closed = False
        self._index_file = -1  # descriptor; -1 when closed
        self._damaged_samples = 0
        self._removed_folders = 0
        self._write_failure = self._removal_failure = ""
        self._stuck_bytes = 0  # bytes of stale folders that cannot be removed
        self._room_lock = threading.Lock()  # held while stale folders are removed; acquired before `_lock`
        self._folder = open_folder(Path(path), fingerprint, wait_s=lock_wait_s)
        try:
            self._open(num_samples)
        except BaseException as error:  # including interrupts: the lock would otherwise last as long as this process
            self._folder.release()
            if isinstance(error, OSError):
                raise ConfigError(f"the disk cache cannot use {self._folder.path}: {error}") from error
            raise

    def has(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples are stored: bool[n]. Their bytes are only checked by a read."""
        with self._lock:
            return self._table.held(sample_ids)

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the bytes of stored samples, 0 for others: int64[n]."""
        with self._lock:
            spots = self._table.lookup(sample_ids)
        return np.where(spots["address"] > COMING, spots["length"], 0).astype(np.int64)

    def set_budget(self, budget_bytes: int) -> None:
        """Set the budget. Stored samples are never dropped, so usage may stay above it."""
        self._budget_bytes = budget_bytes
        self._make_room(0)

    def put(self, sample_ids: Ids, lengths: NDArray[np.int64], data: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Store samples that are not stored yet, up to the budget.

        If the disk rejects a write, nothing more is stored, and `stats` contains the reason.

        Args:
            sample_ids, lengths: int64[n], lengths in bytes.
            data: uint8[lengths.sum()], the samples end to end.

        Returns:
            bool[n], true if this call stored the sample; false if it is already stored or does not fit.

        Raises:
            ConfigError: `data` has the wrong length.
            StateError: the tier is closed.
        """
        if len(data) != int(lengths.sum()):
            raise ConfigError(f"the samples' data must have {int(lengths.sum())} bytes, got {len(data)}")
        with self._using():
            self._make_room_for(sample_ids, lengths)
            kept, runs = self._reserve(sample_ids, lengths)
            rows = _rows_of(sample_ids[kept], lengths[kept], runs)
            # Without the lock: each call writes only to the space it has reserved.
            try:
                self._write(rows, runs, data.data, starts=pack(lengths)[kept].tolist())
                self._publish(rows)
            except OSError as error:
                self._give_up_writing(rows, error)
                return np.zeros(len(kept), np.bool_)
            return kept

    def get(
        self,
        sample_ids: Ids,
        lengths: NDArray[np.int64],
        *,
        buffer: memoryview | NDArray[np.uint8],
        offsets: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Read samples into a buffer.

        Args:
            sample_ids: int64[n].
            lengths: int64[n], bytes; a sample stored with another length counts as damaged.
            buffer: writable bytes; only the samples' ranges are modified.
            offsets: int64[n], start of each sample's range.

        Returns:
            bool[n], true if the sample was read and passed its check. The ranges of other samples are undefined.

        Raises:
            ConfigError: a sample's range is outside the buffer.
            StateError: the tier is closed.
        """
        targets = _targets(buffer, offsets, lengths)
        with self._using():
            with self._lock:
                spots = self._table.lookup(sample_ids)
            # Without the lock from here: files only grow, so spots stay valid.
            here = spots["address"] > COMING
            good = here & (spots["length"] == lengths)
            rows = np.flatnonzero(good)
            good[rows] = self._segments.read(spots[rows], [targets[i] for i in rows.tolist()])
            for i in np.flatnonzero(good).tolist():
                good[i] = _crc(int(sample_ids[i]), targets[i]) == int(spots["crc"][i])
            self._drop(sample_ids[here & ~good], spots["address"][here & ~good])
            return good

    def stats(self) -> DiskStats:
        """Return the tier's statistics."""
        with self._lock:
            return DiskStats(
                budget_bytes=self._budget_bytes,
                used_bytes=self._minio.used_bytes,
                stale_bytes=sum(self._stale.values()),
                samples=self._samples,
                segments=len(self._segments),
                damaged_rows=self._damaged_rows,
                damaged_samples=self._damaged_samples,
                removed_folders=self._removed_folders,
                write_failure=self._write_failure,
                removal_failure=self._removal_failure,
            )

    def close(self, *, deadline_s: float = 30.0) -> None:
        """Wait for calls in progress and unlock the folder; its content stays. May be repeated.

        Raises:
            WaitTimeoutError: a call is still running after `deadline_s`; the folder stays locked.
        """
        with self._idle:
            if self._closed and self._index_file < 0:
                return
            self._closed = True  # before the wait, to reject further calls
            if not self._idle.wait_for(lambda: not self._busy, deadline_s):
                raise WaitTimeoutError(
                    f"{self._busy} calls still use the disk cache {self._folder.path} after "
                    f"{units.seconds(deadline_s)}: the disk does not answer"
                )
            self._segments.close()
            os.close(self._index_file)
            self._index_file = -1
            self._folder.release()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _open(self, num_samples: int) -> None:
        """Load the folder's valid content, and trim its files to match."""
        folder = self._folder
        found = recover(folder.index, self._salt, num_samples=num_samples, sizes=folder.segments())
        self._table, self._damaged_rows = found.table, found.damaged_rows
        ends = self._within_budget(found)
        self._samples = sum(found.live[number].samples for number in ends)
        # The index first: after a crash between the two steps, the files still contain everything in the index.
        if found.file_rows != self._samples:
            folder.replace(folder.index, lambda file: write_index(file, self._table, self._salt))
        self._segments = Segments(folder, ends, segment_bytes=self._segment_bytes)
        self._index_file = os.open(folder.index, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._index_bytes = self._samples * ROW.itemsize
        root = folder.path.parent
        self._stale = {path: folder_bytes(path) for path in stale_folders(root, folder)}  # oldest first
        self._minio = MinIO(self._budget_bytes)
        self._minio.used_bytes = sum(ends.values()) + self._index_bytes
        self._make_room(0)  # the budget may have shrunk: stale folders go first

    def _within_budget(self, found: Recovered) -> dict[int, int]:
        ends, used = {}, 0
        for number, extent in sorted(found.live.items()):
            used += extent.end + extent.samples * ROW.itemsize
            if used <= self._budget_bytes:
                ends[number] = extent.end
            else:
                self._table.mark(self._table.ids_in(number), ABSENT)  # `Segments` removes the file
        return ends

    def _make_room_for(self, sample_ids: Ids, lengths: NDArray[np.int64]) -> None:
        if self._stale:  # usually empty, and then there is nothing to remove
            with self._lock:
                new = self._table.absent(sample_ids)
            self._make_room(int((lengths[new] + ROW.itemsize).sum()))

    def _make_room(self, nbytes: int) -> None:
        """Remove stale folders, oldest first, until ``nbytes`` are free or none is left."""
        with self._room_lock:
            while self._stale and self._usable_bytes() - self._minio.used_bytes < nbytes:
                oldest = next(iter(self._stale))
                removed, failure = False, ""
                try:
                    removed = remove_stale(oldest)
                except OSError as error:  # for example another user's folder; it stays, and so do its bytes
                    failure = f"removing {oldest}, which nobody uses, failed: {error}"
                with self._lock:
                    held_bytes = self._stale.pop(oldest)
                    self._stuck_bytes += held_bytes if failure else 0
                    self._removal_failure = self._removal_failure or failure
                    self._removed_folders += removed
            with self._lock:
                self._minio.budget_bytes = max(self._usable_bytes(), self._minio.used_bytes)

    def _usable_bytes(self) -> int:
        return self._budget_bytes - sum(self._stale.values()) - self._stuck_bytes

    def _reserve(self, sample_ids: Ids, lengths: NDArray[np.int64]) -> tuple[NDArray[np.bool_], list[Run]]:
        with self._lock:
            new = self._table.absent(sample_ids) & (lengths > 0) & (lengths <= self._segment_bytes)
            # No writes after a failure: on a full disk, every later call would waste its writes.
            new &= _first_of_each(sample_ids) & (not self._write_failure)
            kept = self._minio.admit(np.where(new, lengths + ROW.itemsize, 0))
            self._table.mark(sample_ids[kept], COMING)  # so that no other call writes them
            return kept, self._segments.reserve(lengths[kept])

    def _write(self, rows: Rows, runs: list[Run], data: memoryview, *, starts: list[int]) -> None:
        lengths = rows["length"].tolist()
        spans = zip(rows["sample"].tolist(), starts, lengths, strict=True)
        rows["crc"] = [_crc(sample_id, data[start : start + length]) for sample_id, start, length in spans]
        for run in runs:
            self._segments.write(run, data, starts=starts, lengths=lengths)

    def _publish(self, rows: Rows) -> None:
        content = memoryview(sealed(rows, self._salt).tobytes())
        with self._lock:  # serialized, because each call appends after the last row
            write_all(self._index_file, content, self._index_bytes)
            self._index_bytes += len(content)
            self._table.enter(rows)
            self._samples += len(rows)

    def _give_up_writing(self, rows: Rows, error: OSError) -> None:
        """Forget these samples and stop writing. Their bytes stay charged, because parts of them may be on disk."""
        with self._lock:
            self._table.mark(rows["sample"], ABSENT)
            self._write_failure = self._write_failure or f"writing to {self._folder.path} failed: {error}"

    def _drop(self, sample_ids: Ids, addresses: NDArray[np.uint64]) -> None:
        """Forget samples that are damaged at these addresses, unless another thread already did."""
        if len(sample_ids):
            with self._lock:
                still = self._table.lookup(sample_ids)["address"] == addresses
                still &= _first_of_each(sample_ids)
                self._table.mark(sample_ids[still], ABSENT)
                self._damaged_samples += int(still.sum())
                self._samples -= int(still.sum())

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StateError(f"the disk cache {self._folder.path} is closed")
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:  # the same lock
                self._busy -= 1
                self._idle.notify_all()


def _crc(sample_id: int, content: memoryview) -> int:
    """Return a sample's checksum, seeded with its id, so that another sample's bytes do not match."""
    return zlib.crc32(content, sample_id & 0xFFFFFFFF)


def _targets(
    buffer: memoryview | NDArray[np.uint8], offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> list[memoryview]:
    view, ends = buffer if isinstance(buffer, memoryview) else buffer.data, offsets + lengths
    if len(offsets) and (int(offsets.min()) < 0 or int(ends.max()) > len(view)):
        raise ConfigError(
            f"the buffer must hold bytes [{offsets.min()}, {ends.max()}) of the samples, got {len(view)} bytes"
        )
    return [view[start:end] for start, end in zip(offsets.tolist(), ends.tolist(), strict=True)]


def _rows_of(sample_ids: Ids, lengths: NDArray[np.int64], runs: list[Run]) -> Rows:
    rows = np.zeros(len(sample_ids), ROW)
    rows["sample"], rows["length"] = sample_ids, lengths
    for run in runs:
        part = rows[run.start : run.stop]
        part["segment"], part["offset"] = run.segment, run.offset + pack(lengths[run.start : run.stop])
    return rows


def _first_of_each(sample_ids: Ids) -> NDArray[np.bool_]:
    first = np.zeros(len(sample_ids), np.bool_)
    first[np.unique(sample_ids, return_index=True)[1]] = True
    return first
