"""Takes calls for blocks from consumers on the coordinator's own machine, over a socket instead of through Ray.

What a consumer sends is JSON, and is checked as calls through Ray are. An answer is a pickle, as Ray's are: a consumer
reads it, which trusts its coordinator. A consumer that gets no answer here makes the same call through Ray; so whatever
goes wrong with a socket costs time, and nothing else.
"""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import ray

from mbaas import local_socket
from mbaas.errors import MbaasError
from mbaas.messages import Delivery, LocalAnswer

Ask = Callable[[list[Any]], Awaitable[Delivery]]
"""Takes a call, as `mbaas.coordinator.service.ConsumerApi.ask` does."""

Spawn = Callable[[Coroutine[Any, Any, Any]], object]
"""Runs a coroutine in the background."""


def packed(answer: LocalAnswer) -> bytes:
    """Return an answer as it is sent; if it cannot be sent without Ray, that the call must be made through Ray."""
    buffer = io.BytesIO()
    try:
        _WithoutRay(buffer, pickle.HIGHEST_PROTOCOL).dump(answer)
    except pickle.PicklingError:
        return pickle.dumps(LocalAnswer(answer.number))
    return buffer.getvalue()


class _WithoutRay(pickle.Pickler):
    """Refuses references that Ray has to count (`mbaas.uncounted`): a plain pickle would lose who owns the object."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ray.ObjectRef):
            raise pickle.PicklingError("a reference that Ray counts")
        return NotImplemented


class LocalCalls:
    """Listens for consumers as long as its process lives.

    Args:
        ask: what calls are given to.
        spawn: what answers are made in.
    """

    def __init__(self, ask: Ask, spawn: Spawn) -> None:
        self._ask, self._spawn = ask, spawn
        self._address: asyncio.Task[str | None] | None = None
        self._server: asyncio.Server | None = None

    async def address(self) -> str | None:
        """Return where consumers of this machine can connect; None if there are no such sockets."""
        if self._address is None:
            self._address = asyncio.get_running_loop().create_task(self._listen())
        return await self._address

    async def _listen(self) -> str | None:
        if not local_socket.are_supported():
            return None
        loop = asyncio.get_running_loop()
        try:
            listening, address = local_socket.listen()
            self._server = await loop.create_unix_server(lambda: _Connection(self._ask, self._spawn), sock=listening)
        except OSError:  # too many files are open, most likely
            return None
        return address


class _Connection(asyncio.Protocol):
    """One consumer's socket. Its calls may overlap: one that waits is ended by the next."""

    def __init__(self, ask: Ask, spawn: Spawn) -> None:
        self._ask, self._spawn = ask, spawn
        self._messages = local_socket.Messages()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connected: socket.socket = transport.get_extra_info("socket")
        if not local_socket.is_own_user(connected):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            for message in self._messages.put(data):
                number, call = json.loads(message)
                self._spawn(self._answer(number, call))
        except (local_socket.BrokenSocketError, ValueError, TypeError, RecursionError):  # no message of a consumer
            self._transport.abort()

    async def _answer(self, number: object, call: list[Any]) -> None:
        assert self._transport is not None
        answer = LocalAnswer(number)
        try:
            answer = LocalAnswer(number, await self._ask(call))
        except MbaasError as error:
            answer = LocalAnswer(number, error=error)
        except Exception:  # a bug, which was reported; the consumer meets it again through Ray
            pass
        if not self._transport.is_closing():
            self._transport.write(local_socket.framed(packed(answer)))
