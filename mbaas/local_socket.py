"""Messages between two processes of one machine that know each other through Ray, without Ray.

A call over a Unix socket takes a tenth of the CPU time of one through Ray (docs/scaling.md). Calls for blocks are by
far the most frequent ones, so consumers on a coordinator's own machine make them over a socket
(`mbaas.client.block_calls`, `mbaas.coordinator.local_calls`).

A socket's address is a name in Linux's abstract namespace, of which no file is left however its owner ends. Such a name
has no permissions. So each side asks the kernel whose process the other one is, and speaks only to its own user's.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator

MOST_BYTES = 64 * 2**20
"""A message is never longer: a delivery has some kilobytes, with thousands of bad samples some megabytes."""

_LENGTH = struct.Struct(">I")


class BrokenSocketError(Exception):
    """Says that nothing more will come over a socket: it was closed, or what came is no message."""


def are_supported() -> bool:
    """Tell whether this system has such sockets: Linux does."""
    return sys.platform == "linux"


def listen() -> tuple[socket.socket, str]:
    """Return a socket to which processes of this machine can connect, not blocking, and its address.

    Raises:
        OSError: the system gives none.
    """
    address = f"mbaas-{secrets.token_hex(16)}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.bind(f"\0{address}")
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening, address


def connect(address: str, timeout_s: float) -> socket.socket:
    """Return a socket that is connected to who listens at an address.

    Raises:
        OSError: nobody does on this machine, or somebody of another user.
    """
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
    """Tell whether the process at the other end is of this process's user."""
    _, uid, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.geteuid())


def framed(message: bytes) -> bytes:
    """Return a message as it is sent: behind its length."""
    return _LENGTH.pack(len(message)) + message


class Messages:
    """Cuts what comes over a socket into messages."""

    def __init__(self) -> None:
        self._left = bytearray()

    def put(self, received: bytes) -> Iterator[bytes]:
        """Take in what was received, and yield the messages that are whole now.

        Raises:
            BrokenSocketError: a message is longer than `MOST_BYTES`, so it is none of ours.
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
