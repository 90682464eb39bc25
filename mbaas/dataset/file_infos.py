"""Asking a file system what it knows of files: whether they are there, how long they are, when they changed."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pyarrow.fs
from pyarrow.fs import FileInfo

from mbaas.dataset.faults import s3_attempts, said
from mbaas.dataset.location import Location, join
from mbaas.errors import DatasetError
from mbaas.progress import track

S3_ATTEMPTS = 5
"""Attempts that an S3 client makes of each request while files are looked for."""

_ASKED_AT_ONCE = 1000  # files that are asked for in one call
_REMOTE_THREADS = 32  # a store answers for each file by itself


def file_infos(where: Location, names: list[str]) -> list[FileInfo]:
    """Ask for files by their names below a folder; a file that is not there has an answer, too.

    Raises:
        DatasetError: the file system did not answer.
    """
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
    except Exception as error:  # a file system of somebody else's raises what it likes
        raise DatasetError(f"cannot look for the files of {where.root}: {said(error)}") from error


def _all(parts: Iterable[list[FileInfo]], total: int) -> list[FileInfo]:
    return [*chain.from_iterable(track(parts, "files", total, amount=len))]
