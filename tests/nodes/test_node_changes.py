"""A feed survives nodes that die, join, or are slower than others."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray
from node_feeds import OPTIONS, SAMPLES, augmented, digests

import mbaas
from mbaas import transforms as T
from support.trials import record_epoch
from support.waiting import wait_until


def test_a_node_dies_and_another_comes(nodes, data, feed_name):
    nodes.add()
    doomed = nodes.add()
    with mbaas.serve("one", data, augmented(), prep_workers=1, **OPTIONS) as one:
        alone = digests(one, 6)
    with (
        mbaas.serve(feed_name, data, augmented(), prep_workers=2, **{**OPTIONS, "staging_bytes": 2 << 20}) as feed,
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
        del batch
        assert sum(map(len, ids)) == SAMPLES
        assert loader.ledger.exact
        assert longest_s < 15.0
        wait_until(lambda: len(feed.status().nodes) == 1, "the feed lives on one node")
        wait_until(lambda: any("is gone" in note for note in feed.status().notes), "the log says so")
        # Ray refuses the worker that it was starting on the dead node; after a pause another worker waits for a node.
        wait_until(lambda: waits_for_a_cpu(feed.status()), "there is no second one, and the status says so")
        status = feed.status()
        assert (status.state, status.workers_at_work) == ("serving", 1)
        # Parts of the third epoch that were prepared before the node died are not fetched again. The fourth epoch
        # caches their samples. It was all prepared after the death, because less than an epoch is staged.
        third, fourth = record_epoch(loader), record_epoch(loader)
        wait_until(lambda: feed.status().cached_samples == SAMPLES, "what is being read is kept")
        # Bytes read by the node's cache. A fetch made ahead is counted later, together with its block.
        read_before = bytes_read(feed.status())

        nodes.add()
        wait_until(lambda: [node.workers for node in feed.status().nodes] == [1, 1], "a worker came", deadline_s=60.0)
        records = [first, third, fourth, record_epoch(loader), record_epoch(loader)]
        for record in records:
            assert record.flaws(range(SAMPLES)) == []
        assert [record.row_digest for record in records] == [alone[0], *alone[2:]]
        wait_until(lambda: feed.status().cached_samples == SAMPLES, "all samples that are on their way are kept")
        status = feed.status()
        moved = min(node.cached_samples for node in status.nodes)
        assert 0.3 * SAMPLES < moved < 0.7 * SAMPLES
        assert bytes_read(status) == read_before, "samples move from memory to memory"
        assert status.waits_for == ()

        with ThreadPoolExecutor(1) as trial:
            for node in list(nodes.there):
                nodes.kill(node)
            sixth = trial.submit(record_epoch, loader)
            try:
                status = wait_until(lambda: waits_for_anybody(feed.status()), "nobody is left, and the trial says so")
                assert any(" are being started, each needs 1 CPU" in wait for wait in status.waits_for)
            finally:
                nodes.add(2)
            assert sixth.result(60.0).flaws(range(SAMPLES)) == []


def bytes_read(status):
    """Bytes that the running caches have read from storage."""
    return sum(node.storage_bytes for node in status.nodes)


def waits_for_a_cpu(status):
    """Return whether a feed waits only for one worker's CPU."""
    return len(status.waits_for) == 1 and "is being started, it needs 1 CPU" in status.waits_for[0]


def waits_for_anybody(status):
    """Status of a feed without workers whose trial lists the workers that it waits for; otherwise None."""
    (member,) = status.consumers
    says_it = member.waits_for.startswith("no prep worker is up; ") and "each needs 1 CPU" in member.waits_for
    return status if status.state == "waiting" and says_it else None


@pytest.mark.long
def test_samples_move_to_the_nodes_that_prepare_them_faster(nodes, data, feed_name):
    """Besides decoding, a sample takes 1 ms on one node and 3 ms on the other.

    At first each node has half of the samples, so the samples that the fast worker took over crossed the network in
    every epoch.
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
