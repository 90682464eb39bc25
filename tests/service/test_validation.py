"""A validation feed prepares the same minibatches once, for trials that read them at any time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from service_feeds import SAMPLES

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.tools.chaos.participants import kill
from support.processes import coordinator_pid
from support.trials import EpochRecord, record_epoch

PLAIN = T.Pipeline([T.DecodeImage()])


@pytest.fixture(scope="module")
def feed(ray_session: None) -> Iterator[mbaas.Feed]:
    with mbaas.serve("validation", synthetic(SAMPLES), PLAIN, batch_size=64, shuffle=False, prep_workers=2) as feed:
        yield feed


def epochs_of(loader: mbaas.Loader, count: int) -> list[EpochRecord]:
    return [record_epoch(loader) for _ in range(count)]


def test_each_minibatch_is_prepared_once_and_nobody_waits_for_another(feed: mbaas.Feed) -> None:
    with (
        mbaas.join(feed.name, consumer="unread") as unread,
        mbaas.join(feed.name, consumer="slow", format="numpy") as slow,
        mbaas.join(feed.name, consumer="quick", format="numpy") as quick,
    ):
        stands = iter(slow)
        first = next(stands)
        records = epochs_of(quick, 4)
        assert [record.flaws(range(SAMPLES)) for record in records] == [[]] * 4
        assert all(np.array_equal(record.sample_ids, np.arange(SAMPLES)) for record in records), "the dataset's order"
        assert [record.digests for record in records] == [records[0].digests] * 4
        assert np.array_equal(first["sample_id"], np.arange(64))
        rest = [batch["sample_id"] for batch in stands]
        assert np.array_equal(np.concatenate([first["sample_id"], *rest]), np.arange(SAMPLES))
        assert next(iter(unread))["sample_id"][0] == 0
        late = epochs_of(mbaas.join(feed.name, consumer="late", format="numpy"), 1)
        assert late[0].digests == records[0].digests
    status = feed.status()
    assert status.keeps_all
    assert status.prepared_samples == SAMPLES
    assert status.inexact_epochs == status.remade_blocks == 0


def test_a_state_goes_on_in_the_middle_of_an_epoch(feed: mbaas.Feed) -> None:
    with mbaas.join(feed.name, consumer="saved", format="numpy") as loader:
        epochs_of(loader, 2)
        batches = iter(loader)
        taken = [next(batches)["sample_id"] for _ in range(5)]
        state = loader.state_dict()
    with mbaas.join(feed.name, consumer="restored", format="numpy") as loader:
        loader.load_state_dict(state)
        rest = [batch["sample_id"] for batch in loader]
        assert np.array_equal(np.concatenate([*taken, *rest]), np.arange(SAMPLES))
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
        assert loader.ledger is not None
        assert loader.ledger.exact


@pytest.mark.chaos
def test_what_was_kept_is_prepared_again_after_the_coordinators_death(feed: mbaas.Feed) -> None:
    with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        before = record_epoch(loader)
        kill(coordinator_pid(feed.name))
        after = epochs_of(loader, 2)
    assert [record.digests for record in after] == [before.digests] * 2
    assert feed.status().prepared_samples == SAMPLES, "counted since the restart: each once"
