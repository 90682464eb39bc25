"""The cache nodes of a feed, as actors, and the placement of its samples. Others decide where they are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
from msgspec import Struct
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mbaas import runtime
from mbaas.cache.node import CacheNodeActor
from mbaas.cache.stats import CacheStats, Flow
from mbaas.coordinator.asking import answer, answer_or_none
from mbaas.core.layout import Layout
from mbaas.dataset import Dataset
from mbaas.placement import Holders, MovedIn, NodeWeight, Placement, PlacementHistory, PlacementUpdate, place_samples
from mbaas.settings import FeedSettings

ANSWER_S = 2.0
"""How long a cache node may take for a short answer before the caller goes on without it."""

START_CALL_S = 40.0
"""How long a cache node may take to start; less than the supervisor waits."""

PROBE_CALL_S = 5.0
"""After this long without an answer a cache node counts as dead; less than the supervisor waits for that report. Ray
restarts one in a second or two.
"""

MOVE_OUT_S = 30.0
"""How long others fetch what a node keeps that is to go, before they say how far they came."""

MOVE_OUT_CALL_S = 110.0
"""Longest time in which they say so: they end what they have begun. Less than the supervisor waits."""


class FoundCache(Struct, frozen=True):
    """A cache node that an earlier coordinator left."""

    actor: Any
    answers: bool


class CachePool:
    """Cache nodes and placement of one feed.

    Cache nodes outlive a coordinator; they end with the feed, because each looks whether it still has a coordinator.

    Args:
        settings: of the feed.
        dataset, dataset_ref: the samples, here and in the object store.
        layout: of the feed.

    Attributes:
        placements: by which blocks are cut. The newest is known to every cache node, and to every worker that works.
        actors: node id -> its cache node.
        budgets: node id -> bytes that its cache may have, once the node was looked at; of earlier nodes, too.
        rooms: node id -> bytes of prepared minibatches that its object store has room for, likewise.
        kept: node id -> bytes that its cache keeps, and that it may, as it said last.
        dataset_ref: the samples, in the object store.
    """

    def __init__(self, settings: FeedSettings, dataset: Dataset, dataset_ref: Any, layout: Layout) -> None:
        self._settings, self._dataset, self._layout = settings, dataset, layout
        self.dataset_ref = dataset_ref
        self._generations: dict[str, int] = {}
        self._others: dict[tuple[str, int], Any] = {}  # those that start, and those that a younger one has replaced
        self._holders: Holders | None = None
        self._next: Placement | None = None  # told, or being told, and not used yet
        self.placements = PlacementHistory(layout.order)
        self.actors: dict[str, Any] = {}
        self.budgets: dict[str, int] = {}
        self.rooms: dict[str, int] = {}
        self.kept: dict[str, tuple[float, float]] = {}

    # ---- beginning and end ----

    @staticmethod
    async def survivors(feed: str) -> dict[tuple[str, int], FoundCache]:
        """Find the cache nodes that an earlier coordinator of the feed left: (node id, generation) -> cache node."""
        found: dict[tuple[str, int], Any] = {}
        for name, actor in runtime.children(feed, "cache").items():
            node, _, generation = name.rpartition(".")
            found[node, int(generation)] = actor
        pids = await asyncio.gather(*(answer_or_none(actor.pid.remote(), ANSWER_S) for actor in found.values()))
        return {key: FoundCache(actor, pid is not None) for (key, actor), pid in zip(found.items(), pids, strict=True)}

    async def adopt(self, found: Mapping[tuple[str, int], FoundCache]) -> None:
        """Take over the cache nodes that an earlier coordinator left; of several on a machine the youngest."""
        await self._look_at_stores()  # first: a status may be asked for before the next placement is found
        self._others = {key: cache.actor for key, cache in found.items()}
        self._generations = dict(sorted(found))
        self.actors = {node: self._others.pop((node, generation)) for node, generation in self._generations.items()}

    async def start(self, node: str, generation: int) -> None:
        """Start the cache node of a machine.

        Raises:
            asyncio.TimeoutError, RayError: it does not come up.
            ValueError: an actor of that name lives.
        """
        await self._look_at_stores()
        # The generation makes the name a new one: Ray may hold that of an earlier cache node of this machine.
        options = {
            **runtime.child_options(self._settings.name, "cache", f"{node}.{generation}"),
            "max_restarts": -1,  # an empty cache beside its workers is back in two seconds, a new one takes longer
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        cache = CacheNodeActor.options(**options).remote(
            self.dataset_ref,
            self._layout.order,
            cache_bytes=self.budgets.get(node, 0),  # 0: the node is gone again, and so will this actor be
            readahead_bytes=self._layout.readahead_bytes,
            threads=self._settings.threads.first_fetch,
            node=node,
            feed=self._settings.name,
            coordinator=ray.get_runtime_context().get_actor_id(),
            disk=self._settings.disk,
            storage_s=self._settings.timeouts.storage_s,
            decoded=self._layout.decoded,
        )
        self._others[node, generation] = cache
        try:
            await answer(cache.pid.remote(), START_CALL_S)
        except BaseException:  # a cancelled start, too: nobody else knows of the actor yet
            self.end(node, generation)
            raise
        if self._others.pop((node, generation), None) is not None:  # else it was ended meanwhile
            self.actors[node], self._generations[node] = cache, generation

    async def answers(self, node: str, generation: int) -> bool:
        """Return whether a machine's cache node answers; one that Ray is restarting gets the time to come back."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PROBE_CALL_S
        while self._generations.get(node) == generation and loop.time() < end:
            if await answer_or_none(self.actors[node].pid.remote(), ANSWER_S) is not None:
                return True
            await asyncio.sleep(0.1)
        return False

    def end(self, node: str, generation: int) -> None:
        """Kill a machine's cache node, also one that is still starting, or that a younger one has replaced."""
        cache = self._others.pop((node, generation), None)
        if self._generations.get(node) == generation:
            cache = self.actors.pop(node)
            del self._generations[node]
            self.kept.pop(node, None)
        if cache is not None:
            ray.kill(cache)

    # ---- placement ----

    async def move_placement(self, version: int, weights: Mapping[str, float]) -> None:
        """Find homes for all samples on these machines, in proportion to their weights, and tell the cache nodes.

        Cache nodes that do not answer in time ask for the placement themselves, when they are asked for a part of it.
        """
        self._holders = await self._who_keeps_what()
        self._next = await self._find(weights, version)
        update = self.update
        assert update is not None
        await asyncio.gather(
            *(answer_or_none(cache.update_placement.remote(update), ANSWER_S) for cache in self.actors.values())
        )

    def use_placement(self, version: int) -> None:
        """Cut blocks by the placement that was told last."""
        if self._next is not None and self._next.version == version:
            self.placements.add(self._next)
            self._next = None

    @property
    def told(self) -> tuple[Placement, ...]:
        """All placements that a worker must know, oldest first."""
        return (*self.placements.all, *([self._next] if self._next is not None else []))

    @property
    def update(self) -> PlacementUpdate | None:
        """The placements and peers that a cache node must know; None while the feed starts."""
        if not self.told:
            return None
        *older, newest = self.told
        return PlacementUpdate(newest, self._holders, dict(self.actors), tuple(older))

    async def _find(self, weights: Mapping[str, float], version: int) -> Placement:
        await self._look_at_stores()
        node_weights = [NodeWeight(node, self.budgets.get(node, 0), weight) for node, weight in weights.items()]

        def find() -> Placement:
            stored = self._dataset.stored
            return place_samples(node_weights, num_samples=len(stored), lengths=stored.lengths, version=version)

        # In a thread: it draws a number for every sample on every node, and this event loop serves consumers.
        return await asyncio.get_running_loop().run_in_executor(None, find)

    async def _look_at_stores(self) -> None:
        """Grant each node that came since the last look what its own object store has room for, and note how much."""
        stores = await asyncio.get_running_loop().run_in_executor(None, runtime.store_bytes)
        for node, store in stores.items():
            self.budgets.setdefault(node, self._settings.cache_bytes_on(store))
            self.rooms.setdefault(node, self._settings.staging_room_on(store))

    async def _who_keeps_what(self) -> Holders | None:
        """Ask cache nodes which samples they keep; None if nothing is kept. A node that does not answer keeps none.

        Its samples are then read from storage again, which is slower and no error.
        """
        nodes = sorted(self.actors)
        answers = await asyncio.gather(
            *(answer_or_none(self.actors[node].holdings.remote(), ANSWER_S) for node in nodes)
        )
        index, decoded_bytes = np.full(len(self._dataset.stored), -1, np.int16), None
        for number, holdings in enumerate(answers):
            if holdings is None:
                continue
            index[holdings.sample_ids] = number
            if holdings.decoded_bytes is not None:
                decoded_bytes = np.zeros(len(index), np.int64) if decoded_bytes is None else decoded_bytes
                decoded_bytes[holdings.sample_ids] = holdings.decoded_bytes
        return Holders(tuple(nodes), index, decoded_bytes) if (index >= 0).any() else None

    async def move_out(self, node: str) -> MovedIn:
        """Have the other nodes fetch, for a while, what a node keeps that is to go. Returns the sum over them."""
        others = [cache for other, cache in self.actors.items() if other != node]
        calls = [answer_or_none(cache.move_in.remote(MOVE_OUT_S), MOVE_OUT_CALL_S) for cache in others]
        moved: list[MovedIn] = [each for each in await asyncio.gather(*calls) if each is not None]
        return MovedIn(sum(each.samples for each in moved), sum(each.left for each in moved))

    # ---- what cache nodes are asked and told ----

    async def stats(self) -> dict[str, CacheStats]:
        """Ask all cache nodes how they are doing, by node id; those that do not answer are left out."""
        nodes = list(self.actors)
        found = await asyncio.gather(*(answer_or_none(self.actors[node].stats.remote(), ANSWER_S) for node in nodes))
        return {node: stats for node, stats in zip(nodes, found, strict=True) if stats is not None}

    async def flow(self, node: str, pace_per_s: float) -> Flow | None:
        """Ask a node's cache what it measured and decided; None if it does not answer."""
        cache = self.actors.get(node)
        flow: Flow | None = None if cache is None else await answer_or_none(cache.flow.remote(pace_per_s), ANSWER_S)
        if flow is not None and self.actors.get(node) is cache:
            self.kept[node] = flow.kept_bytes, flow.budget_bytes
        return flow

    async def set_threads(self, node: str, threads: int) -> None:
        """Have a node's cache read storage with ``threads`` threads; one that is gone is left alone."""
        if (cache := self.actors.get(node)) is not None:
            await answer_or_none(cache.set_threads.remote(threads), ANSWER_S)
