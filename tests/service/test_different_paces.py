"""On a real feed a slow trial does not slow down a fast one, and the status gives the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from service_feeds import augmented

import mbaas
from mbaas.dataset import synthetic
from support.trials import Trials, result
from support.waiting import wait_until

SAMPLES, BATCH = 1003, 32
STAGING_BYTES = 8 * BATCH * (32 * 32 * 3 + 16)
"""Eight minibatches of one block each: a quarter of an epoch."""

FAST_S, SLOW_S = 0.01, 0.2
"""Step times. An epoch of the slow trial takes six seconds, and so would any epoch in a shared cohort."""


@pytest.fixture
def feed(ray_session: None, feed_name: str) -> Iterator[mbaas.Feed]:
    options = {"batch_size": BATCH, "staging_bytes": STAGING_BYTES, "prep_workers": 1}
    with mbaas.serve(feed_name, synthetic(SAMPLES, height=32, width=32), augmented(), **options) as feed:
        yield feed


def test_a_fast_trial_does_not_wait_for_a_slow_one_and_both_get_exact_epochs(feed: mbaas.Feed) -> None:
    ids = range(SAMPLES)
    with Trials(feed.name) as trials:
        fast, slow = trials.join("fast"), trials.join("slow")
        slow_epochs, fast_epochs = slow.epochs(2, SLOW_S), fast.epochs(5, FAST_S)
        told = wait_until(lambda: [m.apart for m in feed.status().consumers if m.apart], "the slow one goes apart")
        assert "blocks/s instead of" in told[0]
        ready, _ = ray.wait([fast_epochs, slow_epochs], timeout=90)
        assert ready == [fast_epochs], "five epochs are over before two of the slow one are"
        assert [record.flaws(ids) for record in result(fast_epochs)] == [[]] * 5
        assert [record.flaws(ids) for record in result(slow_epochs)] == [[]] * 2
        assert any("split slow from fast: " in note for note in feed.status().notes)
