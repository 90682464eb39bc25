"""Which way a consumer's calls for blocks go, over a socket of its machine or through Ray: both ends, without Ray.

Every call can be made through Ray, and a socket is cheaper, so a consumer calls through Ray until an answer tells it of
a socket (`Transport`). The coordinator tells of its own on its own machine, and elsewhere of a relay's, where that pays
(`RelayDirectory`). Whatever becomes of a socket, a call without an answer is made once more, through Ray; the
coordinator knows by its number that it came twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

RELAYED_FROM = 2
"""Consumers on a machine from which on their calls are relayed: for a single one that takes a little more CPU time than
it saves (docs/scaling.md).
"""

RELAYING_PAYS_PER_S = 30.0
"""Calls a second from which on an actor that does nothing else takes less CPU time than it saves (docs/scaling.md)."""

LOOK_S = 5.0
"""Pause before it is asked again where a relay listens: consumers call through Ray, so that may have changed."""

KEPT_MACHINES = 1000
"""The most machines whose calls and relays are remembered: clusters that grow and shrink have ever new ones."""

RelayT = TypeVar("RelayT")


class Transport:
    """A consumer's end: the socket over which its calls go, if they go over one.

    Attributes:
        socket: the address of the socket in use; None: calls go through Ray.
    """

    def __init__(self) -> None:
        self.socket: str | None = None
        self._tried: set[str] = set()

    def offer(self, socket: str) -> bool:
        """Take in what an answer told; tell whether to connect to that socket, which is in use from now on.

        One that was lost is not used again: nobody listened there, or it broke, or who listens hangs.
        """
        if socket in self._tried or self.socket is not None:
            return False
        self._tried.add(socket)
        self.socket = socket
        return True

    def lose(self, socket: str) -> None:
        """Use a socket no more."""
        if self.socket == socket:
            self.socket = None

    def begin(self) -> CallTransport:
        """Begin a call."""
        return CallTransport(self)


class CallTransport:
    """Where the answer to one call is awaited.

    Attributes:
        socket: over the socket at this address; None: through Ray.
        is_answered: whether the answer came over the socket.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.socket, self.is_answered = transport.socket, False

    def lose_socket(self) -> bool:
        """Take in that the socket broke or brings no answer in time; tell whether to make the call through Ray."""
        if self.socket is None or self.is_answered:
            return False
        self._transport.lose(self.socket)
        self.socket = None
        return True

    def answer(self, *, says_it: bool) -> bool:
        """Take in what came over the socket; tell whether to make the call through Ray, since it does not say it."""
        self.is_answered = says_it
        if not says_it:
            self.socket = None
        return not says_it


@dataclass(frozen=True)
class _Known(Generic[RelayT]):
    id: str
    address: str
    relay: RelayT


@dataclass
class _Calls:
    """Calls of a node's consumers through Ray since a relay was looked for there; since the first one before that."""

    since: float
    number: int = 0
    per_s_before: float | None = None
    """How many a second there were before that look; None: there was none."""


class RelayDirectory(Generic[RelayT]):
    """The coordinator's end: the relays of other machines, at most one on each, and when to look for or start one.

    Args:
        relay: makes what the coordinator keeps for a relay.
    """

    def __init__(self, relay: Callable[[], RelayT]) -> None:
        self._relay = relay
        self._by_node: dict[str, _Known[RelayT]] = {}
        self._calls: dict[str, _Calls] = {}  # by node; for which a relay was looked for last at the end

    def is_to_look(self, node: str, consumers: int, now: float) -> bool:
        """Take in a call through Ray; tell whether a relay is to be looked for, which counts as done.

        Args:
            node: of the consumer that called.
            consumers: how many run there.
            now: in seconds.
        """
        calls = self._calls.get(node) or self._count(node, _Calls(now))
        calls.number += 1
        is_long_ago = now >= calls.since + LOOK_S
        if consumers < RELAYED_FROM or (calls.per_s_before is not None and not is_long_ago):
            return False
        # What came in less time may be a burst, as at the beginning of trials.
        per_s = calls.number / (now - calls.since) if is_long_ago else 0.0
        self._count(node, _Calls(now, per_s_before=per_s))
        return True

    def _count(self, node: str, calls: _Calls) -> _Calls:
        """Begin to count a node's calls anew, and forget the node that was counted anew longest ago if need be."""
        self._calls.pop(node, None)
        self._calls[node] = calls
        if len(self._calls) > KEPT_MACHINES:
            gone = next(iter(self._calls))
            del self._calls[gone]
            self._by_node.pop(gone, None)
        return calls

    def may_start(self, node: str) -> bool:
        """Tell, after a look, whether an actor that only relays is worth it on a node that has no cache node."""
        calls = self._calls.get(node)
        return calls is not None and (calls.per_s_before or 0.0) >= RELAYING_PAYS_PER_S

    def found(self, node: str, relay: str, address: str) -> None:
        """Take in where the relay with this id listens; what is kept for one that it replaces is let go."""
        if node not in self._by_node or self._by_node[node].id != relay:
            self._by_node[node] = _Known(relay, address, self._relay())

    def address(self, node: str) -> str | None:
        """Return where consumers of a node may call; None if that is not known."""
        known = self._by_node.get(node)
        return None if known is None else known.address

    def relay(self, relay: str) -> RelayT | None:
        """Return what is kept for the relay with this id; None if it is not known."""
        return next((known.relay for known in self._by_node.values() if known.id == relay), None)
