"""The program that serves each feed, in the cluster's key-value store. It is named if a feed name is already in use."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from importlib import metadata
from pathlib import Path

import msgspec

from mbaas.errors import ConfigError
from mbaas.ray_cluster import store
from mbaas.wire import protocol


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
    version: str = ""
    protocol: str = ""

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


def keep_server(feed: str) -> None:
    """Record that this program serves a feed."""
    store.put(feed, "server", msgspec.json.encode(Server.of_this_program()))


def recall_server(feed: str) -> Server | None:
    """Return the program that last served a feed; None if unknown."""
    found = store.get(feed, "server")
    return msgspec.json.decode(found, type=Server) if found else None


def check_version(feed: str) -> None:
    """Reject a feed that is served with an incompatible version of mbaas.

    Raises:
        ConfigError: the message protocols differ; the message contains both versions and the program.
    """
    server = recall_server(feed)
    if server is not None and server.protocol != protocol.PROTOCOL:
        version = metadata.version("mbaas")
        other = server.version or "an older version"
        raise ConfigError(
            f"feed {feed!r} is served with mbaas {other} (messages {server.protocol or 'unknown'}), and this program "
            f"has {version} (messages {protocol.PROTOCOL}): install the same one in both; it is served by {server}"
        )


def forget_server(feed: str) -> None:
    """Delete the record of the program that serves a feed."""
    store.delete(feed, "server")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
