"""Messages over Unix sockets between two processes of one machine that find each other through Ray.

A call over a Unix socket takes a tenth of the CPU time of a Ray call (docs/scaling.md). Calls for blocks are by far the
most frequent, so consumers make them over a socket, to their coordinator or to a relay for a coordinator on another
machine.

A socket's address is a name in Linux's abstract namespace, which leaves no file however its owner ends. Such names have
no permissions. So each side checks the user of the other process with the kernel, and accepts only its own user.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from typing import TypeAlias

MOST_BYTES = 64 * 2**20
"""Upper bound on a message: a delivery has some kilobytes, with thousands of bad samples some megabytes."""

_LENGTH = struct.Struct(">I")


class BrokenSocketError(Exception):
    """The socket was closed, or received an invalid message."""


def connect(address: str, timeout_s: float) -> socket.socket:
    """Return a socket connected to an address. Raises `OSError` without a listener of this user there."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(timeout_s)
        connected.connect(f"\0{address}")
        if not is_own_user(connected):
            raise PermissionError(f"socket {address} belongs to another user")
    except OSError:
        connected.close()
        raise
    return connected


def is_own_user(connected: socket.socket) -> bool:
    """Return whether the process at the other end has the same user as this process."""
    _, uid, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.geteuid())


def framed(message: bytes) -> bytes:
    """Return a message prefixed with its length."""
    return _LENGTH.pack(len(message)) + message


class Messages:
    """Splits the bytes from a socket into messages."""

    def __init__(self) -> None:
        self._left = bytearray()

    def put(self, received: bytes) -> Iterator[bytes]:
        """Add received bytes, and yield the messages that are complete; `BrokenSocketError` if one is above
        `MOST_BYTES`.
        """
        self._left += received
        while len(self._left) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._left)
            if length > MOST_BYTES:
                raise BrokenSocketError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._left) < end:
                return
            message = bytes(self._left[_LENGTH.size : end])
            del self._left[:end]
            yield message


Handler: TypeAlias = "Callable[[Connection, bytes], object]"
"""Handler of a message from a connection."""


class Connection(asyncio.Protocol):
    """The listener's end of a connection; ``handle`` is called with each message, ``gone`` when the other side
    disconnected.
    """

    def __init__(self, handle: Handler, gone: Callable[[Connection], object]) -> None:
        self._handle, self._gone = handle, gone
        self._messages = Messages()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connected: socket.socket = transport.get_extra_info("socket")
        if not is_own_user(connected):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._messages.put(data):
                self._handle(self, message)
        except BrokenSocketError:
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio names it
        self._gone(self)

    def send(self, message: bytes) -> None:
        """Send a message, unless the connection has ended."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(framed(message))

    def hang_up(self) -> None:
        """End the connection; nothing more is sent or received."""
        assert self._transport is not None
        self._transport.abort()


class Listener:
    """Listens from the first call of `address`; ``handle`` gets each message, ``gone`` each connection that ended."""

    def __init__(self, handle: Handler, gone: Callable[[Connection], object] = lambda _: None) -> None:
        self._handle, self._gone = handle, gone
        self._address: asyncio.Task[str | None] | None = None
        self._server: asyncio.Server | None = None

    async def address(self) -> str | None:
        """Return the address for processes of this machine; None if it cannot listen."""
        if self._address is None:
            self._address = asyncio.get_running_loop().create_task(self._listen())
        return await self._address

    async def _listen(self) -> str | None:
        loop, address = asyncio.get_running_loop(), f"mbaas-{secrets.token_hex(16)}"
        try:
            self._server = await loop.create_unix_server(lambda: Connection(self._handle, self._gone), f"\0{address}")
        except OSError:  # most likely too many open files
            return None
        return address

    def close(self) -> None:
        """Stop accepting connections; existing ones continue."""
        if self._server is not None:
            self._server.close()
