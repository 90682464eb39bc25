"""An address of mapped memory is resolved to its file and offset."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from mbaas.dataset.readers.huggingface import mapped_files

PAGE = mmap.PAGESIZE


def address_of(memory: mmap.mmap) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


@pytest.mark.parametrize("offset", [0, PAGE])
def test_memory_is_found_in_its_file_until_that_is_replaced(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "a file.bin"
    path.write_bytes(bytes(3 * PAGE))
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 2 * PAGE, access=mmap.ACCESS_READ, offset=offset)
    start = address_of(memory)
    found = mapped_files()
    assert found(start, 0) == (str(path), offset)
    assert found(start + 10, 2 * PAGE - 10) == (str(path), offset + 10)
    assert found(start + 10, 2 * PAGE) is None, "it ends before"
    assert found(0, 1) is None
    (tmp_path / "other").write_bytes(bytes(3 * PAGE))
    (tmp_path / "other").rename(path)
    assert mapped_files()(start, 1) is None


def test_memory_that_is_in_no_file_is_not_found() -> None:
    memory = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert mapped_files()(address_of(memory), 1) is None
