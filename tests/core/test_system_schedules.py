"""In thousands of random schedules of a whole feed, trials get exact epochs and keep going, whatever is lost."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from mbaas.core.cluster.supervisor import Supervisor
from mbaas.core.staging.consumers import ConsumerTable
from mbaas.core.staging.scheduling import Scheduler
from mbaas.core.staging.state import StagingState
from support.system_schedules import System, run_some

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # pure arithmetic, slow on a busy machine

PARTS = 20


def test_every_trial_gets_its_epochs_exactly_and_goes_on_whatever_happens():
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for part in [pool.submit(run_some, range(first, 4_000, PARTS)) for first in range(PARTS)]:
            part.result()


def test_a_seed_always_gives_the_same_schedule():
    first, second = System(11), System(11)
    first.run()
    second.run()
    assert list(map(str, first.story)) == list(map(str, second.story))


def _moved_ahead_without_what_it_holds(self, consumer, block):
    """A former bug: a consumer that moves to another epoch gives up the block that its trial still works on."""
    consumer.cursor = consumer.released = consumer.done = block
    consumer.own_epoch = self.epochs.own_epoch(block)


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (Supervisor, "_match_worker_count", lambda self: None),
        (Supervisor, "_end_silent", lambda self, workers: None),
        (Supervisor, "_died", lambda self, event: None),
        (Supervisor, "_behind", lambda self, name: None),
        (Supervisor, "_node_gone", lambda self, node, reason: None),
        (Supervisor, "_nodes_dead", lambda self, nodes: None),
        (Supervisor, "_overdue", lambda self, worker: None),
        (Supervisor, "_overdue_cache", lambda self, cache: None),
        (Supervisor, "_move_failed", lambda self, reason: None),
        (Supervisor, "_briefing_failed", lambda self, event: None),
        (Supervisor, "_cache_failed", lambda self, event: None),
        (StagingState, "_expire", lambda self, member: None),
        (StagingState, "_put_off", lambda self, event, now: None),
        (StagingState, "_task_failed", lambda self, event, now: None),
        (Scheduler, "drop_unwanted", lambda self: None),
        (Scheduler, "_make_room", lambda self, nbytes, urgent: False),
        (ConsumerTable, "begin_at", _moved_ahead_without_what_it_holds),
    ],
)
def test_the_schedules_catch_a_broken_core(monkeypatch, owner, method, broken):
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(AssertionError, match=r"^seed \d+ at "):
        run_some(range(1_000))  # the rarest failure occurs in one of a hundred seeds
