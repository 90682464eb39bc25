"""Workers are allocated to jobs as in A-Dloader."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.model.curves import ThroughputCurve
from mbaas.model.lending import Job, allocate

PEAKS_AT_4 = ThroughputCurve(((4, 360),), slope=-20)


def job(name: str, demand: float, **options: object) -> Job:
    """A job whose workers prepare 100 samples/s each."""
    return Job(**{"name": name, "demand_per_s": demand, "prep": ThroughputCurve.linear(100), **options})  # type: ignore[arg-type]


THREE = [job("a", 250), job("b", 310), job("c", 120)]
"""The jobs need 2.5, 3.1 and 1.2 workers: 3 + 4 + 2 = 9."""


@pytest.mark.parametrize(
    ("pool", "workers", "limits", "idle"),
    [
        (12, [3, 4, 2], ["training"] * 3, 3),
        (9, [3, 4, 2], ["training"] * 3, 0),
        (8, [3, 3, 2], ["training", "pool", "training"], 0),  # b has 0.9 too many, c 0.8, a 0.5
        (7, [3, 3, 1], ["training", "pool", "pool"], 0),  # now c
        (6, [2, 3, 1], ["pool"] * 3, 0),  # c keeps its last one; a has 0.5 too many, b 0.1 too few
        (5, [2, 2, 1], ["pool"] * 3, 0),  # a lacks 0.5, b only 0.1
        (4, [1, 2, 1], ["pool"] * 3, 0),  # a lacks 0.5, b 1.1
        (3, [1, 1, 1], ["pool"] * 3, 0),
        (2, [1, 1, 0], ["pool"] * 3, 0),
        (0, [0, 0, 0], ["pool"] * 3, 0),
    ],
)
def test_the_most_over_provisioned_gives_first(pool: int, workers: list[int], limits: list[str], idle: int) -> None:
    allocation = allocate(THREE, pool=pool)
    assert [got.workers for got in allocation.by_job] == workers
    assert [got.limit for got in allocation.by_job] == limits
    assert allocation.idle == idle
    assert allocation.workers == dict(zip("abc", workers, strict=True))


def test_with_no_more_workers_than_jobs_everybody_has_one() -> None:
    """Even a job that needs 3.1."""
    assert allocate(THREE, pool=3).workers == {"a": 1, "b": 1, "c": 1}


def test_a_job_never_gets_more_than_its_prep_can_use() -> None:
    """360 with 4, 340 with 5: 500 is out of reach, and 4 is the most that it can use."""
    (got,) = allocate([job("a", 500, prep=PEAKS_AT_4)], pool=16).by_job
    assert (got.workers, got.limit) == (4, "prep")
    (got,) = allocate([job("a", 270, prep=PEAKS_AT_4)], pool=16).by_job
    assert (got.workers, got.limit) == (3, "training")


def test_a_job_without_demand_keeps_one() -> None:
    allocation = allocate([job("a", 0), job("b", 150)], pool=8)
    assert (allocation.workers, allocation.idle) == ({"a": 1, "b": 2}, 5)


def test_reserved_workers_are_given_up_last() -> None:
    """b needs 3.1 and keeps 4 despite the largest surplus. With a pool of 6, not all of 4 + 3 can be kept."""
    jobs = [job("a", 250, reserved=3), job("b", 310, reserved=4), job("c", 120)]
    assert allocate(jobs, pool=8).workers == {"a": 3, "b": 4, "c": 1}
    assert allocate(jobs, pool=6).workers == {"a": 2, "b": 3, "c": 1}


def test_reserving_more_than_it_can_use_gives_nobody_more() -> None:
    assert allocate([job("a", 120, reserved=6)], pool=8).workers == {"a": 2}


def test_the_last_of_equals_gives_first() -> None:
    assert allocate([job("a", 150), job("b", 150), job("c", 150)], pool=5).workers == {"a": 2, "b": 2, "c": 1}


@pytest.mark.parametrize(
    ("jobs", "pool", "reason"),
    [
        (
            THREE,
            9,
            "a prepares 300 samples/s with 3 of the pool of 9, enough for the 250 samples/s that its training could "
            "consume (these need 2.5)",
        ),
        (
            THREE[1:],
            4,
            "b prepares 300 samples/s with 3 of the pool of 4; the 310 samples/s that its training could consume need "
            "3.1, but other jobs need some too",
        ),
        (
            [job("a", 500, prep=PEAKS_AT_4)],
            8,
            "a prepares 360 samples/s with 4 of the pool of 8, less than the 500 samples/s that its training could "
            "consume, but more workers would not be faster",
        ),
    ],
)
def test_every_share_says_why(jobs: list[Job], pool: int, reason: str) -> None:
    assert allocate(jobs, pool=pool).by_job[0].reason == reason


def literally(needs: list[float], pool: int) -> list[int]:
    """The paper's algorithm, one worker at a time, for a pool larger than the number of jobs."""
    counts = [max(1, math.ceil(need - 1e-6)) for need in needs]
    while sum(counts) > pool:
        givers = [i for i, count in enumerate(counts) if count > 1]
        counts[max(givers, key=lambda i: (round(counts[i] - needs[i], 6), i))] -= 1
    return counts


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=8), st.integers(0, 40))
def test_it_is_what_the_paper_says(demands: list[int], pool: int) -> None:
    """Demands in hundredths of a worker, so that equal excesses are equal."""
    jobs = [job(str(number), demand, prep=ThroughputCurve.linear(100)) for number, demand in enumerate(demands)]
    allocation = allocate(jobs, pool=pool)
    counts = [got.workers for got in allocation.by_job]
    assert sum(counts) + allocation.idle == pool
    assert allocation.idle >= 0
    assert all(count <= j.useful for count, j in zip(counts, jobs, strict=True))
    if pool <= len(jobs):
        assert counts == [1] * pool + [0] * (len(jobs) - pool)
        return
    assert min(counts) >= 1
    wanted = literally([demand / 100 for demand in demands], pool)
    lacks = sorted(round(demand / 100 - count, 6) for demand, count in zip(demands, counts, strict=True))
    assert lacks == sorted(round(demand / 100 - count, 6) for demand, count in zip(demands, wanted, strict=True))


def test_the_least_number_stays_with_an_idle_job_while_others_lack_workers() -> None:
    """a needs none and keeps 3 of 9; b and c, which need 15 each, get the other 6."""
    jobs = [job("a", 0, least=3), job("b", 1500), job("c", 1500)]
    assert allocate(jobs, pool=9).workers == {"a": 3, "b": 3, "c": 3}


def test_jobs_lack_workers_in_inverse_proportion_to_their_weights() -> None:
    """Both need 9 workers, and there are 12: a lacks 2 at weight 2, b lacks 4."""
    jobs = [job("a", 900, weight=2.0), job("b", 900)]
    assert allocate(jobs, pool=12).workers == {"a": 7, "b": 5}


@given(st.integers(2, 6), st.integers(0, 30), st.floats(1, 10), st.data())
def test_a_larger_weight_takes_nothing_from_its_job(number: int, pool: int, weight: float, data: st.DataObject) -> None:
    demands = data.draw(st.lists(st.integers(0, 1500), min_size=number, max_size=number))
    jobs = [job(str(i), demand) for i, demand in enumerate(demands)]
    heavy = [job("0", demands[0], weight=weight), *jobs[1:]]
    assert allocate(heavy, pool=pool).workers["0"] >= allocate(jobs, pool=pool).workers["0"]


@given(
    st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 3), st.integers(1, 8)), min_size=1, max_size=6), st.data()
)
def test_bounds_of_jobs_hold(jobs: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """At least the least number if the pool has that many for all jobs, and at most the most."""
    bounded = [job(str(i), need, least=least, most=most) for i, (need, least, most) in enumerate(jobs)]
    fewest = len(jobs) + 1 + sum(least for _, least, _ in jobs)
    pool = data.draw(st.integers(fewest, fewest + 8))
    allocation = allocate(bounded, pool=pool)
    for got, (_, least, most) in zip(allocation.by_job, jobs, strict=True):
        assert least <= got.workers <= max(least, most)


@given(st.integers(1, 6), st.integers(7, 30), st.data())
def test_a_larger_pool_takes_nothing_from_anybody(number: int, pool: int, data: st.DataObject) -> None:
    demands = data.draw(st.lists(st.integers(0, 1500), min_size=number, max_size=number))
    jobs = [job(str(i), demand, reserved=1 + i % 3) for i, demand in enumerate(demands)]
    small, large = allocate(jobs, pool=pool), allocate(jobs, pool=pool + 1)
    if pool >= sum(min(j.reserved, j.useful) for j in jobs):
        assert all(large.workers[name] >= count for name, count in small.workers.items())
        assert all(small.workers[j.name] >= min(j.reserved, j.useful) for j in jobs)
