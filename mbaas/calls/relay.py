"""Local proxy for a coordinator on another machine, for block calls of this machine's consumers.

A Ray call costs the same with one consumer's request as with the requests of a whole machine. So the cache node of a
machine, or else an actor for this purpose (`RelayNode`), listens for the coordinator, collects requests, and sends them
in one call, an exchange. An exchange returns answers to these and to earlier requests, as soon as there are any. At
most one exchange waits for answers, because the next one ends it. Exchanges are numbered, because one may overtake
another. Requests and answers are passed on unread.

Consumers connect through a local socket, exactly as on the coordinator's machine. On any error, the relay hangs up, and
the consumers repeat their pending calls through Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import ray
from msgspec import Struct
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mbaas.calls import encoding
from mbaas.calls.socket import Connection, Listener
from mbaas.ray_cluster import actor_names, bugs, leftovers

GATHER_S = 0.01
"""Longest wait of an exchange for further calls. Ranks of one trial often call within it, and ahead of need."""

UNUSED_S = 60.0
"""Period in seconds of the check for consumers; a `RelayNode` ends after two checks without any."""

ConsumerT = TypeVar("ConsumerT", bound=Hashable)


class Exchange(Struct, frozen=True):
    """One call to the coordinator, numbered from 1; ``requests``: number of a request -> the consumer's message."""

    number: int
    requests: dict[int, bytes]


class PendingRequests(Generic[ConsumerT]):
    """Pending requests of a machine's consumers, and the decision when the next exchange is due.

    ``consumers`` sent a request and did not leave.
    """

    def __init__(self) -> None:
        self._numbers, self._exchanges = itertools.count(1), itertools.count(1)
        self.consumers: set[ConsumerT] = set()
        self._unsent: dict[int, bytes] = {}
        self._waiting: dict[int, ConsumerT] = {}  # by the numbers of unanswered requests
        self._under_way: set[int] = set()

    def add(self, consumer: ConsumerT, request: bytes) -> None:
        """Add a consumer's request."""
        number = next(self._numbers)
        self.consumers.add(consumer)
        self._waiting[number] = consumer
        self._unsent[number] = request

    def leave(self, consumer: ConsumerT) -> None:
        """Remove a consumer that is gone, and its requests."""
        self.consumers.discard(consumer)
        self._waiting = {number: other for number, other in self._waiting.items() if other != consumer}
        self._unsent = {number: request for number, request in self._unsent.items() if number in self._waiting}

    @property
    def is_due(self) -> bool:
        """True if an exchange must start: there are unsent requests, or unanswered ones without an open exchange."""
        return bool(self._unsent) or (bool(self._waiting) and not self._under_way)

    @property
    def is_complete(self) -> bool:
        """True if every consumer waits for an answer, so that no more requests can arrive before the next answers."""
        return self.consumers == set(self._waiting.values())

    def begin(self) -> Exchange:
        """Begin an exchange with all unsent requests."""
        exchange = Exchange(next(self._exchanges), self._unsent)
        self._unsent = {}
        self._under_way.add(exchange.number)
        return exchange

    def end(self, number: int, answers: dict[int, bytes]) -> list[tuple[ConsumerT, bytes]]:
        """End an exchange; return its answers for consumers that are still connected."""
        self._under_way.discard(number)
        return [(self._waiting.pop(request), answer) for request, answer in answers.items() if request in self._waiting]


class Relay:
    """Collects calls to one coordinator, forwards them together, and distributes the answers.

    ``coordinator`` has the method `mbaas.calls.server.CallServer.exchange`.
    """

    def __init__(self, coordinator: Any) -> None:
        self.id, self.is_closed = os.urandom(8).hex(), False
        self._coordinator = coordinator
        self.calls: PendingRequests[Connection] = PendingRequests()
        self._listener = Listener(self._take, self.calls.leave)
        self._gathering: asyncio.TimerHandle | None = None
        self._exchanges: set[asyncio.Task[None]] = set()  # references that protect the tasks from garbage collection

    async def address(self) -> str | None:
        """Return the socket address for consumers of this machine; None if local sockets are not available."""
        return await self._listener.address()

    def close(self) -> None:
        """Disconnect all consumers and accept no more calls."""
        self.is_closed = True
        self._listener.close()
        for connection in self.calls.consumers:
            connection.hang_up()  # handled later, so the collection does not change during the loop

    def _take(self, connection: Connection, message: bytes) -> None:
        if self.is_closed:  # connected while the relay was closing
            connection.hang_up()
            return
        self.calls.add(connection, message)
        self._gather()

    def _gather(self) -> None:
        if not self.calls.is_due:
            return
        if self.calls.is_complete:
            self._send()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_S, self._send)

    def _send(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
        self._gathering = None
        if self.calls.is_due and not self.is_closed:
            task = asyncio.get_running_loop().create_task(self._exchange(self.calls.begin()))
            self._exchanges.add(task)
            task.add_done_callback(self._exchanges.discard)

    async def _exchange(self, exchange: Exchange) -> None:
        try:
            answers = await self._coordinator.exchange.remote(self.id, exchange.number, exchange.requests)
            for connection, answer in self.calls.end(exchange.number, answers):
                if answer == encoding.HANG_UP:
                    connection.hang_up()
                else:
                    connection.send(answer)
        except RayError:  # the coordinator is gone or does not know this relay; consumers find out through Ray
            self.close()
        except Exception as error:  # otherwise the error would be lost and consumers would wait
            bugs.log_bug(error, "while calls for blocks were relayed")
            self.close()
        else:
            self._gather()


class Relays:
    """The relays of one machine, one per coordinator."""

    def __init__(self) -> None:
        self._by_coordinator: dict[str, Relay] = {}

    async def find(self, coordinator_id: str, coordinator: Any) -> tuple[str, str] | None:
        """Return id and socket address of the relay for a coordinator's actor id; None without local sockets."""
        relay = self._by_coordinator.get(coordinator_id)
        if relay is None or relay.is_closed:
            relay = self._by_coordinator[coordinator_id] = Relay(coordinator)
        address = await relay.address()
        return None if address is None else (relay.id, address)

    @property
    def have_consumers(self) -> bool:
        """True if any consumer is connected."""
        return any(relay.calls.consumers for relay in self._by_coordinator.values())


# ---- an actor for nodes without a cache node ----


class RelayNode:
    """Runs the relays of a node without a cache node, because the feed prepares nothing there.

    It ends with the actor ``coordinator``, the feed's coordinator.
    """

    def __init__(self, coordinator: str, *, unused_s: float = UNUSED_S) -> None:
        self._relays, self._unused_s = Relays(), unused_s
        self._end: asyncio.Task[None] | None = None
        leftovers.end_with(coordinator)

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

    Call this only in the feed's coordinator, because the actor ends with its creator.
    """
    main = ray.get_runtime_context().get_actor_id()
    options = {
        **actor_names.child_options(feed, "relay", node),
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
    return await asyncio.to_thread(find)
