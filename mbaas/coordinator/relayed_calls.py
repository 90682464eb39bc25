"""Answers calls for blocks that the relays of other machines gathered; see `mbaas.exchange`."""

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
"""How long an actor may take to say where it listens. One that was just started says so at the next look."""


@dataclass
class _Relay:
    """What is kept for a relay; ``news`` is set when an exchange may have something to bring back."""

    end: CoordinatorEnd = field(default_factory=CoordinatorEnd)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class RelayedCalls:
    """The calls of consumers on other machines.

    Args:
        ask: what calls are given to.
        spawn: what answers are made in.
        relaying: finds the actor that relays on a node, and may start one if the second argument says so; None if
            there is none.
    """

    def __init__(self, ask: Ask, spawn: Spawn, relaying: Callable[[str, bool], Awaitable[Any]]) -> None:
        self._ask, self._spawn, self._relaying = ask, spawn, relaying
        self._relays = RelayDirectory(_Relay)

    def offer(self, node: str, consumers: int) -> str | None:
        """Return where consumers of another machine may call; None if that is not known, or not worth it.

        Args:
            node: of a consumer that called through Ray.
            consumers: how many run there.
        """
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
        """Take calls in, and return answers, as soon as there are any, by the numbers of the calls.

        Raises:
            StateError: the relay is not known here: it was found by an earlier coordinator.
        """
        known = self._relays.relay(relay)
        if known is None:
            raise StateError(f"relay {relay!r} is not known to this coordinator")
        known.end.begin(number)
        known.news.set()
        for request, message in requests.items():
            self._spawn(self._answer(known, request, message))
        end = asyncio.get_running_loop().time() + POLL_S
        # When this wakes up, all answers that come of one event are there: none of them waits for anything else.
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
