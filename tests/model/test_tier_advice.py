"""The bandwidth model gives a cache node sound advice. MB is 10^6 bytes, speeds are per thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mbaas.cache.stats import TransferSums
from mbaas.cache.tuner import Speedometer
from mbaas.model.tiers import STEADY_LOOKS, Advisor, FetchSpeeds, UpcomingBytes

MB = 10**6


def weighed(advisor: Advisor, **mb_per_s: float) -> list[str]:
    return advisor.weigh(FetchSpeeds(**{name: rate * MB for name, rate in mb_per_s.items()}))


def test_a_disk_is_used_until_both_rates_are_known_and_it_is_no_faster() -> None:
    advisor = Advisor(has_disk=True, readahead_bytes=0)
    assert weighed(advisor, local=5000) == weighed(advisor, disk=50) == weighed(advisor, storage=80) == []
    assert advisor.uses_disk
    assert weighed(advisor, disk=80, storage=80) == [
        "the disk tier is not used: a thread gets 80 MB/s from it, and 80 MB/s from storage"
    ]
    assert not advisor.uses_disk
    assert weighed(advisor, disk=70, storage=80) == [], "it is reported once"


def test_a_disk_that_was_no_faster_must_be_a_quarter_faster_to_be_used_again() -> None:
    advisor = Advisor(has_disk=True, readahead_bytes=0)
    weighed(advisor, disk=79, storage=80)
    assert weighed(advisor, disk=99, storage=80) == []
    assert not advisor.uses_disk
    (told,) = weighed(advisor, disk=101, storage=80)
    assert told.startswith("the disk tier is used again")
    assert weighed(advisor, disk=81, storage=80) == []
    assert advisor.uses_disk


def test_a_node_without_a_disk_has_none_to_use() -> None:
    advisor = Advisor(has_disk=False, readahead_bytes=0)
    assert weighed(advisor, disk=500, storage=1, remote=1) == []
    assert not advisor.uses_disk
    assert not advisor.prefers_disk


def test_what_lies_on_the_disk_and_in_another_nodes_memory_comes_from_the_faster() -> None:
    advisor = Advisor(has_disk=True, readahead_bytes=0)
    weighed(advisor, local=5000, disk=200, storage=20)
    assert not advisor.prefers_disk, "the network is not known"
    weighed(advisor, local=5000, disk=200, storage=20, remote=300)
    assert not advisor.prefers_disk
    weighed(advisor, local=5000, disk=200, storage=20, remote=100)
    assert advisor.prefers_disk
    weighed(advisor, local=5000, disk=15, storage=20, remote=10)
    assert not advisor.prefers_disk, "it is not used at all"


def test_a_block_takes_the_time_of_all_its_bytes_at_the_measured_speeds() -> None:
    """4 MB from storage at 2 MB/s, 8 MB from disk at 4 MB/s, 12 MB written to memory at 6 MB/s: 2 + 2 + 2 s.

    Without a measurement, a tier is as fast as memory.
    """
    storage_bytes, disk_bytes = np.array([4.0, 0.0]) * MB, np.array([8.0, 0.0]) * MB
    speeds = FetchSpeeds(local=6.0 * MB, disk=4.0 * MB, remote=5.0 * MB, storage=2.0 * MB)
    assert speeds.read_s(storage_bytes=storage_bytes, disk_bytes=disk_bytes).tolist() == pytest.approx([6.0, 0.0])
    unknown = FetchSpeeds(local=6.0 * MB)
    assert unknown.read_s(storage_bytes=storage_bytes, disk_bytes=disk_bytes).tolist() == pytest.approx([4.0, 0.0])


def ahead(blocks: int = 20, *, storage_mb: float = 1.0, disk_mb: float = 0.0, samples: int = 100) -> UpcomingBytes:
    """Blocks of 100 samples that each lack this many bytes."""
    return UpcomingBytes(blocks * samples, np.full(blocks, storage_mb * MB), np.full(blocks, disk_mb * MB))


def depths(advisor: Advisor, looks: int, coming: UpcomingBytes, pace_per_s: float, **changes: Any) -> list[int]:
    speeds = FetchSpeeds(**({"local": 1e12, "storage": 10.0 * MB} | changes))
    found = []
    for _ in range(looks):
        advisor.look_ahead(coming, speeds, threads=4, pace_per_s=pace_per_s)
        found.append(advisor.depth_bytes)
    return found


def test_read_ahead_becomes_shallow_when_that_has_been_enough_for_some_time() -> None:
    """4 threads of 10 MB/s read a block of 1 MB in 25 ms.

    Prep takes 100 / 2,000 = 50 ms a block: two blocks suffice.
    """
    advisor = Advisor(has_disk=False, readahead_bytes=30 * MB)
    found = depths(advisor, STEADY_LOOKS + 2, ahead(), pace_per_s=2000)
    assert found == [30 * MB] * (STEADY_LOOKS - 1) + [2 * MB] * 3


def test_read_ahead_is_deep_at_once_when_storage_is_slower_than_prep() -> None:
    advisor = Advisor(has_disk=False, readahead_bytes=30 * MB)
    depths(advisor, STEADY_LOOKS, ahead(), pace_per_s=2000)
    assert depths(advisor, 1, ahead(), pace_per_s=20_000) == [30 * MB]


def test_a_slow_part_of_the_order_is_read_in_time() -> None:
    """18 blocks from disk at 100 MB/s, then 4 MB from storage: 0.1 s. Prep takes 50 ms a block."""
    coming = ahead(disk_mb=1.0, storage_mb=0.0)
    coming.from_storage[15] = 4 * MB
    advisor = Advisor(has_disk=True, readahead_bytes=30 * MB)
    found = depths(advisor, STEADY_LOOKS, coming, pace_per_s=2000, disk=100.0 * MB)
    assert 2 * MB < found[-1] < 12 * MB


def test_every_reading_thread_has_something_to_read() -> None:
    """Samples of 10 kB, and 4 threads with two samples each; a block has only one sample."""
    advisor = Advisor(has_disk=False, readahead_bytes=30 * MB)
    coming = UpcomingBytes(20, np.full(20, 10_000.0), np.zeros(20))
    assert depths(advisor, STEADY_LOOKS, coming, pace_per_s=1)[-1] == 4 * 2 * 10_000


def test_the_budget_bounds_the_depth() -> None:
    advisor = Advisor(has_disk=False, readahead_bytes=MB)
    assert set(depths(advisor, STEADY_LOOKS, ahead(), pace_per_s=2000)) == {MB}


def test_nothing_known_and_nothing_lacking_leave_the_budget() -> None:
    for changes, coming, pace_per_s in (
        ({"storage": None}, ahead(), 2000.0),
        ({}, ahead(), 0.0),
        ({}, ahead(storage_mb=0.0), 2000.0),
        ({}, ahead(blocks=0), 2000.0),
    ):
        advisor = Advisor(has_disk=False, readahead_bytes=30 * MB)
        assert depths(advisor, STEADY_LOOKS, coming, pace_per_s, **changes)[-1] == 30 * MB


def test_a_much_smaller_depth_is_told_once() -> None:
    advisor = Advisor(has_disk=False, readahead_bytes=30 * MB)
    speeds, told = FetchSpeeds(local=1e12, storage=10.0 * MB), []
    for _ in range(3 * STEADY_LOOKS):
        told += advisor.look_ahead(ahead(), speeds, threads=4, pace_per_s=2000)
    assert told == ["2 MB of at most 30 MB are read ahead: storage keeps up with prep, which could take 20 MB/s"]


def test_speeds_are_those_of_the_reads_that_are_made() -> None:
    """1 MB in 0.5 thread-seconds is 2 MB/s. Less than 0.05 s is ignored; a later 4 MB/s has weight one half."""
    meter = Speedometer()
    meter.update("storage", TransferSums(MB // 10, 0.04, 0.04))
    assert meter.speeds.storage is None
    meter.update("storage", TransferSums(MB, 0.5, 0.2))
    assert meter.speeds.storage == 2 * MB
    meter.update("storage", TransferSums(MB + 1, 0.54, 0.3))
    assert meter.speeds.storage == 2 * MB
    meter.update("storage", TransferSums(3 * MB, 1.0, 0.5))
    assert meter.speeds.storage == 3 * MB


def test_a_disk_that_was_read_is_known_better_than_one_that_was_tried_out() -> None:
    meter = Speedometer()
    meter.probed(local=9.0, disk=5.0)
    assert (meter.speeds.local, meter.speeds.disk) == (9, 5)
    meter.update("disk", TransferSums(MB, 1.0, 1.0))
    assert meter.speeds.disk == MB, "the guess is replaced"
    meter.probed(local=9.0, disk=5.0)
    assert meter.speeds.disk == MB


def test_what_is_known_is_told() -> None:
    assert str(FetchSpeeds(local=5e9, storage=2e6)) == "memory 5 GB/s, storage 2 MB/s"
