"""Threads process each sample once and raise an error only after every thread has finished."""

from __future__ import annotations

import threading
import time

import pytest

from mbaas.prep.process import SampleThreads


@pytest.mark.parametrize("threads", [1, 3])
def test_each_sample_is_worked_on_once(threads: int) -> None:
    crew, seen = SampleThreads(threads), []
    for count in (0, 1, 20):
        crew.run(seen.append, count)
    crew.close()
    assert sorted(seen) == sorted([0, *range(20)])


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_is_raised_when_all_threads_are_done(threads: int) -> None:
    """One thread raises at once, while the other is still at work."""
    crew, done = SampleThreads(threads), []
    failing = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            failing.set()
            raise RuntimeError("a bug")
        assert failing.wait(10)
        time.sleep(0.1)  # a call that did not wait would return meanwhile
        done.append(number)

    with pytest.raises(RuntimeError, match="a bug"):
        crew.run(work, threads)
    assert done == list(range(1, threads))
    crew.close()
