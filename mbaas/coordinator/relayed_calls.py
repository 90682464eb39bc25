"""Answers calls for blocks collected by relays on other nodes; see `mbaas.exchange`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from mbaas.coordinator.asking import answer_or_none
from mbaas.coordinator.local_calls import Ask, Spawn, answered
from mbaas.errors import StateError
from mbaas.exchange import HANG_UP, CoordinatorEnd
from mbaas.messages import POLL_S
from mbaas.transports import RelayDirectory

ANSWER_S = 2.0
"""Timeout for an actor to report its socket address, in seconds. A new actor reports it at the next check."""


@dataclass
class _Relay:
    end: CoordinatorEnd = field(default_factory=CoordinatorEnd)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class RelayedCalls:
    """The calls of consumers on other nodes.

    ``relaying`` returns the relay actor of a node, or None; it may start one if its second argument is True.
    """

    def __init__(self, ask: Ask, spawn: Spawn, relaying: Callable[[str, bool], Awaitable[Any]]) -> None:
        self._ask, self._spawn, self._relaying = ask, spawn, relaying
        self._relays = RelayDirectory(_Relay)

    def offer(self, node: str, consumers: int) -> str | None:
        """Return a socket address for consumers of another node; None if unknown yet, or not worth a relay."""
        if self._relays.is_to_look(node, consumers, asyncio.get_running_loop().time()):
            self._spawn(self._look(node))
        return self._relays.address(node)

    async def _look(self, node: str) -> None:
        actor, own = await self._relaying(node, self._relays.may_start(node)), ray.get_runtime_context()
        if actor is None:
            return
        found = await answer_or_none(actor.relay.remote(own.get_actor_id(), own.current_actor), ANSWER_S)
        if found is not None:
            self._relays.found(node, *found)

    async def exchange(self, relay: str, number: int, requests: dict[int, bytes]) -> dict[int, bytes]:
        """Accept calls, and return available answers by call number, waiting for the first.

        Raises:
            StateError: the relay is unknown: it was found by an earlier coordinator.
        """
        known = self._relays.relay(relay)
        if known is None:
            raise StateError(f"relay {relay!r} is not known to this coordinator")
        known.end.begin(number)
        known.news.set()
        for request, message in requests.items():
            self._spawn(self._answer(known, request, message))
        end = asyncio.get_running_loop().time() + POLL_S
        # When this wakes up, all answers caused by one event are there: each is made without waiting.
        while (answers := known.end.look(number)) is None:
            known.news.clear()
            try:
                await asyncio.wait_for(known.news.wait(), end - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                return {}
        return answers

    async def _answer(self, relay: _Relay, request: int, message: bytes) -> None:
        answer = await answered(self._ask, message)
        relay.end.answer(request, HANG_UP if answer is None else answer)
        relay.news.set()
