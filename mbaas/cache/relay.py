"""Takes calls for blocks from consumers of this machine in the place of a coordinator on another one.

The consumers' end of it is the same as on a coordinator's own machine: a socket, to which they were given the address.
Whatever goes wrong, the relay hangs up, and consumers make the calls that wait through Ray.
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
"""How long an exchange waits for further calls, while there is a consumer that waits for none. Those that share
minibatches often call within this time, and they call ahead of need.
"""


class Relays:
    """The relays of one machine: one for each coordinator of a feed, which has one for each lane."""

    def __init__(self) -> None:
        self._by_coordinator: dict[str, Relay] = {}

    async def find(self, coordinator_id: str, coordinator: Any) -> tuple[str, str] | None:
        """Have calls taken for a coordinator that has this actor id.

        Returns:
            the relay's id, and where consumers can connect; None if there are no such sockets.
        """
        relay = self._by_coordinator.get(coordinator_id)
        if relay is None or relay.is_closed:
            relay = self._by_coordinator[coordinator_id] = Relay(coordinator)
        address = await relay.address()
        return None if address is None else (relay.id, address)

    @property
    def have_consumers(self) -> bool:
        """Whether a consumer called and is still there."""
        return any(relay.has_consumers for relay in self._by_coordinator.values())


class Relay:
    """Gathers the calls to one coordinator, and hands its answers out.

    Args:
        coordinator: the actor, which has `mbaas.coordinator.relayed_calls.RelayedCalls.exchange` as ``exchange``.

    Attributes:
        id: tells relays apart.
        is_closed: whether it takes no calls any more.
    """

    def __init__(self, coordinator: Any) -> None:
        self.id, self.is_closed = os.urandom(8).hex(), False
        self._coordinator = coordinator
        self._calls: NodeEnd[Connection] = NodeEnd()
        self._listener = Listener(self._take, self._calls.leave)
        self._gathering: asyncio.TimerHandle | None = None
        self._exchanges: set[asyncio.Task[None]] = set()  # which would be collected, had nobody a reference

    async def address(self) -> str | None:
        """Return where consumers of this machine can connect; None if there are no such sockets."""
        return await self._listener.address()

    @property
    def has_consumers(self) -> bool:
        """Whether a consumer called and is still there."""
        return bool(self._calls.consumers)

    def close(self) -> None:
        """Hang up on everybody, and take no more calls."""
        self.is_closed = True
        self._listener.close()
        for connection in self._calls.consumers:
            connection.hang_up()  # which is noticed later: nobody leaves meanwhile

    def _take(self, connection: Connection, message: bytes) -> None:
        if self.is_closed:  # it connected while the relay was being closed
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
        except RayError:  # it is gone, or knows nothing of this relay: consumers hear of it through Ray
            self.close()
        except Exception as error:  # nobody else would hear of it, and consumers would wait
            bugs.log_bug(error, "while calls for blocks were relayed")
            self.close()
        else:
            self._gather()
