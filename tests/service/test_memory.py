"""Staging stays within its budget for all consumers, and long waits name the consumer that holds too much."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
from service_feeds import augmented

import mbaas
from mbaas import serving
from mbaas.client import stream
from mbaas.coordinator import registry
from mbaas.ray_cluster import resources
from mbaas.samples.order import SampleOrder, Shuffle, id_hash
from mbaas.tools.chaos.participants import paused
from support.processes import coordinator_pid
from support.trials import Recorder, record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_clean")

SAMPLE_BYTES = 32 * 32 * 3 + 16
BUDGET_BYTES = 6 * 64 * SAMPLE_BYTES
"""Room for six minibatches of one block each. An epoch has sixteen."""

STEP_S = 1.5
"""A step of a slow trial."""


@pytest.fixture(scope="module")
def narrow(ray_session, photos_data):
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": BUDGET_BYTES}
    with mbaas.serve(
        "narrow", photos_data, augmented(), cache_bytes=0, staging=mbaas.Staging(readahead_bytes=0), **options
    ) as feed:
        yield feed


def test_a_consumer_that_hoards_views_gets_copies_in_the_end_and_holds_up_nobody(narrow):
    with (
        mbaas.join(narrow.name, consumer="hoarder", format="numpy", wait_timeout_s=20.0) as loader,
        mbaas.join(narrow.name, consumer="other", format="numpy", wait_timeout_s=20.0) as other,
    ):
        hoard, taken, kept = [], Recorder(), Recorder()
        for batch in loader:
            taken.add(batch)
            hoard.append(batch)
        assert taken.record(loader.ledger).flaws(range(1003)) == []
        assert narrow.status().staged_bytes <= BUDGET_BYTES
        for _ in range(2):
            assert record_epoch(other).flaws(range(1003)) == []
            assert narrow.status().staged_bytes <= BUDGET_BYTES
        for batch in hoard:
            kept.add(batch)
        assert kept.record(None).row_digest == taken.record(None).row_digest
        del hoard, batch
        assert record_epoch(loader).flaws(range(1003)) == []


def test_a_trial_that_waits_for_a_slower_one_says_so_and_not_that_prep_is_slow(narrow):
    """The slow trial pauses in a step once staging is full. The other one waits that long, and prep is idle.

    Prep time is not compared, because the machine may be busy.
    """
    with (
        mbaas.join(narrow.name, consumer="fast", format="numpy") as fast,
        mbaas.join(narrow.name, consumer="slow", format="numpy") as slow,
        ThreadPoolExecutor(1) as other,
    ):
        running, seen = other.submit(record_epoch, fast), Recorder()
        for taken, batch in enumerate(slow):
            seen.add(batch)
            if taken == 0:
                wait_until(lambda: narrow.status().staged_bytes > BUDGET_BYTES - 64 * SAMPLE_BYTES, "all room is taken")
                time.sleep(STEP_S)
        assert seen.record(slow.ledger).flaws(range(1003)) == []
        assert running.result(60.0).flaws(range(1003)) == []
        assert fast.ledger.feed_epoch == slow.ledger.feed_epoch
        report = fast.report()
        assert report.peer_stall_s > 0.9 * STEP_S
        assert report.wait_s >= report.peer_stall_s > report.prep_stall_s
        assert slow.report().peer_stall_s < 0.1 * report.peer_stall_s


def test_trials_that_each_hold_a_minibatch_in_an_epoch_of_their_own_all_go_on(narrow):
    """Seven trials, with room for six minibatches. Without copies each would wait for the others forever."""
    order = SampleOrder(1003, 0, 64)

    def rest_of_an_epoch(number):
        first = order.samples_at(Shuffle(3 * number), 0, 64)  # the epoch continues after these
        with mbaas.join(narrow.name, consumer=f"apart-{number}", format="numpy", wait_timeout_s=20.0) as loader:
            counts = {"position": 64, "samples": 64, "id_hash": id_hash(first)}
            loader.load_state_dict({**loader.state_dict(), "feed_epoch": 3 * number, **counts})
            ids = first.tolist()
            for batch in loader:  # holds one minibatch while it waits for the next
                ids.extend(batch["sample_id"].tolist())
            return ids, loader.ledger

    with ThreadPoolExecutor(7) as threads:
        for ids, ledger in threads.map(rest_of_an_epoch, range(7)):
            assert ledger.exact
            assert sorted(ids) == list(range(1003))
    assert narrow.status().staged_bytes <= BUDGET_BYTES


def test_a_long_wait_is_told_to_the_log_and_again_when_it_has_doubled(narrow, monkeypatch, caplog):
    """Warnings start at 0.1 s, when a call returns without a block. A call takes at most half of ``wait_timeout_s``."""
    monkeypatch.setattr(stream, "FIRST_WARNING_S", 0.1)
    with (
        mbaas.join(narrow.name, consumer="stands still", format="numpy") as loader,
        mbaas.join(narrow.name, consumer="waits", format="numpy", wait_timeout_s=2.0) as other,
    ):
        stays = next(iter(loader))
        with pytest.raises(mbaas.WaitTimeoutError):
            record_epoch(other)
        del stays
    told = [record.getMessage() for record in caplog.records if record.name == "mbaas.client.stream"]
    assert 1 <= len(told) <= 4
    slowest = "the slowest consumer, stands still, is at block "
    assert all("consumer 'waits' waited " in text and slowest in text for text in told)


def test_torch_minibatches_are_private_and_may_be_hoarded(narrow):
    with mbaas.join(narrow.name, consumer="collector", wait_timeout_s=20.0) as loader:
        hoard = list(loader)
        assert len(hoard) == 16
        assert loader.ledger.exact


@pytest.mark.parametrize("batch_size", [100, 1003], ids=["across blocks", "bigger than the budget"])
def test_minibatches_that_cross_blocks_need_no_more_than_the_budget(narrow, batch_size):
    with mbaas.join(narrow.name, consumer="big", format="numpy", batch_size=batch_size, wait_timeout_s=20.0) as loader:
        assert record_epoch(loader).flaws(range(1003)) == []


def test_what_a_consumer_gave_back_is_free_again(narrow):
    with mbaas.join(narrow.name, consumer="me", format="numpy") as loader:
        record_epoch(loader)
    wait_until(lambda: narrow.status().staged_bytes == 0, "all staged bytes are given back")


@pytest.mark.parametrize(
    ("cpus", "most", "staged"), [(4, None, 2**30), (32, None, 35 * 2**27), (4, 16, 35 * 2**27), (200, None, 15 * 10**9)]
)
def test_a_feed_stages_what_all_workers_that_it_may_have_need(
    ray_session, photos_data, monkeypatch, cpus, most, staged
):
    """128 MiB for each of two blocks per worker and for three more, at least 1 GiB and at most 15 % of 100 GB."""
    monkeypatch.setattr(resources, "cpus", lambda: cpus)
    monkeypatch.setattr(resources, "store_bytes", lambda **_: {"a": 100 * 10**9})
    monkeypatch.setattr(registry, "in_order", list)  # as if this were the only feed
    monkeypatch.setattr(serving, "_start", lambda fill_in, *_given, **_options: fill_in())
    scaling = mbaas.Scaling(max_prep_workers=most)
    settings = mbaas.serve("filled in", photos_data, augmented(), batch_size=64, scaling=scaling)
    assert settings.staging_bytes == staged


def test_a_feed_without_room_for_what_its_workers_make_says_so(feed_name, photos_data):
    scaling = mbaas.Scaling(max_prep_workers=8)
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": BUDGET_BYTES, "scaling": scaling}
    with mbaas.serve(feed_name, photos_data, augmented(), **options) as feed:
        (note,) = (note for note in feed.status().notes if "staging memory" in note)
        assert "some of 8 prep workers of a node will wait: the staging memory, 1.19 MB, has room for 6 blocks" in note
        with mbaas.join(feed.name, format="numpy") as loader:
            assert record_epoch(loader).flaws(range(1003)) == []


def test_a_coordinator_that_stands_still_is_waited_for_as_long_as_was_said(narrow, monkeypatch, caplog):
    """The first answer is late after 1.5 s plus 0.5 s of grace, and the wait ends after 3.5 s."""
    monkeypatch.setattr(stream, "ANSWER_S", 0.5)
    monkeypatch.setattr(stream, "FIRST_WARNING_S", 0.1)
    with mbaas.join(narrow.name, consumer="me", format="numpy", wait_timeout_s=3.0) as loader:
        batches, pid = iter(loader), coordinator_pid(narrow.name)
        next(batches)
        with paused(pid):
            began = time.monotonic()
            with pytest.raises(mbaas.WaitTimeoutError, match=r"'me' waited 3\.\d* s .*: the feed's coordinator does"):
                deque(batches, maxlen=0)  # blocks received earlier, then none
            assert 3.0 <= time.monotonic() - began < 10.0
        told = [record.getMessage() for record in caplog.records if record.name == "mbaas.client.stream"]
        assert any("'narrow': the feed's coordinator does not answer" in text for text in told), told
        del batches
        assert record_epoch(loader).flaws(range(1003)) == []
