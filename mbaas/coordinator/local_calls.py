"""Accepts calls for blocks over a socket from consumers on the coordinator's own node, instead of through Ray.

Requests are JSON, and are validated like calls through Ray. Answers are pickles, as in Ray: a consumer trusts its
coordinator. A consumer without an answer repeats the call through Ray, so a socket failure costs only time.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import ray

from mbaas.errors import MbaasError
from mbaas.local_socket import Connection, Listener
from mbaas.messages import Delivery, SocketAnswer

Ask = Callable[[list[Any]], Awaitable[Delivery]]
"""Answers a call, as `mbaas.coordinator.service.ConsumerApi.ask` does."""

Spawn = Callable[[Coroutine[Any, Any, Any]], object]
"""Runs a coroutine in the background."""


def packed(answer: SocketAnswer) -> bytes:
    """Return an encoded answer. If it cannot be sent without Ray, it instructs the consumer to call through Ray."""
    buffer = io.BytesIO()
    try:
        _WithoutRay(buffer, pickle.HIGHEST_PROTOCOL).dump(answer)
    except pickle.PicklingError:
        return pickle.dumps(SocketAnswer(answer.number))
    return buffer.getvalue()


class _WithoutRay(pickle.Pickler):
    """Refuses references that Ray counts (`CountedObject`): a plain pickle would lose the object's owner."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ray.ObjectRef):
            raise pickle.PicklingError("a reference that Ray counts")
        return NotImplemented


async def answered(ask: Ask, message: bytes) -> bytes | None:
    """Return the encoded answer to a consumer's message; None for an invalid call."""
    try:
        number, call = json.loads(message)
    except (ValueError, TypeError, RecursionError):
        return None
    answer = SocketAnswer(number)
    try:
        answer = SocketAnswer(number, await ask(call))
    except MbaasError as error:
        answer = SocketAnswer(number, error=error)
    except Exception:  # a bug, already reported; the consumer meets it again through Ray
        pass
    return packed(answer)


class LocalCalls:
    """Listens for consumers for the lifetime of its process. A consumer's next call ends its pending one."""

    def __init__(self, ask: Ask, spawn: Spawn) -> None:
        self._ask = ask
        self._listener = Listener(lambda connection, message: spawn(self._answer(connection, message)))

    async def address(self) -> str | None:
        """Return the address for consumers on this node; None if such sockets are unavailable."""
        return await self._listener.address()

    async def _answer(self, connection: Connection, message: bytes) -> None:
        answer = await answered(self._ask, message)
        if answer is None:
            connection.hang_up()
        else:
            connection.send(answer)
