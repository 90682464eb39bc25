"""Bytes of samples are read from local and other file systems, and every failure names its reason."""

from __future__ import annotations

import errno
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem as FsspecLocal  # type: ignore[import-untyped]
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem
from tenacity import Retrying

from mbaas.dataset.storage.reader import ByteRange, FileReader
from mbaas.dataset.storage.retry import PatientReader, retrying
from mbaas.errors import BadSampleError, ConfigError, StorageError
from mbaas.tools.analysis.measuring.storage import Span, drop, resident_share

CONTENT = bytes(range(256)) * 40  # 10,240 bytes


class Local(FSSpecHandler):  # type: ignore[misc]
    """Local files treated as remote ones: opening them first raises the given errors."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(FsspecLocal())
        self.errors = list(errors)
        self.opened = 0

    def open_input_file(self, path: str) -> Any:
        self.opened += 1
        if self.errors:
            raise self.errors.pop(0)
        return super().open_input_file(path)


@pytest.fixture(params=["local", "remote"])
def filesystem(request: pytest.FixtureRequest) -> FileSystem:
    return LocalFileSystem() if request.param == "local" else PyFileSystem(Local())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "1.jpg"
    path.write_bytes(CONTENT)
    return path


def at(path: Path, offset: int = 0, length: int = len(CONTENT), file_bytes: int | None = None) -> ByteRange:
    """A byte range, by default to the end of the file."""
    return ByteRange(f"test://{path.name}", str(path), offset, length, file_bytes or offset + length)


def read(filesystem: FileSystem, where: ByteRange) -> bytes:
    buffer = np.zeros(where.length, np.uint8)
    FileReader(filesystem, lambda _: where).read_into(0, buffer)
    return buffer.tobytes()


def reason(filesystem: FileSystem, where: ByteRange, *, retry: Retrying | None = None) -> str:
    """Reason of the `BadSampleError` that reading raises, after the attempts of ``retry`` if given."""
    found = FileReader(filesystem, lambda _: where)
    with pytest.raises(BadSampleError) as caught:
        (PatientReader(found, retry) if retry else found).read_into(0, np.zeros(where.length, np.uint8))
    assert caught.value.uri == where.uri
    return caught.value.reason


def not_given(filesystem: FileSystem, where: ByteRange) -> StorageError:
    with pytest.raises(StorageError) as caught:
        FileReader(filesystem, lambda _: where).read_into(0, np.zeros(where.length, np.uint8))
    return caught.value


def test_a_whole_file_is_read(filesystem: FileSystem, file: Path) -> None:
    assert read(filesystem, at(file)) == CONTENT


@pytest.mark.parametrize("length", [0, 1, 1_000, len(CONTENT) - 77])
def test_a_range_of_a_file_is_read(filesystem: FileSystem, file: Path, length: int) -> None:
    assert read(filesystem, at(file, 77, length, len(CONTENT))) == CONTENT[77 : 77 + length]


def test_an_empty_file_is_read_into_an_empty_buffer(filesystem: FileSystem, tmp_path: Path) -> None:
    (tmp_path / "0.jpg").touch()
    assert read(filesystem, at(tmp_path / "0.jpg", length=0)) == b""


def test_the_buffer_may_be_part_of_a_larger_one(filesystem: FileSystem, file: Path) -> None:
    """As in a slab: bytes around the sample do not change."""
    slab = memoryview(bytearray(b"\xff" * (len(CONTENT) + 20)))
    FileReader(filesystem, lambda _: at(file)).read_into(0, slab[10:-10])
    assert bytes(slab) == b"\xff" * 10 + CONTENT + b"\xff" * 10


@pytest.mark.parametrize("length", [0, len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_buffer_of_another_length_is_refused_with_both_lengths(
    filesystem: FileSystem, file: Path, length: int
) -> None:
    with pytest.raises(ConfigError, match=f"test://1.jpg must have 10240 bytes, got {length}"):
        FileReader(filesystem, lambda _: at(file)).read_into(0, np.zeros(length, np.uint8))


@pytest.mark.parametrize("size", [0, len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_file_of_another_size_is_not_the_one_that_was_listed(filesystem: FileSystem, file: Path, size: int) -> None:
    file.write_bytes((CONTENT + b"more")[:size])
    assert reason(filesystem, at(file)) == f"the file has {size} bytes now, 10240 when the dataset was listed"


@pytest.mark.parametrize("file_bytes", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_pack_of_samples_of_another_size_is_not_the_one_that_was_listed(
    filesystem: FileSystem, file: Path, file_bytes: int
) -> None:
    where = at(file, 0, 10_000, file_bytes)
    assert reason(filesystem, where) == f"the file has 10240 bytes now, {file_bytes} when the dataset was listed"


def test_a_deleted_file_is_named(filesystem: FileSystem, file: Path) -> None:
    file.unlink()
    error = not_given(filesystem, at(file))
    assert error.reason == "the file is gone since the dataset was listed"
    assert error.is_missing


def test_a_file_that_went_with_its_folder_is_away_and_not_just_missing(filesystem: FileSystem, tmp_path: Path) -> None:
    """A mount may be unavailable for a while."""
    error = not_given(filesystem, at(tmp_path / "mount" / "1.jpg"))
    assert error.reason == "the file is gone since the dataset was listed, and so is its folder"
    assert not error.is_missing


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENOTCONN])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_an_error_of_a_local_file_may_pass(file: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str) -> None:
    def fail(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    assert not_given(LocalFileSystem(), at(file)).reason == f"reading failed: [Errno {code}] {os.strerror(code)}"


def test_what_is_wrong_with_a_file_for_good_is_not_a_storage_error(filesystem: FileSystem, file: Path) -> None:
    file.write_bytes(CONTENT[:-1])
    with pytest.raises(BadSampleError) as caught:
        read(filesystem, at(file))
    assert not isinstance(caught.value, StorageError)


def test_reading_a_part_of_a_file_brings_no_other_part_from_disk(tmp_path: Path) -> None:
    """Twenty samples of 40 kB in a row, as the first of a file of 12 MB. The kernel would take this for a sequence."""
    path, sample = tmp_path / "packed", 40_000
    with path.open("wb") as out:
        out.write(os.urandom(300 * sample))
        out.flush()
        os.fsync(out.fileno())
    whole = Span(str(path), 0, 300 * sample)
    drop([whole])
    if resident_share([whole]):
        pytest.skip("the temporary folder is in memory, so its files are never read from disk")
    for i in range(20):
        read(LocalFileSystem(), at(path, i * sample, sample, 300 * sample))
    assert resident_share([Span(str(path), 0, 20 * sample)]) == 1
    assert resident_share([Span(str(path), 21 * sample, 279 * sample)]) == 0


def test_a_folder_in_the_place_of_a_file_is_no_sample(filesystem: FileSystem, file: Path) -> None:
    file.unlink()
    file.mkdir()
    assert reason(filesystem, at(file, length=file.stat().st_size))


def test_a_pipe_or_a_device_in_the_place_of_a_file_is_an_error_and_no_wait(file: Path) -> None:
    for put in (lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero")):
        file.unlink()
        put()
        assert reason(LocalFileSystem(), at(file)) == "it is not a file any more"


def test_a_name_cannot_forge_lines_of_a_log() -> None:
    error = BadSampleError("data/a\n[mbaas] all is well.jpg", "it is empty")
    assert str(error) == r"cannot prepare 'data/a\n[mbaas] all is well.jpg': it is empty"
    assert error.uri == "data/a\n[mbaas] all is well.jpg"


def test_a_file_that_may_not_be_read_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    denied = "this process has no permission to read the file"
    assert reason(PyFileSystem(Local(PermissionError(13, "Permission denied"))), at(file)) == denied
    monkeypatch.setattr(os, "open", refuse)
    assert reason(LocalFileSystem(), at(file)) == denied


def test_short_reads_are_continued(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:1_000]], offset))
    assert read(LocalFileSystem(), at(file, 77, 9_999, len(CONTENT))) == CONTENT[77 : 77 + 9_999]


def test_a_file_that_ends_while_it_is_read_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, views, offset: 0 if offset >= 4_000 else preadv(fd, [views[0][:4_000]], offset),
    )
    assert not_given(LocalFileSystem(), at(file)).reason == "the file ended after 4000 of 10240 bytes"


def test_a_reader_asks_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*args: object) -> int:
        calls.append(args)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    assert not_given(LocalFileSystem(), at(file)).reason == "reading failed: [Errno 5] Input/output error"
    assert len(calls) == 1


def test_no_descriptor_is_left_open(filesystem: FileSystem, file: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for length in (len(CONTENT), 5):
        for _ in range(5):
            try:
                read(filesystem, at(file, length=length))
            except BadSampleError:
                assert length == 5
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def retry(pauses: list[float], *, attempts: int = 3) -> Retrying:
    return retrying(attempts=attempts, sleep=pauses.append)


def test_a_passing_fault_of_a_remote_store_is_tried_again(file: Path) -> None:
    store = Local(OSError("connection reset"), TimeoutError("slow"))
    pauses: list[float] = []
    buffer = np.zeros(len(CONTENT), np.uint8)
    PatientReader(FileReader(PyFileSystem(store), lambda _: at(file)), retry(pauses)).read_into(0, buffer)
    assert buffer.tobytes() == CONTENT
    assert (store.opened, len(pauses)) == (3, 2)


def test_after_the_last_attempt_the_last_fault_is_told(file: Path) -> None:
    store = Local(OSError("first"), OSError("second"), OSError("third"), OSError("fourth"))
    message = reason(PyFileSystem(store), at(file), retry=retry([]))
    assert re.fullmatch(r"reading failed: third \(3 attempts in [\d.]+ (µs|ms|s)\)", message)
    assert store.opened == 3


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), PermissionError(13, "denied")])
def test_what_a_retry_cannot_mend_is_not_tried_again(file: Path, error: Exception) -> None:
    if isinstance(error, FileNotFoundError):
        file.unlink()
    store = Local(error)
    pauses: list[float] = []
    reason(PyFileSystem(store), at(file), retry=retry(pauses))
    assert (store.opened, pauses) == (1, [])


def test_threads_share_a_reader(filesystem: FileSystem, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.jpg" for i in range(40)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 5_000)
    reader = FileReader(filesystem, lambda i: at(paths[i], length=5_000))

    def read_one(i: int) -> bool:
        buffer = np.zeros(5_000, np.uint8)
        reader.read_into(i % 40, buffer)
        return bool((buffer == i % 40).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read_one, range(400)))


class ThrottledError(Exception):
    """Exception as raised by storage clients written in Python."""


@pytest.mark.parametrize(
    ("error", "reason", "passes"),
    [
        (ThrottledError("SlowDown:\n reduce your rate"), "ThrottledError: SlowDown: reduce your rate", True),
        (ThrottledError(), "ThrottledError", True),
        (TypeError("no len()"), "TypeError: no len()", False),
        (KeyError("Contents"), "KeyError: 'Contents'", False),
        (ValueError("\x1b[2J"), r"'ValueError: \x1b[2J'", False),
        (OSError("HTTP status 503"), "HTTP status 503", True),
    ],
)
def test_whatever_a_file_system_raises_is_said_of_the_sample(
    monkeypatch: pytest.MonkeyPatch, file: Path, error: Exception, reason: str, passes: bool
) -> None:
    """An error of any other type would count as a bug in mbaas and fail the whole block."""

    def open_input_file(self: Local, path: str) -> None:
        raise error

    monkeypatch.setattr(Local, "open_input_file", open_input_file)
    with pytest.raises(BadSampleError) as caught:
        read(PyFileSystem(Local()), at(file))
    assert caught.value.reason == f"reading failed: {reason}"
    assert isinstance(caught.value, StorageError) == passes


def test_that_there_is_no_memory_says_nothing_about_a_sample(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    def open_input_file(self: Local, path: str) -> None:
        raise MemoryError

    monkeypatch.setattr(Local, "open_input_file", open_input_file)
    with pytest.raises(MemoryError):
        read(PyFileSystem(Local()), at(file))


def test_a_file_system_that_cannot_tell_what_is_there_leaves_a_missing_file_missing(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    file.unlink()
    monkeypatch.setattr(Local, "get_file_info", lambda self, paths: [])
    error = not_given(PyFileSystem(Local()), at(file))
    assert error.reason == "the file is gone since the dataset was listed, and so is its folder"
