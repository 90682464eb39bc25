"""Local files behind pyarrow that every process of a test can make fail."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import ray
from fsspec.implementations.local import LocalFileSystem as FsspecLocal  # type: ignore[import-untyped]
from pyarrow.fs import FSSpecHandler, PyFileSystem

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module


class FailingFiles(FSSpecHandler):  # type: ignore[misc]
    """Local files that cannot be opened while the folder ``switches`` contains a file of the same name.

    Each such file contains the error's name in `errno`.
    """

    def __init__(self, switches: str) -> None:
        super().__init__(FsspecLocal())
        self.switches = switches

    def __reduce__(self) -> tuple[Any, ...]:
        return FailingFiles, (self.switches,)

    def open_input_file(self, path: str) -> Any:
        switch = Path(self.switches, Path(path).name)
        if switch.exists():
            code = getattr(errno, switch.read_text())
            raise OSError(code, os.strerror(code), path)
        return super().open_input_file(path)


def failing(switches: Path) -> PyFileSystem:
    return PyFileSystem(FailingFiles(str(switches)))
