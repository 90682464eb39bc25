"""The folders of the disk tier: whose they are, who holds them, and which may be removed.

Each dataset has a folder of its own, named by its fingerprint, beside those of others. What we made carries our
marker, a small file; nothing without it is ever touched, and in a folder with it only files of our names are.
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

VERSION = 1
"""Version of the files' layout; a folder of another one is emptied, not read."""

MARKER = "mbaas-disk-tier.json"
INDEX = "index.bin"

_LOCK = "lock"
_MARKER_BYTES = 1000  # more than ours ever has
_SEGMENT = re.compile(r"segment-(\d{6})\.bin")
_UNFINISHED = ".new"  # of a file that takes another's place when it is complete
_FINGERPRINT = re.compile(r"[0-9A-Za-z_-]{1,64}")
_PERIOD_S = 0.02  # between two tries to get a lock


class Folder(Struct, frozen=True):
    """One dataset's folder, held by this process alone until `release`.

    Attributes:
        path: of the folder.
        lock: descriptor of its lock file; the lock goes with the process, however it ends. A forked child
            would share it: fork none.
    """

    path: Path
    lock: int

    @property
    def index(self) -> Path:
        """The index file."""
        return self.path / INDEX

    def segment(self, number: int) -> Path:
        """The file of a segment."""
        return self.path / f"segment-{number:06}.bin"

    def segments(self) -> dict[int, int]:
        """List the segment files: number -> bytes."""
        entries = ((_SEGMENT.fullmatch(entry.name), entry) for entry in os.scandir(self.path))
        return {int(match[1]): entry.stat().st_size for match, entry in entries if match}

    def clear_strangers(self) -> None:
        """Remove what has the name of a file of ours and is none: a link, by which we would write to somebody else's
        file, or a pipe, at which we would wait for ever.
        """
        for entry in list(os.scandir(self.path)):
            named_as_ours = _SEGMENT.fullmatch(entry.name) or entry.name == INDEX
            if named_as_ours and not entry.is_file(follow_symlinks=False):
                Path(entry.path).unlink()

    def replace(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Have a file written so that it is there as it was or whole, whatever happens."""
        unfinished = path.with_name(path.name + _UNFINISHED)
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # never through a link
            write(file)
            file.flush()
            os.fsync(file.fileno())  # before the rename, which may reach the disk earlier than the bytes
        unfinished.rename(path)

    def wipe(self) -> None:
        """Remove our segments and index; the marker stays."""
        for entry in list(self.path.iterdir()):
            if _SEGMENT.fullmatch(entry.name) or entry.name == INDEX or entry.name.endswith(_UNFINISHED):
                entry.unlink()

    def remove(self) -> None:
        """Remove the folder and end the hold; files that are not ours keep the folder alive.

        The marker goes after the segments, so that what a crash leaves behind is still known as ours.
        """
        self.wipe()
        (self.path / MARKER).unlink(missing_ok=True)
        (self.path / _LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()
        self.release()

    def release(self) -> None:
        """End the hold; what is in the folder stays."""
        os.close(self.lock)  # which unlocks it


def open_folder(root: Path, fingerprint: str, *, wait_s: float) -> Folder:
    """Take the folder of a dataset, made if there is none, emptied if its marker tells of anything else.

    Args:
        wait_s: for another process to let go, as one does that was just killed.

    Raises:
        ConfigError: the folder cannot be made or used, or it holds files and no marker of ours.
        ResourceError: another process holds it.
    """
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ConfigError(f"a fingerprint must be up to 64 letters and digits, got {fingerprint!r}")
    path = root / fingerprint
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder = _hold(path, wait_s)
    except OSError as error:
        raise _unusable(root, error) from error
    if folder is None:
        raise ResourceError(
            f"{path} is in use by another process; a disk cache serves one service at a time: "
            f"give each service of a machine a path of its own"
        )
    try:
        _claim(folder, fingerprint)
    except BaseException as error:  # an interrupt, too: the lock would stay as long as this process
        folder.release()
        if isinstance(error, OSError):
            raise _unusable(root, error) from error
        raise
    return folder


def _unusable(root: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the disk cache needs a folder that it may write to, got {root}: {error}")


def stale_folders(root: Path, own: Folder) -> list[Path]:
    """List the folders of other datasets that nobody holds, the one that was opened longest ago first."""
    found: list[tuple[float, Path]] = []
    for entry in os.scandir(root):
        path = Path(entry.path)
        # A link may lead to where others keep their caches.
        if entry.is_dir(follow_symlinks=False) and path != own.path and (path / MARKER).is_file():
            found.append(((path / MARKER).stat().st_mtime, path))
    return [path for _, path in sorted(found) if _is_free(path)]


def folder_bytes(path: Path) -> int:
    """Count the bytes of our files in a folder."""
    return sum(e.stat().st_size for e in os.scandir(path) if _SEGMENT.fullmatch(e.name) or e.name == INDEX)


def remove_stale(path: Path) -> bool:
    """Remove a folder of ours unless somebody has taken hold of it meanwhile."""
    folder = _hold(path, 0.0) if (path / MARKER).is_file() else None
    if folder is None:
        return False
    folder.remove()
    return True


def _claim(folder: Folder, fingerprint: str) -> None:
    """Check or write the marker, and date it: its time is when the folder was last opened."""
    marker = folder.path / MARKER
    said = {"format": "mbaas disk tier", "version": VERSION, "fingerprint": fingerprint}
    if marker.is_symlink() or not marker.is_file():
        others = [entry.name for entry in folder.path.iterdir() if not entry.name.startswith((_LOCK, MARKER))]
        if others:
            raise ConfigError(f"{folder.path} holds files, for instance {others[0]}, but no {MARKER}: not ours to use")
    else:
        folder.clear_strangers()
        if _said(marker) == said:
            os.utime(marker)
            return
        folder.wipe()
    folder.replace(marker, lambda file: file.write(json.dumps(said).encode()))


def _said(marker: Path) -> object:
    try:
        with marker.open("rb") as file:
            return json.loads(file.read(_MARKER_BYTES))
    except (ValueError, RecursionError):  # torn by a crash, or not text at all
        return None


def _is_free(path: Path) -> bool:
    folder = _hold(path, 0.0)
    if folder:
        folder.release()
    return folder is not None


def _hold(path: Path, wait_s: float) -> Folder | None:
    """Take the lock of a folder; None if somebody else keeps it."""
    deadline = time.monotonic() + wait_s
    while True:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            # The kernel gives it back when the process ends, however that ends: no lock outlives its holder.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been removed, and made anew, between the two calls: then the lock is nobody's.
            if os.path.samestat(os.fstat(lock), (path / _LOCK).stat()):
                return Folder(path, lock)
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(lock)
        if time.monotonic() >= deadline:
            return None
        time.sleep(_PERIOD_S)
