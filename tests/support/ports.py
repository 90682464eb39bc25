"""Ports and local sockets for servers that tests start."""

from __future__ import annotations

import random
import socket
import uuid
from contextlib import suppress

PORTS = range(20_000, 32_768)
"""Above the ports that `ray start` gives its workers, and below the ephemeral ports of Linux."""


def free_ports(number: int) -> list[int]:
    """Find distinct ports of this machine that are free and outside the ephemeral range."""
    found: list[int] = []
    # Another test process may be searching too, so each draws its own ports. Property tests seed the default generator
    # identically in all processes.
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.socket() as tried:
            tried.bind(("", port))
            found.append(port)
        if len(found) == number:
            return found
    raise OSError(f"{len(found)} of {number} ports are free of {PORTS.start} to {PORTS.stop - 1}")


def listen() -> tuple[socket.socket, str]:
    """Return a socket that accepts connections at a local address of `mbaas.calls.socket`, and this address."""
    listening, address = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"mbaas-{uuid.uuid4().hex}"
    listening.bind(f"\0{address}")
    listening.listen()
    return listening, address
