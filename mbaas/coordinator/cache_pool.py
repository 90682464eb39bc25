"""The nodes that a feed lives on: a cache node on each, and which samples have their home where."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mbaas import runtime
from mbaas.cache.node import FETCH_THREADS, CacheNode
from mbaas.cache.stats import CacheStats, Flow
from mbaas.core.layout import Layout
from mbaas.dataset import Dataset
from mbaas.placement import Holders, NodeWeight, Placement, PlacementHistory, PlacementUpdate, place_samples
from mbaas.settings import FeedSettings

ANSWER_S = 2.0
"""How long a cache node may take for a short answer before it is left out of it."""

START_S = 30.0
"""How long a cache node may take to start."""


class CachePool:
    """Cache nodes and homes of one feed.

    Cache nodes outlive a coordinator; they end with the feed, because each looks whether it still has a coordinator.

    Args:
        settings: of the feed.
        dataset, dataset_ref: the samples, here and in the object store.
        layout: of the feed.

    Attributes:
        atlas: how blocks are cut; its newest homes are known to every cache node and worker.
        caches: node id -> its cache node.
    """

    def __init__(self, settings: FeedSettings, dataset: Dataset, dataset_ref: Any, layout: Layout) -> None:
        self._settings, self._dataset, self._dataset_ref, self._layout = settings, dataset, dataset_ref, layout
        self._lock = asyncio.Lock()
        self._placement_update: PlacementUpdate | None = None
        self.placements = PlacementHistory(layout.order)
        self.caches: dict[str, Any] = {}

    @staticmethod
    async def survivors(feed: str) -> dict[str, Any]:
        """Node id -> its cache node, of those that an earlier coordinator of the feed left and that answer."""
        found = runtime.children(feed, "cache")
        answers = await asyncio.gather(*(_answer(cache.pid.remote()) for cache in found.values()))
        return {node: cache for (node, cache), pid in zip(found.items(), answers, strict=True) if pid is not None}

    async def move_homes(self, weights: Mapping[str, float], workers: Iterable[Any]) -> None:
        """Give every sample a home on one of the nodes, in proportion to ``weights``; start caches where there is none.

        Args:
            weights: node id -> its speed of preparing.
            workers: handles of the prep workers that must know.
        """
        async with self._lock:
            await asyncio.gather(*map(self._open, set(weights) - set(self.caches)))
            version, holders = await self._holders()
            placement = await self._homes(weights, version + 1)
            self._placement_update = PlacementUpdate(placement, holders, dict(self.caches))
            told = [cache.update_placement.remote(self._placement_update) for cache in self.caches.values()]
            told += [worker.update_placement.remote(placement, self.caches) for worker in workers]
            await asyncio.gather(*(_answer(ref) for ref in told))
            self.placements.add(placement)

    async def tell(self, worker: Any) -> None:
        """Tell a worker what the others know already."""
        assert self._placement_update is not None
        await worker.update_placement.remote(self._placement_update.placement, self.caches)

    def is_placed_on(self, nodes: Iterable[str]) -> bool:
        """Whether samples have homes on exactly these nodes."""
        return self.placements.newest is not None and set(self.placements.newest.nodes) == set(nodes)

    @property
    def placement_update(self) -> PlacementUpdate | None:
        """What a restarted cache node must know; None while the feed starts."""
        return self._placement_update

    async def _open(self, node: str) -> None:
        feed = self._settings.name
        options = {
            **runtime.child_options(feed, "cache", node),
            "max_restarts": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        cache = CacheNode.options(**options).remote(  # type: ignore[attr-defined]
            self._dataset_ref,
            self._layout.order,
            cache_bytes=self._settings.cache_bytes,
            readahead_bytes=self._layout.readahead_bytes,
            threads=min(FETCH_THREADS, self._settings.threads.fetch),
            node=node,
            feed=feed,
            disk=self._settings.disk,
        )
        await asyncio.wait_for(_result(cache.pid.remote()), START_S)
        self.caches[node] = cache

    async def _homes(self, weights: Mapping[str, float], version: int) -> Placement:
        node_weights = [NodeWeight(node, self._settings.cache_bytes, weight) for node, weight in weights.items()]

        def find() -> Placement:
            return place_samples(
                node_weights, num_samples=len(self._dataset), lengths=self._dataset.lengths, version=version
            )

        return await asyncio.get_running_loop().run_in_executor(None, find)

    async def _holders(self) -> tuple[int, Holders | None]:
        """The newest version of homes that anybody knows, and who keeps which sample now."""
        nodes = sorted(self.caches)
        index = np.full(len(self._dataset), -1, np.int16)
        newest = 0
        for number, node in enumerate(nodes):
            holdings = await _answer(self.caches[node].holdings.remote())
            if holdings is not None:
                newest = max(newest, holdings.version)
                index[holdings.sample_ids] = number
        return newest, Holders(tuple(nodes), index) if (index >= 0).any() else None

    async def move_out(self, node: str, within_s: float) -> None:
        """Have the other nodes fetch what a node keeps that is to go; what they do not get in time is let go."""
        others = [cache for other, cache in self.caches.items() if other != node]
        with contextlib.suppress(asyncio.TimeoutError, ray.exceptions.RayError):
            await asyncio.wait_for(asyncio.gather(*(_result(cache.move_in.remote()) for cache in others)), within_s)

    async def answers(self, node: str, within_s: float) -> bool:
        """Whether a node's cache answers; one that is being restarted gets the time to come back."""
        cache, end = self.caches.get(node), asyncio.get_running_loop().time() + within_s
        while cache is not None and asyncio.get_running_loop().time() < end:
            if await _answer(cache.pid.remote()) is not None:
                return True
            await asyncio.sleep(0.1)
        return False

    async def stats(self) -> dict[str, CacheStats]:
        """Node id -> how its cache is doing; without those that do not answer."""
        nodes = list(self.caches)
        found = await asyncio.gather(*(_answer(self.caches[node].stats.remote()) for node in nodes))
        return {node: stats for node, stats in zip(nodes, found, strict=True) if stats is not None}

    async def flow(self, node: str, pace_per_s: float) -> Flow | None:
        """What a node's cache measured and decided; None if it does not answer."""
        cache = self.caches.get(node)
        return None if cache is None else await _answer(cache.flow.remote(pace_per_s))

    async def set_threads(self, node: str, threads: int) -> None:
        """Have a node's cache read storage with so many threads; one that is gone is left alone."""
        if (cache := self.caches.get(node)) is not None:
            await _answer(cache.set_threads.remote(threads))

    def close(self, node: str) -> None:
        """A node is gone: forget its cache."""
        cache = self.caches.pop(node, None)
        if cache is not None:
            ray.kill(cache)

    def close_all(self) -> None:
        for node in list(self.caches):
            self.close(node)


async def _answer(ref: Any) -> Any:
    """An actor's answer, or None if it has none in time."""
    try:
        return await asyncio.wait_for(_result(ref), ANSWER_S)
    except (asyncio.TimeoutError, ray.exceptions.RayError):
        return None


async def _result(ref: Any) -> Any:
    return await ref
