"""A consumer's calls to coordinators, with timeouts and mbaas errors.

All calls can go through Ray. Calls for blocks (`BlockCalls`) go over a local socket once an answer through Ray has
offered one, because that is cheaper. The socket belongs to the coordinator, or to a relay for a coordinator on another
node. If a socket breaks or brings no answer, the pending call is repeated through Ray, which also reports a dead
coordinator. The coordinator detects repetitions by their number.
"""

from __future__ import annotations

import contextlib
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

    Raises `WaitTimeoutError` without an answer within ``timeout_s``, `FeedRestartingError` if the coordinator died and
    is restarting, `FeedGoneError` if it is gone for good.
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
    """Return the result of `call`, repeating it while the coordinator is starting or restarting, for ``timeout_s`` in
    total.

    ``ask`` makes a call and returns its reference. Each call gets at least `ANSWER_S`. Raises `FeedRestartingError`
    if the coordinator was still away at the timeout, `FeedGoneError` if it is gone for good, perhaps with its
    cluster.
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


# ---- calls for blocks ----


class NoAnswerYetError(Exception):
    """A call has no answer within its timeout. The answer may still arrive."""


class BlockCalls:
    """Makes the calls of one session; ``what`` describes a call in errors, and ``connect`` opens a socket."""

    def __init__(self, coordinator: Any, what: str, connect: Callable[[str], Connection] | None = None) -> None:
        self._coordinator, self._what, self._connect = coordinator, what, connect or Connection
        self._connection: Connection | None = None  # None: calls go through Ray
        self._tried: set[str] = set()

    @property
    def socket(self) -> str | None:
        """Address of the socket in use; None: calls go through Ray."""
        return None if self._connection is None else self._connection.address

    def offer(self, address: str | None) -> None:
        """Use the socket at ``address``, as offered in an answer, from now on, unless one is in use.

        A lost socket is not used again: nothing listened there, it broke, or the listener hangs.
        """
        if address is not None and address not in self._tried and self._connection is None:
            self._tried.add(address)
            with contextlib.suppress(OSError):
                self._connection = self._connect(address)

    def lose(self, connection: Connection) -> None:
        """Close a socket, and make all further calls through Ray until another one is offered."""
        connection.close()
        if self._connection is connection:
            self._connection = None

    def close(self) -> None:
        """Close the socket."""
        if self._connection is not None:
            self._connection.close()

    def make(self, call: BlockCall) -> PendingCall:
        """Start a call."""
        return PendingCall(self, encoding.encode(call), self._connection)

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

    def __init__(self, calls: BlockCalls, call: bytes, connection: Connection | None) -> None:
        self._calls, self._call, self._connection = calls, call, connection  # no connection: made through Ray
        self._number, self._ref = 0, None
        self._answer: SocketAnswer | None = None  # over the socket
        if connection is None:
            self._make_through_ray()
            return
        try:
            self._number = connection.send(call)
        except local_socket.BrokenSocketError:
            self.lose_socket()

    def _make_through_ray(self) -> None:
        self._connection, self._ref = None, self._calls.through_ray(self._call)

    def result(self, timeout_s: float) -> Delivery:
        """Return the coordinator's answer.

        Raises:
            NoAnswerYetError: no answer within ``timeout_s``.
            MbaasError: raised by the coordinator, or because it is gone; see `call`.
        """
        end = time.monotonic() + timeout_s
        found = self._over_socket(timeout_s)
        if found is None:
            return self._calls.ray_answer(self._ref, max(0.0, end - time.monotonic()))
        if found.error is not None:
            raise found.error
        assert found.delivery is not None
        return found.delivery

    def _over_socket(self, timeout_s: float) -> SocketAnswer | None:
        """Wait for an answer over the socket. Return None if it arrives through Ray."""
        if self._connection is None or self._answer is not None:
            return self._answer
        try:
            found = self._connection.receive(self._number, timeout_s)
        except local_socket.BrokenSocketError:
            self.lose_socket()
            return None
        if found is None:
            raise NoAnswerYetError
        if found.delivery is None and found.error is None:  # the coordinator met a bug; Ray brings the full error
            self._make_through_ray()
            return None
        self._answer = found
        return found

    def lose_socket(self) -> None:
        """Repeat the call through Ray if unanswered, and make all further calls there: the socket's owner may hang."""
        if self._connection is not None and self._answer is None:
            self._calls.lose(self._connection)
            self._make_through_ray()

    def is_answered(self) -> bool:
        """Return whether `result` would return or raise at once."""
        try:
            return self._over_socket(0) is not None or bool(ray.wait([self._ref], timeout=0)[0])
        except NoAnswerYetError:
            return False


class Connection:
    """A consumer's end of a socket. Raises `BrokenSocketError` if it is closed, and closes it if it breaks."""

    def __init__(self, address: str) -> None:
        self.address = address
        connected = local_socket.connect(address, CONNECT_S)
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
        except (OSError, local_socket.BrokenSocketError, *encoding.INVALID) as error:
            self.close()
            raise local_socket.BrokenSocketError(str(error)) from error
