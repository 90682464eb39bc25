"""The watchdog logs the stacks of all threads during a stall, and is silent otherwise."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from mbaas.prep.process import StallWatchdog

pytestmark = pytest.mark.slow


@pytest.fixture
def log() -> Iterator[tuple[int, int]]:
    """The non-blocking read end and the write end of a pipe."""
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for end in ends:
        os.close(end)


def written(log: tuple[int, int]) -> str:
    try:
        return os.read(log[0], 100_000).decode()
    except BlockingIOError:
        return ""


def a_long_nap() -> None:
    time.sleep(0.6)


def test_work_that_takes_too_long_says_where_it_is(log: tuple[int, int]) -> None:
    with StallWatchdog(0.2, fd=log[1]):
        a_long_nap()
    assert "a_long_nap" in written(log)


def test_work_in_another_thread_is_seen_too(log: tuple[int, int]) -> None:
    """Work that ends in this thread leaves the other thread's work in progress."""
    watch, begun = StallWatchdog(0.2, fd=log[1]), threading.Event()

    def work() -> None:
        with watch:
            begun.set()
            a_long_nap()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(5)
    with watch:
        pass
    thread.join()
    assert "a_long_nap" in written(log)


def test_work_that_goes_on_or_has_ended_is_silent(log: tuple[int, int]) -> None:
    watch = StallWatchdog(2.0, fd=log[1])
    for _ in range(6):
        with watch:
            time.sleep(0.4)
    time.sleep(2.1)
    assert written(log) == ""
