"""Throttled storage has the stated speed, and its log contains every read."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks.throttled import READ, ReadLog, Throttle, measured_bytes_per_s, throttled
from mbaas.dataset import synthetic
from mbaas.errors import ConfigError


def test_transfers_queue_and_idle_time_is_lost() -> None:
    """100 bytes/s. At 0 s, 50 and 100 bytes: 0.5 and 1.5 s. At 1 s, 100: 2.5 s. At 10 s, after a pause: 11 s."""
    throttle = Throttle(100.0)
    asked = ((50, 0.0), (100, 0.0), (100, 1.0), (100, 10.0))
    assert [throttle.book(nbytes, now) for nbytes, now in asked] == [0.5, 1.5, 2.5, 11.0]


def test_a_limit_must_be_above_zero() -> None:
    with pytest.raises(ConfigError, match="got 0"):
        Throttle(0.0)


def test_the_limit_is_what_threads_get(tmp_path: Path) -> None:
    """Never more; on a busy machine, idle time is lost."""
    data = throttled(synthetic(64, height=64, width=64), bytes_per_s=2e6, log=tmp_path / "log")
    assert 0.5 < measured_bytes_per_s(data, seconds=0.5) / 2e6 < 1.05


def test_bytes_are_the_same_and_reads_are_logged(tmp_path: Path) -> None:
    plain = synthetic(5)
    data = pickle.loads(pickle.dumps(throttled(plain, bytes_per_s=1e9, log=tmp_path / "log")))
    length = int(plain.lengths(np.arange(1))[0])
    reader = data.reader()
    for sample in (3, 0, 3):
        ours, theirs = np.empty(length, np.uint8), np.empty(length, np.uint8)
        reader.read_into(sample, ours)
        plain.reader().read_into(sample, theirs)
        assert ours.tobytes() == theirs.tobytes()
    log = ReadLog.of(data)
    assert [reads["sample"].tolist() for reads in log.reads] == [[3, 0, 3]]
    assert log.epoch_bytes(3, together=True) == (2 * length, length, 0)
    assert ReadLog.of(data, but=[os.getpid()]).epoch_bytes(2, together=True) == (0, 0)


def test_threads_do_not_tear_the_log(tmp_path: Path) -> None:
    data = throttled(synthetic(40), bytes_per_s=1e9, log=tmp_path / "log")
    reader, length = data.reader(), int(data.lengths(np.arange(1))[0])

    def read(first: int) -> None:
        for sample in range(first, 40, 4):
            reader.read_into(sample, np.empty(length, np.uint8))

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (reads,) = ReadLog.of(data).reads
    assert sorted(reads["sample"].tolist()) == list(range(40))


def reads_of(*samples: tuple[int, float]) -> np.ndarray:
    return np.array([*samples], READ)


def test_epochs_are_told_apart_by_how_often_a_sample_was_read() -> None:
    """Samples of 10, 20 and 30 bytes; one process read 0 1 0, the other 2 0."""
    reads = (reads_of((0, 1.0), (1, 2.0), (0, 3.0)), reads_of((2, 1.0), (0, 2.0)))
    log = ReadLog(reads, np.array([10, 20, 30]))
    assert log.epoch_bytes(3, together=True) == (60, 10, 10), "0 was read three times"
    assert log.epoch_bytes(3, together=False) == (70, 10, 0), "twice by one, and once by the other"


def test_the_fastest_second() -> None:
    """Reads of 10 bytes end at 0, 0.5, 1.0, 5.0 and 5.1 s, so 20 bytes arrive within one second after the first."""
    reads = reads_of(*((0, at) for at in (0.0, 0.5, 1.0, 5.0, 5.1)))
    log = ReadLog((reads, reads_of()), np.array([10]))
    assert log.fastest_bytes_per_s(1.0) == 20.0
    assert log.fastest_bytes_per_s(0.2) == pytest.approx(50.0)
    assert ReadLog((), np.array([10])).fastest_bytes_per_s() == 0.0
