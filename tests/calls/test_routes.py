"""Every call for blocks is answered even if sockets fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from mbaas.calls.client import BlockCalls, NoAnswerYetError, PendingCall
from mbaas.calls.socket import BrokenSocketError
from mbaas.wire.consumers import Ask, BlockCall, Delivery, SocketAnswer

CALL = BlockCall(Ask("a", 0, 0, 0, 0), 1.0)


class Socket:
    """A connection whose next answer is ``comes``; None for a late answer."""

    def __init__(self, consumer: Consumer, address: str) -> None:
        if address != consumer.listening:
            raise ConnectionRefusedError
        self.consumer, self.address, self.is_closed = consumer, address, False
        self.comes: SocketAnswer | None = None
        consumer.connected.append(address)

    def send(self, _: bytes) -> int:
        self._check()
        self.consumer.newest.over.append(self.address)
        return 1

    def receive(self, _number: int, _timeout_s: float) -> SocketAnswer | None:
        self._check()
        return self.comes

    def _check(self) -> None:
        if self.is_closed or self.address != self.consumer.listening:
            self.is_closed = True
            raise BrokenSocketError

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Made:
    """A call, the routes that it used, and its answer."""

    over: list[str] = field(default_factory=list)
    answer: str = ""
    call: PendingCall | None = None


class Consumer:
    """Calls over sockets that break, hang or refuse connections, and through Ray, which always answers."""

    def __init__(self, seed: int = 0) -> None:
        self.chances = Random(seed)
        self.made: list[Made] = []
        self.newest = Made()
        self.connected: list[str] = []
        self.listening = "socket 0"
        coordinator = SimpleNamespace(ask=SimpleNamespace(remote=lambda _: self.newest.over.append("Ray")))
        self.calls = BlockCalls(coordinator, "the test", lambda address: Socket(self, address))  # type: ignore[arg-type, return-value]

    def make(self) -> Made:
        self.newest = Made()
        self.made.append(self.newest)
        self.newest.call = self.calls.make(CALL)
        return self.newest

    def lose(self, made: Made) -> None:
        self.newest = made  # it may be repeated through Ray
        assert made.call is not None
        made.call.lose_socket()

    def look(self, made: Made, comes: SocketAnswer | None) -> None:
        """Look for the answer to a call; ``comes`` is the answer on its socket."""
        self.newest = made
        call: Any = made.call
        if call._connection is not None:
            call._connection.comes = comes
        try:
            if call._over_socket(0.0) is not None:
                made.answer = made.over[-1]
        except NoAnswerYetError:
            pass

    def step(self) -> None:
        waiting = [made for made in self.made if not made.answer]
        if not waiting or (len(waiting) < 3 and self.chances.random() < 0.2):
            self.make()
            return
        made = self.chances.choice(waiting)
        if self.chances.random() < 0.1:
            self.listening = f"socket {self.chances.randrange(1000)}"  # the listener died and was restarted
        if made.over[-1] == "Ray":
            made.answer = "Ray"
            # Old answers may arrive late and name a socket that is gone.
            told = self.chances.choice([None, self.listening, f"socket {self.chances.randrange(5)}"])
            used, before = self.calls.socket, len(self.connected)
            self.calls.offer(told)
            assert used is None or len(self.connected) == before, "a working socket is not replaced"
        elif self.chances.random() < 0.1:
            self.lose(made)  # it timed out
        else:
            answers = (None, SocketAnswer(1), *[SocketAnswer(1, Delivery())] * 8)
            self.look(made, self.chances.choice(answers))
        if self.chances.random() < 0.1:
            self.lose(self.chances.choice(self.made))  # perhaps an answered one, which changes nothing


@pytest.mark.parametrize("seed", range(300))
def test_every_call_is_answered_and_made_at_most_once_in_each_way(seed: int) -> None:
    consumer = Consumer(seed)
    while len(consumer.made) < 60:
        consumer.step()
    for _ in range(1000):
        if all(made.answer for made in consumer.made):
            break
        consumer.step()
    for made in consumer.made[:60]:
        assert made.answer == made.over[-1], "the answer arrives on the route of the last attempt"
        assert made.over.count("Ray") <= 1
        assert len(made.over) == len(set(made.over)) <= 2
    assert len(consumer.connected) == len(set(consumer.connected)), "no socket is tried twice"
    assert any(made.answer != "Ray" for made in consumer.made), "sockets are used at all"


def test_a_call_that_waits_on_a_socket_of_before_leaves_the_new_one_alone() -> None:
    consumer = Consumer()
    consumer.calls.offer("socket 0")
    first, second = consumer.make(), consumer.make()
    consumer.lose(first)
    consumer.listening = "socket 1"
    consumer.calls.offer("socket 1")
    consumer.lose(second)
    assert consumer.calls.socket == "socket 1"
    consumer.calls.offer("socket 0")
    assert consumer.calls.socket == "socket 1"
    consumer.lose(second)
    assert second.over == ["socket 0", "Ray"], "by now it uses Ray"


def test_an_answered_call_loses_no_socket() -> None:
    consumer = Consumer()
    consumer.calls.offer("socket 0")
    made = consumer.make()
    consumer.look(made, SocketAnswer(1, Delivery()))
    consumer.lose(made)
    assert (made.answer, made.over, consumer.calls.socket) == ("socket 0", ["socket 0"], "socket 0")


def test_what_a_socket_does_not_say_is_asked_through_ray_and_the_socket_is_used_again() -> None:
    consumer = Consumer()
    consumer.calls.offer("socket 0")
    made = consumer.make()
    consumer.look(made, SocketAnswer(1))
    assert (made.answer, made.over) == ("", ["socket 0", "Ray"])
    assert consumer.make().over == ["socket 0"]
