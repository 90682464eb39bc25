"""A consumer's calls for blocks: through Ray, until an answer tells of a socket on this machine, and then over that.

The socket is the coordinator's, or that of a relay for a coordinator on another machine. Both ways reach the same
method of the coordinator, and a call may be made on both: the coordinator knows by its number that it came twice. So
when a socket breaks, or brings no answer, the call that waits is made again through Ray, which also knows what became
of a coordinator that is gone.
"""

from __future__ import annotations

import contextlib
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
from mbaas.messages import BlockCall, Delivery, LocalAnswer

CONNECT_S = 5.0
"""How long a coordinator may take to accept a connection, and to take in what is sent; it has just answered a call."""

RECEIVED_BYTES = 2**16
"""What is read from a socket at once."""


class NoAnswerYetError(Exception):
    """Says that a call has no answer within the time that was set. It may still come."""


class BlockCalls:
    """Makes the calls of one session.

    Args:
        coordinator: the lane's actor.
        what: what a call is, for errors.
    """

    def __init__(self, coordinator: Any, what: str) -> None:
        self._coordinator, self._what = coordinator, what
        self._line: _Line | None = None
        self._tried: set[str] = set()

    def offer(self, address: str | None) -> None:
        """Use the socket at an address from now on, if there is one, and none is used.

        One that was tried before is not tried again: nobody listened there, or it broke, or who listens hangs.
        """
        if address is None or address in self._tried or self.are_local:
            return
        self._tried.add(address)
        with contextlib.suppress(OSError):
            self._line = _Line(local_socket.connect(address, CONNECT_S))

    def close(self) -> None:
        """Use this socket no more."""
        if self._line is not None:
            self._line.close()

    @property
    def are_local(self) -> bool:
        """Whether calls go over a socket."""
        return self._line is not None and not self._line.is_closed

    def make(self, call: BlockCall) -> PendingCall:
        """Begin a call."""
        return PendingCall(self, call.plain(), self._line)

    def through_ray(self, call: list[Any]) -> Any:
        """Begin a call through Ray; return a reference to its result."""
        return self._coordinator.ask.remote(call)

    def ray_answer(self, ref: Any, timeout_s: float) -> Delivery:
        """Return what came through Ray; see `PendingCall.result`."""
        try:
            delivery: Delivery = answer(ref, timeout_s, self._what)
        except ray.exceptions.GetTimeoutError:
            raise NoAnswerYetError from None
        self.offer(delivery.socket)
        return delivery


class PendingCall:
    """A call that was made, and perhaps answered; it may be forgotten at any time."""

    def __init__(self, calls: BlockCalls, call: list[Any], line: _Line | None) -> None:
        self._calls, self._call = calls, call
        self._line, self._number, self._ref = line, 0, None
        self._answer: LocalAnswer | None = None
        number = None if line is None else line.send(call)
        if number is None:
            self._make_through_ray()
        else:
            self._number = number

    def _make_through_ray(self) -> None:
        self._line, self._ref = None, self._calls.through_ray(self._call)

    def result(self, timeout_s: float) -> Delivery:
        """Return what the coordinator answers.

        Raises:
            NoAnswerYetError: there is no answer within ``timeout_s``.
            MbaasError: what the coordinator raised, or what became of it: see `mbaas.client.rpc.call`.
        """
        end = time.monotonic() + timeout_s
        if self._comes_over_socket(timeout_s):
            assert self._answer is not None
            if self._answer.error is not None:
                raise self._answer.error
            if self._answer.delivery is not None:
                return self._answer.delivery
            self._make_through_ray()  # the coordinator met a bug, which is told in full there
        return self._calls.ray_answer(self._ref, max(0.0, end - time.monotonic()))

    def _comes_over_socket(self, timeout_s: float) -> bool:
        """Whether there is an answer, which came over the socket; if the socket breaks, make the call through Ray."""
        if self._answer is None and self._line is not None:
            try:
                self._answer = self._line.receive(self._number, timeout_s)
            except local_socket.BrokenSocketError:
                self._make_through_ray()
            else:
                if self._answer is None:
                    raise NoAnswerYetError
        return self._line is not None

    def give_up_socket(self) -> None:
        """Make the call through Ray if it has no answer, as all further ones: who has the socket may hang."""
        if self._line is not None and self._answer is None:
            self._calls.close()
            self._make_through_ray()

    def is_answered(self) -> bool:
        """Whether `result` returns or raises at once."""
        try:
            return self._comes_over_socket(0) or bool(ray.wait([self._ref], timeout=0)[0])
        except NoAnswerYetError:
            return False


class _Line:
    """A socket to a coordinator; used by one thread."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket: socket.socket | None = connected
        self._end = weakref.finalize(self, connected.close)  # a session that another one replaces is only dropped
        self._end.atexit = False
        self._messages = local_socket.Messages()
        self._numbers = itertools.count(1)

    @property
    def is_closed(self) -> bool:
        return self._socket is None

    def close(self) -> None:
        self._socket = None
        self._end()

    def send(self, call: list[Any]) -> int | None:
        """Send a call; return its number on this socket, or None if it cannot be sent."""
        if self._socket is None:
            return None
        number = next(self._numbers)
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.sendall(local_socket.framed(json.dumps([number, call]).encode()))
        except OSError:
            self.close()
            return None
        except BaseException:  # an interrupt: half a message may be sent
            self.close()
            raise
        return number

    def receive(self, number: int, timeout_s: float) -> LocalAnswer | None:
        """Return the answer to a call; None if it does not come in time. Answers to calls before it are forgotten.

        Raises:
            BrokenSocketError: it never will come here.
        """
        end = time.monotonic() + timeout_s
        try:
            while self._socket is not None:
                self._socket.settimeout(max(0.0, end - time.monotonic()))
                received = self._socket.recv(RECEIVED_BYTES)
                if not received:
                    raise local_socket.BrokenSocketError("its coordinator closed it")
                for message in self._messages.put(received):
                    answered: LocalAnswer = pickle.loads(message)
                    if answered.number == number:  # the newest: nothing follows it
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
