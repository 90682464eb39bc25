"""A coordinator that dies is restarted; workers and caches keep running, and consumers keep their exact position."""

from __future__ import annotations

import time

import pytest
import ray

import mbaas
from mbaas import transforms as T
from mbaas.coordinator import recovery
from mbaas.errors import FeedNotFoundError, FeedRestartingError
from mbaas.prep.worker import FETCH_TIMEOUT_S
from mbaas.tools.chaos.participants import kill, paused
from support.feeds import in_coordinator
from support.processes import cache_node_pids, coordinator_pid, prep_worker_pids
from support.trials import Recorder, record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.chaos

SAMPLES = 2011
DEATHS = 3


def pipeline():
    return T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])


@pytest.mark.alone
def test_consumers_of_a_coordinator_that_dies_miss_nothing_and_wait_less_than_five_seconds(serve_small, ray_clean):
    """Three kills in one epoch, with two consumers; one holds a minibatch of every block."""
    with serve_small(SAMPLES, T.RandomHorizontalFlip(), prep_workers=2) as feed:
        with mbaas.join(feed.name, consumer="alone", format="numpy") as loader:
            undisturbed = [record_epoch(loader) for _ in range(3)]
        digests = {record.ledger.feed_epoch: record.row_digest for record in undisturbed}
        read_before = feed.status().fetched.storage.nbytes
        children = sorted(prep_worker_pids(feed.name) + cache_node_pids(feed.name))
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            recorder, longest_s, kept = Recorder(), 0.0, []
            began = time.monotonic()
            for number, batch in enumerate(loader, 1):
                longest_s = max(longest_s, time.monotonic() - began) if number > 1 else 0.0
                recorder.add(batch)
                kept = [*kept[-2:], batch]
                if number % 8 == 0 and number <= 8 * DEATHS:
                    kill(coordinator_pid(feed.name))
                began = time.monotonic()
            record = recorder.record(loader.ledger)
            del batch, kept
            assert record.flaws(range(SAMPLES)) == []
            assert longest_s < 5.0
            again = record_epoch(loader)
            assert again.flaws(range(SAMPLES)) == []
        status = feed.status()
        assert sorted(prep_worker_pids(feed.name) + cache_node_pids(feed.name)) == children, "they continued"
        assert any("the coordinator was restarted" in note for note in status.notes)
        ledgers = feed.ledger()
        assert ledgers["consumer"].to_pylist() == ["alone"] * 3 + ["me"] * 2, "also from earlier coordinators"
        assert ledgers["exact"].to_pylist() == [True] * 5
        assert status.fetched.storage.nbytes == 0, "caches announced their slabs: nothing was read again"
        assert read_before > 0
        assert digests  # consumers bring the epoch's number, which fixes its order
        assert again.ledger.feed_epoch == record.ledger.feed_epoch + 1


def test_a_consumer_that_leaves_while_the_coordinator_restarts_hands_in_its_last_ledger(serve_small, ray_clean):
    """Its heartbeat, which would have delivered the ledger at once, has already ended."""
    with serve_small(203, T.RandomHorizontalFlip(), prep_workers=1) as feed:
        loader = mbaas.join(feed.name, consumer="me", format="numpy")
        loader._heartbeat.end()
        assert record_epoch(loader).flaws(range(203)) == []
        kill(coordinator_pid(feed.name))
        loader.close()
        ledgers = feed.ledger()
        assert (ledgers["consumer"].to_pylist(), ledgers["exact"].to_pylist()) == (["me"], [True])


def first_status(feed):
    """Status of a feed from the first call that does not fail because the coordinator is restarting."""
    end = time.monotonic() + 30.0
    while True:
        try:
            return feed.status()
        except FeedRestartingError:
            assert time.monotonic() < end, "the coordinator does not come back"


def test_a_status_comes_back_with_the_coordinator_and_a_stop_while_it_restarts_leaves_nothing(serve_small, ray_clean):
    """`mbaas serve` polls constantly, so even the first status must include the caches."""
    feed = serve_small(SAMPLES, T.RandomHorizontalFlip(), prep_workers=1)
    before = feed.status()
    for _ in range(DEATHS):
        kill(coordinator_pid(feed.name))
        status = first_status(feed)
        assert (status.restarts, status.failed) == (1, None)
        assert status.cache_bytes == before.cache_bytes > 0, "the caches that it found have their budgets"
    kill(coordinator_pid(feed.name))
    feed.stop()
    with pytest.raises(FeedNotFoundError):
        mbaas.connect(feed.name)
    wait_until(lambda: not prep_worker_pids(feed.name) + cache_node_pids(feed.name), "workers and caches are gone")


def what_it_waits_for(feed):
    """Resources that the restarting coordinator lacks; () while it cannot answer."""
    try:
        return in_coordinator(feed.name, lambda coordinator: coordinator._adoption.sentences(0.0), timeout_s=5)
    except ray.exceptions.RayError:
        return ()


def test_a_dataset_that_is_not_kept_comes_from_a_cache_that_stands_still_while_the_coordinator_restarts(
    serve_small, ray_clean, monkeypatch
):
    """The table counts as too large for the key-value store.

    Only the cache has it, and the cache is silent for longer than the coordinator waits at a time.
    """
    with (
        serve_small(SAMPLES, T.RandomHorizontalFlip(), prep_workers=1) as feed,
        mbaas.join(feed.name, consumer="me", format="numpy") as loader,
    ):
        layout, dataset = recovery.recall(feed.name)
        monkeypatch.setattr(recovery, "MAX_PACKED_BYTES", 0)
        recovery.remember(feed.name, layout, dataset)
        recorder = Recorder()
        for number, batch in enumerate(loader, 1):
            recorder.add(batch)
            if number == 8:
                (cache,) = cache_node_pids(feed.name)
                with paused(cache):
                    kill(coordinator_pid(feed.name))
                    (said,) = wait_until(lambda: what_it_waits_for(feed), "it says that it waits for the cache")
                    assert "it waits for its 1 cache node to tell it, which did not answer (on " in said
        del batch
        assert recorder.record(loader.ledger).flaws(range(SAMPLES)) == []
        assert cache_node_pids(feed.name) == [cache], "it continued"
        status = feed.status()
        assert (status.failed, status.restarts) == (None, 1)


@pytest.mark.parametrize(
    "others",
    [(prep_worker_pids,), (cache_node_pids,), (prep_worker_pids, cache_node_pids)],
    ids=["prep", "cache", "all"],
)
def test_a_coordinator_that_dies_together_with_the_only_worker_or_cache_costs_no_sample(serve_small, ray_clean, others):
    """All at once, mid-epoch: the first process to return finds none of the others."""
    with (
        serve_small(SAMPLES, T.RandomHorizontalFlip(), prep_workers=1) as feed,
        mbaas.join(feed.name, consumer="me", format="numpy") as loader,
    ):
        recorder = Recorder()
        for number, batch in enumerate(loader, 1):
            recorder.add(batch)
            if number == 8:
                pids = [coordinator_pid(feed.name), *(pid for pids_of in others for pid in pids_of(feed.name))]
                for pid in pids:
                    kill(pid)
                killed_at = time.monotonic()
        took_s = time.monotonic() - killed_at
        del batch
        assert len(pids) == 1 + len(others)
        assert took_s < FETCH_TIMEOUT_S / 2, "the remaining worker does not depend on state of the dead one"
        assert recorder.record(loader.ledger).flaws(range(SAMPLES)) == []
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
        status = feed.status()
        assert (status.failed, status.restarts) == (None, 1)
