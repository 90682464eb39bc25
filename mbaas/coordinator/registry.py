"""The program that serves each feed and the resources that the feed reserves, and the lock for dividing these.

All are in the cluster's key-value store. A program that serves a feed needs the claims of earlier feeds. It does not
call their coordinators, which may hang or be restarting. The lock serializes programs that serve at the same moment:
its holder reads the claims, decides, and registers its feed before the next program reads.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import msgspec

from mbaas.errors import ConfigError
from mbaas.memory.budgets import MemoryClaim
from mbaas.ray_cluster import actor_names, store
from mbaas.wire import protocol
from mbaas.wire.consumers import Claims

LEASE_S = 10.0
"""A program that holds the lock for this many seconds is dead or hangs, and the next one takes over.

The lock is needed for a few calls to the cluster's head.
"""

LOOK_S = 0.02
"""Pause between two checks of the lock, in seconds."""

_LOCK = "serving:"
_FREE = b""


class Server(msgspec.Struct, frozen=True):
    """The program that serves a feed.

    Attributes:
        program: file name of its script, or of Python without a script, as in a notebook.
        since_s: start of serving, Unix time in seconds.
        protocol: its `mbaas.wire.protocol.PROTOCOL`.
    """

    program: str
    pid: int
    user: str
    host: str
    since_s: float
    version: str
    protocol: str

    @classmethod
    def of_this_program(cls) -> Server:
        """Return the description of this program."""
        script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else sys.executable
        program, version = Path(script).name, metadata.version("mbaas")
        return cls(program, os.getpid(), _user(), socket.gethostname(), time.time(), version, protocol.PROTOCOL)

    @property
    def is_ours(self) -> bool:
        """Return whether this program's user runs it, on the same host."""
        return (self.user, self.host) == (_user(), socket.gethostname())

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.since_s))
        return f"{self.program} (process {self.pid}) of user {self.user} on {self.host}, since {since}"


def enter(feed: str, claims: Claims, number: int) -> None:
    """Store the claims of a new feed whose coordinator is registered, and that this program serves it.

    ``number``, from `dividing`, defines the order of feeds.
    """
    store.put(feed, "server", msgspec.json.encode(Server.of_this_program()))
    _put(feed, claims, number)


def update(feed: str, claims: Claims) -> None:
    """Store a feed's current claims; do nothing if the feed has ended."""
    if (found := _read(feed)) is not None:
        _put(feed, claims, found[0])


def forget(feed: str) -> None:
    """Delete the entry of a feed."""
    store.delete(feed, "claims")
    store.delete(feed, "server")


def server_of(feed: str) -> Server | None:
    """Return the program that last served a feed; None if unknown."""
    found = store.get(feed, "server")
    return msgspec.json.decode(found, type=Server) if found else None


def check_version(feed: str) -> None:
    """Reject a feed that is served with an incompatible version of mbaas.

    Raises:
        ConfigError: the message protocols differ; the message contains both versions and the program.
    """
    server = server_of(feed)
    if server is not None and server.protocol != protocol.PROTOCOL:
        raise ConfigError(
            f"feed {feed!r} is served with mbaas {server.version} (messages {server.protocol}), and this program has "
            f"{metadata.version('mbaas')} (messages {protocol.PROTOCOL}): install the same one in both; it is served "
            f"by {server}"
        )


def claims_of(feed: str) -> Claims | None:
    """Return the claims of a feed; None if it has ended, or is just being registered."""
    found = _read(feed)
    return None if found is None else found[1]


def in_order() -> list[Claims]:
    """Return the claims of every feed that runs, hangs or is restarting, in the order of their start."""
    # If a program was killed its claims remain, but Ray forgets the name of its coordinator.
    found = [kept for name in actor_names.feed_names() if (kept := _read(name)) is not None]
    return [claims for _, claims in sorted(found, key=lambda kept: kept[0])]


@contextlib.contextmanager
def dividing() -> Iterator[int]:
    """Hold the lock, and yield a number above the numbers of all earlier holders."""
    number, mine = _acquire()
    try:
        yield number
    finally:
        if store.get(None, _lock(number)) == mine:  # otherwise it was taken over, and is deleted
            store.put(None, _lock(number), _FREE)


def _acquire() -> tuple[int, bytes]:
    # The store has one atomic operation: put a value if the key is new. So each holder creates a key with the next
    # number, and the highest number counts. Deleting and putting the same key would admit two programs that take over
    # from a dead holder.
    mine = uuid.uuid4().hex.encode()
    last, since = -1, 0.0
    while True:
        numbers = _numbers()
        highest = max(numbers, default=0)
        if highest != last:
            last, since = highest, time.monotonic()
        if not highest or not store.get(None, _lock(highest)) or time.monotonic() - since > LEASE_S:
            own = highest + 1
            store.put_new(None, _lock(own), mine)
            # The number may have been used and deleted since; then there is a higher one. The value identifies the
            # holder.
            if store.get(None, _lock(own)) == mine and max(_numbers()) == own:
                for number in numbers:
                    store.delete(None, _lock(number))
                return own, mine
        time.sleep(LOOK_S)


def _numbers() -> list[int]:
    return [int(name.removeprefix(_LOCK)) for name in store.names(None, _LOCK)]


def _lock(number: int) -> str:
    return f"{_LOCK}{number}"


def _put(feed: str, claims: Claims, number: int) -> None:
    store.put(feed, "claims", json.dumps({"number": number, **asdict(claims)}).encode())


def _read(feed: str) -> tuple[int, Claims] | None:
    found = store.get(feed, "claims")
    if not found:
        return None
    kept = json.loads(found)
    return kept["number"], Claims(memory=MemoryClaim(**kept["memory"]), cpus=kept["cpus"], gpus=kept["gpus"])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
