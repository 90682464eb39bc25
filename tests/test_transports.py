"""Every call for blocks is answered even if sockets fail, and relays are looked for where they pay."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from mbaas import transports
from mbaas.transports import LOOK_S, RELAYED_FROM, RELAYING_PAYS_PER_S, CallTransport, RelayDirectory, Transport


@dataclass
class Made:
    """A call, the transports that it used, and its answer."""

    transport: CallTransport
    over: list[str]
    answer: str = ""


class Consumer:
    """Calls over sockets that break, hang or refuse connections, and through Ray, which always answers."""

    def __init__(self, seed: int) -> None:
        self.chances = Random(seed)
        self.transport = Transport()
        self.calls: list[Made] = []
        self.connected: list[str] = []
        self.closed: set[str] = set()
        self.listening = "socket 0"

    def through_ray(self, call: Made) -> None:
        call.over.append("Ray")

    def make(self) -> None:
        call = Made(self.transport.begin(), [])
        self.calls.append(call)
        if call.transport.socket is None:
            self.through_ray(call)
        else:
            assert call.transport.socket == self.connected[-1], "no call is made over another socket than the last one"
            if call.transport.socket in self.closed:
                self.lose(call)
            else:
                call.over.append(call.transport.socket)

    def lose(self, call: Made) -> None:
        lost = call.transport.socket
        if call.transport.lose_socket():
            assert lost is not None
            self.closed.add(lost)
            self.through_ray(call)

    def step(self) -> None:
        waiting = [call for call in self.calls if not call.answer]
        if not waiting or (len(waiting) < 3 and self.chances.random() < 0.2):
            self.make()
            return
        call = self.chances.choice(waiting)
        socket = call.transport.socket
        if self.chances.random() < 0.1:
            self.listening = f"socket {self.chances.randrange(1000)}"  # the listener died and was restarted
        if socket is None:
            call.answer = "Ray"
            # Old answers may arrive late and name a socket that is gone.
            told = self.chances.choice([None, self.listening, f"socket {self.chances.randrange(5)}"])
            used = self.transport.socket
            if told is not None and self.transport.offer(told):
                assert used is None, "a socket that does is not left for another"
                self.connected.append(told)
                if told != self.listening:
                    self.transport.lose(told)
        elif socket in self.closed or socket != self.listening or self.chances.random() < 0.1:
            self.lose(call)  # it broke or timed out
        elif call.transport.answer(says_it=self.chances.random() < 0.9):
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
    transport = Transport()
    assert transport.offer("old")
    first, second = transport.begin(), transport.begin()
    assert first.lose_socket()
    assert transport.offer("new")
    assert second.lose_socket()
    assert transport.socket == "new"
    assert not transport.offer("old")
    assert not second.lose_socket(), "it goes through Ray by now"


def test_an_answered_call_loses_no_socket() -> None:
    transport = Transport()
    transport.offer("socket")
    call = transport.begin()
    assert not call.answer(says_it=True)
    assert not call.lose_socket()
    assert transport.socket == "socket"


def test_what_a_socket_does_not_say_is_asked_through_ray_and_the_socket_is_used_again() -> None:
    transport = Transport()
    transport.offer("socket")
    call = transport.begin()
    assert call.answer(says_it=False)
    assert (call.socket, call.is_answered) == (None, False)
    assert transport.begin().socket == "socket"


@pytest.mark.parametrize("seed", range(50))
def test_relays_are_looked_for_where_several_call_through_ray_and_not_too_often(seed: int) -> None:
    chances, now = Random(seed), 0.0
    directory = RelayDirectory(list[int])
    looks: dict[str, list[float]] = {"a": [], "b": []}
    found: dict[str, str] = {}
    for number in range(300):
        now += chances.expovariate(1.0)
        node, consumers = chances.choice("ab"), chances.randrange(4)
        is_due = consumers >= RELAYED_FROM and not any(at > now - LOOK_S for at in looks[node])
        assert directory.is_to_look(node, consumers, now) == is_due
        if not is_due:
            continue
        looks[node].append(now)
        before = found.get(node)
        if before is None or chances.random() < 0.3:  # its cache node has been replaced
            found[node] = f"relay {number}"
        relay = found[node]
        directory.found(node, relay, f"socket of {relay}")
        assert directory.address(node) == f"socket of {relay}"
        kept = directory.relay(relay)
        assert kept is not None
        assert bool(kept) == (relay == before), "one that is known keeps what it has, a new one begins with nothing"
        kept.append(number)
        if before is not None and relay != before:
            assert directory.relay(before) is None
    assert min(map(len, looks.values())) > 10


def looks(directory: RelayDirectory[list[int]], began: float, per_s: float, seconds: float) -> list[tuple[float, bool]]:
    """Simulate calls of one node at a steady rate; return (time, may start a relay) of each search for relays."""
    calls = [began + number / per_s for number in range(int(seconds * per_s))]
    return [(now, directory.may_start("a")) for now in calls if directory.is_to_look("a", RELAYED_FROM, now)]


@pytest.mark.parametrize("per_s", [1.0, 0.9 * RELAYING_PAYS_PER_S, 1.1 * RELAYING_PAYS_PER_S, 300.0])
def test_an_actor_that_only_relays_is_started_where_calls_are_frequent(per_s: float) -> None:
    directory = RelayDirectory(list[int])
    assert not directory.may_start("a"), "nobody called"
    first, *later = looks(directory, 100.0, per_s, 4 * LOOK_S)
    assert first == (100.0, False), "at the first look nothing is known of their pace"
    assert len(later) >= 2
    assert {starts for _, starts in later} == {per_s > RELAYING_PAYS_PER_S}
    assert not directory.may_start("b")


def test_calls_are_counted_from_one_look_to_the_next() -> None:
    directory = RelayDirectory(list[int])
    assert [starts for _, starts in looks(directory, 0.0, 300.0, LOOK_S + 1.0)] == [False, True]
    # Calls were relayed for an hour: neither earlier calls nor that hour count at the second search.
    assert [starts for _, starts in looks(directory, 3600.0, 300.0, LOOK_S + 1.0)] == [False, True]
    assert [starts for _, starts in looks(directory, 7200.0, 10.0, LOOK_S + 1.0)] == [False, False]


def test_a_burst_of_first_calls_starts_nothing() -> None:
    directory = RelayDirectory(list[int])
    for number in range(100):  # one consumer, which calls 100 times in a tenth of a second
        assert not directory.is_to_look("a", 1, number / 1000)
    assert directory.is_to_look("a", RELAYED_FROM, 0.1)
    assert not directory.may_start("a")


def test_machines_that_were_looked_at_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "KEPT_MACHINES", 3)
    directory = RelayDirectory(list[int])
    for number, node in enumerate("abcad"):
        assert directory.is_to_look(node, RELAYED_FROM, number * LOOK_S)
        directory.found(node, f"relay of {node}", f"socket of {node}")
    assert [node for node in "abcd" if directory.address(node) is not None] == ["a", "c", "d"]
    assert [node for node in "abcd" if directory.relay(f"relay of {node}") is not None] == ["a", "c", "d"]
    assert directory.is_to_look("b", RELAYED_FROM, 5 * LOOK_S), "one that calls again is looked for again"
    assert not directory.may_start("b")


def test_of_a_machine_without_a_relay_nothing_is_known() -> None:
    directory = RelayDirectory(list[int])
    directory.found("node", "relay", "socket")
    assert directory.address("another") is None
    assert directory.relay("another") is None
