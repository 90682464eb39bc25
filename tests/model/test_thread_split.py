"""Threads are divided between fetch and prep, and among queues."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.model.curves import ThroughputCurve
from mbaas.model.threads import TierBytes, divide_threads, split_threads

PREP = ThroughputCurve(((6, 600),), slope=-20)
"""100 samples/s per thread, with the peak at 6 threads."""

STORAGE = TierBytes(60e6, ThroughputCurve.linear(100e6))
"""60 MB of a minibatch at 100 MB/s per thread."""


def load_time_s(tier: TierBytes, threads: int) -> float:
    return float(tier.seconds(np.array([threads], dtype=np.float64))[0])


def test_load_time_of_a_tier() -> None:
    """6 MB / (3 x 20 MB/s) = 0.1 s."""
    storage = TierBytes(6e6, ThroughputCurve.linear(20e6))
    assert load_time_s(storage, 3) == pytest.approx(0.1)
    assert load_time_s(storage, 0) == math.inf
    assert load_time_s(TierBytes(0, ThroughputCurve.linear(0)), 0) == 0


def split(step_s: float, **changes: object) -> tuple[int, int]:
    """(prep, fetch) threads of 8 for minibatches of 60 samples."""
    found = split_threads(
        **{"total": 8, "prep": PREP, "samples": 60, "tiers": [STORAGE], "step_s": step_s, **changes}  # type: ignore[arg-type]
    )
    assert found.prep + found.fetch + found.idle == 8
    return found.prep, found.fetch


def test_prep_starts_at_its_peak() -> None:
    """60/600 = 0.1 s on 6 threads and 60/200 = 0.3 s on 2: 0.4 s fit a step of 0.5 s."""
    assert split(0.5) == (6, 2)


def test_threads_move_while_a_minibatch_takes_longer_than_the_step() -> None:
    """6+2: 0.1 + 0.3 = 0.4; 5+3: 0.12 + 0.2 = 0.32; 4+4: 0.15 + 0.15 = 0.3. Not beyond: 3+5 is 0.2 + 0.12 = 0.32."""
    assert split(0.35) == (5, 3)
    assert split(0.31) == (4, 4)
    assert split(0.25) == (4, 4)


def test_tiers_are_read_one_after_the_other() -> None:
    """Two tiers with 30 MB each take as long as one with 60 MB."""
    half = TierBytes(30e6, ThroughputCurve.linear(100e6))
    assert split(0.31, tiers=[half, half]) == (4, 4)


def test_threads_stay_when_prep_would_become_the_bottleneck() -> None:
    """90 samples, step 0.2 s. 6+2: 0.15 + 0.3; 5+3: 0.18 + 0.2; 4+4: prep 0.225 s, fetch 0.15 s."""
    found = split_threads(8, prep=PREP, samples=90, tiers=[STORAGE], step_s=0.2)
    assert (found.prep, found.fetch) == (5, 3)
    assert found.reason == (
        "prep takes 180 ms on 5 and fetch 200 ms on 3 of 8 threads: longer than the step of 200 ms, but with one less "
        "prep would be the bottleneck"
    )


def test_nothing_moves_when_prep_is_the_bottleneck() -> None:
    """300/600 = 0.5 s of prep against 0.3 s of fetch and a step of 0.1 s."""
    found = split_threads(8, prep=PREP, samples=300, tiers=[STORAGE], step_s=0.1)
    assert (found.prep, found.fetch) == (6, 2)
    assert found.reason == "prep takes 500 ms on 6 and fetch 300 ms on 2 of 8 threads: prep is the bottleneck"


def test_nothing_moves_for_saturated_storage() -> None:
    """100 MB/s for any number of threads: fetch takes 0.6 s. One thread is enough, and the other stays idle."""
    saturated = TierBytes(60e6, ThroughputCurve(((1, 100e6),), slope=0))
    found = split_threads(8, prep=PREP, samples=60, tiers=[saturated], step_s=0.5)
    assert (found.prep, found.fetch, found.idle) == (6, 1, 1)
    assert "one more to fetch makes it no shorter" in found.reason


def test_fetch_threads_that_make_storage_slower_stay_idle() -> None:
    """A disk reads 150 MB/s with 2 threads and 10 MB/s less with each more. Fetch uses 2 of its 5 threads."""
    disk = TierBytes(60e6, ThroughputCurve(((2, 150e6),), slope=-10e6))
    found = split_threads(8, prep=ThroughputCurve(((3, 600),), slope=0), samples=60, tiers=[disk], step_s=1.0)
    assert (found.prep, found.fetch, found.idle) == (3, 2, 3)
    assert found.fetch_s == pytest.approx(0.4)


def test_prep_keeps_a_thread() -> None:
    """Prep takes 0.01 s and fetch 0.6 s: fetch gets all threads but one."""
    assert split(0.01, samples=1) == (1, 7)
    assert split(0.5, total=8, prep=ThroughputCurve.linear(100)) == (6, 2)


@given(
    total=st.integers(2, 40),
    peak=st.integers(1, 40),
    samples=st.floats(1, 1e4),
    mbytes=st.floats(0, 1e3),
    knee=st.integers(1, 40),
    step_s=st.floats(0.001, 10),
)
def test_the_split_is_never_worse_than_where_it_began(
    total: int, peak: int, samples: float, mbytes: float, knee: int, step_s: float
) -> None:
    prep = ThroughputCurve(((peak, 100.0 * peak),), slope=-5)
    tier = TierBytes(mbytes * 1e6, ThroughputCurve(((knee, 50e6 * knee),), slope=0))
    found = split_threads(total, prep=prep, samples=samples, tiers=[tier], step_s=step_s)
    assert found.prep >= 1
    assert found.fetch >= 1
    assert found.idle == total - found.prep - found.fetch >= 0
    first = min(prep.peak(most=total).count, total - 1)
    assert found.prep <= first
    begun_s = samples / prep.rate(first) + load_time_s(tier, total - first)
    assert found.prep_s + found.fetch_s <= begun_s * (1 + 1e-9)
    if found.prep_s > max(found.fetch_s, step_s):
        assert found.prep == first


@pytest.mark.parametrize(
    ("total", "lengths", "counts"),
    [
        (8, [10, 30], [2, 6]),
        (8, [1, 1, 1], [3, 3, 2]),  # 2.67 each
        (7, [10, 20, 40], [1, 2, 4]),
        (6, [10, 20, 40], [1, 2, 3]),  # 0.86, 1.71, 3.43: the first two fractions are larger
        (4, [100, 1, 1], [2, 1, 1]),  # 3.92, 0.04, 0.04, but no queue waits forever
        (5, [0, 7, 0, 3], [0, 4, 0, 1]),  # 3.5 and 1.5, the earlier one first
        (2, [1, 5, 3], [0, 1, 1]),
        (4, [0, 0], [0, 0]),
        (0, [3, 1], [0, 0]),
        (3, [], []),
    ],
)
def test_threads_follow_the_lengths_of_queues(total: int, lengths: list[int], counts: list[int]) -> None:
    assert divide_threads(total, lengths=lengths) == counts


@given(st.integers(0, 64), st.lists(st.integers(0, 1000), max_size=16))
def test_shares_are_complete_fair_and_in_order(total: int, lengths: list[int]) -> None:
    counts = divide_threads(total, lengths=lengths)
    waiting = [length for length in lengths if length]
    assert sum(counts) == (total if waiting else 0)
    pairs = sorted(zip(lengths, counts, strict=True))
    assert all(count == 0 for length, count in pairs if not length)
    for (short, few), (long, many) in pairwise(pairs):
        assert short == long or few <= many
    if waiting and total >= len(waiting):
        assert all(count >= 1 for length, count in pairs if length)
        fair = [total * length / sum(waiting) for length in lengths]
        if all(f >= 1 for f in fair if f):
            assert all(abs(count - f) < 1 for count, f in zip(counts, fair, strict=True))
