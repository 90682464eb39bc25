"""The bandwidth model agrees with arithmetic by hand; MB is 10^6 bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.model.curves import ThroughputCurve
from mbaas.model.tiers import (
    STORAGE,
    Bandwidths,
    Depth,
    Locality,
    StagingClass,
    StorageClass,
    Tier,
    readahead_depth,
)

MB = 10**6


READERS = 4
"""Threads that read shared storage simultaneously."""


def storage_class(name: str, capacity: int, read: float, *, threads: int = 1) -> StorageClass:
    return StorageClass(name=name, capacity_bytes=capacity, read=ThroughputCurve.flat(read), threads=threads)


def nopfs(**changes: Any) -> Bandwidths:
    """The setup of the NoPFS paper: staging, RAM and SSD with 8, 4 and 2 threads at 111,000, 85,000 and 4,000 MB/s."""
    settings: dict[str, Any] = {
        "staging": StagingClass(capacity_bytes=5_000 * MB, write=ThroughputCurve.flat(111_000 * MB), threads=8),
        "classes": (
            storage_class("RAM", 120_000 * MB, 85_000 * MB, threads=4),
            storage_class("SSD", 900_000 * MB, 4_000 * MB, threads=2),
        ),
        "network_bytes_per_s": 24_000 * MB,
        "storage": ThroughputCurve.through({1: 330 * MB, 2: 730 * MB, 4: 1540 * MB, 8: 2870 * MB}),
        "prep_bytes_per_s": 200 * MB,
    }
    return Bandwidths(**(settings | changes))


def fetch_s(bandwidths: Bandwidths, tier: Tier, nbytes: float) -> float:
    return nbytes / bandwidths.fetch_bytes_per_s(tier, readers=READERS)


OWN_RAM, OWN_SSD = Tier(Locality.OWN, 0), Tier(Locality.OWN, 1)
REMOTE_RAM, REMOTE_SSD = Tier(Locality.REMOTE, 0), Tier(Locality.REMOTE, 1)


def test_a_rate_is_a_line_between_points_through_zero_and_flat_after_the_last() -> None:
    """2 threads give 100 and 4 give 160, so 3 give (100 + 160) / 2 = 130, 1 gives 100 / 2 = 50, and 8 give 160."""
    rate = ThroughputCurve.through({4: 160.0, 2: 100.0})
    assert [rate.rate(threads) for threads in (1, 2, 3, 4, 8)] == [50, 100, 130, 160, 160]
    assert [rate.rate_of_each(threads) for threads in (1, 2, 4, 8)] == [50, 50, 40, 20]


@pytest.mark.parametrize(
    ("tier", "seconds"),
    [
        (OWN_RAM, 42.5 / 21_250),
        (OWN_SSD, 42.5 / 2_000),
        (REMOTE_RAM, 42.5 / 21_250),
        (REMOTE_SSD, 42.5 / 2_000),
        (STORAGE, 42.5 / 385),
    ],
)
def test_fetch_times_of_the_papers_machines(tier: Tier, seconds: float) -> None:
    """42.5 MB; per thread: RAM 85,000 / 4 = 21,250 MB/s, SSD 4,000 / 2 = 2,000, storage 1,540 / 4 = 385.

    The network's 24,000 MB/s is faster than either class, so remote is as fast as local.
    """
    assert fetch_s(nopfs(), tier, 42.5 * MB) == pytest.approx(seconds)


def test_a_slow_network_bounds_what_is_remote_and_nothing_else() -> None:
    """42.5 MB at min(1,000, 21,250) MB/s takes 42.5 ms from a remote RAM; local RAM still takes 2 ms."""
    slow = nopfs(network_bytes_per_s=1_000 * MB)
    assert fetch_s(slow, REMOTE_RAM, 42.5 * MB) == pytest.approx(0.0425)
    assert fetch_s(slow, OWN_RAM, 42.5 * MB) == pytest.approx(0.002)


def test_writing_takes_as_long_as_the_slower_of_preparing_and_storing() -> None:
    """100 MB: prep takes 100 / 200 = 0.5 s, storing 100 / (111,000 / 8) = 7.2 ms, the time without prep."""
    assert 100 * MB / nopfs().write_bytes_per_s == pytest.approx(0.5)
    assert 100 * MB / nopfs(prep_bytes_per_s=float("inf")).write_bytes_per_s == pytest.approx(100 / 13_875)


def test_a_block_from_two_tiers_takes_the_sum() -> None:
    """20 MB of local SSD and 77 MB of storage: 20/2,000 + 77/385 = 0.01 + 0.2, and 97/200 = 0.485 to write."""
    assert nopfs().read_s({OWN_SSD: 20.0 * MB, STORAGE: 77.0 * MB}, readers=READERS) == pytest.approx(0.695)
    blocks = nopfs().read_s(
        {OWN_SSD: np.array([20.0, 0.0]) * MB, STORAGE: np.array([77.0, 38.5]) * MB}, readers=READERS
    )
    assert blocks.tolist() == pytest.approx([0.695, 0.1 + 0.1925])


def test_the_fastest_tier_is_taken() -> None:
    """Remote RAM (21,250) beats local SSD (2,000).

    With a network of 1,000 MB/s it does not, but still beats storage (385).
    """
    assert nopfs().fastest([OWN_SSD, REMOTE_RAM], readers=READERS) == REMOTE_RAM
    assert nopfs(network_bytes_per_s=1_000 * MB).fastest([OWN_SSD, REMOTE_RAM], readers=READERS) == OWN_SSD
    assert nopfs(network_bytes_per_s=1_000 * MB).fastest([REMOTE_SSD], readers=READERS) == REMOTE_SSD
    assert nopfs(network_bytes_per_s=300 * MB).fastest([REMOTE_RAM, REMOTE_SSD], readers=READERS) == STORAGE
    assert nopfs().fastest([], readers=READERS) == STORAGE


def test_own_comes_before_remote_if_both_are_as_fast() -> None:
    assert (
        nopfs().fastest([REMOTE_RAM, OWN_RAM], readers=READERS)
        == nopfs().fastest([OWN_RAM, REMOTE_RAM], readers=READERS)
        == OWN_RAM
    )


def test_classes_that_are_faster_than_storage_are_worth_while_the_fastest_first() -> None:
    """Storage gives 1,540 / 4 = 385 MB/s: a disk of 380 MB/s is not worthwhile, one of 390 MB/s is."""
    assert nopfs(classes=(storage_class("SSD", 6, 4e9), storage_class("RAM", 10, 85e9))).worthwhile(
        readers=READERS
    ) == [1, 0]
    assert nopfs(classes=(storage_class("disk", 9, 380e6),)).worthwhile(readers=READERS) == []
    assert nopfs(classes=(storage_class("disk", 9, 390e6),)).worthwhile(readers=READERS) == [0]
    assert nopfs(classes=()).worthwhile(readers=READERS) == []


def test_even_blocks_need_one_block_ahead() -> None:
    """Reading takes 2 s / 2 threads = 1 s, consuming 10 / 10 = 1 s: while a block is consumed, the next one is read.

    A depth of 1 has no room for the next block until the first one is consumed.
    """
    depth = readahead_depth([2.0] * 6, [10] * 6, consume_bytes_per_s=10, threads=2)
    assert depth == Depth(blocks=2, nbytes=20, keeps_up=True)


def test_a_slow_block_needs_the_time_of_those_before_it() -> None:
    """Consuming takes 1 s per block, reading 0 s except for block 4, which takes 2.5 s.

    Block 4 is due at 4. With depth d its read may begin when block 4 - d is consumed, at 5 - d. So 5 - d + 2.5 <= 4
    must hold, which gives d >= 3.5: 4 blocks.
    """
    depth = readahead_depth([0, 0, 0, 0, 2.5, 0, 0], [1] * 7, consume_bytes_per_s=1, threads=1)
    assert depth == Depth(blocks=4, nbytes=4, keeps_up=True)


def test_the_bytes_are_those_of_the_largest_run() -> None:
    """Depth 2, and the two largest neighbors have 7 + 5 bytes."""
    depth = readahead_depth([0.0] * 4, [3, 7, 5, 1], consume_bytes_per_s=1, threads=1)
    assert (depth.blocks, depth.nbytes) == (1, 7)
    depth = readahead_depth([0.5, 0.5, 0.5, 0.5], [3, 7, 5, 1], consume_bytes_per_s=1, threads=1)
    assert (depth.blocks, depth.nbytes) == (2, 12)


def test_storage_that_is_too_slow_is_told() -> None:
    """4 blocks of 2 s to read and 1 s to consume: 8 s of reading exceed 4 s of consuming.

    With depth 3, block 3 begins when block 0 is consumed, at 1, and arrives at 3, just in time. With depth 2, block 2
    begins at 1 and is due at 2.
    """
    depth = readahead_depth([2.0] * 4, [1] * 4, consume_bytes_per_s=1, threads=1)
    assert depth == Depth(blocks=3, nbytes=3, keeps_up=False)


def waits(read_s: list[float], sizes: list[int], depth: int) -> bool:
    """Return whether a consumer of 1 byte/s that starts after the first ``depth`` blocks waits, by simulation."""
    n, read_end, consumed = len(sizes), [0.0] * len(sizes), [0.0] * len(sizes)
    reader = now = 0.0
    for k in range(n):
        if k >= depth:
            reader = max(reader, consumed[k - depth]) + read_s[k]
            read_end[k] = reader
        if read_end[k] > now + 1e-6:
            return True
        now += sizes[k]
        consumed[k] = now
    return False


BLOCKS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), min_size=1, max_size=14)


@given(blocks=BLOCKS)
def test_the_depth_is_the_smallest_with_which_the_consumer_never_waits(blocks: list[tuple[int, int]]) -> None:
    read_s, sizes = [read / 4 for read, _ in blocks], [size for _, size in blocks]
    depth = readahead_depth(read_s, sizes, consume_bytes_per_s=1, threads=1)
    assert not waits(read_s, sizes, depth.blocks)
    assert depth.blocks == 1 or waits(read_s, sizes, depth.blocks - 1)
    windows = [sum(sizes[i : i + depth.blocks]) for i in range(len(sizes) - depth.blocks + 1)]
    assert depth.nbytes == max(windows)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ThroughputCurve.through({}), r"must have points above 0, got \{\}"),
        (lambda: ThroughputCurve.through({0: 5.0}), r"must ascend from above 0, got \[0.0\]"),
        (lambda: ThroughputCurve.through({1: 0.0}), r"must have points above 0, got \{1: 0.0\}"),
        (lambda: storage_class("SSD", -1, 5), "capacity_bytes of SSD must be at least 0, got -1"),
        (lambda: storage_class("SSD", 1, 5, threads=0), "threads of SSD must be at least 1, got 0"),
        (lambda: storage_class("remote", 1, 5), "may not be called compute, staging, remote, pfs, got 'remote'"),
        (lambda: StagingClass(capacity_bytes=1, threads=0), "threads of staging must be at least 1, got 0"),
        (lambda: nopfs().fetch_bytes_per_s(STORAGE, readers=0), "readers must be at least 1, got 0"),
        (lambda: nopfs(network_bytes_per_s=0.0), "network_bytes_per_s must be above 0, got 0"),
        (lambda: readahead_depth([], [], consume_bytes_per_s=1, threads=1), "at least one, got 0, 0"),
        (lambda: readahead_depth([1], [1, 2], consume_bytes_per_s=1, threads=1), "got 1, 2"),
        (lambda: readahead_depth([1], [1], consume_bytes_per_s=0, threads=1), "above 0, got 0"),
        (lambda: readahead_depth([1], [1], consume_bytes_per_s=1, threads=0), "threads must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
