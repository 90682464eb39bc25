"""Takes calls for blocks from consumers on the coordinator's own machine, over a socket instead of through Ray.

What a consumer sends is JSON, and is checked as calls through Ray are. An answer is a pickle, as Ray's are: a consumer
reads it, which trusts its coordinator. A consumer that gets no answer here makes the same call through Ray; so whatever
goes wrong with a socket costs time, and nothing else.
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
"""Takes a call, as `mbaas.coordinator.service.ConsumerApi.ask` does."""

Spawn = Callable[[Coroutine[Any, Any, Any]], object]
"""Runs a coroutine in the background."""


def packed(answer: SocketAnswer) -> bytes:
    """Return an answer as it is sent; if it cannot be sent without Ray, that the call must be made through Ray."""
    buffer = io.BytesIO()
    try:
        _WithoutRay(buffer, pickle.HIGHEST_PROTOCOL).dump(answer)
    except pickle.PicklingError:
        return pickle.dumps(SocketAnswer(answer.number))
    return buffer.getvalue()


class _WithoutRay(pickle.Pickler):
    """Refuses references that Ray has to count (`mbaas.uncounted`): a plain pickle would lose who owns the object."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ray.ObjectRef):
            raise pickle.PicklingError("a reference that Ray counts")
        return NotImplemented


async def answered(ask: Ask, message: bytes) -> bytes | None:
    """Return the answer to what a consumer sent, as it is sent; None if that is no call."""
    try:
        number, call = json.loads(message)
    except (ValueError, TypeError, RecursionError):
        return None
    answer = SocketAnswer(number)
    try:
        answer = SocketAnswer(number, await ask(call))
    except MbaasError as error:
        answer = SocketAnswer(number, error=error)
    except Exception:  # a bug, which was reported; the consumer meets it again through Ray
        pass
    return packed(answer)


class LocalCalls:
    """Listens for consumers as long as its process lives. Their calls may overlap: one that waits is ended by the next.

    Args:
        ask: what calls are given to.
        spawn: what answers are made in.
    """

    def __init__(self, ask: Ask, spawn: Spawn) -> None:
        self._ask = ask
        self._listener = Listener(lambda connection, message: spawn(self._answer(connection, message)))

    async def address(self) -> str | None:
        """Return where consumers of this machine can connect; None if there are no such sockets."""
        return await self._listener.address()

    async def _answer(self, connection: Connection, message: bytes) -> None:
        answer = await answered(self._ask, message)
        if answer is None:
            connection.hang_up()
        else:
            connection.send(answer)
