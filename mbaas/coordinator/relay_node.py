"""An actor that only relays calls for blocks, on a node where the feed has no cache node to do so."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mbaas import runtime
from mbaas.cache.relay import Relays

UNUSED_S = 60.0
"""Period in seconds of the check for consumers; the actor ends after two checks without any. Waiting costs CPU time."""


class RelayNode:
    """Runs the relays of a node without a cache node, because the feed prepares nothing there.

    It ends with the actor ``coordinator``, the feed's main coordinator.
    """

    def __init__(self, coordinator: str, *, unused_s: float = UNUSED_S) -> None:
        self._relays, self._unused_s = Relays(), unused_s
        self._end: asyncio.Task[None] | None = None
        runtime.end_with(coordinator)

    async def relay(self, coordinator_id: str, coordinator: Any) -> tuple[str, str] | None:
        """Relay calls for blocks from consumers on this node; see `Relays.find`."""
        if self._end is None:
            me = ray.get_runtime_context().current_actor
            self._end = asyncio.get_running_loop().create_task(self._end_unused(me))
        return await self._relays.find(coordinator_id, coordinator)

    async def _end_unused(self, me: Any) -> None:
        looks = 0
        while looks < 2:
            await asyncio.sleep(self._unused_s)
            looks = 0 if self._relays.have_consumers else looks + 1
        ray.kill(me)


RelayNodeActor: Any = ray.remote(num_cpus=0)(RelayNode)


async def relay_node(feed: str, node: str, *, may_start: bool) -> Any | None:
    """Return the feed's relay-only actor on a node, starting it if allowed; otherwise None.

    Call this only in the feed's main coordinator, because the actor ends with its creator.
    """
    main = ray.get_runtime_context().get_actor_id()
    options = {
        **runtime.child_options(feed, "relay", node),
        "get_if_exists": True,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }

    def find() -> Any | None:
        try:
            if may_start:
                return RelayNodeActor.options(**options).remote(main)
            return ray.get_actor(options["name"], namespace=options["namespace"])
        except (ValueError, ray.exceptions.RayError):  # the name is free, or its holder has just ended
            return None

    # In a thread: Ray calls its GCS, and this event loop serves consumers.
    return await asyncio.get_running_loop().run_in_executor(None, find)
