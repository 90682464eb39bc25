"""One feed on several nodes: homes, parts and caches."""

from __future__ import annotations

import time

import numpy as np
import pytest
import ray
from node_feeds import BATCH, OPTIONS, SAMPLES, augmented, digests

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.memory.budgets import STORE_SHARE
from mbaas.memory.part_memory import refs_of
from mbaas.ray_cluster import resources
from support.late_storage import late
from support.leaks import store_use
from support.trials import record_epoch
from support.waiting import wait_until


def test_bytes_do_not_depend_on_the_cluster_and_each_sample_is_read_from_storage_once(three_nodes, data, feed_name):
    with mbaas.serve("one", data, augmented(), prep_workers=1, **OPTIONS) as one:
        alone = digests(one, 3)
    with mbaas.serve(feed_name, data, augmented(), prep_workers=3, **OPTIONS) as feed:
        assert digests(feed, 3) == alone
        status = feed.status()
        assert [node.workers for node in status.nodes] == [1, 1, 1]
        assert sum(node.storage_bytes for node in status.nodes) == data.total_bytes == status.fetched.storage.nbytes
        assert status.cached_samples == SAMPLES
        assert all(0.85 * SAMPLES / 3 < node.cached_samples < 1.15 * SAMPLES / 3 for node in status.nodes)
        epochs = status.prepared_samples / SAMPLES
        assert status.fetched.remote.nbytes <= 0.05 * epochs * data.total_bytes
        assert status.remade_blocks == 0


def test_own_pipelines_have_the_same_bytes_on_every_cluster_and_samples_are_read_once_for_all(
    three_nodes, data, feed_name
):
    """Two trials, one after the other, with pipelines of their own."""
    others = [
        T.Pipeline([T.DecodeImage(), T.RandomCrop(24), T.RandomHorizontalFlip(0.2)]),
        T.Pipeline([T.DecodeImage(), T.CenterCrop(20), T.RandomVerticalFlip()]),
    ]
    alone = []
    for pipeline in others:
        with mbaas.serve("one", data, pipeline, prep_workers=1, **OPTIONS) as one:
            alone.append(digests(one, 8))
    with mbaas.serve(feed_name, data, augmented(), prep_workers=3, **OPTIONS) as feed:
        for number, pipeline in enumerate(others):
            with mbaas.join(feed.name, f"trial-{number}", format="numpy", pipeline=pipeline) as loader:
                found = [record_epoch(loader) for _ in range(3)]
            assert [record.flaws(range(SAMPLES)) for record in found] == [[]] * 3
            first = found[0].ledger.feed_epoch
            assert [record.row_digest for record in found] == alone[number][first : first + 3]
        status = feed.status()
        assert status.remade_blocks == 0
        assert status.fetched.storage.nbytes == data.total_bytes
        assert store_use().spilled_bytes == 0


def test_draws_have_the_same_bytes_on_every_cluster_and_caches_keep_each_sample_once(three_nodes, data, feed_name):
    draws = data.resample(np.arange(SAMPLES) ** 3, samples=SAMPLES, seed=2)
    with mbaas.serve("one", draws, augmented(), prep_workers=1, **OPTIONS) as one:
        alone = digests(one, 3)
    with mbaas.serve(feed_name, draws, augmented(), prep_workers=3, **OPTIONS) as feed:
        assert digests(feed, 3) == alone
        status = feed.status()
        assert [node.workers for node in status.nodes] == [1, 1, 1]
        # The caches hold the samples that epochs drew so far, and read-ahead: 64 blocks, of eight epochs.
        sofar, ahead = (
            np.unique([draws.stored_ids(np.arange(SAMPLES), epoch) for epoch in range(epochs)]) for epochs in (3, 13)
        )
        assert status.fetched.storage.samples <= status.cached_samples
        assert len(sofar) <= status.cached_samples <= len(ahead)
        ranks = [mbaas.join(feed.name, "trial", format="numpy", rank=rank, world_size=2) for rank in range(2)]
        with ranks[0], ranks[1]:
            found = [batch["sample_id"] for pair in zip(*ranks, strict=True) for batch in pair]
        assert sorted(np.concatenate(found).tolist()) == list(range(SAMPLES))


def test_the_next_block_comes_from_its_node_while_the_trial_works(three_nodes, data, feed_name):
    """The trial's node prepares no block."""
    here = ray.get_runtime_context().get_node_id()
    with (
        mbaas.serve(feed_name, data, augmented(), prep_workers=1, **OPTIONS),
        mbaas.join(feed_name, consumer="me", format="numpy") as loader,
    ):

        def is_next_here() -> bool:
            next_blocks = [received.block for received in list(loader._stream.received)[:1]]
            refs = refs_of(part.address.held() for block in next_blocks for part in block.parts)
            locations = ray.experimental.get_object_locations(refs).values()
            return bool(refs) and all(here in location["node_ids"] for location in locations)

        found = []
        for _ in range(3):
            for batch in loader:
                del batch
                time.sleep(0.05)
                found.append(is_next_here())
        assert np.mean(found) > 0.3


def test_caches_that_do_not_hold_the_dataset_leave_exactly_the_rest_to_storage(three_nodes, data, feed_name):
    budget = data.total_bytes // 6
    options = {**OPTIONS, "cache_bytes": budget, "cache_decoded": False}  # decoded samples would have other sizes
    with mbaas.serve(feed_name, data, augmented(), prep_workers=3, **options) as feed:
        digests(feed, 3)
        status = feed.status()
        assert status.cached_bytes == pytest.approx(data.total_bytes / 2, rel=0.01)
        assert all(0.95 * budget < node.cached_bytes <= budget for node in status.nodes)
        whole_epochs = status.prepared_samples / SAMPLES
        due = data.total_bytes + (whole_epochs - 1) * (data.total_bytes - status.cached_bytes)
        assert status.fetched.storage.nbytes == pytest.approx(due, rel=0.02)


@pytest.mark.long
def test_nodes_store_each_sample_once_in_a_shared_folder_and_one_node_reads_what_all_stored(
    three_nodes, data, feed_name, tmp_path
):
    """Memory holds a quarter of the samples, on one node a twelfth."""
    total, slow = data.total_bytes, late(data, late_s=0.005)
    disk = mbaas.Disk(path=tmp_path, max_bytes=4 * total, shared=True)
    options = {**OPTIONS, "cache_bytes": total // 12, "cache_decoded": False, "disk": disk}
    with mbaas.serve(feed_name, slow, augmented(), prep_workers=3, **options) as feed:
        found = digests(feed, 3)
        status = feed.status()
        assert [node.workers for node in status.nodes] == [1, 1, 1]
        assert total <= status.fetched.storage.nbytes < 1.05 * total
        assert status.fetched.disk.nbytes > 0.7 * total
    segments = {file: file.stat().st_size for file in tmp_path.rglob("segment-*.bin")}
    assert len({file.parent for file in segments}) == 3, "each node has its own volume"
    with mbaas.serve(f"{feed_name}-2", slow, augmented(), prep_workers=1, **options) as second:
        assert digests(second, 3) == found
        assert second.status().fetched.storage.nbytes < 0.01 * total
    assert segments == {file: file.stat().st_size for file in tmp_path.rglob("segment-*.bin")}


def test_feeds_that_share_a_cpu_share_it_on_one_node_so_that_a_trial_finds_a_whole_one(three_nodes, data, feed_name):
    """By default a first feed reserves one of three CPUs, a second half a CPU, and a third a quarter."""
    options = {"batch_size": BATCH, "cache_bytes": 10_000_000, "staging_bytes": 4 << 20}
    with (
        mbaas.serve(f"{feed_name}-1", data, augmented(), **options) as first,
        mbaas.serve(f"{feed_name}-2", data, augmented(), **options) as second,
        mbaas.serve(f"{feed_name}-3", data, augmented(), **options) as third,
    ):
        statuses = [feed.status() for feed in (first, second, third)]
        assert [status.claims.cpus for status in statuses] == [1.0, 0.5, 0.25]
        (one,), (half,), (quarter,) = [status.nodes for status in statuses]
        assert one.node != half.node == quarter.node
        assert 1.0 in resources.free_cpus().values()


def test_a_node_with_a_small_object_store_has_a_small_cache(three_nodes, data, feed_name):
    """The small node replaces the one where another feed works.

    70 % of its 100 MiB are 73.4 MB, including 40 MB for staging and 20 MB of the other feed.
    """
    other = {"batch_size": BATCH, "prep_workers": 1, "cache_bytes": 10_000_000, "staging_bytes": 10_000_000}
    options = {"batch_size": BATCH, "prep_workers": 3, "cache_bytes": 60_000_000, "staging_bytes": 40_000_000}
    with mbaas.serve("other", data, augmented(), **other):
        small = three_nodes.add(object_store_memory=100 << 20)
        with mbaas.serve(feed_name, data, augmented(), **options) as feed:
            status = feed.status()
        assert small.node_id in {node.node for node in status.nodes}
        own = int((100 << 20) * STORE_SHARE) - 40_000_000 - 20_000_000
        assert status.cache_bytes == 2 * 60_000_000 + own
        three_nodes.remove(small)


def test_nothing_spills_on_a_smaller_node_that_comes_later(three_nodes, feed_name):
    """Ready blocks fill the budget ahead of the trial.

    Two nodes of 200 MiB may have 146.8 MB of prepared minibatches each. A node of 75 MiB, which spills from 63 MB on,
    replaces one. Half of the nine blocks of 15.7 MB that fit 145 MB would be too much.
    """
    large = synthetic(SAMPLES, height=256, width=256)
    options = {"batch_size": 16, "prep_workers": 2, "cache_bytes": 0, "staging_bytes": 145_000_000}

    class Busy:
        """Occupies a CPU."""

        def is_up(self) -> bool:
            return True

    busy = ray.remote(num_cpus=1)(Busy).remote()
    assert ray.get(busy.is_up.remote(), timeout=60)
    before = store_use().spilled_bytes
    ahead = mbaas.Staging(ahead_blocks=1000)
    with (
        mbaas.serve(feed_name, large, T.Pipeline([T.DecodeImage()]), staging=ahead, **options) as feed,
        mbaas.join(feed_name, consumer="me", format="numpy") as loader,
    ):
        small = three_nodes.add(object_store_memory=75 << 20)
        used = {node.node for node in feed.status().nodes}
        leaving = next(node for node in three_nodes.there if node.node_id in used)
        (staying,) = used - {leaving.node_id}
        three_nodes.remove(leaving)
        note = "object store has room for 55.1 MB of prepared samples, and up to 145 MB may be staged"
        wait_until(lambda: any(note in each for each in feed.status().notes), "a worker came there", deadline_s=60.0)
        next(iter(loader))
        wait_until(lambda: feed.status().staged_bytes > 0.9 * 145_000_000, "blocks are staged", deadline_s=60.0)
        status = feed.status()
        assert {node.node: node.workers for node in status.nodes} == {staying: 1, small.node_id: 1}
        assert (status.workers_at_work, status.state) == (1, "serving")
        assert [worker.samples > 0 for worker in status.workers if worker.name == "prep-2"] == [False]
        assert store_use().spilled_bytes == before
        ray.kill(busy)
