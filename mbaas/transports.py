"""Choice of the route for a consumer's calls for blocks: a socket on its machine, or Ray. Both ends, without Ray
imports.

Every call can be made through Ray, but a socket is cheaper. A consumer therefore calls through Ray until an answer
contains a socket (`Transport`). The coordinator offers its own socket on its own machine, and elsewhere a relay's,
where that saves CPU time (`RelayDirectory`). If a socket fails, calls without an answer are repeated through Ray; the
coordinator detects repetitions by their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

RELAYED_FROM = 2
"""Least number of consumers on a machine for which calls are relayed: for a single one, the relay takes slightly more
CPU time than it saves (docs/scaling.md)."""

RELAYING_PAYS_PER_S = 30.0
"""Calls per second above which a dedicated relay actor takes less CPU time than it saves (docs/scaling.md)."""

LOOK_S = 5.0
"""Pause between two searches for a relay. While consumers call through Ray, one may start or end."""

KEPT_MACHINES = 1000
"""Upper bound on the machines whose calls and relays are stored: elastic clusters keep adding new ones."""

RelayT = TypeVar("RelayT")


class Transport:
    """A consumer's end: the socket for its calls, if any.

    Attributes:
        socket: address of the socket in use; None: calls go through Ray.
    """

    def __init__(self) -> None:
        self.socket: str | None = None
        self._tried: set[str] = set()

    def offer(self, socket: str) -> bool:
        """Handle a socket offered in an answer; return whether to connect to it, which makes it the socket in use.

        A lost socket is not used again: nothing listened there, it broke, or the listener hangs.
        """
        if socket in self._tried or self.socket is not None:
            return False
        self._tried.add(socket)
        self.socket = socket
        return True

    def lose(self, socket: str) -> None:
        """Stop using a socket."""
        if self.socket == socket:
            self.socket = None

    def begin(self) -> CallTransport:
        """Begin a call."""
        return CallTransport(self)


class CallTransport:
    """Route of one call's answer.

    Attributes:
        socket: address of the socket; None: through Ray.
        is_answered: True if the answer came over the socket.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.socket, self.is_answered = transport.socket, False

    def lose_socket(self) -> bool:
        """Handle a broken socket or one without a timely answer; return whether to repeat the call through Ray."""
        if self.socket is None or self.is_answered:
            return False
        self._transport.lose(self.socket)
        self.socket = None
        return True

    def answer(self, *, says_it: bool) -> bool:
        """Handle a message over the socket; return whether to repeat the call through Ray, because it is not an
        answer.
        """
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
    """Calls through Ray from a node's consumers since the last search for a relay, or since the first call."""

    since: float
    number: int = 0
    per_s_before: float | None = None
    """Calls per second before that search; None: no search yet."""


class RelayDirectory(Generic[RelayT]):
    """The coordinator's end: the relays of other machines, at most one on each, and the decision to find or start one.

    Args:
        relay: creates the coordinator's data for a relay.
    """

    def __init__(self, relay: Callable[[], RelayT]) -> None:
        self._relay = relay
        self._by_node: dict[str, _Known[RelayT]] = {}
        self._calls: dict[str, _Calls] = {}  # by node, ordered by the last search for a relay

    def is_to_look(self, node: str, consumers: int, now: float) -> bool:
        """Count a call through Ray; return whether to search for a relay now, and count that search as done.

        Args:
            node: of the calling consumer.
            consumers: number of consumers there.
            now: in seconds.
        """
        calls = self._calls.get(node) or self._count(node, _Calls(now))
        calls.number += 1
        is_long_ago = now >= calls.since + LOOK_S
        if consumers < RELAYED_FROM or (calls.per_s_before is not None and not is_long_ago):
            return False
        # Calls within less time may be a burst, as at the start of trials.
        per_s = calls.number / (now - calls.since) if is_long_ago else 0.0
        self._count(node, _Calls(now, per_s_before=per_s))
        return True

    def _count(self, node: str, calls: _Calls) -> _Calls:
        # Keeps the KEPT_MACHINES nodes with the most recent searches.
        self._calls.pop(node, None)
        self._calls[node] = calls
        if len(self._calls) > KEPT_MACHINES:
            gone = next(iter(self._calls))
            del self._calls[gone]
            self._by_node.pop(gone, None)
        return calls

    def may_start(self, node: str) -> bool:
        """Return, after a search, whether a node without a cache node is worth a dedicated relay actor."""
        calls = self._calls.get(node)
        return calls is not None and (calls.per_s_before or 0.0) >= RELAYING_PAYS_PER_S

    def found(self, node: str, relay: str, address: str) -> None:
        """Set the address of the relay with this id; the data of a relay that it replaces are dropped."""
        if node not in self._by_node or self._by_node[node].id != relay:
            self._by_node[node] = _Known(relay, address, self._relay())

    def address(self, node: str) -> str | None:
        """Return the address that consumers of a node may call; None without a relay."""
        known = self._by_node.get(node)
        return None if known is None else known.address

    def relay(self, relay: str) -> RelayT | None:
        """Return the data of the relay with this id, or None."""
        return next((known.relay for known in self._by_node.values() if known.id == relay), None)
