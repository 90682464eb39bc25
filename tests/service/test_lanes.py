"""A feed whose blocks are divided between several coordinators delivers the same as with one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from service_feeds import augmented

import mbaas
from mbaas import transforms as T
from mbaas.control import FeedControl
from support.trials import Recorder, Trials, record_epoch, result

SAMPLES, BATCH_SIZE, LANES = 1003, 20, 3
SAMPLE_BYTES = 32 * 32 * 3 + 16
OPTIONS = {"batch_size": BATCH_SIZE, "prep_workers": 2, "staging_bytes": 18 * BATCH_SIZE * SAMPLE_BYTES}
"""Staging for 18 blocks of one minibatch each, six per lane. An epoch has 51."""


@pytest.fixture(scope="module")
def whole(ray_session, photos_data):
    """Twelve epochs of a feed with one lane, and the states of a loader in the first one."""
    with (
        mbaas.serve("one-lane", photos_data, augmented(), **OPTIONS) as feed,
        mbaas.join(feed.name, consumer="me", format="numpy") as loader,
    ):
        recorder, states = Recorder(), {0: json.dumps(loader.state_dict())}
        for number, batch in enumerate(loader, 1):
            recorder.add(batch)
            states[number] = json.dumps(loader.state_dict())
        del batch
        epochs = [recorder.record(loader.ledger), *(record_epoch(loader) for _ in range(11))]
    return epochs, states


@pytest.fixture(scope="module")
def laned(ray_session, photos_data):
    """The same feed in three lanes. All tests share it, so they compare counts before and after."""
    with mbaas.serve("lanes", photos_data, augmented(), staging=mbaas.Staging(lanes=LANES), **OPTIONS) as feed:
        yield feed


def test_bytes_do_not_depend_on_the_number_of_lanes(whole, laned):
    """The first test that uses the feed, so it starts with the first epoch."""
    epochs, _ = whole
    with mbaas.join(laned.name, consumer="me", format="numpy") as loader:
        for expected in epochs[:3]:
            record = record_epoch(loader)
            assert record.flaws(range(SAMPLES)) == []
            assert record.digests == expected.digests
    status = laned.status()
    assert status.lanes == LANES
    assert status.failed is None


def test_consumers_with_other_batch_sizes_share_blocks_that_were_prepared_once(whole, laned):
    """Each epoch's 51 blocks are prepared once, and of a third epoch at most as many as memory holds."""
    sizes = {"one": 20, "two": 33, "three": 64}
    before = laned.status()
    mbaas.announce(laned.name, list(sizes))
    with Trials(laned.name) as trials:
        joined = [trials.join(name, batch_size=size) for name, size in sizes.items()]
        assert all(trial.pid for trial in joined), "on a busy machine processes come later than reservations last"
        running = [trial.epochs(2) for trial in joined]
        records = [result(ref) for ref in running]
        status = laned.status()
    for together in zip(*records, strict=True):
        assert [record.flaws(range(SAMPLES)) for record in together] == [[]] * 3
        assert {record.row_digest for record in together} == {whole[0][together[0].ledger.feed_epoch].row_digest}
    assert status.remade_blocks == before.remade_blocks
    prepared = status.prepared_samples - before.prepared_samples
    assert 2 * SAMPLES <= prepared <= 2 * SAMPLES + 18 * BATCH_SIZE
    assert status.staged_bytes <= status.staging_bytes
    assert sum(status.workers[n].samples for n in range(2)) == status.prepared_samples


def test_a_newcomer_begins_an_epoch_with_the_others_in_all_lanes(whole, laned):
    """It waits for the third epoch, because the start of the second is no longer staged."""
    before = laned.status()
    with Trials(laned.name) as trials:
        early = trials.join("early")
        result(early.take(51))
        first = result(early.rest())
        result(early.take(30))
        late = trials.join("late")
        assert late.pid
        begun = late.rest()
        second, third = result(early.rest()), result(early.rest())
        joined = result(begun)
        status = laned.status()
    assert [record.flaws(range(SAMPLES)) for record in (first, second, third, joined)] == [[]] * 4
    epoch = first.ledger.feed_epoch
    assert [record.ledger.feed_epoch for record in (second, third, joined)] == [epoch + 1, epoch + 2, epoch + 2]
    assert [record.digests for record in (first, second, third)] == [
        record.digests for record in whole[0][epoch : epoch + 3]
    ]
    assert joined.digests == third.digests
    assert status.remade_blocks == before.remade_blocks


@pytest.mark.parametrize("position", [0, 1, 2, 3, 25, 50, 51])
def test_a_state_of_a_feed_of_one_lane_goes_on_exactly_in_three(whole, laned, position):
    epochs, states = whole
    with mbaas.join(laned.name, consumer=f"from-{position}", format="numpy") as loader:
        loader.load_state_dict(json.loads(states[position]))
        assert loader.state_dict() == json.loads(states[position])
        tail = record_epoch(loader)
        assert tail.digests == epochs[0].digests[position:]
        np.testing.assert_array_equal(tail.sample_ids, epochs[0].sample_ids[position * BATCH_SIZE :])
        assert tail.ledger == epochs[0].ledger
        assert record_epoch(loader).digests == epochs[1].digests


@pytest.mark.long
def test_a_consumer_out_of_step_meets_others_at_an_epochs_end_in_all_lanes(whole, ray_clean, photos_data, feed_name):
    """One returns to the middle of the first epoch while the other is in its second. Both stay exact."""
    _, states = whole
    with (
        mbaas.serve(
            feed_name,
            photos_data,
            augmented(),
            staging=mbaas.Staging(lanes=LANES),
            timeouts=mbaas.Timeouts(patience_s=2.0),
            **OPTIONS,
        ) as feed,
        Trials(feed.name) as trials,
    ):
        one, two = trials.join("one"), trials.join("two")
        result(one.take(0))
        result(two.take(0))
        ran = [one.rest(), two.rest()]
        for ref in ran:
            assert result(ref).flaws(range(SAMPLES)) == []
        result(one.take(20))
        result(two.load(json.loads(states[40])))
        tail = result(two.rest())
        running = [one.epochs(3), two.epochs(3)]
        records = [result(ref) for ref in running]
        assert feed.status().inexact_epochs == 0
    assert tail.digests == whole[0][0].digests[40:]
    for epochs in records:
        assert [record.flaws(range(SAMPLES)) for record in epochs] == [[]] * 3
    digests: dict[int, str] = {}
    for record in (record for epochs in records for record in epochs):
        assert digests.setdefault(record.ledger.feed_epoch, record.row_digest) == record.row_digest


@pytest.mark.long
def test_a_consumer_that_stands_still_keeps_others_waiting_once_not_in_each_lane(ray_clean, photos_data, feed_name):
    """Patience ends in the lane with the first wait. The other lanes follow at once, not after 3 s each."""
    with (
        mbaas.serve(
            feed_name,
            photos_data,
            augmented(),
            staging=mbaas.Staging(lanes=LANES),
            timeouts=mbaas.Timeouts(patience_s=3.0),
            **OPTIONS,
        ) as feed,
        Trials(feed.name) as trials,
    ):
        mbaas.announce(feed.name, ["one", "two"])
        idle, one = trials.join("two"), trials.join("one")
        result(idle.take(2))
        began = time.monotonic()
        assert result(one.rest()).flaws(range(SAMPLES)) == []
        assert time.monotonic() - began < 2 * 3.0
        assert sum("two kept one waiting" in note for note in feed.status().notes) == 1
        assert result(idle.rest()).flaws(range(SAMPLES)) == []


def test_a_loop_that_is_left_half_way_goes_on_with_the_next_epoch(whole, laned):
    with mbaas.join(laned.name, consumer="me", format="numpy") as loader:
        loader.load_state_dict(json.loads(whole[1][0]))
        recorder = Recorder()
        for number, batch in enumerate(loader, 1):
            recorder.add(batch)
            if number == 8:
                break
        del batch
        assert recorder.record(None).digests == whole[0][0].digests[:8]
        assert record_epoch(loader).digests == whole[0][1].digests
        assert loader._stream.held_blocks() <= 1


@pytest.mark.long
def test_bad_samples_are_left_out_in_every_lane_and_listed_once(ray_clean, tmp_path, feed_name):
    """Every seventh of 140 files is not an image: 20 bad samples in each of two epochs, for both consumers."""
    (tmp_path / "only").mkdir()
    for number in range(140):
        encoded = cv2.imencode(".png", np.full((8, 8, 3), number, np.uint8))[1].tobytes()
        (tmp_path / "only" / f"{number:03d}.png").write_bytes(b"this is no image" if number % 7 == 3 else encoded)
    data, pipeline = mbaas.read_images(str(tmp_path)), T.Pipeline([T.DecodeImage()])
    options = {"batch_size": 10, "prep_workers": 2, "staging_bytes": 10 * 10 * (8 * 8 * 3 + 16)}
    with (
        mbaas.serve(feed_name, data, pipeline, staging=mbaas.Staging(lanes=3), on_bad_sample="skip", **options) as feed,
        Trials(feed.name) as trials,
    ):
        mbaas.announce(feed.name, ["one", "two"])
        running = [trials.join(name).epochs(2) for name in ("one", "two")]
        records = [record for ref in running for record in result(ref)]
        status = feed.status()
    bad = {skipped.sample_id for skipped in status.skipped}
    assert len(bad) == 20
    assert status.skipped_total >= 40
    for record in records:
        assert record.flaws(set(range(140)) - bad) == []


def test_a_story_is_told_by_all_lanes(whole, laned):
    """Block 4 is the second block of lane 1. A consumer is in every lane."""
    with mbaas.join(laned.name, consumer="me", format="numpy") as loader:
        loader.load_state_dict(json.loads(whole[1][0]))
        record_epoch(loader)
    block = FeedControl.of(laned.name).story("block 4")
    assert block[0] == "lane 1, its block 1:"
    assert "GRANTED" in block[1]
    heads = [line for line in FeedControl.of(laned.name).story("me") if line.startswith("lane")]
    assert heads == [f"lane {number}, blocks counted as in the lane:" for number in range(LANES)]
    with pytest.raises(mbaas.errors.ConfigError, match=r"nothing is known of 'you'.*me"):
        FeedControl.of(laned.name).story("you")


def test_what_cannot_be_in_lanes_is_refused(ray_clean, photos_data, feed_name):
    options = {"batch_size": 400, "prep_workers": 1, "staging_bytes": 25 << 20}
    with pytest.raises(mbaas.ConfigError, match=r"staging.lanes must be at least 1, got 0"):
        mbaas.serve(feed_name, photos_data, augmented(), staging=mbaas.Staging(lanes=0), **options)
    with pytest.raises(mbaas.ConfigError, match=r"at most the blocks of an epoch, 3 of 400 samples, got 4"):
        mbaas.serve(feed_name, photos_data, augmented(), staging=mbaas.Staging(lanes=4), **options)


def cpu_s(pid):
    """CPU time of all threads of a process, as counted by Linux."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_costs_are_the_cpu_time_of_all_processes_of_a_feed(laned):
    """Worker time is compared with the operating system's count.

    The cache node and three coordinators need at least 0.05 s each, because Python alone takes that long to start.
    """
    with mbaas.join(laned.name, consumer="me", format="numpy") as loader:
        record_epoch(loader)
    status = laned.status()
    costs, of_workers = status.costs, sum(cpu_s(worker.pid) for worker in status.workers)
    # worker time after the last part is reported with the next one; Linux counts in hundredths of a second
    assert 0.5 * of_workers < costs.prep_cpu_s <= of_workers + 0.1
    assert costs.cache_cpu_s > 0.05
    assert costs.coordinator_cpu_s > LANES * 0.05
    assert costs.delivered_samples == status.delivered_samples
    assert 0 < costs.encoded_cpu_s < costs.prep_cpu_s
    assert 0 < costs.encoded_samples < status.prepared_samples
    later = laned.costs()
    assert later.cpu_s >= costs.cpu_s
    assert later.delivered_samples == costs.delivered_samples
