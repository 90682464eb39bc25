"""The nodes that a feed lives on: a cache node on each, and which samples have their home where."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mbaas.cache.atlas import Atlas, Holders, Survey
from mbaas.cache.homes import Homes, Host, settle
from mbaas.cache.node import CacheNode
from mbaas.cache.stats import CacheStats
from mbaas.dataset import Dataset
from mbaas.order import Sweep

ANSWER_S = 2.0
"""How long a cache node may take for a short answer before it is left out of it."""

START_S = 30.0
"""How long a cache node may take to start."""


class Territory:
    """Cache nodes and homes of one feed.

    Args:
        coordinator: handle of the feed's coordinator, which tells a restarted cache node what it must know.
        dataset, dataset_ref: the samples, here and in the object store.
        sweep: the order.
        cache_bytes: for raw samples, on each node.
        readahead_bytes: read ahead of prep, on all nodes together.

    Attributes:
        atlas: how blocks are cut; its newest homes are known to every cache node and worker.
        caches: node id -> its cache node.
    """

    def __init__(
        self,
        coordinator: Any,
        dataset: Dataset,
        dataset_ref: Any,
        sweep: Sweep,
        *,
        cache_bytes: int,
        readahead_bytes: int,
    ) -> None:
        self._coordinator, self._dataset, self._dataset_ref, self._sweep = coordinator, dataset, dataset_ref, sweep
        self._cache_bytes, self._readahead_bytes = cache_bytes, readahead_bytes
        self._lock = asyncio.Lock()
        self._survey: Survey | None = None
        self.atlas = Atlas(sweep)
        self.caches: dict[str, Any] = {}

    async def settle(self, weights: Mapping[str, float], workers: Iterable[Any]) -> None:
        """Give every sample a home on one of the nodes, in proportion to ``weights``; start caches where there is none.

        Args:
            weights: node id -> its speed of preparing.
            workers: handles of the prep workers that must know.
        """
        async with self._lock:
            for node in set(weights) - set(self.caches):
                self.caches[node] = await self._open(node)
            holders = await self._holders() if self.atlas.newest is not None else None
            homes = await self._homes(weights)
            self._survey = Survey(homes, holders, dict(self.caches))
            told = [cache.settle.remote(self._survey) for cache in self.caches.values()]
            told += [worker.settle.remote(homes, self.caches) for worker in workers]
            await asyncio.gather(*(_answer(ref) for ref in told))
            self.atlas.add(homes)

    async def tell(self, worker: Any) -> None:
        """Tell a worker what the others know already."""
        assert self._survey is not None
        await worker.settle.remote(self._survey.homes, self.caches)

    def is_settled_on(self, nodes: Iterable[str]) -> bool:
        """Whether samples have homes on exactly these nodes."""
        return self.atlas.newest is not None and set(self.atlas.newest.nodes) == set(nodes)

    @property
    def survey(self) -> Survey | None:
        """What a restarted cache node must know; None while the feed starts."""
        return self._survey

    async def _open(self, node: str) -> Any:
        options = {
            "max_restarts": -1,
            "enable_task_events": False,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        cache = CacheNode.options(**options).remote(  # type: ignore[attr-defined]
            self._dataset_ref,
            self._sweep,
            cache_bytes=self._cache_bytes,
            readahead_bytes=self._readahead_bytes,
            node=node,
            coordinator=self._coordinator,
        )
        await asyncio.wait_for(_result(cache.pid.remote()), START_S)
        return cache

    async def _homes(self, weights: Mapping[str, float]) -> Homes:
        hosts = [Host(node, self._cache_bytes, weight) for node, weight in weights.items()]
        version = 1 if self.atlas.newest is None else self.atlas.newest.version + 1

        def find() -> Homes:
            size = len(self._dataset)
            return settle(hosts, num_samples=size, lengths=self._dataset.lengths, version=version)

        return await asyncio.get_running_loop().run_in_executor(None, find)

    async def _holders(self) -> Holders:
        """Who keeps which sample now."""
        nodes = sorted(self.caches)
        index = np.full(len(self._dataset), -1, np.int16)
        for number, node in enumerate(nodes):
            kept = await _answer(self.caches[node].holdings.remote())
            if kept is not None:
                index[kept] = number
        return Holders(tuple(nodes), index)

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
