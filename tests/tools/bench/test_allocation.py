"""Ways to divide workers between jobs: each keeps to the pool, and feeds need no pause and no knowledge of needs."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

import pytest
from rich.console import Console

from benchmarks.allocation import real, simulation
from benchmarks.allocation.policies import AtEvents, by_surplus, equal_shares, first_come, in_proportion
from benchmarks.allocation.report import Report, figures, tables
from benchmarks.allocation.simulation import (
    BOUND,
    EQUAL,
    OURS,
    measure,
    measure_static,
    policies,
    settled_rates,
    simulate,
)
from benchmarks.allocation.workload import KINDS, POOL, TrainingRun, at_once, pool_of, workload
from mbaas.model.curves import ThroughputCurve

LINE = ThroughputCurve.linear(100)


def run(name: str, need: float, *, arrives_s: float = 0.0, minutes: float = 1.0) -> TrainingRun:
    """A job that needs so many workers and takes so many minutes if it never waits."""
    return TrainingRun(
        name=name, arrives_s=arrives_s, samples=need * 100 * minutes * 60, step_per_s=need * 100, prep=LINE
    )


THREE = [run("0-a", 4.0), run("1-b", 1.0), run("2-c", 2.5)]


def test_the_rules_divide_as_they_are_called() -> None:
    """7 workers for needs of 4, 1 and 2.5: equal 2.3 each, in proportion 3.7, 0.9 and 2.3, in order 4, 1 and 2."""
    assert [*equal_shares(THREE, 7).values()] == [3, 2, 2]
    assert [*in_proportion(THREE, 7).values()] == [4, 1, 2]
    assert [*first_come(THREE, 7).values()] == [4, 1, 2]
    assert [*first_come(THREE, 4).values()] == [4, 0, 0]
    assert [*in_proportion(THREE, 2).values()] == [1, 1, 0]


def test_a_lone_job_takes_as_long_as_its_workers_need() -> None:
    """6,000 samples at 100/s each: 4 workers take 15 s, one takes 60 s."""
    job = run("0-a", 4.0, minutes=0.25)
    assert simulate([job], AtEvents(equal_shares, 4)) == {"0-a": 15.0}
    assert simulate([job], AtEvents(equal_shares, 1)) == {"0-a": 60.0}


def test_a_pause_and_a_window_cost_their_time() -> None:
    """b arrives at 10 s, begins at 40 s, and a pauses for 16 s then. Without both, a and b take 60 s each."""
    jobs = [run("0-a", 1.0), run("1-b", 1.0, arrives_s=10.0)]
    assert simulate(jobs, AtEvents(equal_shares, 4)) == {"0-a": 60.0, "1-b": 70.0}
    paused = simulate(jobs, AtEvents(equal_shares, 4, window_s=30.0, pause_s=16.0))
    assert paused == {"0-a": 76.0, "1-b": 100.0}


class Watched:
    """A policy that checks that no more workers work than the pool has, a lone worker of a feed apart."""

    def __init__(self, policy: simulation.Policy, pool: int) -> None:
        self.changes, self._policy, self._pool = 0, policy, pool

    def workers(self, active: Sequence[TrainingRun], now: float) -> Mapping[str, float]:
        found = self._policy.workers(active, now)
        assert found.keys() == {job.name for job in active}
        assert sum(found.values()) <= self._pool + 1e-9
        return found

    def trained(self, served: Mapping[str, float]) -> None:
        self._policy.trained(served)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [8, 13])
def test_no_policy_uses_more_than_the_pool_and_all_jobs_end(jobs: int) -> None:
    runs, pool = workload(jobs, seed=3), pool_of(jobs)
    for make in policies(jobs, pool, seed=3).values():
        ends = simulate(runs, Watched(make(), pool))
        assert len(ends) == jobs
        assert all(ends[each.name] >= each.arrives_s + each.least_s - 1e-6 for each in runs)


@pytest.mark.slow
def test_feeds_that_measure_come_close_to_those_who_know_and_beat_a_pool_for_each() -> None:
    """Eight jobs on 18 workers, the mean of three workloads."""
    found = {outcome.policy: outcome for outcome in measure(8, seeds=3, tell=lambda _: None)}
    ours, known = found[OURS], found["in proportion to need"]
    assert ours.stall < known.stall + 0.05
    assert ours.makespan_s < 0.8 * found["a pool for each"].makespan_s
    assert ours.makespan_s <= found["A-Dloader, 30 s window, 16 s pause"].makespan_s
    assert found[BOUND].makespan_s <= min(outcome.makespan_s for outcome in found.values())
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(tables(Report(tuple(found.values()), tuple(measure_static(8, seeds=1)), ())))
    text = console.export_text()
    assert "8 jobs, 18 workers, simulated" in text
    assert "8 jobs at once, 18 workers, simulated" in text
    assert len(figures(Report(tuple(found.values()), (), ()))["outcomes"]) == 7


@pytest.mark.slow
def test_a_dloaders_rule_gives_more_in_all_than_equal_shares() -> None:
    """Rates are 280 d up to 6 workers, then 140 more for each.

    The rule gives 8, 1, 3, 1, 2, 1, 1 and 1 of 18 workers: 1,960 + 180 + 840 + 260 + 560 + 280 + 280 + 280 = 4,640.
    With two workers each, jobs get 4 x 560 + 180 + 260 + 350 + 420 = 3,450 samples/s; two of them have a third worker.
    """
    rule, equal = (AtEvents(rule, POOL) for rule in (by_surplus, equal_shares))
    jobs = at_once(8, seed=0)
    assert sum(settled_rates(jobs, rule).values()) == pytest.approx(4640)
    assert 3450 <= sum(settled_rates(jobs, equal).values()) <= 3450 + 2 * 280
    found = {each.policy: each for each in measure_static(8, seeds=3)}
    assert found[OURS].samples_per_s > 0.9 * 4640
    assert found[EQUAL].samples_per_s < found[OURS].samples_per_s


def test_a_workload_has_every_kind_equally_often() -> None:
    names = [each.name.partition("-")[2] for each in workload(64, seed=1)]
    assert sorted(names) == sorted([kind.name for kind in KINDS] * 8)
    assert (pool_of(8), pool_of(64)) == (POOL, 8 * POOL)
    assert math.isfinite(min(each.fetch_per_s for each in workload(8, seed=0)))


def test_real_jobs_are_those_of_the_simulation_slower_and_shorter() -> None:
    """Workers prepare 100 in place of 280 samples/s, and jobs need half as many of 9 in place of 18 workers."""
    for job, small in zip(workload(8, seed=0), real.jobs(0.1), strict=True):
        assert small.name == job.name
        assert small.arrives_s == pytest.approx(job.arrives_s / 10)
        assert small.step_per_s == pytest.approx(min(job.step_per_s, job.fetch_per_s) * 100 / 280 / 2)
        assert small.samples == pytest.approx(job.samples / 10 * 100 / 280 / 2)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_real_feeds_share_workers_and_tell_what_it_gained(no_ray: None) -> None:
    """The first one takes most workers, needs fewer than one, and lends to the second, which needs four."""
    runs = [run("00-light", 0.5, minutes=1), run("01-heavy", 4.0, arrives_s=1.0, minutes=0.5)]
    lent, alone = real.measure(runs, rounds=1, tell=lambda _: None)
    assert {job.name for job in lent.jobs} == {job.name for job in alone.jobs} == {"00-light", "01-heavy"}
    assert lent.moves_s
    assert not alone.moves_s
    assert any("borrowed" in change.causes for change in lent.changes["01-heavy"])
