"""Builds the `Opening` of a feed, the starting point of `mbaas.coordinator.supervision`.

A new feed starts its workers; a restarted coordinator adopts its predecessor's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from mbaas.base.units import counted
from mbaas.coordinator import recovery
from mbaas.coordinator.background import answer_or_none
from mbaas.coordinator.cache_pool import CachePool, FoundCache
from mbaas.coordinator.worker_pool import WorkerPool
from mbaas.core.cluster import events as ev
from mbaas.core.layout import Layout, lay_out
from mbaas.dataset import Dataset
from mbaas.errors import FeedFailedError, ResourceError
from mbaas.settings import FeedSettings
from mbaas.transforms import Pipeline

DATASET_S = 60.0
"""Timeout for a cache node to send a large dataset, in seconds. Small datasets are read from the key-value store."""


@dataclass(frozen=True)
class Opening:
    """Workers, caches and layout that supervision starts from.

    Attributes:
        settings: the feed's options, with the measured size of its cache.
        begin: the supervisor's first event.
        lent: key -> a worker of this feed that works for another feed.
    """

    settings: FeedSettings
    dataset: Dataset
    layout: Layout
    workers: WorkerPool
    caches: CachePool
    begin: ev.Begin
    lent: Mapping[Hashable, Any] = field(default_factory=dict)


async def prepare(
    settings: FeedSettings, workers: WorkerPool, dataset: Dataset, pipeline: Pipeline, launched: Mapping[str, Any]
) -> Opening:
    """Start all workers of a new feed, and measure a prepared sample.

    ``launched`` are the actors of the starting workers, by name.

    Raises:
        ResourceError: workers did not get their CPUs.
        BadSampleError: no sample can be prepared.
        ConfigError: the staging budget is too small.
    """
    dataset_ref = ray.put(dataset)
    started = await workers.start_all(launched)
    probe = await workers.probe(started[0], dataset_ref)
    layout = lay_out(
        settings,
        probe,
        (worker.node for worker in started),
        num_samples=len(dataset),
        stored_samples=len(dataset.stored),
        stored_bytes=dataset.stored.total_bytes,
        is_random=pipeline.is_random,
        redrawn=dataset.stored is not dataset,
        identity=f"{pipeline.prefix_fingerprint} {workers.engine}, all but {settings.undecoded_share}",
        earlier=await asyncio.to_thread(recovery.recall_layout, settings.name),
    )
    await asyncio.to_thread(recovery.remember, settings.name, layout, dataset)
    begin = ev.Begin(
        workers={worker.name: ev.FoundWorker(worker.node) for worker in started},
        serial=len(started),
        version=_first_version(),
    )
    settings = layout.sized(settings)
    caches = CachePool(settings, dataset, dataset_ref, layout)
    return Opening(settings, dataset, layout, workers, caches, begin)


async def adopt(settings: FeedSettings, workers: WorkerPool) -> Opening:
    """Take over the workers and cache nodes of an earlier coordinator that are still alive.

    Raises:
        ResourceError: only cache nodes have the dataset and none answers now.
        FeedFailedError: the feed's layout or its dataset is lost.
    """
    feed = settings.name
    layout, dataset = await asyncio.to_thread(recovery.recall, feed)
    found = await CachePool.survivors(feed)
    # A dataset too large for the key-value store is available from the cache nodes only.
    if layout is not None and dataset is None:
        dataset = await _dataset_of(found)
    if layout is None:
        raise FeedFailedError(ev.FeedEnd.NOT_KEPT.of(feed))
    if dataset is None and not found:
        raise FeedFailedError(ev.FeedEnd.DATASET_LOST.of(feed))
    if dataset is None:  # a cache node that hangs or restarts may have it, and answer later
        nodes = ", ".join(sorted({node[:8] for node, _ in found}))
        raise ResourceError(
            f"the dataset of feed {feed!r} is too large for the cluster's key-value store, so it waits for its "
            f"{counted(len(found), 'cache node')} to tell it, which did not answer (on {nodes})"
        )
    dataset_ref, settings = ray.put(dataset), layout.sized(settings)
    caches = CachePool(settings, dataset, dataset_ref, layout)
    await caches.adopt(found)
    survivors = await workers.survivors()
    begin = ev.Begin(
        workers={worker.name: ev.FoundWorker(worker.node, worker.owner) for worker in survivors.workers},
        caches={key: cache.answers for key, cache in found.items()},
        lent={borrower: tuple(lent) for borrower, lent in survivors.lent.items()},
        serial=survivors.serial,
        version=_first_version(),
        is_restart=True,
        rooms={node: caches.rooms[node] for node, _ in found if node in caches.rooms},
    )
    lent: dict[Hashable, Any] = {key: actor for each in survivors.lent.values() for key, actor in each.items()}
    return Opening(settings, dataset, layout, workers, caches, begin, lent)


async def _dataset_of(found: Mapping[tuple[str, int], FoundCache]) -> Dataset | None:
    for cache in found.values():
        if cache.answers:
            dataset: Dataset | None = await answer_or_none(cache.actor.dataset.remote(), DATASET_S)
            if dataset is not None:
                return dataset
    return None


def _first_version() -> int:
    # above all placement versions of an earlier coordinator, because no feed makes a thousand placements per second
    return time.time_ns() // 1_000_000
