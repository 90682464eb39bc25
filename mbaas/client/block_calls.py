"""A consumer's calls for blocks: through Ray at first, and over a local socket once an answer has offered one.

The socket belongs to the coordinator, or to a relay for a coordinator on another node. Both routes reach the same
method of the coordinator. If a socket breaks or brings no answer, the pending call is repeated through Ray, which also
reports a dead coordinator. `mbaas.transports` chooses the route.
"""

from __future__ import annotations

import itertools
import json
import pickle
import socket
import time
import weakref
from typing import Any

import ray

from mbaas import local_socket
from mbaas.client.rpc import answer
from mbaas.messages import BlockCall, Delivery, SocketAnswer
from mbaas.transports import CallTransport, Transport

CONNECT_S = 5.0
"""Timeout for a coordinator to accept a connection or a message, in seconds; it has just answered a call."""

RECEIVED_BYTES = 2**16
"""Bytes read from a socket at once."""


class NoAnswerYetError(Exception):
    """A call has no answer within its timeout. The answer may still arrive."""


class BlockCalls:
    """Makes the calls of one session; ``what`` describes a call in errors."""

    def __init__(self, coordinator: Any, what: str) -> None:
        self._coordinator, self._what = coordinator, what
        self._transport = Transport()
        self._line: _Line | None = None

    def offer(self, address: str | None) -> None:
        """Use the socket at ``address`` from now on, unless one is in use; see `Transport.offer`."""
        if address is None or not self._transport.offer(address):
            return
        try:
            self._line = _Line(local_socket.connect(address, CONNECT_S))
        except OSError:
            self._transport.lose(address)

    def close(self) -> None:
        """Close the socket."""
        if self._line is not None:
            self._line.close()

    @property
    def are_over_socket(self) -> bool:
        """True if further calls use a socket."""
        return self._transport.socket is not None

    def make(self, call: BlockCall) -> PendingCall:
        """Start a call."""
        transport = self._transport.begin()
        return PendingCall(self, call.plain(), transport, None if transport.socket is None else self._line)

    def through_ray(self, call: list[Any]) -> Any:
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

    def __init__(self, calls: BlockCalls, call: list[Any], transport: CallTransport, line: _Line | None) -> None:
        self._calls, self._call, self._transport, self._line = calls, call, transport, line
        self._number, self._ref = 0, None
        self._answer: SocketAnswer | None = None
        if line is None:
            self._make_through_ray()
            return
        try:
            self._number = line.send(call)
        except local_socket.BrokenSocketError:
            self.lose_socket()

    def _make_through_ray(self) -> None:
        self._ref = self._calls.through_ray(self._call)

    def result(self, timeout_s: float) -> Delivery:
        """Return the coordinator's answer.

        Raises:
            NoAnswerYetError: no answer within ``timeout_s``.
            MbaasError: raised by the coordinator, or because it is gone; see `mbaas.client.rpc.call`.
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
        if self._transport.socket is None or self._transport.is_answered:
            return self._transport.is_answered
        assert self._line is not None
        try:
            self._answer = self._line.receive(self._number, timeout_s)
        except local_socket.BrokenSocketError:
            self.lose_socket()
            return False
        if self._answer is None:
            raise NoAnswerYetError
        says_it = self._answer.delivery is not None or self._answer.error is not None
        if self._transport.answer(says_it=says_it):  # the coordinator met a bug; Ray brings the full error
            self._make_through_ray()
        return self._transport.is_answered

    def lose_socket(self) -> None:
        """Repeat the call through Ray if unanswered, and make all further calls there: the socket's owner may hang."""
        if self._transport.lose_socket():
            assert self._line is not None
            self._line.close()
            self._make_through_ray()

    def is_answered(self) -> bool:
        """Return whether `result` would return or raise at once."""
        try:
            return self._comes_over_socket(0) or bool(ray.wait([self._ref], timeout=0)[0])
        except NoAnswerYetError:
            return False


class _Line:
    def __init__(self, connected: socket.socket) -> None:
        self._socket: socket.socket | None = connected
        self._end = weakref.finalize(self, connected.close)  # a session that is replaced by another one is only dropped
        self._end.atexit = False
        self._messages = local_socket.Messages()
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self._socket = None
        self._end()

    def send(self, call: list[Any]) -> int:
        if self._socket is None:
            raise local_socket.BrokenSocketError("it was closed")
        number = next(self._numbers)
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.sendall(local_socket.framed(json.dumps([number, call]).encode()))
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
                    answered: SocketAnswer = pickle.loads(message)
                    if answered.number == number:  # the newest call: no answer follows
                        return answered
            raise local_socket.BrokenSocketError("it was closed")
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as error:
            self.close()
            raise local_socket.BrokenSocketError(str(error)) from error
        except local_socket.BrokenSocketError:
            self.close()
            raise
