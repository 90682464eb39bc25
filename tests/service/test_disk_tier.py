"""What memory has no room for lies on the local disk, and is there again when the service is."""

from __future__ import annotations

import pytest
from service_feeds import STAGING_BYTES, augmented

import mbaas
from mbaas.errors import ConfigError
from mbaas.testing.trials import record_epoch

pytestmark = pytest.mark.usefixtures("ray_clean")


def epochs(feed, count):
    with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        records = [record_epoch(loader) for _ in range(count)]
    assert all(record.ledger.exact for record in records)
    return [record.row_digest for record in records]


def test_storage_is_not_read_again_in_two_lives_of_the_service(photos_data, feed_name, tmp_path):
    """Memory for a quarter; the disk holds all. The second life reads from memory and disk alone.

    Around the first epoch's end a sample may be read for the next epoch before the first has put it onto the disk.
    """
    total = photos_data.total_bytes
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": STAGING_BYTES, "cache_bytes": total // 4}
    disk = {"disk_path": str(tmp_path), "disk_bytes": 2 * total}
    with mbaas.serve(feed_name, photos_data, augmented(), **options, **disk) as feed:
        first = epochs(feed, 3)
        before = feed.status()
        assert total <= before.storage_bytes < 1.5 * total
        epochs(feed, 2)
        status = feed.status()
        assert status.storage_bytes == before.storage_bytes
        assert status.disk - before.disk >= 0.7 * (status.prepared_samples - before.prepared_samples)
    with mbaas.serve(feed_name, photos_data, augmented(), **options, **disk) as feed:
        assert epochs(feed, 3) == first
        status = feed.status()
        assert (status.storage_bytes, status.misses) == (0, 0)
        assert status.disk_bytes > 0


def test_a_disk_needs_a_path_and_bytes(photos_data, feed_name):
    with pytest.raises(ConfigError, match="disk_path and disk_bytes need each other, got '/x' and 0 bytes"):
        mbaas.serve(feed_name, photos_data, augmented(), batch_size=64, disk_path="/x")
