"""Folders of files whose file system records every opened file."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from pyarrow.fs import FileSelector, FileSystemHandler, LocalFileSystem

from mbaas.dataset import Dataset

DEADLINE_S = 20.0

# Ray workers cannot import test modules.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def eventually(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.02)


class WatchedFiles(FileSystemHandler):
    """The local file system, extended: it records each opened file, can fail, and can make readers meet.

    Args:
        watch: folder shared by all processes, with the opened files (`log`), a switch to fail (`broken`), files that
            fail (`away-*`), and readers that wait for each other (`meeting`, `came-*`).
    """

    def __init__(self, watch: str) -> None:
        self.watch = watch

    def open_input_file(self, path: str) -> Any:
        with Path(self.watch, "log").open("a") as log:  # one short write in append mode is never torn
            log.write(f"{path}\n")
        if Path(self.watch, "broken").exists():
            raise MemoryError("a bug, not a bad file")  # any other error of a file system concerns its files
        if Path(self.watch, f"away-{Path(path).name}").exists():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        self._meet(path)
        return LocalFileSystem().open_input_file(path)

    def _meet(self, path: str) -> None:
        """Open a file of a meeting only once all its files have been requested."""
        meeting = Path(self.watch, "meeting")
        invited = meeting.read_text().split() if meeting.exists() else []
        if path in invited:
            Path(self.watch, f"came-{Path(path).name}").touch()
            eventually(lambda: len(list(Path(self.watch).glob("came-*"))) == len(invited), "all have come")

    def get_type_name(self) -> str:
        return "watched"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WatchedFiles) and other.watch == self.watch

    def __hash__(self) -> int:
        return hash(self.watch)

    def get_file_info(self, paths: list[str]) -> Any:
        return LocalFileSystem().get_file_info(paths)

    def get_file_info_selector(self, selector: FileSelector) -> Any:
        return LocalFileSystem().get_file_info(selector)

    def normalize_path(self, path: str) -> str:
        return path

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("mbaas only reads files")

    open_input_stream = open_output_stream = open_append_stream = copy_file = move = _refuse
    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse


@dataclass(frozen=True)
class Folder:
    """A folder of small, distinct files with a record of openings."""

    root: Path
    watch: Path
    dataset: Dataset

    def contents(self) -> list[bytes]:
        """The bytes of each sample, by sample id."""
        return [Path(self.dataset.uri(i)).read_bytes() for i in range(len(self.dataset))]

    def opened(self) -> Counter[str]:
        """Number of openings of each file."""
        log = self.watch / "log"
        return Counter(log.read_text().split("\n")[:-1] if log.exists() else [])

    def invite(self, sample_ids: list[int]) -> None:
        """Keep every file of ``sample_ids`` from opening until all have been requested."""
        (self.watch / "meeting").write_text("\n".join(self.dataset.uri(i) for i in sample_ids))
