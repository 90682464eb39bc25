"""Trials that pause between epochs, or never read, do not hold up others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from service_feeds import augmented

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from support.trials import Trials, result
from support.waiting import wait_until

SAMPLES, BATCH = 1003, 32
STAGING_BYTES = 8 * BATCH * (32 * 32 * 3 + 16)
"""Eight minibatches of one block each. An epoch has 32, more than are prepared ahead."""

PATIENCE_S = 300.0
"""Longer than a test may take, so a consumer that waits for another's patience to end fails the test."""


@pytest.fixture(scope="module", params=["training", "validation"])
def feed(ray_session: None, request: pytest.FixtureRequest) -> Iterator[mbaas.Feed]:
    """A shuffled feed for training, and a feed for validation whose epochs are all the same."""
    is_training = request.param == "training"
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "staging_bytes": STAGING_BYTES,
        "prep_workers": 1,
        "timeouts": mbaas.Timeouts(patience_s=PATIENCE_S, reservation_s=PATIENCE_S),
        "shuffle": is_training,
    }
    pipeline = augmented() if is_training else T.Pipeline([T.DecodeImage()])
    data = synthetic(SAMPLES, height=32, width=32)
    with mbaas.serve(f"between-{request.param}", data, pipeline, **options) as feed:
        yield feed


@pytest.fixture
def trials(feed: mbaas.Feed) -> Iterator[Trials]:
    with Trials(feed.name) as trials:
        yield trials


def states(feed: mbaas.Feed) -> dict[str, str]:
    return {member.name: member.state for member in feed.status().consumers}


def test_whoever_tests_between_its_epochs_holds_up_nobody_and_shares_again(feed: mbaas.Feed, trials: Trials) -> None:
    ids = range(SAMPLES)
    tests, trains = trials.join("tests"), trials.join("trains")
    assert [result(each.epochs(1))[0].flaws(ids) for each in (tests, trains)] == [[], []]
    wait_until(lambda: states(feed)["tests"] == "resting", "the trial that does not ask rests")
    for record in result(trains.epochs(3)):
        assert record.flaws(ids) == []
    result(trains.take(16))
    before = feed.status().prepared_samples
    others = trains.rest(), trains.epochs(1)  # continues in the background
    (record,) = result(tests.epochs(1))
    assert record.flaws(ids) == []
    assert result(others[0]).flaws(ids) == []
    assert [each.flaws(ids) for each in result(others[1])] == [[]]
    prepared = feed.status().prepared_samples - before
    assert prepared < 2 * SAMPLES, "one reads an epoch and a half, the other an epoch: shared blocks are prepared once"


def test_a_loader_that_nobody_reads_costs_the_others_nothing(feed: mbaas.Feed, trials: Trials) -> None:
    result(trials.join("unread").state())
    reads = trials.join("reads")
    began = time.monotonic()
    for record in result(reads.epochs(2)):
        assert record.flaws(range(SAMPLES)) == []
    assert time.monotonic() - began < PATIENCE_S / 10
