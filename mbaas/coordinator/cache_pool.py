"""The cache node actors of a feed and the placement of its samples. The supervisor decides which nodes need a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
from msgspec import Struct
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mbaas.cache.node import CacheNodeActor
from mbaas.cache.stats import CacheStats, Flow
from mbaas.coordinator.background import answer_or_none
from mbaas.core.layout import Layout
from mbaas.dataset import Dataset
from mbaas.memory.budgets import cache_budget, staging_room
from mbaas.ray_cluster import actor_names, resources
from mbaas.samples.placement import (
    DecodedSizes,
    Holders,
    MovedIn,
    NodeWeight,
    Placement,
    PlacementHistory,
    PlacementUpdate,
    place_samples,
)
from mbaas.settings import FeedSettings
from mbaas.wire.samples import DecodedSamples

ANSWER_S = 2.0
"""Timeout for a short answer of a cache node, after which the caller continues without it, in seconds."""

START_CALL_S = 40.0
"""Timeout for a cache node to start, in seconds; less than the supervisor waits."""

PROBE_CALL_S = 5.0
"""A cache node without an answer for this long counts as dead, in seconds; less than the supervisor waits.

Ray restarts a cache node in one or two seconds.
"""

MOVE_OUT_S = 30.0
"""Time for other nodes to fetch the samples cached on a draining node before they report progress, in seconds."""

MOVE_OUT_CALL_S = 110.0
"""Timeout for their reports, in seconds, because fetches in progress are completed; less than the supervisor waits."""


class FoundCache(Struct, frozen=True):
    """A cache node found after a restart of the coordinator."""

    actor: Any
    answers: bool


class CachePool:
    """Cache nodes and placement of one feed.

    Cache nodes outlive a coordinator. They end with the feed, because each checks that the feed still has a
    coordinator.

    Attributes:
        placements: placements that cut blocks. Every cache node and every active worker has the newest.
        actors: node id -> its cache node.
        budgets: node id -> bytes that its cache may use, for each node seen so far, including nodes that are gone.
        rooms: node id -> bytes of prepared minibatches that fit its object store, for the same nodes.
        kept: node id -> bytes cached and capacity in bytes, as last reported.
    """

    def __init__(self, settings: FeedSettings, dataset: Dataset, dataset_ref: Any, layout: Layout) -> None:
        self._settings, self._dataset, self._layout = settings, dataset, layout
        self.dataset_ref = dataset_ref
        self._generations: dict[str, int] = {}
        self._others: dict[tuple[str, int], Any] = {}  # starting cache nodes, and replaced ones
        self._holders: Holders | None = None
        self._decoded: DecodedSamples | None = None  # how decoded samples are to be kept, if that was changed
        self._next: Placement | None = None  # sent, or being sent, and not in use yet
        self.placements = PlacementHistory(layout.order)
        self.actors: dict[str, Any] = {}
        self.budgets: dict[str, int] = {}
        self.rooms: dict[str, int] = {}
        self.kept: dict[str, tuple[float, float]] = {}

    @property
    def stored_samples(self) -> int:
        """Number of samples in storage."""
        return len(self._dataset.stored)

    # ---- start and end ----

    @staticmethod
    async def survivors(feed: str) -> dict[tuple[str, int], FoundCache]:
        """Return the cache nodes of an earlier coordinator: (node id, generation) -> cache node."""
        found: dict[tuple[str, int], Any] = {}
        for name, actor in actor_names.children(feed, "cache").items():
            node, _, generation = name.rpartition(".")
            found[node, int(generation)] = actor
        pids = await asyncio.gather(*(answer_or_none(actor.pid.remote(), ANSWER_S) for actor in found.values()))
        return {key: FoundCache(actor, pid is not None) for (key, actor), pid in zip(found.items(), pids, strict=True)}

    async def adopt(self, found: Mapping[tuple[str, int], FoundCache]) -> None:
        """Take over the cache nodes of an earlier coordinator, the youngest of each node."""
        await self._look_at_stores()  # first, because a status may be requested before the next placement is found
        self._others = {key: cache.actor for key, cache in found.items()}
        self._generations = dict(sorted(found))
        self.actors = {node: self._others.pop((node, generation)) for node, generation in self._generations.items()}

    async def start(self, node: str, generation: int) -> None:
        """Start a cache node.

        Raises:
            asyncio.TimeoutError, RayError: it does not start.
            ValueError: an actor with that name is alive.
        """
        await self._look_at_stores()
        # The generation makes the name unique: Ray may still hold the name of this node's earlier cache node.
        options = {
            **actor_names.child_options(self._settings.name, "cache", f"{node}.{generation}"),
            "max_restarts": -1,  # a restarted empty cache next to its workers is up in 2 s, a new one takes longer
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        cache = CacheNodeActor.options(**options).remote(
            self.dataset_ref,
            self._layout.order,
            cache_bytes=self.budgets.get(node, 0),  # 0: the node is gone again, and this actor will be too
            readahead_bytes=self._layout.readahead_bytes,
            threads=self._settings.threads.fetch,
            node=node,
            feed=self._settings.name,
            coordinator=ray.get_runtime_context().get_actor_id(),
            disk=self._settings.disk,
            storage_s=self._settings.timeouts.storage_s,
            decoded=self._layout.decoded,
        )
        self._others[node, generation] = cache
        try:
            await asyncio.wait_for(cache.pid.remote(), START_CALL_S)
        except BaseException:  # includes a cancelled start: nothing else refers to the actor yet
            self.end(node, generation)
            raise
        if self._others.pop((node, generation), None) is not None:  # otherwise `end` was called meanwhile
            self.actors[node], self._generations[node] = cache, generation

    async def answers(self, node: str, generation: int) -> bool:
        """Return whether a cache node answers. Waits for one that Ray is restarting."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PROBE_CALL_S
        while self._generations.get(node) == generation and loop.time() < end:
            if await answer_or_none(self.actors[node].pid.remote(), ANSWER_S) is not None:
                return True
            await asyncio.sleep(0.1)
        return False

    def end(self, node: str, generation: int) -> None:
        """Kill a cache node, including one that is starting or was replaced."""
        cache = self._others.pop((node, generation), None)
        if self._generations.get(node) == generation:
            cache = self.actors.pop(node)
            del self._generations[node]
            self.kept.pop(node, None)
        if cache is not None:
            ray.kill(cache)

    # ---- placement ----

    async def move_placement(self, version: int, weights: Mapping[str, float]) -> None:
        """Place all samples on nodes in proportion to their weights, and send the placement to the cache nodes.

        Cache nodes that do not answer in time fetch the placement when a part is requested from them.
        """
        self._holders = await self._who_keeps_what()
        self._next = await self._find(weights, version)
        update = self.update
        assert update is not None
        await asyncio.gather(
            *(answer_or_none(cache.update_placement.remote(update), ANSWER_S) for cache in self.actors.values())
        )

    def use_placement(self, version: int) -> None:
        """Cut blocks by the placement that was sent last."""
        if self._next is not None and self._next.version == version:
            self.placements.add(self._next)
            self._next = None

    @property
    def told(self) -> tuple[Placement, ...]:
        """All placements that a worker needs, oldest first."""
        return (*self.placements.all, *([self._next] if self._next is not None else []))

    @property
    def update(self) -> PlacementUpdate | None:
        """The placements and peers that a cache node needs; None while the feed starts."""
        if not self.told:
            return None
        *older, newest = self.told
        return PlacementUpdate(newest, self._holders, dict(self.actors), tuple(older), self._decoded)

    async def _find(self, weights: Mapping[str, float], version: int) -> Placement:
        await self._look_at_stores()
        node_weights = [NodeWeight(node, self.budgets.get(node, 0), weight) for node, weight in weights.items()]

        def find() -> Placement:
            stored, room = self._dataset.stored, sum(weight.cache_bytes for weight in node_weights)
            # If samples are drawn by weight and do not all fit, each node caches the most frequent ones.
            limited = self._dataset.stored_draws is None or room >= stored.total_bytes
            return place_samples(
                node_weights, num_samples=len(stored), lengths=stored.lengths, version=version, limited=limited
            )

        # In a thread: this draws a number per sample and node, and this event loop serves consumers.
        return await asyncio.to_thread(find)

    async def _look_at_stores(self) -> None:
        stores = await asyncio.to_thread(resources.store_bytes)
        claim, earlier = self._settings.memory, self._settings.earlier
        # each node keeps the bytes computed from the first size of its object store
        for node, store in stores.items():
            self.budgets.setdefault(node, cache_budget(store, claim, earlier))
            self.rooms.setdefault(node, staging_room(store, earlier))

    async def _who_keeps_what(self) -> Holders | None:
        # A node that does not answer counts as empty: its samples are read from storage again, which is slower but
        # correct.
        nodes = sorted(self.actors)
        answers = await asyncio.gather(
            *(answer_or_none(self.actors[node].holdings.remote(), ANSWER_S) for node in nodes)
        )
        index, decoded = np.full(len(self._dataset.stored), -1, np.int16), None
        for number, holdings in enumerate(answers):
            if holdings is None:
                continue
            index[holdings.sample_ids] = number
            if holdings.decoded is not None:
                decoded = DecodedSizes.none(len(index)) if decoded is None else decoded
                decoded.put(holdings.sample_ids, holdings.decoded)
        return Holders(tuple(nodes), index, decoded) if (index >= 0).any() else None

    async def move_out(self, node: str) -> MovedIn:
        """Have the other nodes fetch the samples cached on a draining node. Return the sum of their results."""
        others = [cache for other, cache in self.actors.items() if other != node]
        calls = [answer_or_none(cache.move_in.remote(MOVE_OUT_S), MOVE_OUT_CALL_S) for cache in others]
        moved: list[MovedIn] = [each for each in await asyncio.gather(*calls) if each is not None]
        return MovedIn(sum(each.samples for each in moved), sum(each.left for each in moved))

    # ---- calls to cache nodes ----

    async def stats(self) -> dict[str, CacheStats]:
        """Return statistics of all cache nodes that answer, by node id."""
        nodes = list(self.actors)
        found = await asyncio.gather(*(answer_or_none(self.actors[node].stats.remote(), ANSWER_S) for node in nodes))
        return {node: stats for node, stats in zip(nodes, found, strict=True) if stats is not None}

    async def flow(self, node: str, pace_per_s: float, noted: tuple[int, int]) -> Flow | None:
        """Return the measurements and decisions of a node's cache; None if it does not answer. See `CacheNode.flow`."""
        cache = self.actors.get(node)
        if cache is None:
            return None
        flow: Flow | None = await answer_or_none(cache.flow.remote(pace_per_s, noted), ANSWER_S)
        if flow is not None and self.actors.get(node) is cache:
            self.kept[node] = flow.used_bytes, flow.budget_bytes
        return flow

    async def keep_decoded(self, decoded: DecodedSamples) -> None:
        """Have all cache nodes keep decoded samples in another form, or by other costs.

        New cache nodes get it with their placement.
        """
        self._decoded = decoded
        await asyncio.gather(
            *(answer_or_none(cache.keep_decoded.remote(decoded), ANSWER_S) for cache in self.actors.values())
        )
