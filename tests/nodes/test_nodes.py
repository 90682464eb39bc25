"""One feed on several nodes: homes, parts, deaths of nodes and nodes that come."""

from __future__ import annotations

import time

import numpy as np
import pytest
import ray

import mbaas
from mbaas import transforms as T
from mbaas.budgets import STORE_SHARE
from mbaas.dataset import synthetic
from support.trials import record_epoch
from support.waiting import wait_until

SAMPLES = 1003
OPTIONS = {"batch_size": 64, "staging_bytes": 4 << 20}


@pytest.fixture(scope="module")
def data() -> mbaas.Dataset:
    return synthetic(SAMPLES, height=32, width=32)


def pipeline() -> T.Pipeline:
    return T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(32), T.RandomHorizontalFlip()])


def digests(feed: mbaas.Feed, epochs: int, consumer: str = "me") -> list[str]:
    """Of all bytes of each epoch, which must be exact."""
    with mbaas.join(feed.name, consumer=consumer, format="numpy") as loader:
        records = [record_epoch(loader) for _ in range(epochs)]
    assert [record.flaws(range(SAMPLES)) for record in records] == [[]] * epochs
    return [record.row_digest for record in records]


def test_bytes_do_not_depend_on_the_cluster_and_each_sample_is_read_from_storage_once(nodes, data, feed_name):
    for _ in range(4):
        nodes.add()
    with mbaas.serve("one", data, pipeline(), prep_workers=1, **OPTIONS) as one:
        alone = digests(one, 3)
    with mbaas.serve(feed_name, data, pipeline(), prep_workers=4, **OPTIONS) as feed:
        assert digests(feed, 3) == alone
        status = feed.status()
        assert [node.workers for node in status.nodes] == [1, 1, 1, 1]
        assert sum(node.storage_bytes for node in status.nodes) == data.total_bytes == status.fetched.storage.nbytes
        assert status.cached_bytes == data.total_bytes
        block_part = data.total_bytes / 4
        assert all(0.85 * block_part < node.cached_bytes < 1.15 * block_part for node in status.nodes)
        epochs = status.prepared_samples / SAMPLES
        assert status.fetched.remote.nbytes <= 0.05 * epochs * data.total_bytes
        assert status.remade_blocks == 0


def test_a_node_with_a_small_object_store_has_a_small_cache(nodes, data, feed_name):
    """Of 70 % of its 100 MiB, 73.4 MB, 40 MB are for staging, and 20 MB are another feed's."""
    large = nodes.add(cpus=2).node_id
    first = mbaas.serve(
        "first", data, pipeline(), batch_size=64, prep_workers=1, cache_bytes=10_000_000, staging_bytes=10_000_000
    )
    small = nodes.add(store_bytes=100 << 20).node_id
    options = {"batch_size": 64, "prep_workers": 2, "cache_bytes": 60_000_000, "staging_bytes": 40_000_000}
    with first, mbaas.serve(feed_name, data, pipeline(), **options) as feed:
        status = feed.status()
        assert {node.node for node in status.nodes} == {large, small}
        assert status.cache_bytes == 60_000_000 + int((100 << 20) * STORE_SHARE) - 40_000_000 - 20_000_000


def test_the_next_block_comes_from_its_node_while_the_trial_works(nodes, feed_name):
    """The trial runs where no block is made."""
    nodes.add()
    here = ray.get_runtime_context().get_node_id()
    whole = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(64)])
    with (
        mbaas.serve(feed_name, synthetic(SAMPLES, height=32, width=32), whole, prep_workers=1, batch_size=64),
        mbaas.join(feed_name, consumer="me", format="numpy") as loader,
    ):

        def is_next_here() -> bool:
            next_blocks = [received.block for received in list(loader._stream.session.received)[:1]]
            refs = [ref for block in next_blocks for part in block.parts for ref in part.refs]
            places = ray.experimental.get_object_locations(refs).values()
            return bool(refs) and all(here in place["node_ids"] for place in places)

        found = []
        for _ in range(3):
            for batch in loader:
                del batch
                time.sleep(0.05)
                found.append(is_next_here())
        assert np.mean(found) > 0.3


def test_caches_that_do_not_hold_the_dataset_leave_exactly_the_rest_to_storage(nodes, data, feed_name):
    for _ in range(3):
        nodes.add()
    budget = data.total_bytes // 6
    with mbaas.serve(feed_name, data, pipeline(), prep_workers=3, cache_bytes=budget, **OPTIONS) as feed:
        digests(feed, 3)
        status = feed.status()
        assert status.cached_bytes == pytest.approx(data.total_bytes / 2, rel=0.01)
        assert all(0.95 * budget < node.cached_bytes <= budget for node in status.nodes)
        whole_epochs = status.prepared_samples / SAMPLES
        due = data.total_bytes + (whole_epochs - 1) * (data.total_bytes - status.cached_bytes)
        assert status.fetched.storage.nbytes == pytest.approx(due, rel=0.02)


def test_a_node_dies_and_another_comes(nodes, data, feed_name):
    nodes.add()
    doomed = nodes.add()
    with mbaas.serve("one", data, pipeline(), prep_workers=1, **OPTIONS) as one:
        alone = digests(one, 6)
    with (
        mbaas.serve(feed_name, data, pipeline(), prep_workers=2, **{**OPTIONS, "staging_bytes": 2 << 20}) as feed,
        mbaas.join(feed_name, consumer="me", format="numpy") as loader,
    ):
        first = record_epoch(loader)
        longest_s = 0.0
        loop, began = iter(loader), time.monotonic()
        ids = [next(loop)["sample_id"].copy() for _ in range(3)]
        nodes.kill(doomed)
        for batch in loop:
            longest_s = max(longest_s, time.monotonic() - began)
            ids.append(batch["sample_id"].copy())
            began = time.monotonic()
        assert sum(map(len, ids)) == SAMPLES
        assert loader.ledger.exact
        assert longest_s < 15.0
        wait_until(lambda: len(feed.status().nodes) == 1, "the feed lives on one node")
        wait_until(lambda: any("is gone" in note for note in feed.status().notes), "the log says so")
        # Parts of the third epoch that were made before the node died are not fetched again: the fourth has them kept,
        # of which none was made by then, because less than an epoch is staged.
        third, fourth = record_epoch(loader), record_epoch(loader)
        wait_until(lambda: feed.status().cached_bytes == data.total_bytes, "what is being read is kept")
        read_before = feed.status().fetched.storage.nbytes

        nodes.add()
        wait_until(lambda: [node.workers for node in feed.status().nodes] == [1, 1], "a worker came", deadline_s=60.0)
        records = [first, third, fourth, record_epoch(loader), record_epoch(loader)]
        for record in records:
            assert record.flaws(range(SAMPLES)) == []
        assert [record.row_digest for record in records] == [alone[0], *alone[2:]]
        wait_until(lambda: feed.status().cached_bytes == data.total_bytes, "all samples that are on their way are kept")
        status = feed.status()
        moved = min(node.cached_samples for node in status.nodes)
        assert 0.3 * SAMPLES < moved < 0.7 * SAMPLES
        assert status.fetched.storage.nbytes == read_before, "samples move from memory to memory"


@pytest.mark.long
def test_samples_move_to_the_nodes_that_prepare_them_faster(nodes, data, feed_name):
    """1 ms a sample on one node and 3 ms on the other, beside decoding: at first each has half of the samples. What the
    fast worker took over crossed in every epoch.
    """
    fast, slow = (nodes.add().node_id for _ in range(2))

    def drag(image, _generator):
        time.sleep(0.003 if ray.get_runtime_context().get_node_id() == slow else 0.001)
        return image

    dragging = T.Pipeline([T.DecodeImage(), T.Map(drag)])
    with (
        mbaas.serve(feed_name, data, dragging, prep_workers=2, **OPTIONS) as feed,
        mbaas.join(feed_name, consumer="me", format="numpy") as loader,
    ):
        seconds, crossed = [], []
        while sum(seconds) < 60:
            began, before = time.monotonic(), feed.status()
            assert record_epoch(loader).flaws(range(SAMPLES)) == []
            seconds.append(time.monotonic() - began)
            crossed.append((feed.status().fetched.remote.samples - before.fetched.remote.samples) / SAMPLES)
        status = feed.status()
        notes = [note for note in status.notes if "of the speed" in note]
        assert len(notes) == 1, status.notes
        parts = {node.node: node.cached_samples / SAMPLES for node in status.nodes}
        assert 0.15 < parts[slow] < 0.40
        assert parts[slow] + parts[fast] == pytest.approx(1)
        assert np.mean(crossed[-10:]) < np.mean(crossed[1:11]) / 2
        assert np.median(seconds[-10:]) < np.median(seconds[1:11])
        assert status.fetched.storage.nbytes == data.total_bytes, "samples move from memory to memory"
