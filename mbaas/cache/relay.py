"""Local proxy for a coordinator on another machine, for block calls of this machine's consumers.

Consumers connect through a local socket, exactly as on the coordinator's machine. On any error, the relay hangs up, and
the consumers repeat their pending calls through Ray.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from ray.exceptions import RayError

from mbaas import bugs
from mbaas.exchange import HANG_UP, Exchange, NodeEnd
from mbaas.local_socket import Connection, Listener

GATHER_S = 0.01
"""Longest wait of an exchange for further calls. Ranks of one trial often call within it, and ahead of need."""


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
        return any(relay.has_consumers for relay in self._by_coordinator.values())


class Relay:
    """Collects calls to one coordinator, forwards them together, and distributes the answers.

    ``coordinator`` has the method `mbaas.coordinator.relayed_calls.RelayedCalls.exchange`.
    """

    def __init__(self, coordinator: Any) -> None:
        self.id, self.is_closed = os.urandom(8).hex(), False
        self._coordinator = coordinator
        self._calls: NodeEnd[Connection] = NodeEnd()
        self._listener = Listener(self._take, self._calls.leave)
        self._gathering: asyncio.TimerHandle | None = None
        self._exchanges: set[asyncio.Task[None]] = set()  # references that protect the tasks from garbage collection

    async def address(self) -> str | None:
        """Return the socket address for consumers of this machine; None if local sockets are not available."""
        return await self._listener.address()

    @property
    def has_consumers(self) -> bool:
        """True if any consumer is connected."""
        return bool(self._calls.consumers)

    def close(self) -> None:
        """Disconnect all consumers and accept no more calls."""
        self.is_closed = True
        self._listener.close()
        for connection in self._calls.consumers:
            connection.hang_up()  # handled later, so the collection does not change during the loop

    def _take(self, connection: Connection, message: bytes) -> None:
        if self.is_closed:  # connected while the relay was closing
            connection.hang_up()
            return
        self._calls.request(connection, message)
        self._gather()

    def _gather(self) -> None:
        if not self._calls.is_due:
            return
        if self._calls.is_complete:
            self._send()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_S, self._send)

    def _send(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
        self._gathering = None
        if self._calls.is_due and not self.is_closed:
            task = asyncio.get_running_loop().create_task(self._exchange(self._calls.begin()))
            self._exchanges.add(task)
            task.add_done_callback(self._exchanges.discard)

    async def _exchange(self, exchange: Exchange) -> None:
        try:
            answers = await self._coordinator.exchange.remote(self.id, exchange.number, exchange.requests)
            for connection, answer in self._calls.end(exchange.number, answers):
                if answer == HANG_UP:
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
