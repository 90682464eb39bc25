"""The bandwidth model gives a cache node sound advice. MB is 10^6 bytes, speeds are per thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.cache.stats import Speedometer, TransferSums
from mbaas.model.tiers import (
    AGAIN,
    STEADY_LOOKS,
    Admission,
    Advisor,
    DiskOrder,
    DiskRoom,
    FetchSpeeds,
    UpcomingBytes,
    admissions,
)

MB = 10**6


def disks(*mb_per_s: float | None) -> DiskOrder:
    """Disks a, b, ... with these speeds; None is not measured."""
    order = DiskOrder([*"abcd"[: len(mb_per_s)]])
    for index, rate in enumerate(mb_per_s):
        if rate is not None:
            order.measured(index, rate * MB)
    return order


def test_a_disk_is_used_until_both_rates_are_known_and_it_is_no_faster() -> None:
    order = disks(None)
    assert order.weigh(None) == order.weigh(80.0 * MB) == []
    assert order.used == [0]
    order.measured(0, 80.0 * MB)
    assert order.weigh(80.0 * MB) == ["the disk a is not used: a thread gets 80 MB/s from it, and 80 MB/s from storage"]
    assert order.used == []
    order.measured(0, 70.0 * MB)
    assert order.weigh(80.0 * MB) == [], "it is reported once"


def test_a_disk_that_was_no_faster_must_be_a_quarter_faster_to_be_used_again() -> None:
    order = disks(79)
    order.weigh(80.0 * MB)
    order.measured(0, 99.0 * MB)
    assert order.weigh(80.0 * MB) == []
    assert order.used == []
    order.measured(0, 101.0 * MB)
    (told,) = order.weigh(80.0 * MB)
    assert told.startswith("the disk a is used again")
    order.measured(0, 81.0 * MB)
    assert order.weigh(80.0 * MB) == []
    assert order.used == [0]


def test_each_disk_is_weighed_and_the_fastest_comes_first() -> None:
    order = disks(50, 900, None, 200)
    assert order.used == [1, 3, 0, 2], "one without a measurement comes last"
    assert order.speed is None
    assert order.at_least(200.0 * MB) == [1, 3]
    (told,) = order.weigh(60.0 * MB)
    assert told.startswith("the disk a is not used")
    assert order.used == [1, 3, 2]
    order.measured(2, 950.0 * MB)
    assert order.used == [2, 1, 3]
    assert order.speed == 200 * MB


def test_a_disk_that_failed_is_named_once_and_never_used_again() -> None:
    order = disks(50, 900)
    (told,) = order.failed(1, "its folder was removed")
    assert told == (
        "the disk b is dropped: its folder was removed; its samples are read from storage, and other disks stay in use"
    )
    assert order.failed(1, "it hangs") == []
    order.measured(1, 5000.0 * MB)
    assert order.weigh(20.0 * MB) == []
    assert order.used == [0]
    (told,) = order.failed(0, "it hangs")
    assert told.endswith("read from storage")


@given(st.lists(st.tuples(st.sampled_from(["measure", "weigh", "fail"]), st.integers(0, 3), st.integers(1, 300))))
def test_any_schedule_of_measurements_and_failures_uses_only_disks_that_work_and_are_worth_it(
    events: list[tuple[str, int, int]],
) -> None:
    order, speeds, failed = disks(None, None, None, None), dict[int, float](), set[int]()
    for kind, index, number in events:
        if kind == "measure":
            speeds[index] = number * MB
            order.measured(index, number * MB)
        elif kind == "fail":
            assert bool(order.failed(index, "it hangs")) == (index not in failed)
            failed.add(index)
        else:
            order.weigh(number * MB)
            assert all(speeds[i] > number * MB for i in order.used if i in speeds)
            worth = {i for i in range(4) if speeds.get(i, np.inf) >= AGAIN * number * MB}
            assert set(order.used) >= worth - failed
        assert not failed & set(order.used)
        known = [speeds.get(i, 0.0) for i in order.used]
        assert known == sorted(known, reverse=True)


def test_what_is_on_a_disk_and_in_another_nodes_memory_comes_from_the_faster() -> None:
    order = disks(200, 100)
    assert order.ahead_of_peers(FetchSpeeds(local=5000.0 * MB)) == [], "the network is not known"
    assert order.ahead_of_peers(FetchSpeeds(local=5000.0 * MB, remote=300.0 * MB)) == []
    assert order.ahead_of_peers(FetchSpeeds(local=5000.0 * MB, remote=150.0 * MB)) == [0]
    assert order.ahead_of_peers(FetchSpeeds(local=90.0 * MB, remote=300.0 * MB)) == [0, 1]
    order.weigh(100.0 * MB)
    assert order.ahead_of_peers(FetchSpeeds(remote=10.0 * MB)) == [0], "the other is not used at all"


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
    advisor = Advisor(readahead_bytes=30 * MB)
    found = depths(advisor, STEADY_LOOKS + 2, ahead(), pace_per_s=2000)
    assert found == [30 * MB] * (STEADY_LOOKS - 1) + [2 * MB] * 3


def test_read_ahead_is_deep_at_once_when_storage_is_slower_than_prep() -> None:
    advisor = Advisor(readahead_bytes=30 * MB)
    depths(advisor, STEADY_LOOKS, ahead(), pace_per_s=2000)
    assert depths(advisor, 1, ahead(), pace_per_s=20_000) == [30 * MB]


def test_a_slow_part_of_the_order_is_read_in_time() -> None:
    """18 blocks from disk at 100 MB/s, then 4 MB from storage: 0.1 s. Prep takes 50 ms a block."""
    coming = ahead(disk_mb=1.0, storage_mb=0.0)
    coming.from_storage[15] = 4 * MB
    advisor = Advisor(readahead_bytes=30 * MB)
    found = depths(advisor, STEADY_LOOKS, coming, pace_per_s=2000, disk=100.0 * MB)
    assert 2 * MB < found[-1] < 12 * MB


def test_every_reading_thread_has_something_to_read() -> None:
    """Samples of 10 kB, and 4 threads with two samples each; a block has only one sample."""
    advisor = Advisor(readahead_bytes=30 * MB)
    coming = UpcomingBytes(20, np.full(20, 10_000.0), np.zeros(20))
    assert depths(advisor, STEADY_LOOKS, coming, pace_per_s=1)[-1] == 4 * 2 * 10_000


def test_the_budget_bounds_the_depth() -> None:
    advisor = Advisor(readahead_bytes=MB)
    assert set(depths(advisor, STEADY_LOOKS, ahead(), pace_per_s=2000)) == {MB}


def test_nothing_known_and_nothing_lacking_leave_the_budget() -> None:
    for changes, coming, pace_per_s in (
        ({"storage": None}, ahead(), 2000.0),
        ({}, ahead(), 0.0),
        ({}, ahead(storage_mb=0.0), 2000.0),
        ({}, ahead(blocks=0), 2000.0),
    ):
        advisor = Advisor(readahead_bytes=30 * MB)
        assert depths(advisor, STEADY_LOOKS, coming, pace_per_s, **changes)[-1] == 30 * MB


def test_a_much_smaller_depth_is_told_once() -> None:
    advisor = Advisor(readahead_bytes=30 * MB)
    speeds, told = FetchSpeeds(local=1e12, storage=10.0 * MB), []
    for _ in range(3 * STEADY_LOOKS):
        told += advisor.look_ahead(ahead(), speeds, threads=4, pace_per_s=2000)
    assert told == ["2 MB of at most 30 MB are read ahead: storage keeps up with prep, which could take 20 MB/s"]


def test_speeds_are_those_of_the_reads_that_are_made() -> None:
    """1 MB in 0.5 thread-seconds is 2 MB/s. Less than 0.05 s is ignored; a later 4 MB/s has weight one half."""
    meter = Speedometer()
    meter.update(TransferSums(MB // 10, 0.04, 0.04))
    assert meter.speed is None
    meter.update(TransferSums(MB, 0.5, 0.2))
    assert meter.speed == 2 * MB
    meter.update(TransferSums(MB + 1, 0.54, 0.3))
    assert meter.speed == 2 * MB
    meter.update(TransferSums(3 * MB, 1.0, 0.5))
    assert meter.speed == 3 * MB


def test_a_disk_that_was_read_is_known_better_than_one_that_was_tried_out() -> None:
    meter = Speedometer()
    meter.probed(5.0)
    assert meter.speed == 5
    meter.update(TransferSums(MB, 1.0, 1.0))
    assert meter.speed == MB, "the guess is replaced"
    meter.probed(5.0)
    assert meter.speed == MB


def test_what_is_known_is_told() -> None:
    assert str(FetchSpeeds(local=5e9, storage=2e6)) == "memory 5 GB/s, storage 2 MB/s"


@pytest.mark.parametrize(
    ("sizes", "has_classes", "in_memory", "found"),
    [
        ((60, 50), False, True, [Admission.MISSING, Admission.MISSING]),  # together they hold all, also what memory has
        ((60, 30), False, True, [Admission.NONE, Admission.NONE]),
        ((60, 30), False, False, [Admission.MISSING, Admission.MISSING]),
        ((60, 30), True, True, [Admission.OF_CLASS, Admission.OF_CLASS]),
    ],
)
def test_local_disks_admit_what_memory_lacks_unless_they_hold_all(
    sizes: tuple[int, ...], has_classes: bool, in_memory: bool, found: list[Admission]
) -> None:
    """100 bytes have their home here, of a dataset of 200."""
    rooms = [DiskRoom(size, False) for size in sizes]
    options = {"needed_bytes": 100, "dataset_bytes": 200, "has_classes": has_classes, "in_memory": in_memory}
    assert admissions(rooms, **options) == found
    assert admissions([*rooms, DiskRoom(200, True)], **options) == [*found, Admission.EVERY]
    small = Admission.OF_CLASS if has_classes else Admission.NONE if in_memory else Admission.MISSING
    assert admissions([*rooms, DiskRoom(199, True)], **options) == [*found, small], "a shared folder that is too small"
