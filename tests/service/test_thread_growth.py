"""The number of threads that read storage adapts to the storage while a trial trains."""

from __future__ import annotations

import time

import pytest
from late_storage import late
from service_feeds import SAMPLES, STAGING_BYTES, augmented

import mbaas
from support.trials import EpochRecord, record_epoch

pytestmark = pytest.mark.usefixtures("ray_clean")

OPTIONS = {
    "batch_size": 64,
    "prep_workers": 1,
    "staging_bytes": STAGING_BYTES,
    "cache_bytes": 0,
    "threads": mbaas.Threads(window_s=1.0, hold_s=0.5),
}


LATE_S = 0.008
LEAST_WITH_8_S = SAMPLES * LATE_S / 8


def width(feed: mbaas.Feed) -> int:
    (node,) = feed.status().nodes
    return node.fetch_threads


def timed_epoch(loader: mbaas.Loader) -> tuple[EpochRecord, float, float]:
    """An epoch's record, its seconds, and its fetch stall in seconds."""
    before, began = loader.report().fetch_stall_s, time.monotonic()
    record = record_epoch(loader)
    return record, time.monotonic() - began, loader.report().fetch_stall_s - before


def test_more_threads_read_storage_that_answers_late_and_the_stall_falls(photos_data, feed_name):
    """1,003 reads of 8 ms: an epoch takes 1.0 s with 8 threads and 0.25 s with 32. Prep takes less.

    Later epochs are slightly shorter, because their start is read ahead.
    """
    with (
        mbaas.serve(feed_name, late(photos_data, late_s=LATE_S), augmented(), **OPTIONS) as feed,
        mbaas.join(feed_name, consumer="me", format="numpy") as loader,
    ):
        before = []
        end = time.monotonic() + 40
        while width(feed) == 8 and time.monotonic() < end:
            before.append(timed_epoch(loader))
        assert width(feed) >= 16
        later = [timed_epoch(loader) for _ in range(3)]
        status = feed.status()
    for record, _, _ in before + later:
        assert record.flaws(range(len(photos_data))) == []
    assert before[0][1] > LEAST_WITH_8_S
    assert min(seconds for _, seconds, _ in later) < 0.9 * LEAST_WITH_8_S
    assert min(stall_s for _, _, stall_s in later) < 0.8 * max(stall_s for _, _, stall_s in before)
    (node,) = status.nodes
    assert node.speeds.storage == pytest.approx(photos_data.total_bytes / SAMPLES / LATE_S, rel=0.4)
    assert node.speeds.local > 1e8
    assert any("16 instead of 8 threads read storage: a minibatch takes" in note for note in status.notes), status.notes
    assert any("a thread gets from memory" in note for note in status.notes), status.notes


@pytest.mark.long
def test_fast_storage_keeps_its_threads(photos_data, feed_name):
    with (
        mbaas.serve(feed_name, photos_data, augmented(), **OPTIONS) as feed,
        mbaas.join(feed_name, consumer="me", format="numpy") as loader,
    ):
        end = time.monotonic() + 5.5  # the demand of trials is known after 4 s
        while time.monotonic() < end:
            record_epoch(loader)
        assert width(feed) <= 8
        assert not [note for note in feed.status().notes if "instead of" in note]
