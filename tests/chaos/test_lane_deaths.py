"""In a feed with lanes, any process may die: consumers miss nothing, get nothing twice, and continue."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

import mbaas
from mbaas import transforms as T
from mbaas.chaos.participants import kill
from mbaas.errors import FeedNotFoundError
from support.processes import cache_node_pids, coordinator_pid, lane_pids, prep_worker_pids
from support.trials import Recorder, Trials, record_epoch, result
from support.waiting import wait_until

pytestmark = pytest.mark.chaos

SAMPLES, LANES, DEATHS = 2011, 2, 3


@pytest.fixture
def laned(serve_small):
    """Two lanes and two workers. A lane has staging for four blocks, and 50 or 51 blocks per epoch."""
    with serve_small(
        SAMPLES,
        T.RandomHorizontalFlip(),
        prep_workers=2,
        staging=mbaas.Staging(lanes=LANES),
        timeouts=mbaas.Timeouts(lease_s=5.0),
    ) as feed:
        yield feed


def lane_pid(feed):
    (pid,) = wait_until(lambda: lane_pids(feed.name), "the lane's coordinator is up")
    return pid


def a_worker(feed):
    return wait_until(lambda: prep_worker_pids(feed.name), "a worker is up")[0]


def children(feed):
    return sorted(prep_worker_pids(feed.name) + cache_node_pids(feed.name))


VICTIMS = {
    "a lane's coordinator": lane_pid,
    "the main coordinator": lambda feed: coordinator_pid(feed.name),
    "a prep worker": a_worker,
}


@pytest.mark.long
@pytest.mark.parametrize("victim", VICTIMS)
def test_consumers_miss_nothing_whoever_dies(laned, victim):
    """Two consumers over two epochs, with three kills in the first. `test_chaos_run` is the short version."""
    with Trials(laned.name) as trials, mbaas.join(laned.name, consumer="me", format="numpy") as loader:
        other = trials.join("other")
        assert other.pid
        running = other.epochs(2)
        recorder, kept = Recorder(), []
        for number, batch in enumerate(loader, 1):
            recorder.add(batch)
            kept = [*kept[-2:], batch]
            if number % 15 == 0 and number <= 15 * DEATHS:
                kill(VICTIMS[victim](laned))
        record = recorder.record(loader.ledger)
        del batch, kept
        records = [record, record_epoch(loader), *result(running)]
    digests: dict[int, str] = {}
    for record in records:
        assert record.flaws(range(SAMPLES)) == []
        assert digests.setdefault(record.ledger.feed_epoch, record.row_digest) == record.row_digest
    status = laned.status()
    assert status.failed is None
    assert status.inexact_epochs == 0
    wait_until(lambda: len(laned.status().workers) == 2, "both workers are up")


def test_workers_and_caches_outlive_both_coordinators(laned):
    before = children(laned)
    with mbaas.join(laned.name, consumer="me", format="numpy") as loader:
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
        kill(lane_pid(laned))
        kill(coordinator_pid(laned.name))
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
    assert children(laned) == before
    assert any("the coordinator was restarted" in note for note in laned.status().notes)


@pytest.mark.long
def test_a_lane_that_stands_still_for_good_is_named_and_started_anew(laned):
    with mbaas.join(laned.name, consumer="me", format="numpy", wait_timeout_s=90.0) as loader:
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
        stopped = lane_pid(laned)
        os.kill(stopped, signal.SIGSTOP)
        try:
            wait_until(lambda: any("lane 1 does not answer" in w for w in laned.status().waits_for), "it is named")
            assert record_epoch(loader).flaws(range(SAMPLES)) == []
            assert lane_pid(laned) != stopped
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGKILL)
    assert any("lane 1 does not answer, and is restarted" in note for note in laned.status().notes)
    assert "SERVING -> SILENT" in "\n".join(laned.story("lane 1"))


@pytest.mark.long
def test_a_killed_consumer_is_removed_in_all_lanes(laned):
    laned.announce(["one", "victim"])
    with Trials(laned.name) as trials:
        victim, one = trials.join("victim"), trials.join("one")
        result(victim.take(3))
        running = one.epochs(2)
        kill(victim.pid)
        for record in result(running):
            assert record.flaws(range(SAMPLES)) == []
        wait_until(lambda: {m.name for m in laned.status().members} == {"one"}, "the victim is removed")
        notes = [note for note in laned.status().notes if "victim was removed" in note]
        assert [any(f"lane {lane}: " in note for note in notes) for lane in range(LANES)] == [True] * LANES
        result(one.close())
        wait_until(lambda: laned.status().staged_bytes == 0, "all staged bytes are given back")


def test_a_feed_that_is_stopped_while_a_lane_restarts_leaves_nothing(serve_small):
    feed = serve_small(SAMPLES, prep_workers=1, staging=mbaas.Staging(lanes=LANES))
    kill(lane_pid(feed))
    feed.stop()
    with pytest.raises(FeedNotFoundError):
        mbaas.connect(feed.name)
    wait_until(lambda: not children(feed) + lane_pids(feed.name), "nobody is left")
