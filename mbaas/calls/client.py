"""A consumer's calls to coordinators, with timeouts and mbaas errors.

All calls can go through Ray. Calls for blocks (`BlockCalls`) go over a local socket once an answer through Ray has
offered one, because that is cheaper. The socket belongs to the coordinator, or to a relay for a coordinator on another
node. If a socket breaks or brings no answer, the pending call is repeated through Ray, which also reports a dead
coordinator. The coordinator detects repetitions by their number.
"""

from __future__ import annotations

import itertools
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any

import ray
from msgspec import Raw

from mbaas.base.units import seconds
from mbaas.calls import encoding
from mbaas.calls import socket as local_socket
from mbaas.errors import FeedGoneError, FeedRestartingError, MbaasError, WaitTimeoutError
from mbaas.ray_cluster import connection
from mbaas.ray_cluster.connection import get
from mbaas.wire.consumers import BlockCall, Delivery, SocketAnswer, SocketCall

RESTART_LOOK_S = 0.1
"""Pause between two checks of a restarting coordinator, in seconds."""

CALL_TIMEOUT_S = 60.0
"""Timeout in seconds of calls without a timeout set by the caller."""

ANSWER_S = 10.0
"""Shortest timeout of any call, and extra wait for an answer after a consumer's own timeout, in seconds.

A coordinator on a busy node may be slow without being dead.
"""

CONNECT_S = 5.0
"""Timeout for a coordinator to accept a connection or a message, in seconds; it has just answered a call."""

RECEIVED_BYTES = 2**16
"""Bytes read from a socket at once."""


# ---- calls through Ray ----


def call(ref: Any, timeout_s: float, what: str) -> Any:
    """Return the result of a call to the coordinator, or raise the mbaas error raised there.

    Raises:
        WaitTimeoutError: no answer within ``timeout_s``.
        FeedRestartingError: the coordinator died and is restarting.
        FeedGoneError: the coordinator is gone for good.
    """
    try:
        return answer(ref, timeout_s, what)
    except ray.exceptions.GetTimeoutError:
        late = f"{what}: the feed's coordinator did not answer within {seconds(timeout_s)}"
        raise WaitTimeoutError(": ".join(filter(None, (late, connection.lost_cluster())))) from None


def answer(ref: Any, timeout_s: float, what: str) -> Any:
    """Like `call`, but raise `ray.exceptions.GetTimeoutError` without an answer within ``timeout_s``."""
    try:
        return get(ref, timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, MbaasError):
            raise error.cause from None
        raise
    except ray.exceptions.ActorUnavailableError as error:  # a subclass of RayActorError, so it must come first
        raise FeedRestartingError(f"{what}: the feed's coordinator does not answer, it may be restarting") from error
    except ray.exceptions.RayActorError as error:
        reason = connection.lost_cluster() or "the feed's coordinator is gone; it was stopped or its driver ended"
        raise FeedGoneError(f"{what}: {reason}") from error


def call_patiently(coordinator: Any, ask: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Return the result of `call`, repeating it while the coordinator is starting or restarting.

    Args:
        ask: makes a call and returns its reference; the call may be made twice.
        timeout_s: total timeout in seconds; each call gets at least `ANSWER_S`.

    Raises:
        FeedRestartingError: the coordinator was still away at the timeout.
        FeedGoneError: it is gone for good, perhaps with its cluster.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            return call(ask(), max(end - time.monotonic(), ANSWER_S), what)
        except FeedRestartingError as error:
            if time.monotonic() > end:
                # Only now: a restarting head node looks like one that has ended.
                if reason := connection.lost_cluster():
                    raise FeedGoneError(f"{what}: {reason}") from error.__cause__
                raise FeedRestartingError(f"{error}; waited {seconds(timeout_s)} for it") from error.__cause__
            await_restart(coordinator, end)


def await_restart(coordinator: Any, end: float) -> None:
    """Wait until a restarting coordinator answers or is gone for good, or until the time ``end`` (`time.monotonic`)."""
    # A call during a restart hangs for up to two seconds before Ray reports it, but a call made after the restart
    # succeeds at once. So make a new call at every check.
    looks: list[Any] = []
    while time.monotonic() < end:
        looks.append(coordinator.__ray_ready__.remote())
        time.sleep(RESTART_LOOK_S)
        answered, looks = ray.wait(looks, num_returns=len(looks), timeout=0)
        if not all(map(_met_restart, answered)):
            return


def _met_restart(answered: Any) -> bool:
    try:
        get(answered, CALL_TIMEOUT_S)
    except ray.exceptions.ActorUnavailableError:
        return True
    except ray.exceptions.RayActorError:  # the next call raises the reason
        return False
    return False


# ---- choice of the route ----


class Route:
    """The socket for a consumer's calls, if any.

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

    def begin(self) -> CallRoute:
        """Begin a call."""
        return CallRoute(self)


class CallRoute:
    """The route of one call's answer.

    Attributes:
        socket: address of the socket; None: through Ray.
        is_answered: True if the answer came over the socket.
    """

    def __init__(self, route: Route) -> None:
        self._route = route
        self.socket, self.is_answered = route.socket, False

    def lose_socket(self) -> bool:
        """Handle a broken socket or one without a timely answer; return whether to repeat the call through Ray."""
        if self.socket is None or self.is_answered:
            return False
        self._route.lose(self.socket)
        self.socket = None
        return True

    def answer(self, *, is_complete: bool) -> bool:
        """Handle an answer over the socket; return whether to repeat the call through Ray, because it is incomplete."""
        self.is_answered = is_complete
        if not is_complete:
            self.socket = None
        return not is_complete


# ---- calls for blocks ----


class NoAnswerYetError(Exception):
    """A call has no answer within its timeout. The answer may still arrive."""


class BlockCalls:
    """Makes the calls of one session; ``what`` describes a call in errors.

    Attributes:
        route: the socket in use, if any.
    """

    def __init__(self, coordinator: Any, what: str) -> None:
        self._coordinator, self._what = coordinator, what
        self.route = Route()
        self._connection: _Connection | None = None

    def offer(self, address: str | None) -> None:
        """Use the socket at ``address`` from now on, unless one is in use; see `Route.offer`."""
        if address is None or not self.route.offer(address):
            return
        try:
            self._connection = _Connection(local_socket.connect(address, CONNECT_S))
        except OSError:
            self.route.lose(address)

    def close(self) -> None:
        """Close the socket."""
        if self._connection is not None:
            self._connection.close()

    def make(self, call: BlockCall) -> PendingCall:
        """Start a call."""
        route = self.route.begin()
        return PendingCall(self, encoding.encode(call), route, None if route.socket is None else self._connection)

    def through_ray(self, call: bytes) -> Any:
        """Start a call through Ray; return a reference to its result."""
        return self._coordinator.ask.remote(call)

    def ray_answer(self, ref: Any, timeout_s: float) -> Delivery:
        """Return the answer through Ray; see `PendingCall.result`."""
        try:
            delivery: Delivery = answer(ref, timeout_s, self._what)
        except ray.exceptions.GetTimeoutError:
            raise NoAnswerYetError from None
        self.offer(delivery.socket)
        return delivery


class PendingCall:
    """A call that may have been answered. It can be dropped at any time."""

    def __init__(self, calls: BlockCalls, call: bytes, route: CallRoute, connection: _Connection | None) -> None:
        self._calls, self._call, self._route, self._connection = calls, call, route, connection
        self._number, self._ref = 0, None
        self._answer: SocketAnswer | None = None
        if connection is None:
            self._make_through_ray()
            return
        try:
            self._number = connection.send(call)
        except local_socket.BrokenSocketError:
            self.lose_socket()

    def _make_through_ray(self) -> None:
        self._ref = self._calls.through_ray(self._call)

    def result(self, timeout_s: float) -> Delivery:
        """Return the coordinator's answer.

        Raises:
            NoAnswerYetError: no answer within ``timeout_s``.
            MbaasError: raised by the coordinator, or because it is gone; see `call`.
        """
        end = time.monotonic() + timeout_s
        if not self._comes_over_socket(timeout_s):
            return self._calls.ray_answer(self._ref, max(0.0, end - time.monotonic()))
        assert self._answer is not None
        if self._answer.error is not None:
            raise self._answer.error
        assert self._answer.delivery is not None
        return self._answer.delivery

    def _comes_over_socket(self, timeout_s: float) -> bool:
        """Wait for an answer over the socket. Return True if it arrived there, False if it arrives through Ray."""
        if self._route.socket is None or self._route.is_answered:
            return self._route.is_answered
        assert self._connection is not None
        try:
            self._answer = self._connection.receive(self._number, timeout_s)
        except local_socket.BrokenSocketError:
            self.lose_socket()
            return False
        if self._answer is None:
            raise NoAnswerYetError
        is_complete = self._answer.delivery is not None or self._answer.error is not None
        if self._route.answer(is_complete=is_complete):  # the coordinator met a bug; Ray brings the full error
            self._make_through_ray()
        return self._route.is_answered

    def lose_socket(self) -> None:
        """Repeat the call through Ray if unanswered, and make all further calls there: the socket's owner may hang."""
        if self._route.lose_socket():
            assert self._connection is not None
            self._connection.close()
            self._make_through_ray()

    def is_answered(self) -> bool:
        """Return whether `result` would return or raise at once."""
        try:
            return self._comes_over_socket(0) or bool(ray.wait([self._ref], timeout=0)[0])
        except NoAnswerYetError:
            return False


class _Connection:
    def __init__(self, connected: socket.socket) -> None:
        self._socket: socket.socket | None = connected
        self._end = weakref.finalize(self, connected.close)  # a session that is replaced by another one is only dropped
        self._end.atexit = False
        self._messages = local_socket.Messages()
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self._socket = None
        self._end()

    def send(self, call: bytes) -> int:
        if self._socket is None:
            raise local_socket.BrokenSocketError("it was closed")
        number = next(self._numbers)
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.sendall(local_socket.framed(encoding.encode(SocketCall(number, Raw(call)))))
        except OSError as error:
            self.close()
            raise local_socket.BrokenSocketError(str(error)) from error
        except BaseException:  # an interrupt: the message may be sent in part
            self.close()
            raise
        return number

    def receive(self, number: int, timeout_s: float) -> SocketAnswer | None:
        end = time.monotonic() + timeout_s
        try:
            while self._socket is not None:
                self._socket.settimeout(max(0.0, end - time.monotonic()))
                received = self._socket.recv(RECEIVED_BYTES)
                if not received:
                    raise local_socket.BrokenSocketError("its coordinator closed it")
                for message in self._messages.put(received):
                    answered = encoding.decode_answer(message)
                    if answered.number == number:  # the newest call: no answer follows
                        return answered
            raise local_socket.BrokenSocketError("it was closed")
        except (BlockingIOError, TimeoutError):
            return None
        except (OSError, *encoding.INVALID) as error:
            self.close()
            raise local_socket.BrokenSocketError(str(error)) from error
        except local_socket.BrokenSocketError:
            self.close()
            raise
