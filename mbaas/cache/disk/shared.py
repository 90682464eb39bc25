"""A disk cache in a folder that cache nodes of several feeds and machines share.

Each cache node writes to one *volume*, a `DiskStore` that it has locked, and reads all others. No file has two writers,
so none can corrupt another's samples. Readers trust only checksums: each index row and each sample has one, as in
`mbaas.cache.disk.store`. A sample that does not match is read from storage. For example, a network file system may not
have delivered its bytes yet.

A writer reserves bytes of the common budget in large pieces, under one lock for the whole folder. A volume whose writer
has ended stays readable, and the next cache node on the same machine continues to fill it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbaas.base.units import seconds
from mbaas.cache.disk.folder import INDEX, MARKER, folder_bytes, is_in_use, locked_file, remove_stale
from mbaas.cache.disk.store import (
    ROW,
    SPOT,
    DiskStats,
    DiskStore,
    are_valid,
    are_whole,
    read_samples,
    salt_of,
)
from mbaas.cache.slab import Slab, extract
from mbaas.errors import ConfigError, ResourceError
from mbaas.samples.order import Ids

RESERVED_SHARE = 1 / 64
"""Smallest reservation of a writer, as a fraction of the budget."""

LOCK_WAIT_S = 10.0
"""Time to wait for the lock of the whole folder when a node starts. Others hold it while they reserve bytes."""

PUT_WAIT_S = 1.0
"""The same when samples are stored. A put that does not get the lock stores only what its volume has room for."""

ASK_AGAIN_S = 10.0
"""Time until bytes are reserved again after a put got too few."""

REFRESH_S = 1.0
"""Minimum time between two scans of the other volumes, if samples are being stored."""

RETIRED_S = 60.0
"""Time until a replaced or removed file is closed; a read that takes longer fails or finds a wrong checksum."""

LATE_S = 30.0
"""Time that a network file system may need for a sample's bytes. Wrong bytes after it are damaged."""

_LOCK = "mbaas-shared.lock"
_LEDGER = "mbaas-shared.json"  # name of a volume -> bytes that its writer may fill
_VOLUME = re.compile(r"(.+)-([0-9a-f]{16})([0-9a-f]{8})")  # fingerprint, machine, number
_CHUNK_ROWS = 1 << 18


class _Volume:
    """The files of another writer, read only."""

    def __init__(self, path: Path, salt: int) -> None:
        self.path, self._salt = path, salt
        self._index = -1
        self._identity = (0, 0)
        self._seen_bytes = 0
        self._segments: dict[int, int] = {}
        self._opening = threading.Lock()
        self._retired: list[tuple[float, int]] = []  # when, and descriptors that other threads may still read

    def refresh(self, num_samples: int) -> tuple[bool, NDArray[np.void]]:
        """Return whether the index was replaced, and the rows added since the last call: ROW[k].

        A replaced index invalidates all earlier rows. After an OSError the next call returns all rows.
        """
        while self._retired and self._retired[0][0] < time.monotonic() - RETIRED_S:
            os.close(self._retired.pop(0)[1])
        found = (self.path / INDEX).stat()
        is_new = (found.st_dev, found.st_ino) != self._identity or found.st_size < self._seen_bytes
        if is_new:
            self.retire()
            self._index = os.open(self.path / INDEX, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._identity, self._seen_bytes = (found.st_dev, found.st_ino), 0
        batches = []
        while len(content := os.pread(self._index, _CHUNK_ROWS * ROW.itemsize, self._seen_bytes)) >= ROW.itemsize:
            rows = np.frombuffer(content[: len(content) // ROW.itemsize * ROW.itemsize], ROW)
            good = np.flatnonzero(are_valid(rows, self._salt, num_samples))
            # Rows after the last good one may not have arrived yet; damaged rows before it never will.
            if not len(good):
                break
            batches.append(rows[good])
            self._seen_bytes += (int(good[-1]) + 1) * ROW.itemsize
        return is_new, np.concatenate(batches) if batches else np.zeros(0, ROW)

    def retire(self) -> None:
        """Begin again at the next `refresh`; the files are closed after `RETIRED_S`."""
        with self._opening:
            files, self._segments = [*self._segments.values()], {}
        files += [self._index] if self._index >= 0 else []
        self._retired += [(time.monotonic(), file) for file in files]
        self._index, self._identity, self._seen_bytes = -1, (0, 0), 0

    def segment(self, number: int) -> int:
        """Return the descriptor of a segment file. Raises OSError."""
        with self._opening:
            if number not in self._segments:
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                self._segments[number] = os.open(self.path / f"segment-{number:06}.bin", flags)
            return self._segments[number]

    def close(self) -> None:
        self.retire()
        for _, file in self._retired:
            os.close(file)
        self._retired.clear()


class SharedStore:
    """The samples of a dataset in a shared folder, with the methods of a `DiskStore`.

    All methods except `close` are thread-safe. Takes 36 bytes of memory per sample of the dataset.
    """

    def __init__(self, path: str | os.PathLike[str], budget_bytes: int, fingerprint: str, *, num_samples: int) -> None:
        """
        Args:
            path: the folder, created if missing.
            budget_bytes: limit for the files of all writers and datasets in the folder.
            fingerprint, num_samples: as for `DiskStore`.

        Raises:
            ConfigError: the path cannot be used, or its file system has no locks.
            ResourceError: another process has held the folder's lock for `LOCK_WAIT_S`.
        """
        self._root, self._budget_bytes, self._fingerprint = Path(path), budget_bytes, fingerprint
        self._num_samples, self._salt = num_samples, salt_of(fingerprint)
        self._spots = np.zeros(num_samples, SPOT)  # positions of other writers' samples
        self._volume_of = np.full(num_samples, -1, np.int32)  # index in `_volumes`
        self._volumes: list[_Volume] = []
        self._refreshed_at = -np.inf
        self._late: dict[int, float] = {}  # sample of another writer -> when its bytes were first wrong
        self._lock = threading.Lock()  # for `_spots`, `_volume_of`, `_late` and `_damaged_samples`
        self._refreshing = threading.Lock()  # for `_volumes` and `_refreshed_at`
        self._reserving = threading.Lock()
        self._ask_at = 0.0  # no bytes are reserved before
        self._damaged_samples = 0
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._own = self._open_own()  # may take long, and the volume has a lock of its own
            try:
                self._reserved_bytes = self._own.stats().used_bytes
                self._own.set_budget(self._reserved_bytes)
                with self._locked(LOCK_WAIT_S):
                    self._write_ledger(self._ledger(), self._reserved_bytes)
            except BaseException:  # including interrupts: the volume's lock would otherwise stay
                self._own.close()
                raise
        except OSError as error:
            raise ConfigError(
                f"a shared disk cache needs a folder with locks that it may write to, got {path}: {error}"
            ) from error
        self.refresh()

    def has(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples this node or a volume that it has read stores: bool[n]."""
        return self._own.has(sample_ids) | (self._volume_of[sample_ids] >= 0)

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        with self._lock:
            elsewhere = np.where(self._volume_of[sample_ids] >= 0, self._spots["length"][sample_ids], 0)
        return np.maximum(self._own.lengths(sample_ids), elsewhere.astype(np.int64))

    def put(self, sample_ids: Ids, lengths: NDArray[np.int64], data: Slab) -> NDArray[np.bool_]:
        """Store samples that no writer has stored, as `DiskStore.put` does. Others find them after `refresh`."""
        self.refresh(at_most_every_s=REFRESH_S)
        new = self._volume_of[sample_ids] < 0
        chosen = np.zeros(len(sample_ids), np.bool_)
        if new.any():
            nbytes = int(lengths[new].sum()) + ROW.itemsize * int(new.sum())
            with self._reserving:
                own = self._own.stats()
                if own.free_bytes < nbytes and not own.write_failure and time.monotonic() >= self._ask_at:
                    with contextlib.suppress(OSError, ResourceError):
                        self._reserve(nbytes)
                    if self._own.stats().free_bytes < nbytes:
                        self._ask_at = time.monotonic() + ASK_AGAIN_S
            chosen[new] = self._own.put(sample_ids[new], lengths[new], extract(data, lengths, new))
        return chosen

    def get(
        self, sample_ids: Ids, lengths: NDArray[np.int64], *, buffer: Slab, offsets: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Read samples into their ranges of a buffer, as `DiskStore.get` does."""
        found = self._own.get(sample_ids, lengths, buffer=buffer, offsets=offsets)
        with self._lock:
            volumes, spots = np.where(found, -1, self._volume_of[sample_ids]), self._spots[sample_ids]
        for number in np.unique(volumes[volumes >= 0]).tolist():
            rows = np.flatnonzero(volumes == number)
            good = spots["length"][rows] == lengths[rows]
            fitting = rows[good][np.argsort(spots["address"][rows[good]], kind="stable")]
            spans = zip(offsets[fitting].tolist(), lengths[fitting].tolist(), strict=True)
            targets = [buffer.data[start : start + length] for start, length in spans]
            read_samples(self._volumes[number].segment, spots["address"][fitting], targets)
            found[fitting] = are_whole(sample_ids[fitting], targets, spots["crc"][fitting])
            self._note_read(sample_ids[rows], found[rows])
        return found

    def refresh(self, at_most_every_s: float = 0.0) -> None:
        """Publish this node's samples, and find newly published samples of other nodes.

        Returns at once while another thread does this.
        """
        if time.monotonic() < self._refreshed_at + at_most_every_s or not self._refreshing.acquire(blocking=False):
            return
        try:
            self._refreshed_at = time.monotonic()
            self._own.flush()
            with contextlib.suppress(OSError):  # an unreadable folder has nothing new
                self._find_others()
        finally:
            self._refreshing.release()

    def _find_others(self) -> None:
        known = {volume.path for volume in self._volumes} | {self._own.path}
        self._volumes += [_Volume(path, self._salt) for path in self._paths(self._fingerprint) if path not in known]
        for number, volume in enumerate(self._volumes):
            try:
                is_new, rows = volume.refresh(self._num_samples)
            except OSError as error:
                volume.retire()
                if not isinstance(error, FileNotFoundError):
                    continue  # its samples may still be readable
                is_new, rows = True, np.zeros(0, ROW)
            with self._lock:
                if is_new:
                    self._volume_of[self._volume_of == number] = -1
                self._volume_of[rows["sample"]] = number
                self._spots[rows["sample"]] = rows[[*(SPOT.names or ())]]

    def is_there(self) -> bool:
        return self._own.is_there()

    def set_budget(self, budget_bytes: int) -> None:
        """Set the limit for all writers together, for further reservations."""
        self._budget_bytes, self._ask_at = budget_bytes, 0.0

    def stats(self) -> DiskStats:
        """Return the statistics of this node's volume; samples and damaged samples include the other volumes."""
        own = self._own.stats()
        return DiskStats(
            budget_bytes=self._budget_bytes,
            used_bytes=own.used_bytes,
            stale_bytes=0,
            samples=own.samples + int((self._volume_of >= 0).sum()),
            damaged_samples=own.damaged_samples + self._damaged_samples,
            write_failure=own.write_failure,
            removal_failure=own.removal_failure,
        )

    def close(self) -> None:
        for volume in self._volumes:
            volume.close()
        self._own.close()

    def _note_read(self, sample_ids: Ids, found: NDArray[np.bool_]) -> None:
        """Forget samples whose bytes are still wrong after `LATE_S`. Until then this node does not store them again."""
        now = time.monotonic()
        with self._lock:
            for sample in sample_ids[found].tolist() if self._late else ():
                self._late.pop(sample, None)
            for sample in np.unique(sample_ids[~found]).tolist():
                if now >= self._late.setdefault(sample, now) + LATE_S:
                    del self._late[sample]
                    self._damaged_samples += 1
                    self._volume_of[sample] = -1

    # ---- the folder's volumes and its budget ----

    def _open_own(self) -> DiskStore:
        """Open an unlocked volume of this machine, or a new one."""
        machine = hashlib.blake2b(socket.gethostname().encode(), digest_size=8).hexdigest()
        own = f"{self._fingerprint}-{machine}"
        # Only this machine's volumes, because some file systems do not enforce locks between machines.
        earlier = sorted(path.name for path in self._paths(self._fingerprint) if path.name.startswith(own))
        new = own + os.urandom(4).hex()
        for volume in (*earlier, new):
            try:
                return DiskStore(
                    self._root,
                    self._budget_bytes,
                    self._fingerprint,
                    num_samples=self._num_samples,
                    volume=volume,
                    lock_wait_s=0.0,
                )
            except ResourceError:
                continue
            except ConfigError as error:
                if not isinstance(error.__cause__, FileNotFoundError):  # another node is removing it
                    raise
        raise ResourceError(f"{self._root / new} is in use by another process")

    def _paths(self, fingerprint: str | None = None) -> list[Path]:
        """Return the volumes in the folder, by default of all datasets. A folder without a marker is not a volume."""
        found = []
        for entry in os.scandir(self._root):
            volume = _VOLUME.fullmatch(entry.name)
            is_ours = volume and entry.is_dir(follow_symlinks=False) and (Path(entry.path) / MARKER).is_file()
            if volume and is_ours and fingerprint in (None, volume[1]):
                found.append(Path(entry.path))
        return found

    @contextlib.contextmanager
    def _locked(self, wait_s: float) -> Iterator[None]:
        """Hold the lock of the whole folder. Raises OSError, and ResourceError after ``wait_s``."""
        file = locked_file(self._root / _LOCK, wait_s)
        if file is None:
            raise ResourceError(f"{self._root / _LOCK} was locked by another process for {seconds(wait_s)}")
        try:
            yield
        finally:
            os.close(file)

    def _reserve(self, nbytes: int) -> None:
        """Reserve bytes for this node's volume, at most as many as the common budget has free."""
        wanted = max(nbytes, int(self._budget_bytes * RESERVED_SHARE))
        # Without the lock, because this may take long: the sizes of all files, and the removal of unused datasets.
        ledger = self._ledger()
        claims = {path: _claim(path) for path in self._others()}
        free = self._budget_bytes - sum(claim.of(ledger) for claim in claims.values()) - self._reserved_bytes
        for path in self._stale([*claims]) if free < wanted else ():
            with contextlib.suppress(OSError):
                remove_stale(path)
                free += claims[path].of(ledger)
            if free >= wanted:
                break
        with self._locked(PUT_WAIT_S):
            ledger, others = self._ledger(), self._others()
            taken = sum((claims[path] if path in claims else _claim(path)).of(ledger) for path in others)
            reserved = self._reserved_bytes + max(0, min(wanted, self._budget_bytes - taken - self._reserved_bytes))
            self._write_ledger(ledger, reserved)
            self._reserved_bytes = reserved
        self._own.set_budget(reserved)

    def _others(self) -> list[Path]:
        return [path for path in self._paths() if path != self._own.path]

    def _ledger(self) -> dict[str, int]:
        try:
            return dict(json.loads((self._root / _LEDGER).read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError):  # missing or damaged: the sizes of files count instead
            return {}

    def _write_ledger(self, ledger: dict[str, int], reserved_bytes: int) -> None:
        there = {path.name for path in self._paths()}
        ledger = {name: nbytes for name, nbytes in ledger.items() if name in there}
        ledger[self._own.path.name] = reserved_bytes
        unfinished = (self._root / _LEDGER).with_suffix(".new")
        unfinished.write_text(json.dumps(ledger))
        unfinished.rename(self._root / _LEDGER)

    def _stale(self, volumes: list[Path]) -> list[Path]:
        """Return the volumes of datasets that no process uses, least recently opened first."""
        used, opened = {self._fingerprint}, {}
        for path in volumes:
            with contextlib.suppress(OSError):
                used |= {_dataset_of(path)} if is_in_use(path) else set()
                opened[path] = (path / MARKER).stat().st_mtime
        return sorted((path for path in opened if _dataset_of(path) not in used), key=lambda path: (opened[path], path))


def _dataset_of(volume: Path) -> str:
    return volume.name.rpartition("-")[0]


class _Claim(NamedTuple):
    """A volume counts with its reservation while it has a writer, later with the size of its files."""

    path: Path
    nbytes: int
    had_writer: bool

    def of(self, ledger: dict[str, int]) -> int:
        """Return the bytes. One that has got a writer since its files were counted may grow to its reservation."""
        reserved = ledger.get(self.path.name, 0)
        with contextlib.suppress(OSError):  # removed meanwhile
            if isinstance(reserved, int) and (self.had_writer or is_in_use(self.path)):
                return max(self.nbytes, reserved)
        return self.nbytes


def _claim(path: Path) -> _Claim:
    try:
        return _Claim(path, folder_bytes(path), is_in_use(path))
    except OSError:  # removed meanwhile
        return _Claim(path, 0, had_writer=False)
