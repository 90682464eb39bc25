"""A partition of 30 s and slow links between nodes lose no sample.

Minutes long, and only for root: `pytest -m long`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import psutil
import pytest

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.errors import ResourceError
from mbaas.tools.chaos.network import Network, clear_leftovers, why_not
from support.trials import Recorder, record_epoch
from support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

SAMPLES = 1003
PARTITION_S = 30.0

DETECTION_S = 25.0
"""Time to detect an unreachable node, with the settings of `network`, and to prepare a part again."""

BLOCK_BYTES = 128 * 224 * 224 * 3
"""Bytes of a block of the feed that `serve_large` serves. All its blocks consist of one part."""


def serve_large(name: str, *, samples: int) -> mbaas.Feed:
    return mbaas.serve(
        name,
        synthetic(samples, height=64, width=64),
        T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(224)]),
        batch_size=128,
        staging_bytes=100 << 20,
        prep_workers=1,
    )


def serve(name: str, *, workers: int, size: int = 32) -> mbaas.Feed:
    def dawdle(image, rng):
        time.sleep(0.005)
        return image

    return mbaas.serve(
        name,
        synthetic(SAMPLES, height=size, width=size),
        T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(size), T.Map(dawdle)]),
        batch_size=64,
        staging_bytes=8 << 20,
        prep_workers=workers,
    )


def test_what_a_killed_program_left_is_no_hindrance(no_ray: None) -> None:
    """A program killed with -9 leaves a bridge, namespaces, and all Ray processes."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    program = (
        "import tempfile; from mbaas.tools.chaos.network import Network\n"
        "network = Network(tempfile.mkdtemp(prefix='mb', dir='/tmp')); network.connect(); network.add()\n"
        "print('there', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "there\n"
        with pytest.raises(ResourceError, match=f"process {killed.pid} has nodes in network namespaces"):
            clear_leftovers()
        killed.kill()
    clear_leftovers()
    assert "mbaas" not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert "mbaas-" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [p for p in psutil.process_iter(["cmdline"]) if "--node-ip-address=10.213.7." in str(p.info["cmdline"])]


def test_a_partition_of_thirty_seconds_costs_no_sample(network: Network, feed_name: str) -> None:
    """The other node's parts are prepared again here, and its samples get new homes. Its return repeats nothing."""
    network.add()
    unplugged = network.add()
    node = unplugged.node_id
    with serve("alone", workers=1) as alone, mbaas.join("alone", consumer="me", format="numpy") as loader:
        expected = [record_epoch(loader).row_digest for _ in range(3)]
        del alone
    with (
        serve(feed_name, workers=2) as feed,
        mbaas.join(feed_name, consumer="me", format="numpy") as loader,
    ):
        first = record_epoch(loader)
        assert {each.node for each in feed.status().nodes} >= {node}
        recorder, longest_s, began = Recorder(), 0.0, time.monotonic()
        loop = iter(loader)
        for _ in range(3):
            recorder.add(next(loop))
        with contextlib.ExitStack() as partition:
            partition.callback(network.cut(unplugged))
            cut = began = time.monotonic()
            for batch in loop:
                longest_s = max(longest_s, time.monotonic() - began)
                recorder.add(batch)
                began = time.monotonic()
            del batch
            ended = time.monotonic()
            time.sleep(max(0.0, cut + PARTITION_S - time.monotonic()))
        second = recorder.record(loader.ledger)
        wait_until(lambda: node not in {each.node for each in feed.status().nodes}, "the feed lives without the node")
        third = record_epoch(loader)
        for record in (first, second, third):
            assert record.flaws(range(SAMPLES)) == []
        assert [record.row_digest for record in (first, second, third)] == expected
        print(f"longest wait {longest_s:.1f} s, the epoch went on for {ended - cut:.1f} s after the cut")
        assert longest_s < DETECTION_S


def test_over_a_slow_link_only_pixels_travel(network: Network, feed_name: str) -> None:
    """50 Mbit/s to each of two nodes. Raw bytes stay in place, and an epoch takes about as long as its pixels need."""
    nodes = [network.add() for _ in range(2)]
    with (
        serve(feed_name, workers=2, size=64) as feed,
        mbaas.join(feed_name, consumer="me", format="numpy") as loader,
    ):
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
        before = feed.status()
        for node in nodes:
            network.limit(node, 50)
        began = time.monotonic()
        record = record_epoch(loader)
        seconds = time.monotonic() - began
        after = feed.status()
        assert record.flaws(range(SAMPLES)) == []
        epochs = (after.prepared_samples - before.prepared_samples) / SAMPLES
        moved = after.fetched.remote.nbytes - before.fetched.remote.nbytes
        raw = after.cached_bytes
        assert moved <= 0.05 * raw * max(1.0, epochs)
        pixels_s = SAMPLES * 64 * 64 * 3 * 8 / 2 / 50e6  # each node sends half of the pixels
        print(f"epoch {seconds:.2f} s, its pixels alone {pixels_s:.2f} s, raw bytes moved {moved} of {raw}")
        assert seconds < 4 * pixels_s + 10.0


def test_a_block_comes_that_travels_for_longer_than_a_look(network: Network, feed_name: str) -> None:
    """40 Mbit/s: a block takes 3.9 s. When readers waited 2 s at a time and restarted each time, none arrived."""
    node = network.add()
    with serve_large(feed_name, samples=512), mbaas.join(feed_name, consumer="me", format="numpy") as loader:
        assert record_epoch(loader).flaws(range(512)) == []
        network.limit(node, 40)
        record_epoch(loader)  # its first blocks arrived before
        began = time.monotonic()
        assert record_epoch(loader).flaws(range(512)) == []
        seconds, pixels_s = time.monotonic() - began, 4 * BLOCK_BYTES * 8 / 40e6
        print(f"epoch {seconds:.2f} s, its pixels alone {pixels_s:.2f} s")
        assert seconds < 1.5 * pixels_s


def test_blocks_travel_while_the_trial_works(network: Network, feed_name: str) -> None:
    """200 Mbit/s, and steps as long as a block's transfer: an epoch takes as long as one of the two, not their sum."""
    node, step_s = network.add(), BLOCK_BYTES * 8 / 200e6
    with serve_large(feed_name, samples=1024), mbaas.join(feed_name, consumer="me", format="numpy") as loader:
        assert record_epoch(loader).flaws(range(1024)) == []
        network.limit(node, 200)
        seconds = []
        for _ in range(2):
            began = time.monotonic()
            for batch in loader:
                del batch
                time.sleep(step_s)
            seconds.append(time.monotonic() - began)
        print(f"epochs {seconds[0]:.2f} and {seconds[1]:.2f} s, steps alone {8 * step_s:.2f} s")
        assert seconds[1] < 1.4 * 8 * step_s
