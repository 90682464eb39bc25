"""Samples that do not fit into memory are read from disks, also after a feed restart, a kill or a disk's failure."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest
from service_feeds import STAGING_BYTES, augmented

import mbaas
from mbaas.dataset import synthetic
from support.late_storage import late
from support.processes import cache_node_pids
from support.trials import record_epoch
from support.waiting import wait_until

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
        (used,) = [disk for node in status.nodes for disk in node.disks]
        assert (used.path, used.max_bytes, used.is_used, used.failure) == (str(tmp_path), 2 * total, True, "")
        assert total / 2 < used.used_bytes <= used.max_bytes


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


def test_two_disks_hold_what_one_cannot_and_survive_a_kill(photos_data, feed_name, tmp_path):
    """Each disk has room for two thirds of the dataset. The cache node is killed in the second epoch."""
    total, data = photos_data.total_bytes, late(photos_data, late_s=0.01)
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": STAGING_BYTES, "cache_bytes": total // 8}
    disks = [mbaas.Disk(path=tmp_path / name, max_bytes=2 * total // 3) for name in "ab"]
    with mbaas.serve(feed_name, data, augmented(), cache_decoded=False, **options) as feed:
        plain = epochs(feed, 4)
    with mbaas.serve(feed_name, data, augmented(), cache_decoded=False, disk=disks, **options) as feed:
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            digests = [record_epoch(loader).row_digest]
            stored = [sum(file.stat().st_size for file in (tmp_path / name).rglob("*.bin")) for name in "ab"]
            assert min(stored) > total // 8
            assert max(stored) <= 2 * total // 3
            order = f"disks, fastest first, by what a thread gets: {tmp_path}"
            wait_until(lambda: any(order in note for note in feed.status().notes), "the disks are measured")
            (pid,) = cache_node_pids(feed.name)
            os.kill(pid, signal.SIGKILL)
            digests += [record_epoch(loader).row_digest for _ in range(2)]
            before = feed.status()
            digests.append(record_epoch(loader).row_digest)
            status = feed.status()
        assert digests == plain
        assert status.fetched.storage.nbytes - before.fetched.storage.nbytes < 0.05 * total


def test_a_disk_that_is_removed_is_named_and_the_feed_goes_on(photos_data, feed_name, tmp_path):
    total, data = photos_data.total_bytes, late(photos_data, late_s=0.01)
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": STAGING_BYTES, "cache_bytes": total // 8}
    disks = [mbaas.Disk(path=tmp_path / name, max_bytes=2 * total // 3) for name in "ab"]
    with mbaas.serve(feed_name, data, augmented(), cache_decoded=False, disk=disks, **options) as feed:
        first = epochs(feed, 2)
        shutil.rmtree(tmp_path / "a")
        end = time.monotonic() + 30
        while not any(
            f"the disk {tmp_path / 'a'} is dropped: its folder was removed" in n for n in feed.status().notes
        ):
            assert time.monotonic() < end, feed.status().notes
            epochs(feed, 1)
        before = feed.status()
        epochs(feed, 2)
        status = feed.status()
        assert status.fetched.disk.nbytes > before.fetched.disk.nbytes, "the other disk is still read"
        assert status.fetched.storage.nbytes > before.fetched.storage.nbytes
        assert not (tmp_path / "a").exists()
    assert len(first) == 2


def test_a_second_feed_finds_the_samples_of_the_first_in_a_shared_folder(photos_data, feed_name, tmp_path):
    """Both feeds are open at the same time, and use other batch sizes and seeds."""
    total, data = photos_data.total_bytes, late(photos_data, late_s=0.01)
    options = {"prep_workers": 1, "staging_bytes": STAGING_BYTES, "cache_bytes": total // 8, "cache_decoded": False}
    options["disk"] = mbaas.Disk(path=tmp_path, max_bytes=2 * total, shared=True)
    with mbaas.serve(feed_name, data, augmented(), batch_size=64, **options) as feed:
        epochs(feed, 2)
        assert feed.status().fetched.storage.nbytes < 1.5 * total
        with mbaas.serve(f"{feed_name}-2", data, augmented(), batch_size=48, seed=5, **options) as second:
            epochs(second, 2)
            status = second.status()
            assert status.fetched.storage.nbytes < 0.05 * total
            assert status.fetched.disk.nbytes > total
        epochs(feed, 1)
    assert sum(file.stat().st_size for file in tmp_path.rglob("segment-*.bin")) <= 1.05 * total
