"""What a cache node tells of its storage."""

from __future__ import annotations

import numpy as np

from mbaas.cache.planner import Planner
from mbaas.cache.read_pool import Read
from mbaas.cache.stats import Meter
from mbaas.cache.tuner import LATE_S, ReadaheadTuner
from mbaas.order import SampleOrder


def test_a_read_that_takes_long_is_told_of_again_when_its_time_has_doubled() -> None:
    order = SampleOrder(100, seed=0, block_samples=10)
    planner = Planner(order, lambda ids: np.ones(len(ids), np.int64), cache_bytes=0, readahead_bytes=0)
    tuner = ReadaheadTuner(planner, Meter(), None, block_samples=10)
    begun, other = Read(1000.0, 7), Read(1100.0, 8)

    def told(read: Read | None, waited_s: float) -> list[str]:
        before = tuner.told
        tuner.watch(read, "file:{}".format, (read or begun).since + waited_s)
        return list(tuner.log)[len(tuner.log) - (tuner.told - before) :]

    assert told(None, 1e6) == []
    assert told(begun, LATE_S - 1) == []
    assert told(begun, 21.0) == ["storage has not given file:7 for 21 s"]
    assert told(begun, 41.0) == []
    assert told(begun, 42.0) == ["storage has not given file:7 for 42 s"]
    assert told(other, 5.0) == []
    assert told(other, LATE_S) == ["storage has not given file:8 for 20 s"]
