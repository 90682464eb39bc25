"""Every request of a machine's consumers is answered once, to its sender, however exchanges are delayed."""

from __future__ import annotations

from random import Random

import pytest

from mbaas.calls.relay import Exchange, PendingRequests
from mbaas.calls.server import KnownRelay


class Machine:
    """Consumers with one pending request each, both ends of a relay, and calls of any duration between them."""

    def __init__(self, seed: int) -> None:
        self.chances = Random(seed)
        self.node, self.coordinator = PendingRequests[str](), KnownRelay("", "")
        self.here = {f"consumer {number}" for number in range(self.chances.randrange(1, 6))}
        self.made = self.exchanges = 0
        self.asked: dict[bytes, str] = {}  # request -> consumer, until answered
        self.given: list[bytes] = []  # requests in the order of their answers
        self.sent: list[Exchange] = []  # on their way to the coordinator
        self.waiting: list[int] = []  # exchanges that have arrived
        self.unanswered: dict[int, bytes] = {}  # requests that have arrived, by number
        self.back: list[tuple[int, dict[int, bytes]]] = []  # exchanges on their way back

    def steps(self) -> list[str]:
        """Steps that may happen now."""
        idle = self.here - set(self.asked.values())
        return [
            *(["ask"] if idle and self.made < 40 else []),
            *(["leave"] if len(self.here) > 1 and self.chances.random() < 0.05 else []),
            *(["send"] if self.node.is_due else []),
            *(["arrive"] if self.sent else []),
            *(["answer"] if self.unanswered else []),
            *(["look"] if self.waiting else []),
            *(["return"] if self.back else []),
        ]

    def take(self, step: str) -> None:
        if step == "ask":
            consumer = self.chances.choice(sorted(self.here - set(self.asked.values())))
            self.made += 1
            request = f"{consumer} asks {self.made}".encode()
            self.asked[request] = consumer
            self.node.add(consumer, request)
        elif step == "leave":
            gone = self.chances.choice(sorted(self.here))
            self.here.remove(gone)
            self.node.leave(gone)
            self.asked = {request: consumer for request, consumer in self.asked.items() if consumer != gone}
        elif step == "send":
            self.exchanges += 1
            self.sent.append(self.node.begin())
        elif step == "arrive":
            exchange = self.sent.pop(self.chances.randrange(len(self.sent)))  # one may overtake another
            self.coordinator.begin(exchange.number)
            self.unanswered |= exchange.requests
            self.waiting.append(exchange.number)
        elif step == "answer":
            number = self.chances.choice(sorted(self.unanswered))
            self.coordinator.add(number, b"answer to " + self.unanswered.pop(number))
        elif step == "look":  # all waiting exchanges wake up, in any order
            self.chances.shuffle(self.waiting)
            for number in list(self.waiting):
                answers = self.coordinator.collect(number)
                if answers is not None:
                    self.waiting.remove(number)
                    self.back.append((number, answers))
            assert len(self.waiting) <= 1, "only the newest exchange waits"
        elif step == "return":
            for consumer, answer in self.node.end(*self.back.pop(self.chances.randrange(len(self.back)))):
                request = answer.removeprefix(b"answer to ")
                assert self.asked.pop(request) == consumer, "it answers an open request of this consumer"
                self.given.append(request)


@pytest.mark.parametrize("seed", range(300))
def test_every_request_of_a_consumer_that_stays_is_answered_once(seed: int) -> None:
    machine = Machine(seed)
    for _ in range(5000):
        steps = machine.steps()
        if not machine.asked and machine.made == 40:
            break
        machine.take(machine.chances.choice(steps))
    assert machine.made == 40
    assert not machine.asked
    assert len(machine.given) == len(set(machine.given))
    assert machine.exchanges <= 2 * 40, "each takes a request along, or was due because one brought an answer"


def test_requests_that_came_together_go_together_and_so_do_their_answers() -> None:
    node, coordinator = PendingRequests[str](), KnownRelay("", "")
    for consumer in "abc":
        node.add(consumer, consumer.encode())
    exchange = node.begin()
    assert list(exchange.requests.values()) == [b"a", b"b", b"c"]
    assert not node.is_due
    coordinator.begin(exchange.number)
    assert coordinator.collect(exchange.number) is None
    for number, request in exchange.requests.items():
        coordinator.add(number, request.upper())
    answers = coordinator.collect(exchange.number)
    assert answers is not None
    assert node.end(exchange.number, answers) == [("a", b"A"), ("b", b"B"), ("c", b"C")]
    assert not node.is_due, "no caller waits"


def test_an_exchange_that_waits_is_ended_by_the_next_one_which_brings_all_answers() -> None:
    node, coordinator = PendingRequests[str](), KnownRelay("", "")
    node.add("a", b"a")
    first = node.begin()
    coordinator.begin(first.number)
    node.add("b", b"b")
    second = node.begin()
    coordinator.begin(second.number)
    assert coordinator.collect(first.number) == {}
    assert node.end(first.number, {}) == []
    assert not node.is_due, "the second brings the answer"
    (number,) = first.requests
    coordinator.add(number, b"A")
    assert coordinator.collect(second.number) == {number: b"A"}
    assert node.end(second.number, {number: b"A"}) == [("a", b"A")]
    assert node.is_due, "a caller waits, and only an exchange brings the answer"
    assert node.begin().requests == {}


def test_it_is_complete_when_nobody_is_left_who_might_ask() -> None:
    node = PendingRequests[str]()
    node.add("a", b"a")
    assert node.is_complete
    node.end(node.begin().number, {1: b"A"})
    node.add("b", b"b")
    assert not node.is_complete, "a has an answer and may ask again"
    node.leave("a")
    assert node.is_complete
    node.leave("b")
    assert not node.is_due
