"""Loops over a loader can be started, left half-way, started again and closed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from service_feeds import SAMPLES

import mbaas
from support.trials import Recorder, record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_clean")


def consumers(feed):
    return {member.name for member in feed.status().consumers}


def test_a_context_manager_leaves_the_feed_at_its_end(plain):
    with mbaas.join(plain.name, consumer="guest", format="numpy") as loader:
        next(iter(loader))
        assert "guest" in consumers(plain)
    wait_until(lambda: "guest" not in consumers(plain), "the guest has left")


def test_close_may_be_called_twice_and_ends_iteration(plain):
    loader = mbaas.join(plain.name, consumer="me", format="numpy")
    loop = iter(loader)
    next(loop)
    loader.close()
    loader.close()
    with pytest.raises(mbaas.StateError, match="'me' is closed"):
        next(loop)
    with pytest.raises(mbaas.StateError, match="'me' is closed"):
        iter(loader)
    with pytest.raises(mbaas.StateError, match="'me' is closed"):
        loader.load_state_dict({})


def test_a_loader_that_is_forgotten_leaves_the_feed(plain):
    loader = mbaas.join(plain.name, consumer="forgotten", format="numpy")
    assert "forgotten" in consumers(plain)
    del loader
    wait_until(lambda: "forgotten" not in consumers(plain), "the forgotten loader has left")


def test_a_loader_that_is_forgotten_at_the_end_of_an_epoch_has_reported_it(plain):
    loader = mbaas.join(plain.name, consumer="forgetful", format="numpy")
    record_epoch(loader)
    del loader
    wait_until(lambda: "forgetful" not in consumers(plain), "the forgotten loader has left")
    assert [ledger.exact for name, ledger in plain.status().ledgers if name == "forgetful"] == [True]


@pytest.mark.parametrize("minibatches", [2, 5, 16], ids=["first block", "second block", "last minibatch"])
def test_after_a_loop_that_was_left_half_way_a_new_one_is_a_fresh_exact_epoch(plain, minibatches):
    with mbaas.join(plain.name, consumer="me", format="numpy") as loader:
        for number, _ in enumerate(loader, 1):
            if number == minibatches:
                break
        del _
        left = loader.state_dict()["feed_epoch"]
        record = record_epoch(loader)
        assert record.flaws(range(SAMPLES)) == []
        assert record.ledger.feed_epoch == left + 1
        assert record_epoch(loader).flaws(range(SAMPLES)) == []


@pytest.mark.parametrize("batch_size", [64, 500], ids=["the feed's", "more than a block"])
def test_one_minibatch_costs_no_epoch(plain, batch_size):
    """After `peek` or ``next(iter(loader))``, the next loop repeats that minibatch and has every other sample once."""
    with mbaas.join(plain.name, consumer="looks", format="numpy", batch_size=batch_size) as loader:
        for _ in range(2):
            peeked = loader.peek()["image"].copy()
            first = next(iter(loader))["image"].copy()
            assert np.array_equal(peeked, first)
            state = loader.state_dict()
            recorder, batches = Recorder(), iter(loader)
            recorder.add(batch := next(batches))
            assert np.array_equal(first, batch["image"])
            assert loader.state_dict() == state
            for batch in batches:
                recorder.add(batch)
            assert recorder.record(loader.ledger).flaws(range(SAMPLES)) == []
            del batch
        assert loader.ledger.epoch == 1


@pytest.mark.parametrize("batch_size", [1, 64, 500, SAMPLES], ids=["1", "the feed's", "more than a block", "an epoch"])
@pytest.mark.parametrize("format", ["numpy", "torch"])
def test_peek_keeps_its_minibatch_for_the_loop_while_another_trial_goes_on(plain, batch_size, format):
    """The other trial finishes two epochs in between. Writing into the peeked minibatch changes nothing."""
    mbaas.announce(plain.name, ["peeks", "goes on"])
    with (
        mbaas.join(plain.name, consumer="peeks", format=format, batch_size=batch_size) as loader,
        mbaas.join(plain.name, consumer="goes on", format="numpy") as other,
    ):
        stream, state = loader._stream, loader.state_dict()
        peeked = loader.peek()
        images, ids = peeked["image"].tolist(), peeked["sample_id"].tolist()
        if format == "torch":  # NumPy arrays are read-only
            peeked["image"][...] = 0
        assert loader.peek()["sample_id"].tolist() == ids
        assert loader.state_dict() == state
        assert [record_epoch(other).flaws(range(SAMPLES)) for _ in range(2)] == [[], []]
        batches = iter(loader)
        first = next(batches)
        assert first["image"].tolist() == images
        seen = [*first["sample_id"].tolist(), *(i for batch in batches for i in batch["sample_id"].tolist())]
        assert (seen[: len(ids)], sorted(seen)) == (ids, list(range(SAMPLES)))
        assert (loader.ledger.exact, loader.ledger.epoch, loader._stream is stream) == (True, 0, True)
        assert loader.report().samples == SAMPLES, "the peeked minibatch counts once"
        del first


def test_after_a_loaded_state_peek_returns_what_the_next_loop_begins_with(plain):
    with mbaas.join(plain.name, consumer="returns", format="numpy") as loader:
        batches = iter(loader)
        had = [*next(batches)["sample_id"], *next(batches)["sample_id"]]
        with pytest.raises(mbaas.StateError, match=r"in the middle of an epoch \(128 of 1003 samples\): call peek"):
            loader.peek()
        loader.load_state_dict(loader.state_dict())
        peeked = loader.peek()["sample_id"].tolist()
        rest = [sample for batch in loader for sample in batch["sample_id"].tolist()]
        assert rest[: len(peeked)] == peeked
        assert sorted(had + rest) == list(range(SAMPLES))
        assert loader.ledger.exact


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("minibatches", [0, 1, 7, 15])
def test_after_an_error_in_next_the_loop_goes_on(plain, monkeypatch, error, minibatches):
    """The error occurs once while a block is read. Samples of minibatches already cut are not lost."""
    with mbaas.join(plain.name, consumer="stumbles", format="numpy") as loader:
        recorder, batches = Recorder(), iter(loader)
        for _ in range(minibatches):
            recorder.add(next(batches))
        stream = loader._stream

        def stumble():
            raise error("once")

        monkeypatch.setattr(stream, "next", stumble)
        monkeypatch.setattr(stream, "look_ahead", stumble)
        with pytest.raises(error, match="once"):
            next(batches)
        for batch in batches:
            recorder.add(batch)
        assert loader._stream is not stream
        assert recorder.record(loader.ledger).flaws(range(SAMPLES)) == []
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
        del batch


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_after_the_last_minibatch_begins_no_other_epoch(plain, monkeypatch, error):
    with mbaas.join(plain.name, consumer="late", format="numpy") as loader:
        recorder, batches = Recorder(), iter(loader)
        for _ in range(len(loader)):
            recorder.add(next(batches))

        def stumble():
            raise error("once")

        with monkeypatch.context() as once:
            once.setattr(loader._stream, "look_ahead", stumble)
            with pytest.raises(error, match="once"):
                next(batches)
        assert next(batches, None) is None
        assert recorder.record(loader.ledger).flaws(range(SAMPLES)) == []
        assert (loader.epoch, loader.ledger.epoch) == (1, 0)
        assert record_epoch(loader).ledger.epoch == 1


@pytest.mark.parametrize("batch_size", [64, 1, 600], ids=["the feed's", "1", "most of an epoch"])
@pytest.mark.parametrize("drops_last", [False, True])
def test_an_epoch_is_over_for_a_trainer_that_counts_its_minibatches(plain, reseeded, batch_size, drops_last):
    """Lightning and others draw ``len(loader)`` minibatches and never request another one."""
    feed = reseeded if drops_last else plain
    with mbaas.join(feed.name, consumer="counts", format="numpy", batch_size=batch_size) as loader:
        for epoch in range(3):
            recorder, batches = Recorder(), iter(loader)
            for _ in range(len(loader)):
                assert loader.epoch == epoch
                recorder.add(next(batches))
            assert loader.epoch == epoch + 1
            record = recorder.record(loader.ledger)
            assert record.ledger.exact
            assert record.ledger.epoch == epoch
            if not drops_last:
                assert record.flaws(range(SAMPLES)) == []
            assert loader.state_dict()["position"] == record.ledger.samples, "a state saved in the step is its end"
        assert next(batches, None) is None, "a further request yields nothing"
        assert loader.epoch == 3


@pytest.mark.parametrize("batch_size", [64, 600], ids=["the feed's", "most of an epoch"])
@pytest.mark.parametrize("drops_last", [False, True])
def test_set_epoch_passes_the_end_of_an_epoch_that_a_trainer_has_counted(plain, reseeded, batch_size, drops_last):
    """The state is saved in the step on the last minibatch. With ``drop_last`` samples remain after it."""
    feed = reseeded if drops_last else plain
    with mbaas.join(feed.name, consumer="stopped", format="numpy", batch_size=batch_size) as loader:
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
        state, ended = loader.state_dict(), loader.ledger
        del batches
    with mbaas.join(feed.name, consumer="stopped", format="numpy", batch_size=batch_size, state=state) as loader:
        loader.set_epoch(1)
        assert loader.epoch == 1
        assert replace(loader.ledger, seconds=0.0) == replace(ended, seconds=0.0)
        record = record_epoch(loader)
        assert record.ledger.exact
        assert sum(record.sizes) == (SAMPLES // batch_size * batch_size if drops_last else SAMPLES)
    assert feed.status().inexact_epochs == 0


def test_a_loop_that_was_begun_and_gave_nothing_yet_is_no_lost_epoch(plain):
    with mbaas.join(plain.name, consumer="me", format="numpy") as loader:
        iter(loader)
        first = record_epoch(loader)
        assert first.ledger.epoch == 0


def test_of_two_loops_over_one_loader_the_older_one_raises(plain):
    with mbaas.join(plain.name, consumer="me", format="numpy") as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        first = next(newer)["sample_id"]
        with pytest.raises(mbaas.StateError, match="serves one loop at a time"):
            next(older)
        seen = [*first, *(i for batch in newer for i in batch["sample_id"])]
        assert sorted(seen) == list(range(SAMPLES))
        assert loader.ledger.exact
        del first


def test_the_service_hears_of_every_finished_epoch(plain):
    """Reading the stall share uses the same report and must not consume it."""
    with mbaas.join(plain.name, consumer="diligent", format="numpy") as loader:
        for _ in range(3):
            record_epoch(loader)
            assert 0.0 <= loader.stall_share <= 1.0

    def told():
        return [ledger.epoch for name, ledger in plain.status().ledgers if name == "diligent"]

    wait_until(lambda: len(told()) == 3, "three ledgers have arrived")
    assert told() == [0, 1, 2]
    assert plain.status().inexact_epochs == 0


def test_delivered_samples_are_counted_once_even_if_a_state_is_loaded(plain):
    before = plain.status().delivered_samples
    with mbaas.join(plain.name, consumer="twice", format="numpy") as loader:
        record_epoch(loader)
        loader.load_state_dict(loader.state_dict())
        record_epoch(loader)
    wait_until(lambda: "twice" not in consumers(plain), "the consumer has left")
    assert plain.status().delivered_samples - before == 2 * SAMPLES


def test_one_name_is_one_consumer_and_a_second_join_takes_its_place(plain):
    first = mbaas.join(plain.name, consumer="me", format="numpy")
    loop = iter(first)
    next(loop)
    second = mbaas.join(plain.name, consumer="me", format="numpy")
    with pytest.raises(mbaas.StateError, match="'me' joined again elsewhere"):
        for _ in itertools.chain(loop, *itertools.repeat(first, 3)):  # minibatches received earlier may still be read
            pass
    assert record_epoch(second).flaws(range(SAMPLES)) == []
    first.close()
    second.close()
