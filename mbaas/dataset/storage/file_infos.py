"""Looks up existence, size and modification time of files."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pyarrow.fs
from pyarrow.fs import FileInfo

from mbaas.dataset.storage.faults import s3_attempts, said
from mbaas.dataset.storage.location import Location, join
from mbaas.errors import DatasetError
from mbaas.progress import track

S3_ATTEMPTS = 5
"""Attempts of an S3 client per request when files are looked up."""

_ASKED_AT_ONCE = 1000  # files looked up per call
_REMOTE_THREADS = 32  # a store needs one request per file


def file_infos(where: Location, names: list[str]) -> list[FileInfo]:
    """Look up files below a folder, including missing ones; raise DatasetError if the file system fails."""
    filesystem = s3_attempts(where.filesystem, S3_ATTEMPTS)
    paths = [join(where.base, name) for name in names]
    parts = [paths[start : start + _ASKED_AT_ONCE] for start in range(0, len(paths), _ASKED_AT_ONCE)]

    def ask(part: list[str]) -> list[FileInfo]:
        infos: list[FileInfo] = filesystem.get_file_info(part)
        return infos

    try:
        if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            return _all(map(ask, parts), len(paths))
        with ThreadPoolExecutor(_REMOTE_THREADS, thread_name_prefix="mbaas-listing") as pool:
            return _all(pool.map(ask, parts), len(paths))
    except Exception as error:  # third-party file systems raise any exception
        raise DatasetError(f"cannot look for the files of {where.root}: {said(error)}") from error


def _all(parts: Iterable[list[FileInfo]], total: int) -> list[FileInfo]:
    return [*chain.from_iterable(track(parts, "files", total, amount=len))]
