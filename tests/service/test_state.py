"""A saved state continues exactly, also in another process and after a feed restart with other workers."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from service_feeds import SAMPLES, STAGING_BYTES, augmented

import mbaas
from support.trials import EpochRecord, Recorder, Trials, record_epoch, result

pytestmark = pytest.mark.usefixtures("ray_clean")

LAST = -(-SAMPLES // 64)
POSITIONS = (0, 1, 3, 7, LAST - 1, LAST)
"""Numbers of minibatches after which a state is taken, among them 0, a block's end (3) and the last one."""


@dataclass
class Original:
    """Deliveries of a feed before it was stopped.

    Attributes:
        states: minibatches read in the first epoch -> the loader's state, as JSON text.
        between: the state between the two epochs.
        epochs: the records of both epochs.
    """

    states: dict[int, str]
    between: str
    epochs: list[EpochRecord]


@pytest.fixture(scope="module")
def restarted(ray_session, photos_data):
    """A feed restarted with other workers, blocks and batch size, and its deliveries before the restart."""
    options = {"staging_bytes": STAGING_BYTES, "cache_bytes": 0, "staging": mbaas.Staging(readahead_bytes=0)}
    with (
        mbaas.serve("again", photos_data, augmented(), batch_size=64, prep_workers=2, **options) as feed,
        mbaas.join("again", consumer="me", format="numpy") as loader,
    ):
        recorder, states = Recorder(), {0: json.dumps(loader.state_dict())}
        for number, batch in enumerate(loader, 1):
            recorder.add(batch)
            states[number] = json.dumps(loader.state_dict())
        del batch
        first = recorder.record(loader.ledger)
        between = json.dumps(loader.state_dict())
        original = Original(states, between, [first, record_epoch(loader)])
        block_samples = feed.status().block_samples
    with mbaas.serve("again", photos_data, augmented(), batch_size=100, prep_workers=1, **options) as feed:
        assert feed.status().block_samples != block_samples
        yield feed, original


def test_another_run_with_other_workers_and_batches_delivers_the_same_bytes(restarted):
    feed, original = restarted
    with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        loader.load_state_dict(json.loads(original.states[0]))
        epochs = [record_epoch(loader), record_epoch(loader)]
    for new, old in zip(epochs, original.epochs, strict=True):
        assert new.flaws(range(SAMPLES)) == old.flaws(range(SAMPLES)) == []
        assert set(new.sizes[:-1]) == {100}
        assert new.row_digest == old.row_digest


def test_every_state_of_an_epoch_restored_in_another_process_yields_exactly_the_tail(restarted):
    feed, original = restarted
    whole = original.epochs[0]
    with Trials(feed.name) as trials:
        trial = trials.join("restored", batch_size=64)
        for position in POSITIONS:
            result(trial.load(json.loads(original.states[position])))
            tail = result(trial.rest())
            assert tail.digests == whole.digests[position:], f"state after {position} minibatches"
            np.testing.assert_array_equal(tail.sample_ids, whole.sample_ids[position * 64 :])
            assert tail.ledger == whole.ledger
        result(trial.close())


def test_after_the_tail_the_next_epoch_follows(restarted):
    feed, original = restarted
    with mbaas.join(feed.name, consumer="me", batch_size=64, format="numpy") as loader:
        loader.load_state_dict(json.loads(original.states[LAST]))
        assert record_epoch(loader).sizes == ()
        assert record_epoch(loader).digests == original.epochs[1].digests
        assert loader.epoch == 2


def test_a_state_taken_between_two_epochs_goes_on_with_the_second(restarted):
    feed, original = restarted
    with mbaas.join(feed.name, consumer="me", batch_size=64, format="numpy") as loader:
        loader.load_state_dict(json.loads(original.between))
        assert loader.epoch == 1
        assert record_epoch(loader).digests == original.epochs[1].digests


def test_a_state_may_be_loaded_with_another_batch_size(restarted):
    feed, original = restarted
    with mbaas.join(feed.name, consumer="me", batch_size=150, format="numpy") as loader:
        loader.load_state_dict(json.loads(original.states[3]))
        tail = record_epoch(loader)
        assert tail.sizes == (150,) * 5 + (SAMPLES - 3 * 64 - 5 * 150,)
        np.testing.assert_array_equal(tail.sample_ids, original.epochs[0].sample_ids[3 * 64 :])
        assert tail.ledger.exact


def test_a_state_is_exact_even_if_others_are_about_to_begin_a_later_epoch(restarted):
    """The state is inside the first block of an epoch, and the other consumer is at the first block of one too."""
    feed, original = restarted
    with (
        mbaas.join(feed.name, consumer="other", format="numpy") as other,
        mbaas.join(feed.name, consumer="me", batch_size=64, format="numpy") as loader,
    ):
        record_epoch(other)
        assert other.state_dict()["feed_epoch"] > 0
        loader.load_state_dict(json.loads(original.states[3]))
        tail = record_epoch(loader)
    assert tail.digests == original.epochs[0].digests[3:]
    assert tail.ledger.exact


def test_saving_again_right_after_loading_changes_nothing(restarted):
    feed, original = restarted
    with mbaas.join(feed.name, consumer="me", batch_size=64, format="numpy") as loader:
        for position in POSITIONS:
            state = json.loads(original.states[position])
            loader.load_state_dict(state)
            assert loader.state_dict() == state


def test_a_state_of_another_seed_or_version_is_refused(plain, reseeded):
    with mbaas.join(plain.name, consumer="me", format="numpy") as loader:
        state = loader.state_dict()
        with pytest.raises(mbaas.StateError, match="must have version 3, got 0"):
            loader.load_state_dict({**state, "version": 0})
    with mbaas.join(reseeded.name, consumer="me", format="numpy") as loader:
        with pytest.raises(mbaas.StateError, match="another dataset, pipeline, seed or order: its fingerprint is"):
            loader.load_state_dict(state)
