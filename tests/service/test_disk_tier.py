"""Samples that do not fit into memory are read from the local disk, also after a feed restart."""

from __future__ import annotations

import time

import pytest
from late_storage import late
from service_feeds import STAGING_BYTES, augmented

import mbaas
from mbaas.dataset import synthetic
from support.trials import record_epoch

pytestmark = pytest.mark.usefixtures("ray_clean")


def epochs(feed, count):
    with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        records = [record_epoch(loader) for _ in range(count)]
    assert all(record.ledger.exact for record in records)
    return [record.row_digest for record in records]


def test_storage_is_not_read_again_in_two_lives_of_the_service(photos_data, feed_name, tmp_path):
    """Memory holds a quarter of the data, and the faster disk all. The second feed reads only memory and disk.

    Near the end of the first epoch, a sample may be read for the next epoch before it is on the disk.
    """
    total, data = photos_data.total_bytes, late(photos_data, late_s=0.01)
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": STAGING_BYTES, "cache_bytes": total // 4}
    disk = {"disk": mbaas.Disk(path=tmp_path, max_bytes=2 * total)}
    with mbaas.serve(feed_name, data, augmented(), **options, **disk) as feed:
        first = epochs(feed, 3)
        before = feed.status()
        assert total <= before.fetched.storage.nbytes < 1.5 * total
        epochs(feed, 2)
        status = feed.status()
        assert status.fetched.storage.nbytes == before.fetched.storage.nbytes
        read = status.fetched - before.fetched
        assert read.disk.samples >= 0.7 * (status.prepared_samples - before.prepared_samples)
    with mbaas.serve(feed_name, data, augmented(), **options, **disk) as feed:
        assert epochs(feed, 3) == first
        status = feed.status()
        assert (status.fetched.storage.nbytes, status.fetched.storage.samples) == (0, 0)
        assert status.fetched.disk.nbytes > 0


def test_a_disk_that_is_no_faster_than_storage_is_not_used(feed_name, tmp_path):
    """A sample takes 10 ms from disk and far less from storage, so storage is read again and the log gives the reason.

    Storage is slow enough to be measured in one epoch. In the second epoch all samples may come from disk.
    """
    data = late(synthetic(320), late_s=0.0005, disk_s=0.01)
    total = data.total_bytes
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": STAGING_BYTES, "cache_bytes": total // 4}
    disk = {"disk": mbaas.Disk(path=tmp_path, max_bytes=2 * total)}
    with mbaas.serve(feed_name, data, augmented(), cache_decoded=False, **options, **disk) as feed:
        end = time.monotonic() + 30
        while not any(f"the disk {tmp_path} is not used: a thread gets" in note for note in feed.status().notes):
            assert time.monotonic() < end, feed.status().notes
            epochs(feed, 1)
        epochs(feed, 2)  # the first one was planned before the change
        before = feed.status()
        epochs(feed, 1)
        status = feed.status()
        assert status.fetched.disk.samples == before.fetched.disk.samples > 0
        assert status.fetched.storage.nbytes > before.fetched.storage.nbytes
        assert [node.speeds.disk < node.speeds.storage for node in status.nodes] == [True]
