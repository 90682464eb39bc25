"""An in-memory file system with wrong answers: names, kinds, sizes, content and errors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileSystemHandler, FileType

from benchmarks.fuzz.mutations import NAMES

_ERRNO = (errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.ENAMETOOLONG, errno.EACCES, 0, -1, 99_999, 2**31 - 1)


class _WordlessError(Exception):
    """An error whose message cannot be read."""

    def __str__(self) -> str:
        raise ValueError("no words")


_ERRORS: tuple[Callable[[Random], BaseException], ...] = (
    lambda chance: OSError(chance.choice(_ERRNO), "said by a file system"),
    lambda _: OSError("AWS Error SLOW_DOWN during GetObject operation: HTTP status 503"),
    lambda _: OSError("AWS Error NO_SUCH_KEY during HeadObject operation: no such key"),
    lambda _: OSError("HTTP status 999"),
    lambda _: FileNotFoundError("tree"),
    lambda _: PermissionError(errno.EACCES, "no"),
    lambda _: pa.ArrowInvalid("no number"),
    lambda _: pa.ArrowNotImplementedError("not here"),
    lambda _: ValueError("a\nb\x1b[2J"),
    lambda _: KeyError("Contents"),
    lambda _: RuntimeError("Session is closed"),
    lambda _: TypeError("'NoneType' object is not subscriptable"),
    lambda _: RecursionError("too deep"),
    lambda _: UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
    lambda _: TimeoutError("\ud800"),
    lambda _: StopIteration(),
    lambda _: AssertionError(),
    lambda _: _WordlessError(),
)
_PATHS = ("tree", "other/cat/1.png", "/", "", "cat", "..", "tree/../../1.png", "tree/cat", "tree/catalog/1.png", "a\nb")
_SIZES = (None, -1, -2, -(2**63), 0, 1, 1 << 20, (1 << 20) + 1, 2**40, 2**63 - 1)
_KINDS = (FileType.File, FileType.Directory, FileType.NotFound, FileType.Unknown)


class LyingHandler(FileSystemHandler):
    """Serves a tree of classes whose files all have the same content.

    The random numbers of a call depend on its arguments, because threads call in any order.

    Args:
        chance: determines the tree and the seeds of all calls.
        share: fraction of wrong answers.
        content: of the files.
    """

    def __init__(self, chance: Random, share: float, content: bytes) -> None:
        self._seed, self._share, self._content = chance.random(), share, content
        self._names = [name.decode(errors="replace") for name in NAMES]
        classes = chance.sample(["cat", "dog", "é", *self._names], chance.randrange(1, 4))
        self._files = [
            f"tree/{name}/{below}{image}"
            for name in classes
            for below in ("", chance.choice(("", "deep/", "cat/", *(f"{each}/" for each in self._names))))
            for image in chance.sample(["1.png", "2.JPG", "3.txt", *self._names], 3)
        ]

    def _begin(self, *call: object) -> Random:
        """Return the random numbers of a call, or raise an error."""
        chance = Random(f"{self._seed} {call}")
        if self._lies(chance) and chance.random() < 0.5:
            raise chance.choice(_ERRORS)(chance)
        return chance

    def _lies(self, chance: Random) -> bool:
        return chance.random() < self._share

    def _info(self, chance: Random, path: str, kind: Any, size: int | None) -> FileInfo:
        if self._lies(chance):
            path = chance.choice((*_PATHS, *self._names, f"/{path}", f"{path}/", f"{path}/..", "x" * 100_000))
        if self._lies(chance):
            kind, size = chance.choice(_KINDS), chance.choice(_SIZES)
        return FileInfo(path, kind, size=size)

    def get_type_name(self) -> str:
        return "lying"

    def get_file_info(self, paths: list[str]) -> Any:
        chance, found = self._begin("info", paths), []
        for path in paths:
            is_folder = any(file.startswith(f"{path}/") for file in self._files)
            kind = FileType.Directory if is_folder else FileType.File if path in self._files else FileType.NotFound
            found.append(self._info(chance, path, kind, len(self._content) if path in self._files else None))
        return chance.choice((found[1:], [*found, *found], None, [None], 7)) if self._lies(chance) else found

    def get_file_info_selector(self, selector: FileSelector) -> Any:
        chance = self._begin("list", selector.base_dir)
        inside = f"{selector.base_dir}/"
        below = [file for file in self._files if file.startswith(inside)]
        folders = dict.fromkeys(inside + file.removeprefix(inside).split("/")[0] for file in below)
        found = [self._info(chance, folder, FileType.Directory, None) for folder in folders if folder not in below]
        found += [self._info(chance, file, FileType.File, len(self._content)) for file in below if selector.recursive]
        return chance.choice((found * 2, found[1:], None, [None], 7)) if self._lies(chance) else found

    def open_input_file(self, path: str) -> Any:
        chance = self._begin("open", path)
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return None if self._lies(chance) else pa.PythonFile(_LyingFile(chance, self._share, self._content), mode="r")

    def open_input_stream(self, path: str) -> Any:
        return self.open_input_file(path)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse

    def normalize_path(self, path: str) -> str:
        return path


class _LyingFile:
    """A file that ends early, reports wrong sizes, and fails.

    It never returns more bytes than requested. File systems in Python are trusted in this: pyarrow copies all returned
    bytes into the reader's memory.
    """

    def __init__(self, chance: Random, share: float, content: bytes) -> None:
        self._chance, self._share, self._content, self._at = chance, share, content, 0
        self.closed = False

    def _may_err(self) -> None:
        if self._chance.random() < self._share / 2:
            raise self._chance.choice(_ERRORS)(self._chance)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._may_err()
        self._at = offset + (0, self._at, len(self._content))[whence]
        return self._at

    def tell(self) -> Any:
        self._may_err()
        return self._chance.choice(_SIZES) if self._chance.random() < self._share else self._at

    def read(self, size: int = -1) -> Any:
        self._may_err()
        most = len(self._content) - self._at if size is None or size < 0 else size
        if self._chance.random() < 0.3:
            most = min(most, self._chance.choice((0, 1, 7, 100)) if self._chance.random() < self._share else 7)
        found = self._content[max(0, self._at) : max(0, self._at) + most]
        self._at += len(found)
        return self._chance.choice((None, "", 7, [])) if self._chance.random() < self._share / 2 else found

    def close(self) -> None:
        self._may_err()
        self.closed = True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
