"""The coordinator's actor class, light enough for lookups by other programs.

Ray imports the class of every actor that is looked up by name. Importing `mbaas.coordinator.coordinator` takes 0.1 s of
CPU time, and only the coordinator's own process needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

CALLS = (
    "add_pipeline",
    "announce",
    "ask",
    "contents",
    "costs",
    "demand_report",
    "enlist_rank",
    "exchange",
    "expect",
    "hand_back",
    "heartbeat",
    "info",
    "is_given_up",
    "join",
    "leave",
    "ledgers",
    "lent_worker_gone",
    "pipeline_info",
    "placement_update",
    "rank_orders",
    "shared_with",
    "start",
    "status",
    "stop",
    "story",
    "take_on",
)
"""Public methods of `mbaas.coordinator.coordinator.FeedCoordinator`."""


class Coordinator:
    """Runs a `FeedCoordinator` with the given arguments and forwards `CALLS` to it."""

    def __init__(self, *args: Any) -> None:
        from mbaas.coordinator.coordinator import FeedCoordinator  # see the module's docstring

        self._coordinator = FeedCoordinator(*args)


def _forwarding(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(self: Coordinator, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._coordinator, name)(*args, **kwargs)

    call.__name__, call.__qualname__ = name, f"Coordinator.{name}"
    return call


for _name in CALLS:
    setattr(Coordinator, _name, _forwarding(_name))
