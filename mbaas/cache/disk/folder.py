"""The folders of the disk tier: ownership, locks and removal.

Each dataset has a folder, named by its fingerprint, with a marker file. Folders without the marker are never touched,
nor are files with unknown names.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from mbaas.errors import ConfigError, ResourceError

VERSION = 2
"""Version of the file layout; a folder with another version is emptied."""

MARKER = "mbaas-disk-tier.json"
INDEX = "index.bin"

_LOCK = "lock"
_MARKER_BYTES = 1000  # larger than any valid marker
_SEGMENT = re.compile(r"segment-(\d{6})\.bin")
_UNFINISHED = ".new"  # suffix of a file that replaces another when complete
_FINGERPRINT = re.compile(r"[0-9A-Za-z_-]{1,64}")
_PERIOD_S = 0.02  # between attempts to lock


class Folder(Struct, frozen=True):
    """One dataset's folder, locked by this process until `release`.

    `lock` is the lock file's descriptor. A forked child would share the lock, so do not fork.
    """

    path: Path
    lock: int

    @property
    def index(self) -> Path:
        return self.path / INDEX

    def segment(self, number: int) -> Path:
        return self.path / f"segment-{number:06}.bin"

    def segments(self) -> dict[int, int]:
        """Return the segment files: number -> bytes."""
        entries = ((_SEGMENT.fullmatch(entry.name), entry) for entry in os.scandir(self.path))
        return {int(match[1]): entry.stat().st_size for match, entry in entries if match}

    def replace(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Write a file atomically: after a crash it has either its old or its new content."""
        unfinished = path.with_name(path.name + _UNFINISHED)
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # "x" never follows a link
            write(file)
            file.flush()
            os.fsync(file.fileno())  # before the rename, which could otherwise reach the disk before the bytes
        unfinished.rename(path)

    def wipe(self, *, keep_files: bool = False) -> None:
        """Remove the index and all segments, or with ``keep_files`` only links, pipes and the like with their names."""
        # A write through a link would change another file, and opening a pipe would block for ever.
        for entry in list(os.scandir(self.path)):
            is_ours = _SEGMENT.fullmatch(entry.name) or entry.name in (INDEX, INDEX + _UNFINISHED)
            if is_ours and not (keep_files and entry.is_file(follow_symlinks=False)):
                Path(entry.path).unlink()

    def remove(self) -> None:
        """Remove and unlock the folder; it stays if it contains other files.

        The marker is removed after the segments, so that leftovers of a crash can still be identified.
        """
        self.wipe()
        (self.path / MARKER).unlink(missing_ok=True)
        (self.path / _LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()
        self.release()

    def release(self) -> None:
        """Unlock the folder; its content stays."""
        os.close(self.lock)  # also unlocks it


def open_folder(root: Path, fingerprint: str, *, wait_s: float) -> Folder:
    """Lock the folder of a dataset, after waiting up to ``wait_s`` for another process, for example one just killed.

    The folder is created if missing, and emptied if its marker does not match.

    Raises:
        ConfigError: the folder cannot be created or used, or contains files but no marker.
        ResourceError: another process has locked it.
    """
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ConfigError(f"a fingerprint must be up to 64 letters and digits, got {fingerprint!r}")
    path = root / fingerprint
    folder = None
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder = _lock(path, wait_s)
        if folder is not None:
            _claim(folder, fingerprint)
            return folder
    except BaseException as error:  # including interrupts: the lock would otherwise last as long as this process
        if folder is not None:
            folder.release()
        if isinstance(error, OSError):
            raise ConfigError(f"the disk cache needs a folder that it may write to, got {root}: {error}") from error
        raise
    raise ResourceError(
        f"{path} is in use by another process; a disk cache serves one service at a time: "
        f"give each service of a machine a path of its own"
    )


def is_locked_by(folder: Folder) -> bool:
    """Return whether a folder is still the one that was locked, and not removed or replaced since."""
    try:
        return os.path.samestat(os.fstat(folder.lock), (folder.path / _LOCK).stat())
    except OSError:
        return False


def is_in_use(path: Path) -> bool:
    """Return whether a process has locked a folder."""
    if (folder := _lock(path, 0.0)) is None:
        return True
    folder.release()
    return False


def stale_folders(own: Folder) -> list[Path]:
    """Return the unlocked folders of other datasets next to a folder, least recently opened first."""
    opened: dict[Path, float] = {}
    for entry in os.scandir(own.path.parent):
        path = Path(entry.path)
        # A link may lead to other users' caches.
        is_ours = entry.is_dir(follow_symlinks=False) and (path / MARKER).is_file()
        if is_ours and path != own.path and (folder := _lock(path, 0.0)) is not None:
            folder.release()
            opened[path] = (path / MARKER).stat().st_mtime
    return sorted(opened, key=lambda path: (opened[path], path))


def folder_bytes(path: Path) -> int:
    """Return the bytes of the tier's files in a folder."""
    return sum(e.stat().st_size for e in os.scandir(path) if _SEGMENT.fullmatch(e.name) or e.name == INDEX)


def remove_stale(path: Path) -> None:
    """Remove a folder of another dataset unless it is locked by now."""
    if (path / MARKER).is_file() and (folder := _lock(path, 0.0)) is not None:
        folder.remove()


def _claim(folder: Folder, fingerprint: str) -> None:
    """Check or write the marker, and set its time, which records when the folder was last opened."""
    marker = folder.path / MARKER
    content = {"format": "mbaas disk tier", "version": VERSION, "fingerprint": fingerprint}
    if marker.is_symlink() or not marker.is_file():
        others = [entry.name for entry in folder.path.iterdir() if not entry.name.startswith((_LOCK, MARKER))]
        if others:
            raise ConfigError(f"{folder.path} holds files, for instance {others[0]}, but no {MARKER}: not ours to use")
    else:
        folder.wipe(keep_files=True)
        if _content_of(marker) == content:
            os.utime(marker)
            return
        folder.wipe()
    folder.replace(marker, lambda file: file.write(json.dumps(content).encode()))


def _content_of(marker: Path) -> object:
    try:
        with marker.open("rb") as file:
            return json.loads(file.read(_MARKER_BYTES))
    except (ValueError, RecursionError):  # torn by a crash, or not text
        return None


def _lock(path: Path, wait_s: float) -> Folder | None:
    lock = locked_file(path / _LOCK, wait_s)
    return None if lock is None else Folder(path, lock)


def locked_file(path: Path, wait_s: float) -> int | None:
    """Create and lock a file, after waiting up to ``wait_s`` for another process. Return its descriptor, or None."""
    deadline = time.monotonic() + wait_s
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            # The kernel releases the lock when the process ends, for any reason, so no stale lock remains.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If the file was removed and created again between the two calls, the lock is on the old file.
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:  # a file system without locks, or an interrupt
            os.close(lock)
            raise
        os.close(lock)
        if time.monotonic() >= deadline:
            return None
        time.sleep(_PERIOD_S)
