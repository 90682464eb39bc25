"""Runs of several nodes that share a feed, or load alone, from storage of a fixed speed.

Each number of nodes gets a new Ray cluster on this machine. A node has one CPU for prep, one trial, an object store,
and a link to storage (see `benchmarks.throttled`). All nodes share the cores of this machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mbaas
from benchmarks import ID_BYTES
from benchmarks.local_cluster import LocalCluster, actors_on, answers, local_cluster
from benchmarks.nodes.report import Loading, NodesReport, NodesResult, NodesSettings
from benchmarks.nodes.trials import EpochSeen, LoneTrial, SharingTrial
from benchmarks.throttled import ReadLog, ThrottledDataset, measured_bytes_per_s, throttled
from mbaas.base.units import counted
from mbaas.errors import MbaasError
from mbaas.feed import Feed
from mbaas.ray_cluster.resources import spilled_bytes
from mbaas.status import FeedStatus
from mbaas.tools.bench.report import Machine
from mbaas.tools.bench.tasks.images import Images, make_photos

STORE_BYTES = 400 << 20
STAGING_BYTES = 96 << 20

HEADROOM = 1.01
"""Factor for caches of the whole dataset: they need slightly more than their share, because samples are not split."""

START_S = 90.0
EPOCH_S = 300.0
IDLE_S = 60.0
"""Timeouts for the start of trials, for an epoch, and for a feed without consumers to become idle."""


def run(settings: NodesSettings, report: Callable[[str], None] = print) -> NodesReport:
    """Measure all numbers of nodes and cache shares, one after another.

    Raises:
        DatasetError: photographs cannot be generated, or ``settings.data`` contains no images.
    """
    folder = settings.data or make_photos(settings.cache_dir, settings.images, seed=settings.seed, report=report)
    data = mbaas.read_images(folder)
    results = []
    for nodes in settings.nodes:
        with local_cluster(nodes, store_bytes=STORE_BYTES) as cluster:
            for share in settings.cache_shares:
                results.append(_measure(settings, data, cluster, share))
                report(_described(results[-1]))
    return NodesReport(settings, Machine(), tuple(results))


def _described(result: NodesResult) -> str:
    ours, theirs = result.sharing, result.alone
    return (
        f"{counted(result.nodes, 'node')}, caches for {result.cache_share:.0%}: epochs of "
        f"{ours.first_epoch_s:.1f} and {ours.later_epoch_s:.1f} s shared, "
        f"{theirs.first_epoch_s:.1f} and {theirs.later_epoch_s:.1f} s alone"
    )


def _measure(settings: NodesSettings, data: mbaas.Dataset, cluster: LocalCluster, share: float) -> NodesResult:
    nodes, rate = len(cluster.node_ids), settings.storage_bytes_per_s
    headroom = HEADROOM if share == 1 else 1.0
    cache_bytes = int(data.total_bytes * share * headroom / nodes)

    def behind_link(name: str) -> ThrottledDataset:
        return throttled(data, bytes_per_s=rate, log=cluster.folder / f"reads-{share:g}-{name}")

    sharing, remade = _measure_sharing(settings, behind_link("sharing"), cluster, cache_bytes)
    alone = _load_alone(settings, behind_link("alone"), cluster, cache_bytes)
    return NodesResult(
        nodes=nodes,
        cache_share=share,
        cache_bytes=cache_bytes,
        dataset_bytes=data.total_bytes,
        sample_bytes=Images.made.nbytes + ID_BYTES,
        samples=len(data),
        limit_bytes_per_s=rate,
        # the maximum of three: other programs on this machine can only slow it down
        measured_bytes_per_s=max(measured_bytes_per_s(behind_link(f"test-{i}"), seconds=0.5) for i in range(3)),
        sharing=sharing,
        alone=alone,
        spilled_bytes=spilled_bytes(),
        remade=remade,
    )


def _measure_sharing(
    settings: NodesSettings, data: ThrottledDataset, cluster: LocalCluster, cache_bytes: int
) -> tuple[Loading, int]:
    """Run all nodes on one feed; also return the number of parts made more than once."""
    with mbaas.serve(
        f"nodes-{os.getpid()}",
        data,
        Images().pipeline(),
        batch_size=settings.batch,
        seed=settings.seed,
        prep_workers=len(cluster.node_ids),
        cache_bytes=cache_bytes,
        staging_bytes=STAGING_BYTES,
        engine="cpu",
    ) as feed:
        names = [f"trial-{index}" for index in range(len(cluster.node_ids))]
        mbaas.announce(feed.name, names)  # all begin with the same epoch and share it
        crossed = []
        with actors_on(cluster.node_ids, SharingTrial, [(feed.name, name, len(data)) for name in names]) as trials:
            answers([trial.ready.remote() for trial in trials], START_S, "the trials to start")
            epochs, began = [], time.monotonic()
            # All trials finish an epoch before any begins the next, so the bytes belong to one epoch.
            for _ in range(settings.epochs):
                epochs.append(_epoch(trials))
                crossed.append(feed.status().fetched.remote.nbytes)
            status = _idle(feed)  # before trials leave, while prepared blocks still count as staged
            answers([trial.close.remote() for trial in trials], START_S, "the trials to leave")
        sample_bytes = Images.made.nbytes + ID_BYTES
        # exclude the sample that a worker read to learn its shape: it is not part of an epoch
        log = ReadLog.of(data, but=[worker.pid for worker in status.workers])
        loading = Loading(
            epoch_s=_lengths_s(began, epochs),
            storage_bytes=log.epoch_bytes(settings.epochs, together=True),
            fastest_bytes_per_s=log.fastest_bytes_per_s(),
            remote_bytes=_differences(crossed),
            prepared_bytes=(status.prepared_samples * sample_bytes - status.staged_bytes) / settings.epochs,
            cached_bytes=tuple(node.cached_bytes for node in status.nodes),
            missing=_sum(epochs, "missing"),
            repeated=_sum(epochs, "repeated"),
        )
        return loading, status.remade_blocks


def _load_alone(settings: NodesSettings, data: ThrottledDataset, cluster: LocalCluster, cache_bytes: int) -> Loading:
    """Let every node load the whole dataset alone, all at the same time."""
    options = {"seed": settings.seed, "block_samples": settings.batch, "cache_bytes": cache_bytes}
    arguments = [(data, Images().pipeline())] * len(cluster.node_ids)
    with actors_on(cluster.node_ids, LoneTrial, arguments, **options) as trials:
        answers([trial.ready.remote() for trial in trials], START_S, "the trials to start")
        began = time.monotonic()
        epochs = [_epoch(trials) for _ in range(settings.epochs)]
        cached = answers([trial.cached_bytes.remote() for trial in trials], START_S, "what the caches hold")
    log = ReadLog.of(data)
    return Loading(
        epoch_s=_lengths_s(began, epochs),
        storage_bytes=log.epoch_bytes(settings.epochs, together=False),
        fastest_bytes_per_s=log.fastest_bytes_per_s(),
        remote_bytes=(0,) * settings.epochs,
        prepared_bytes=float(len(trials) * len(data) * (Images.made.nbytes + ID_BYTES)),
        cached_bytes=tuple(cached),
        missing=_sum(epochs, "missing"),
        repeated=_sum(epochs, "repeated"),
    )


def _epoch(trials: Sequence[Any]) -> list[EpochSeen]:
    return answers([trial.epoch.remote() for trial in trials], EPOCH_S, "an epoch to end")


def _idle(feed: Feed) -> FeedStatus:
    """Wait until the feed has made all blocks ahead of its trials; return its status.

    Raises:
        MbaasError: it takes longer than `IDLE_S`.
    """
    end, before = time.monotonic() + IDLE_S, feed.status()
    while time.monotonic() < end:
        time.sleep(0.3)
        now = feed.status()
        # Between two blocks no task may exist for a moment, so the sums must also be unchanged.
        same = (now.prepared_samples, now.staged_bytes) == (before.prepared_samples, before.staged_bytes)
        if same and not any(worker.tasks for worker in now.workers):
            return now
        before = now
    raise MbaasError(f"the feed still prepares {IDLE_S:g} s after its last epoch")


def _lengths_s(began: float, epochs: Sequence[Sequence[EpochSeen]]) -> tuple[float, ...]:
    ends = [began, *(max(seen.ended_s for seen in epoch) for epoch in epochs)]
    return tuple(end - start for start, end in pairwise(ends))


def _differences(totals: Sequence[int]) -> tuple[int, ...]:
    return tuple(after - before for before, after in pairwise([0, *totals]))


def _sum(epochs: Sequence[Sequence[EpochSeen]], name: str) -> int:
    return sum(getattr(seen, name) for epoch in epochs for seen in epoch)
