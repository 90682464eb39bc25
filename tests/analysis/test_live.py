"""A feed that runs is analyzed from its own counters, and simulated; it checks what was predicted."""

from __future__ import annotations

import time

import pytest

import mbaas
from mbaas import transforms as T
from mbaas.analysis.live import analyze_feed, simulate_feed
from mbaas.analysis.simulator import POLICIES
from mbaas.dataset import synthetic
from mbaas.errors import StateError
from support.waiting import wait_until

SAMPLES, BATCH_SIZE, STEP_S = 403, 13, 0.02
G = BATCH_SIZE / STEP_S
"""650 samples/s."""


def train(loader: mbaas.Loader) -> None:
    for _ in loader:
        time.sleep(STEP_S)


def test_a_running_feed_knows_where_its_time_goes(ray_clean: None, feed_name: str) -> None:
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
    with mbaas.serve(feed_name, synthetic(SAMPLES), pipeline, batch_size=BATCH_SIZE, prep_workers=1) as feed:
        with pytest.raises(StateError, match="has prepared nothing yet"):
            analyze_feed(feed_name)
        with mbaas.join(feed_name, consumer="me", format="numpy") as loader:
            train(loader)
            loader.flush()
            found = analyze_feed(feed_name)
            assert found.rates.samples == SAMPLES
            assert 0.75 * G < found.rates.step.value <= 1.02 * G
            assert found.prediction.steady.limit == "step"
            assert "Loading is not the problem" in found.sentence

            system, outcomes = simulate_feed(feed_name)
            assert [each.policy for each in outcomes] == list(POLICIES)
            assert system.dataset.samples == SAMPLES
            assert feed.status().prediction_error is None
            train(loader)
            loader.flush()
            error = wait_until(lambda: feed.status().prediction_error, "an epoch answered")
            assert abs(error) < 0.3
            assert any("were predicted" in note for note in feed.status().notes)
            assert loader.ledger is not None
            assert SAMPLES / G * 0.95 < loader.ledger.seconds < 3 * SAMPLES / G
