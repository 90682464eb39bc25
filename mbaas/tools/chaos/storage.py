"""Storage with failures on demand: local files behind a file system that any process can disturb."""

from __future__ import annotations

import errno
import io
import os
import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileSystemHandler, FileType, LocalFileSystem, PyFileSystem

from mbaas.dataset import synthetic
from mbaas.tools.chaos.plan import Action

PASSING = (errno.EIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.ESTALE)
"""Errors that a read may raise."""

SLOW_S = 0.3
"""Time to open a file while storage is slow."""

LOOK_S = 0.05
"""Interval at which a hanging read checks for the end of the disturbance."""

IMAGE_SIZE, CLASSES = 16, 3


class Trouble:
    """A switch that disturbs storage, and a count of the reads affected, both stored in a folder."""

    def __init__(self, folder: Path) -> None:
        self._switch, self._met = folder / "trouble", folder / "met"

    def begin(self, action: Action) -> None:
        # Renaming is atomic: a read must not find an empty file, and thus no action.
        whole = self._switch.with_name("next")
        whole.write_text(action)
        whole.rename(self._switch)

    def end(self) -> None:
        self._switch.unlink(missing_ok=True)

    def now(self) -> str | None:
        """Return the current disturbance, an action of `mbaas.tools.chaos.plan`, or None."""
        try:
            return self._switch.read_text()
        except FileNotFoundError:
            return None

    def count(self) -> None:
        # One byte appended by one unbuffered write: many processes count concurrently without losses.
        with self._met.open("ab", buffering=0) as file:
            file.write(b".")

    @property
    def met(self) -> int:
        """Number of reads affected so far."""
        return self._met.stat().st_size if self._met.exists() else 0


class TroubledFiles(FileSystemHandler):
    """Read-only local files that hang, fail, or are slow, truncated or missing, as set by a `Trouble`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files = LocalFileSystem()
        self._trouble = Trouble(Path(folder))

    # Pickled with the dataset, like any pyarrow file system; each process opens its own.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._folder,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TroubledFiles) and other._folder == self._folder

    def get_type_name(self) -> str:
        return "troubled"

    def normalize_path(self, path: str) -> str:
        return str(self._files.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        if self._trouble.now() == "lose":
            return [FileInfo(path, FileType.NotFound) for path in paths]
        return list(self._files.get_file_info(paths))

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        return list(self._files.get_file_info(selector))

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self._opened(path), mode="r")

    open_input_stream = open_input_file

    def _opened(self, path: str) -> io.FileIO:
        trouble = self._trouble.now()
        if trouble is None:
            return io.FileIO(path)
        self._trouble.count()
        if trouble == "lose":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if trouble == "err":
            code = random.choice(PASSING)
            raise OSError(code, os.strerror(code), path)
        if trouble == "slow":
            time.sleep(SLOW_S)
        while trouble == "hang" and self._trouble.now() == "hang":
            time.sleep(LOOK_S)
        return _CutShort(path) if trouble == "truncate" else io.FileIO(path)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), self._folder)

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse


class _CutShort(io.FileIO):
    """A file whose second half cannot be read, although its size is correct."""

    def read(self, size: int | None = -1) -> bytes:
        # The size stays correct: a file whose size differs from the listing would be rejected before the read.
        half = os.fstat(self.fileno()).st_size // 2
        rest = max(0, half - self.tell())
        return super().read(rest if size is None or size < 0 else min(size, rest)) or b""


def images(folder: Path, samples: int) -> Path:
    """Write small noise images in one folder per class; the same in every run."""
    computed = synthetic(samples, height=IMAGE_SIZE, width=IMAGE_SIZE, num_classes=CLASSES)
    for label in range(CLASSES):
        (folder / str(label)).mkdir(parents=True)
    for number in range(samples):
        (folder / str(number % CLASSES) / f"{number:06d}.png").write_bytes(computed[number]["bytes"])
    return folder


def troubled(folder: Path) -> PyFileSystem:
    """Return the file system that this folder's `Trouble` disturbs."""
    return PyFileSystem(TroubledFiles(str(folder)))
