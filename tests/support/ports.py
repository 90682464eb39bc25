"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

PORTS = range(20_000, 32_768)
"""Above those that `ray start` gives its workers, and below those that Linux gives to whoever asks for any."""


def free_ports(number: int) -> list[int]:
    """Find different ports of this machine that nobody listens on, and that nobody is given who asks for any."""
    found: list[int] = []
    # Another process of the suite may be looking for some now, so each draws its own, and not with the generator that
    # property tests seed alike in all of them.
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.socket() as tried:
            tried.bind(("", port))
            found.append(port)
        if len(found) == number:
            return found
    raise OSError(f"{len(found)} of {number} ports are free of {PORTS.start} to {PORTS.stop - 1}")
