"""In random schedules of one staging core, ledgers are exact, bytes are bounded, and no consumer starves.

Events arrive faster and in wilder orders than a feed could produce. `test_system_schedules` has whole feeds.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from mbaas.core.staging.scheduling import Scheduler
from mbaas.core.staging.state import StagingState
from support.schedules import Simulation, run_some

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # pure arithmetic, slow on a busy machine

PARTS = 10


@pytest.fixture(scope="module")
def pool():
    """One process per CPU core, because schedules are pure arithmetic."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield pool


def run_all(pool, seeds, **options):
    """Run a schedule for each seed, and raise the first failure."""
    parts = [pool.submit(run_some, seeds[part::PARTS], **options) for part in range(PARTS)]
    for part in parts:
        part.result()


def test_every_consumer_gets_its_epochs_exactly_whatever_happens(pool):
    run_all(pool, range(1_000))


def test_each_block_is_made_once_while_nobody_dies_or_falls_out_of_step(pool):
    run_all(pool, range(300), calm=True)


def test_consumers_with_several_pipelines_get_their_epochs_exactly(pool):
    run_all(pool, range(1_000), pipelines=4)


def test_each_block_is_made_once_for_all_consumers_with_the_same_pipeline(pool):
    run_all(pool, range(200), calm=True, pipelines=3)


def test_a_feed_that_keeps_all_and_gets_other_pipelines_is_as_exact(pool):
    run_all(pool, range(300), keeps_all=True, pipelines=3)


def test_a_feed_that_keeps_all_is_as_exact(pool):
    run_all(pool, range(500), keeps_all=True)


def test_each_block_is_made_once_for_all_epochs_of_a_feed_that_keeps_all(pool):
    run_all(pool, range(200), calm=True, keeps_all=True)


def test_long_schedules_hold_too(pool):
    run_all(pool, range(100_000, 100_004), steps=1_000)


def _schedules_until_caught(seeds=300):
    for seed in range(seeds):
        try:
            Simulation(seed).run()
        except AssertionError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (StagingState, "_worker_down", lambda self, name, reason, now, *, blame: self.tasks.worker_down(name)),
        (StagingState, "_node_down", lambda self, node, reason: None),
        (StagingState, "_part_unreadable", lambda self, event: None),
        (StagingState, "_expire", lambda self, member: None),
        (StagingState, "_watch", lambda self, cohort, now: None),
        (Scheduler, "drop_unwanted", lambda self: None),
        (Scheduler, "_make_room", lambda self, nbytes, urgent: False),
    ],
)
def test_the_schedules_catch_a_broken_core(monkeypatch, owner, method, broken):
    monkeypatch.setattr(owner, method, broken)
    assert _schedules_until_caught() is not None
