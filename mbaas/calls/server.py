"""The coordinator's end of calls for blocks over sockets: its own socket, and relays on other machines.

A consumer calls through Ray until an answer contains a socket. The coordinator offers its own socket on its own
machine, and elsewhere a relay's, where that saves CPU time (`RelayDirectory`). A consumer without an answer repeats the
call through Ray, so a socket failure costs only time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from mbaas.calls import encoding
from mbaas.calls.socket import Connection, Listener
from mbaas.errors import MbaasError, StateError
from mbaas.wire.consumers import POLL_S, BlockCall, Delivery, SocketAnswer

RELAYED_FROM = 2
"""Least number of consumers on a machine for which calls are relayed: for a single one, the relay takes slightly more
CPU time than it saves (docs/scaling.md)."""

RELAYING_PAYS_PER_S = 30.0
"""Calls per second above which a dedicated relay actor takes less CPU time than it saves (docs/scaling.md)."""

SEARCH_S = 5.0
"""Pause between two searches for a relay. While consumers call through Ray, one may start or end."""

KEPT_MACHINES = 1000
"""Upper bound on the machines whose calls and relays are stored: elastic clusters keep adding new ones."""

Deliver = Callable[[BlockCall], Awaitable[Delivery]]
"""Answers a call for blocks."""

Spawn = Callable[[Coroutine[Any, Any, Any]], object]
"""Runs a coroutine in the background."""

FindRelay = Callable[[str, bool], Awaitable["tuple[str, str] | None"]]
"""Finds the id and the socket address of a node's relay, and may start one if its second argument is True."""


# ---- choice of relays ----


@dataclass(eq=False)
class KnownRelay:
    """A relay with its address, and answers for it until an exchange fetches them."""

    id: str
    address: str
    has_news: asyncio.Event = field(default_factory=asyncio.Event)  # set when an answer or a newer exchange arrives
    _newest: int = 0
    _answers: dict[int, bytes] = field(default_factory=dict)

    def begin(self, exchange: int) -> None:
        """Record an exchange; older ones return empty at once."""
        self._newest = max(self._newest, exchange)
        self.has_news.set()

    def add(self, request: int, answer: bytes) -> None:
        """Store an answer for the next exchange that collects."""
        self._answers[request] = answer
        self.has_news.set()

    def collect(self, exchange: int) -> dict[int, bytes] | None:
        """Return the answers for an exchange; None if it must wait."""
        if exchange < self._newest:
            return {}
        answers, self._answers = self._answers, {}
        return answers or None


@dataclass
class _Calls:
    """Calls through Ray from a node's consumers since the last search for a relay, or since the first call."""

    since: float
    number: int = 0
    per_s_before: float | None = None
    """Calls per second before that search; None: no search yet."""


class RelayDirectory:
    """The relays of other machines, at most one on each, and the decision to find or start one."""

    def __init__(self) -> None:
        self._by_node: dict[str, KnownRelay] = {}
        self._calls: dict[str, _Calls] = {}  # by node, ordered by the last search for a relay

    def is_search_due(self, node: str, consumers: int, now: float) -> bool:
        """Count a node's call through Ray, and return whether to search for a relay now.

        If so, the search counts as done. ``consumers`` is the number of them on the node.
        """
        calls = self._calls.get(node) or self._count(node, _Calls(now))
        calls.number += 1
        is_long_ago = now >= calls.since + SEARCH_S
        if consumers < RELAYED_FROM or (calls.per_s_before is not None and not is_long_ago):
            return False
        # Calls within less time may be a burst, as at the start of trials.
        per_s = calls.number / (now - calls.since) if is_long_ago else 0.0
        self._count(node, _Calls(now, per_s_before=per_s))
        return True

    def _count(self, node: str, calls: _Calls) -> _Calls:
        # Keeps the KEPT_MACHINES nodes with the most recent searches.
        self._calls.pop(node, None)
        self._calls[node] = calls
        if len(self._calls) > KEPT_MACHINES:
            gone = next(iter(self._calls))
            del self._calls[gone]
            self._by_node.pop(gone, None)
        return calls

    def may_start(self, node: str) -> bool:
        """Return, after a search, whether a node without a cache node is worth a dedicated relay actor."""
        calls = self._calls.get(node)
        return calls is not None and (calls.per_s_before or 0.0) >= RELAYING_PAYS_PER_S

    def add(self, node: str, relay: str, address: str) -> None:
        """Set a node's relay, by its id and address; answers for a relay that it replaces are dropped."""
        if node not in self._by_node or self._by_node[node].id != relay:
            self._by_node[node] = KnownRelay(relay, address)

    def address(self, node: str) -> str | None:
        """Return the address that consumers of a node may call; None without a relay."""
        known = self._by_node.get(node)
        return None if known is None else known.address

    def relay(self, relay: str) -> KnownRelay | None:
        """Return the relay with this id, or None."""
        return next((known for known in self._by_node.values() if known.id == relay), None)


# ---- calls and answers ----


class CallServer:
    """Accepts calls over sockets for the lifetime of its process. A consumer's next call ends its pending one."""

    def __init__(self, deliver: Deliver, spawn: Spawn, find_relay: FindRelay) -> None:
        self._deliver, self._spawn, self._find_relay = deliver, spawn, find_relay
        self._listener = Listener(lambda connection, message: spawn(self._answer_local(connection, message)))
        self._relays = RelayDirectory()

    async def address(self) -> str | None:
        """Return the socket address for consumers on this node; None if such sockets are unavailable."""
        return await self._listener.address()

    def relay_address(self, node: str, consumers: int) -> str | None:
        """Return the socket address for consumers of another node; None if unknown yet, or not worth a relay."""
        if self._relays.is_search_due(node, consumers, asyncio.get_running_loop().time()):
            self._spawn(self._search(node))
        return self._relays.address(node)

    async def _search(self, node: str) -> None:
        found = await self._find_relay(node, self._relays.may_start(node))
        if found is not None:
            self._relays.add(node, *found)

    async def exchange(self, relay: str, number: int, requests: dict[int, bytes]) -> dict[int, bytes]:
        """Accept calls of a relay, and return available answers by call number, waiting for the first.

        Raises `StateError` if the relay is unknown: it was found by an earlier coordinator.
        """
        known = self._relays.relay(relay)
        if known is None:
            raise StateError(f"relay {relay!r} is not known to this coordinator")
        known.begin(number)
        for request, message in requests.items():
            self._spawn(self._answer_relayed(known, request, message))
        end = asyncio.get_running_loop().time() + POLL_S
        # When this wakes up, all answers caused by one event are there: each is made without waiting.
        while (answers := known.collect(number)) is None:
            known.has_news.clear()
            try:
                await asyncio.wait_for(known.has_news.wait(), end - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                return {}
        return answers

    async def _answer_local(self, connection: Connection, message: bytes) -> None:
        answer = await self._answer(message)
        if answer == encoding.HANG_UP:
            connection.hang_up()
        else:
            connection.send(answer)

    async def _answer_relayed(self, relay: KnownRelay, request: int, message: bytes) -> None:
        relay.add(request, await self._answer(message))

    async def _answer(self, message: bytes) -> bytes:
        request = encoding.socket_call(message)
        if request is None:
            return encoding.HANG_UP
        answer = SocketAnswer(request.number)
        try:
            answer = SocketAnswer(request.number, await self._deliver(encoding.decoded(request.call, BlockCall)))
        except MbaasError as error:
            answer = SocketAnswer(request.number, error=error)
        except Exception:  # a bug, already reported; the consumer meets it again through Ray
            pass
        return encoding.encode_answer(answer)
