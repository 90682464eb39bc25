"""Files in shared memory count as left behind if no process maps them."""

from __future__ import annotations

import mmap
import multiprocessing
import uuid

from commandline import SHARED, shared_files, shared_files_left

from mbaas.tools.chaos import usage


def test_files_are_left_that_no_process_has() -> None:
    """Mapped files of other running programs do not count."""
    before, path = shared_files(), SHARED / f"mbaas-test-{uuid.uuid4().hex}"
    path.write_bytes(bytes(8))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 8):
            assert path.name not in shared_files_left(before)
        assert path.name in shared_files_left(before)
    finally:
        path.unlink()


def test_files_of_browsers_are_not_counted() -> None:
    """A browser process that has ended, or does not map a file, may leave the file to another one."""
    before, counted = shared_files(), usage.shared_files()
    path = SHARED / f".org.chromium.{uuid.uuid4().hex}"
    path.write_bytes(bytes(8))
    try:
        assert path.name not in shared_files_left(before) | (usage.shared_files() - counted)
    finally:
        path.unlink()


def test_semaphores_of_a_program_that_runs_are_not_left() -> None:
    """Such as multiprocessing semaphores in Ray's processes."""
    before = shared_files()
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    made = {name for name in shared_files() - before if name.startswith("sem.mp-")}
    assert made
    assert not made & shared_files_left(before)
    del semaphore
