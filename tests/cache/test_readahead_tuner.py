"""A cache node reports hanging reads in its log without repeating itself."""

from __future__ import annotations

import numpy as np

from mbaas.cache.planner import Planner
from mbaas.cache.read_pool import LATE_S, SPARE_THREADS, HangingReads, Read
from mbaas.cache.stats import Meter
from mbaas.cache.tuner import ReadAheadTuner
from mbaas.samples.order import SampleOrder


def idle_tuner() -> ReadAheadTuner:
    order = SampleOrder(100, seed=0, block_samples=10)
    planner = Planner(order, lambda ids: np.ones(len(ids), np.int64), cache_bytes=0, readahead_bytes=0)
    return ReadAheadTuner(planner, Meter(), None, block_samples=10)


def test_a_read_that_takes_long_is_told_of_again_when_its_time_has_doubled() -> None:
    tuner = idle_tuner()
    begun, other = Read(1000.0, 7), Read(1100.0, 8)

    def logged(read: Read | None, waited_s: float) -> list[str]:
        before = tuner.logged
        hanging = HangingReads(int(waited_s >= LATE_S), int(waited_s >= LATE_S))
        tuner.log_hanging(read, hanging, "file:{}".format, (read or begun).since + waited_s)
        return list(tuner.lines)[len(tuner.lines) - (tuner.logged - before) :]

    assert logged(None, 1e6) == []
    assert logged(begun, LATE_S - 1) == []
    assert logged(begun, 21.0) == ["storage has not given file:7 for 21 s"]
    assert logged(begun, 41.0) == []
    assert logged(begun, 42.0) == ["storage has not given file:7 for 42 s"]
    assert logged(other, 5.0) == []
    assert logged(other, LATE_S) == ["storage has not given file:8 for 20 s"]


def test_that_more_reads_hang_than_can_be_replaced_is_told_once_each_time() -> None:
    tuner, read = idle_tuner(), Read(1000.0, 7)
    for reads in (3, SPARE_THREADS, 40, 41, 2, 33):
        tuner.log_hanging(read, HangingReads(reads, min(reads, SPARE_THREADS)), "file:{}".format, 1021.0)
    assert list(tuner.lines) == [
        "storage has not given file:7 for 21 s, and 2 more hang",
        "40 reads hang, more than the 32 in whose place others read: this node reads less, or nothing, until storage "
        "answers",
        "33 reads hang, more than the 32 in whose place others read: this node reads less, or nothing, until storage "
        "answers",
    ]
