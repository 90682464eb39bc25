"""Encoded samples on a local disk, kept over restarts, and checked before they are served.

Samples lie end to end in a few large segment files (`segments`), with an index file beside them (`index`), in a folder
for each dataset (`folder`). Files only grow. A sample counts once its row is in the index, and its row is written after
its bytes; each row and each sample carries a checksum. So what is put is never synced to the disk: a killed
process loses what it was just writing, a power failure what the kernel had not written yet, and whatever is torn,
truncated or flipped is found by its checksum when the folder is opened (rows) or the sample is read (bytes), dropped
and counted. The loss is a read from storage.
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
    """A look at how a disk tier is doing.

    Attributes:
        budget_bytes: the most that this dataset's folder and stale ones may hold together.
        used_bytes: what this dataset's folder is charged: its files, damaged samples included.
        stale_bytes: what folders of other datasets hold that nobody uses; they go, oldest first, when their
            bytes are needed.
        samples: that can be served.
        segments: files they lie in.
        damaged_rows: index entries that were not sound when the folder was opened.
        damaged_samples: samples whose bytes were not sound, or could not be read, since it was opened. More
            than none says that the disk is failing or that somebody writes to the folder.
        removed_folders: stale folders that were removed since.
        write_failure: why nothing is written any more; empty while all is well.
        removal_failure: why a stale folder could not be removed; what it holds is taken from the budget for good.
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
    """A cache of a dataset's encoded samples in local files. Admits until full, never evicts (`MinIO`).

    All methods block while they read or write, and threads may share one. Memory: 16 bytes for each sample of
    the dataset, in pages that are taken as samples come.
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
            path: a folder on a local disk, made if missing; each dataset gets one of its own in it.
            budget_bytes: the most that this dataset's files and those of datasets no longer in use may hold.
                A folder that was filled under a larger budget loses whole segments, the newest first.
            fingerprint: of the dataset; what was kept under the same one is served again.
            num_samples: of the dataset; ids are in [0, num_samples).
            segment_bytes: the most of one segment file; larger samples are not kept.
            lock_wait_s: how long another process may take to let go of the folder, as one does that died.

        Raises:
            ConfigError: a path that cannot be used, a negative budget, or a segment size out of range.
            ResourceError: another process has the dataset's folder open.
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
        self._busy = 0  # calls in progress; files are closed when there is none
        self._closed = False
        self._index_file = -1  # its descriptor while the tier is open
        self._damaged_samples = 0
        self._removed_folders = 0
        self._write_failure = self._removal_failure = ""
        self._stuck_bytes = 0  # of stale folders that cannot be removed
        self._room_lock = threading.Lock()  # held while stale folders are removed; taken before `_lock`
        self._folder = open_folder(Path(path), fingerprint, wait_s=lock_wait_s)
        try:
            self._open(num_samples)
        except BaseException as error:  # an interrupt, too: the lock would stay as long as this process
            self._folder.release()
            if isinstance(error, OSError):
                raise ConfigError(f"the disk cache cannot use {self._folder.path}: {error}") from error
            raise

    def has(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Tell which samples are here: bool[n]. Their bytes are checked only when they are read."""
        with self._lock:
            return self._table.held(sample_ids)

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the bytes of the samples that are here, 0 for others: int64[n]."""
        with self._lock:
            spots = self._table.lookup(sample_ids)
        return np.where(spots["address"] > COMING, spots["length"], 0).astype(np.int64)

    def set_budget(self, budget_bytes: int) -> None:
        """Keep at most so many bytes from now on, or as many as are kept already."""
        self._budget_bytes = budget_bytes
        self._make_room(0)

    def put(self, sample_ids: Ids, lengths: NDArray[np.int64], data: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Keep samples that are not here yet, as long as the budget lasts.

        A disk that cannot be written to is no error: nothing is kept from then on, and `stats` says why.

        Args:
            sample_ids: int64[n].
            lengths: int64[n], bytes.
            data: uint8[lengths.sum()], the samples end to end.

        Returns:
            bool[n], true where this call kept the sample; false where it is here already or does not fit.

        Raises:
            ConfigError: `data` has another length.
            StateError: the tier is closed.
        """
        if len(data) != int(lengths.sum()):
            raise ConfigError(f"the samples' data must have {int(lengths.sum())} bytes, got {len(data)}")
        with self._using():
            self._make_room_for(sample_ids, lengths)
            kept, runs = self._reserve(sample_ids, lengths)
            rows = _rows_of(sample_ids[kept], lengths[kept], runs)
            # Without the lock: the room is this call's own, and others write to theirs.
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
        """Read the samples that are here, each to its own part of a buffer.

        Args:
            sample_ids: int64[n].
            lengths: int64[n], bytes; a sample that was kept with another length is damaged.
            buffer: writable, one-dimensional, of bytes; nothing outside of the samples' parts is touched.
            offsets: int64[n], where each sample goes.

        Returns:
            bool[n], true where the sample's part holds its bytes, checked. Elsewhere it holds anything.

        Raises:
            ConfigError: a sample's part is not inside of the buffer.
            StateError: the tier is closed.
        """
        targets = _targets(buffer, offsets, lengths)
        with self._using():
            with self._lock:
                spots = self._table.lookup(sample_ids)
            # Without the lock from here: files only grow, so a sample stays where its spot says.
            here = spots["address"] > COMING
            good = here & (spots["length"] == lengths)
            rows = np.flatnonzero(good)
            good[rows] = self._segments.read(spots[rows], [targets[i] for i in rows.tolist()])
            for i in np.flatnonzero(good).tolist():
                good[i] = _crc(int(sample_ids[i]), targets[i]) == int(spots["crc"][i])
            self._drop(sample_ids[here & ~good], spots["address"][here & ~good])
            return good

    def stats(self) -> DiskStats:
        """Tell how the tier is doing."""
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
        """Wait for the calls in progress and let the folder go; what is kept stays. May be repeated.

        Raises:
            WaitTimeoutError: a call is still reading or writing after `deadline_s`; the folder stays locked.
        """
        with self._idle:
            if self._closed and self._index_file < 0:
                return
            self._closed = True  # before the wait, so that no further call begins
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
        """Take up what the folder holds, and bring its files to what is believed of them."""
        folder = self._folder
        found = recover(folder.index, self._salt, num_samples=num_samples, sizes=folder.segments())
        self._table, self._damaged_rows = found.table, found.damaged_rows
        ends = self._within_budget(found)
        self._samples = sum(found.live[number].samples for number in ends)
        # The index first: what a crash between the two leaves behind is then still what the index says.
        if found.file_rows != self._samples:
            folder.replace(folder.index, lambda file: write_index(file, self._table, self._salt))
        self._segments = Segments(folder, ends, segment_bytes=self._segment_bytes)
        self._index_file = os.open(folder.index, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._index_bytes = self._samples * ROW.itemsize
        root = folder.path.parent
        self._stale = {path: folder_bytes(path) for path in stale_folders(root, folder)}  # oldest first
        self._minio = MinIO(self._budget_bytes)
        self._minio.used_bytes = sum(ends.values()) + self._index_bytes
        self._make_room(0)  # the budget may be smaller than it was: stale folders go first

    def _within_budget(self, found: Recovered) -> dict[int, int]:
        """Choose the segments that the budget holds, oldest first, and return their ends; forget samples of others."""
        ends, used = {}, 0
        for number, extent in sorted(found.live.items()):
            used += extent.end + extent.samples * ROW.itemsize
            if used <= self._budget_bytes:
                ends[number] = extent.end
            else:
                self._table.mark(self._table.ids_in(number), ABSENT)  # the file goes when `Segments` opens the others
        return ends

    def _make_room_for(self, sample_ids: Ids, lengths: NDArray[np.int64]) -> None:
        if self._stale:  # else there is nothing to remove, as nearly always
            with self._lock:
                new = self._table.absent(sample_ids)
            self._make_room(int((lengths[new] + ROW.itemsize).sum()))

    def _make_room(self, nbytes: int) -> None:
        """Remove stale folders, the oldest first, until ``nbytes`` are free or no such folder is left."""
        with self._room_lock:
            while self._stale and self._usable_bytes() - self._minio.used_bytes < nbytes:
                oldest = next(iter(self._stale))
                removed, failure = False, ""
                try:
                    removed = remove_stale(oldest)
                except OSError as error:  # another user's, for instance: it stays, and so do its bytes
                    failure = f"removing {oldest}, which nobody uses, failed: {error}"
                with self._lock:
                    held_bytes = self._stale.pop(oldest)
                    self._stuck_bytes += held_bytes if failure else 0
                    self._removal_failure = self._removal_failure or failure
                    self._removed_folders += removed
            with self._lock:
                self._minio.budget_bytes = max(self._usable_bytes(), self._minio.used_bytes)

    def _usable_bytes(self) -> int:
        """Tell what stale folders, and those that cannot be removed, leave of the budget."""
        return self._budget_bytes - sum(self._stale.values()) - self._stuck_bytes

    def _reserve(self, sample_ids: Ids, lengths: NDArray[np.int64]) -> tuple[NDArray[np.bool_], list[Run]]:
        """Decide what is kept, and where: the runs count the kept samples."""
        with self._lock:
            new = self._table.absent(sample_ids) & (lengths > 0) & (lengths <= self._segment_bytes)
            # After a failure nothing is written: a disk that is full would cost every later call its writes.
            new &= _first_of_each(sample_ids) & (not self._write_failure)
            kept = self._minio.admit(np.where(new, lengths + ROW.itemsize, 0))
            self._table.mark(sample_ids[kept], COMING)  # so that no other call writes them, too
            return kept, self._segments.reserve(lengths[kept])

    def _write(self, rows: Rows, runs: list[Run], data: memoryview, *, starts: list[int]) -> None:
        """Write the kept samples, which begin at `starts` of `data`, and enter their checksums in the rows."""
        lengths = rows["length"].tolist()
        spans = zip(rows["sample"].tolist(), starts, lengths, strict=True)
        rows["crc"] = [_crc(sample_id, data[start : start + length]) for sample_id, start, length in spans]
        for run in runs:
            self._segments.write(run, data, starts=starts, lengths=lengths)

    def _publish(self, rows: Rows) -> None:
        content = memoryview(sealed(rows, self._salt).tobytes())
        with self._lock:  # one at a time, because each writes behind the last row
            write_all(self._index_file, content, self._index_bytes)
            self._index_bytes += len(content)
            self._table.enter(rows)
            self._samples += len(rows)

    def _give_up_writing(self, rows: Rows, error: OSError) -> None:
        """Forget these samples, and write no more. Their bytes stay charged: parts of them may be on the disk."""
        with self._lock:
            self._table.mark(rows["sample"], ABSENT)
            self._write_failure = self._write_failure or f"writing to {self._folder.path} failed: {error}"

    def _drop(self, sample_ids: Ids, addresses: NDArray[np.uint64]) -> None:
        """Forget samples that are damaged at these addresses, unless another thread was faster."""
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
    """Compute a sample's checksum, begun with its id, so that another sample's bytes do not pass for its own."""
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
    """Tell where an id comes for the first time: bool[n]."""
    first = np.zeros(len(sample_ids), np.bool_)
    first[np.unique(sample_ids, return_index=True)[1]] = True
    return first
