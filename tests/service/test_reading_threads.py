"""All threads read storage that answers late, and one reads storage that answers at once."""

from __future__ import annotations

import time

import pytest
from service_feeds import SAMPLES, STAGING_BYTES, augmented

import mbaas
from support.late_storage import late
from support.trials import record_epoch

pytestmark = pytest.mark.usefixtures("ray_clean")

LATE_S = 0.008


def test_all_threads_read_storage_that_answers_late(photos_data, feed_name):
    """1,003 reads of 8 ms: an epoch takes 2.0 s with 4 threads, and 0.25 s with the 32 of the default.

    Its start is read ahead.
    """
    data, took_s = late(photos_data, late_s=LATE_S), {}
    for threads in (mbaas.Threads(fetch=4), mbaas.Threads()):
        options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": STAGING_BYTES, "cache_bytes": 0}
        with (
            mbaas.serve(feed_name, data, augmented(), threads=threads, **options) as feed,
            mbaas.join(feed_name, consumer="me", format="numpy") as loader,
        ):
            epochs_s = []
            for _ in range(4):
                began = time.monotonic()
                assert record_epoch(loader).flaws(range(SAMPLES)) == []
                epochs_s.append(time.monotonic() - began)
            (node,) = feed.status().nodes
            assert node.fetch_threads == threads.fetch
            took_s[threads.fetch] = min(epochs_s)
            if threads.fetch == 4:
                # All epochs together: what one has read ahead makes the next one shorter.
                assert sum(epochs_s) > 0.7 * len(epochs_s) * SAMPLES * LATE_S / 4
    assert took_s[32] < 0.7 * took_s[4]
    assert node.speeds.storage == pytest.approx(photos_data.total_bytes / SAMPLES / LATE_S, rel=0.5)
