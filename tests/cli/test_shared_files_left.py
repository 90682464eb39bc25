"""What counts as left in shared memory: what no process has."""

from __future__ import annotations

import mmap
import multiprocessing
import uuid

from commandline import SHARED, shared_files, shared_files_left

from mbaas.chaos import usage


def test_files_are_left_that_no_process_has() -> None:
    """Those of programs that run beside are not."""
    before, path = shared_files(), SHARED / f"mbaas-test-{uuid.uuid4().hex}"
    path.write_bytes(bytes(8))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 8):
            assert path.name not in shared_files_left(before)
        assert path.name in shared_files_left(before)
    finally:
        path.unlink()


def test_files_of_browsers_are_not_counted() -> None:
    """A browser's process that has ended, or has no map of a file, leaves it to another one."""
    before, counted = shared_files(), usage.shared_files()
    path = SHARED / f".org.chromium.{uuid.uuid4().hex}"
    path.write_bytes(bytes(8))
    try:
        assert path.name not in shared_files_left(before) | (usage.shared_files() - counted)
    finally:
        path.unlink()


def test_semaphores_of_a_program_that_runs_are_not_left() -> None:
    """As multiprocessing makes them in Ray's processes."""
    before = shared_files()
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    made = {name for name in shared_files() - before if name.startswith("sem.mp-")}
    assert made
    assert not made & shared_files_left(before)
    del semaphore
