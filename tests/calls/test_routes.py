"""Every call for blocks is answered even if sockets fail."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from mbaas.calls.client import CallRoute, Route


@dataclass
class Made:
    """A call, the routes that it used, and its answer."""

    route: CallRoute
    over: list[str]
    answer: str = ""


class Consumer:
    """Calls over sockets that break, hang or refuse connections, and through Ray, which always answers."""

    def __init__(self, seed: int) -> None:
        self.chances = Random(seed)
        self.route = Route()
        self.calls: list[Made] = []
        self.connected: list[str] = []
        self.closed: set[str] = set()
        self.listening = "socket 0"

    def through_ray(self, call: Made) -> None:
        call.over.append("Ray")

    def make(self) -> None:
        call = Made(self.route.begin(), [])
        self.calls.append(call)
        if call.route.socket is None:
            self.through_ray(call)
        else:
            assert call.route.socket == self.connected[-1], "no call is made over another socket than the last one"
            if call.route.socket in self.closed:
                self.lose(call)
            else:
                call.over.append(call.route.socket)

    def lose(self, call: Made) -> None:
        lost = call.route.socket
        if call.route.lose_socket():
            assert lost is not None
            self.closed.add(lost)
            self.through_ray(call)

    def step(self) -> None:
        waiting = [call for call in self.calls if not call.answer]
        if not waiting or (len(waiting) < 3 and self.chances.random() < 0.2):
            self.make()
            return
        call = self.chances.choice(waiting)
        socket = call.route.socket
        if self.chances.random() < 0.1:
            self.listening = f"socket {self.chances.randrange(1000)}"  # the listener died and was restarted
        if socket is None:
            call.answer = "Ray"
            # Old answers may arrive late and name a socket that is gone.
            told = self.chances.choice([None, self.listening, f"socket {self.chances.randrange(5)}"])
            used = self.route.socket
            if told is not None and self.route.offer(told):
                assert used is None, "a socket that does is not left for another"
                self.connected.append(told)
                if told != self.listening:
                    self.route.lose(told)
        elif socket in self.closed or socket != self.listening or self.chances.random() < 0.1:
            self.lose(call)  # it broke or timed out
        elif call.route.answer(is_complete=self.chances.random() < 0.9):
            self.through_ray(call)
        else:
            call.answer = socket
        if self.chances.random() < 0.1:
            self.lose(self.chances.choice(self.calls))  # perhaps an answered one, which changes nothing


@pytest.mark.parametrize("seed", range(300))
def test_every_call_is_answered_and_made_at_most_once_in_each_way(seed: int) -> None:
    consumer = Consumer(seed)
    while len(consumer.calls) < 60:
        consumer.step()
    for _ in range(1000):
        if all(call.answer for call in consumer.calls):
            break
        consumer.step()
    for call in consumer.calls[:60]:
        assert call.answer == call.over[-1], "the answer is awaited where the call was made last"
        assert call.over.count("Ray") <= 1
        assert len(call.over) == len(set(call.over)) <= 2
    assert len(consumer.connected) == len(set(consumer.connected)), "no socket is tried twice"
    assert any(call.answer != "Ray" for call in consumer.calls), "sockets are used at all"


def test_a_call_that_waits_on_a_socket_of_before_leaves_the_new_one_alone() -> None:
    route = Route()
    assert route.offer("old")
    first, second = route.begin(), route.begin()
    assert first.lose_socket()
    assert route.offer("new")
    assert second.lose_socket()
    assert route.socket == "new"
    assert not route.offer("old")
    assert not second.lose_socket(), "it goes through Ray by now"


def test_an_answered_call_loses_no_socket() -> None:
    route = Route()
    route.offer("socket")
    call = route.begin()
    assert not call.answer(is_complete=True)
    assert not call.lose_socket()
    assert route.socket == "socket"


def test_what_a_socket_does_not_say_is_asked_through_ray_and_the_socket_is_used_again() -> None:
    route = Route()
    route.offer("socket")
    call = route.begin()
    assert call.answer(is_complete=False)
    assert (call.socket, call.is_answered) == (None, False)
    assert route.begin().socket == "socket"
