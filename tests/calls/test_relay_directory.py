"""Relays are searched for where they pay."""

from __future__ import annotations

from random import Random

import pytest

from mbaas.calls import server
from mbaas.calls.server import RELAYED_FROM, RELAYING_PAYS_PER_S, SEARCH_S, RelayDirectory


@pytest.mark.parametrize("seed", range(50))
def test_relays_are_looked_for_where_several_call_through_ray_and_not_too_often(seed: int) -> None:
    chances, now = Random(seed), 0.0
    directory = RelayDirectory()
    looks: dict[str, list[float]] = {"a": [], "b": []}
    found: dict[str, str] = {}
    for number in range(300):
        now += chances.expovariate(1.0)
        node, consumers = chances.choice("ab"), chances.randrange(4)
        is_due = consumers >= RELAYED_FROM and not any(at > now - SEARCH_S for at in looks[node])
        assert directory.is_search_due(node, consumers, now) == is_due
        if not is_due:
            continue
        looks[node].append(now)
        before = found.get(node)
        if before is None or chances.random() < 0.3:  # its cache node has been replaced
            found[node] = f"relay {number}"
        relay = found[node]
        directory.add(node, relay, f"socket of {relay}")
        assert directory.address(node) == f"socket of {relay}"
        kept = directory.relay(relay)
        assert kept is not None
        assert bool(kept.collect(1)) == (relay == before), "a known relay keeps its answers, a new one has none"
        kept.add(number, b"answer")
        if before is not None and relay != before:
            assert directory.relay(before) is None
    assert min(map(len, looks.values())) > 10


def looks(directory: RelayDirectory, began: float, per_s: float, seconds: float) -> list[tuple[float, bool]]:
    """Simulate calls of one node at a steady rate; return (time, may start a relay) of each search for relays."""
    calls = [began + number / per_s for number in range(int(seconds * per_s))]
    return [(now, directory.may_start("a")) for now in calls if directory.is_search_due("a", RELAYED_FROM, now)]


@pytest.mark.parametrize("per_s", [1.0, 0.9 * RELAYING_PAYS_PER_S, 1.1 * RELAYING_PAYS_PER_S, 300.0])
def test_an_actor_that_only_relays_is_started_where_calls_are_frequent(per_s: float) -> None:
    directory = RelayDirectory()
    assert not directory.may_start("a"), "no call was made"
    first, *later = looks(directory, 100.0, per_s, 4 * SEARCH_S)
    assert first == (100.0, False), "at the first look nothing is known of their pace"
    assert len(later) >= 2
    assert {starts for _, starts in later} == {per_s > RELAYING_PAYS_PER_S}
    assert not directory.may_start("b")


def test_calls_are_counted_from_one_look_to_the_next() -> None:
    directory = RelayDirectory()
    assert [starts for _, starts in looks(directory, 0.0, 300.0, SEARCH_S + 1.0)] == [False, True]
    # Calls were relayed for an hour: neither earlier calls nor that hour count at the second search.
    assert [starts for _, starts in looks(directory, 3600.0, 300.0, SEARCH_S + 1.0)] == [False, True]
    assert [starts for _, starts in looks(directory, 7200.0, 10.0, SEARCH_S + 1.0)] == [False, False]


def test_a_burst_of_first_calls_starts_nothing() -> None:
    directory = RelayDirectory()
    for number in range(100):  # one consumer, which calls 100 times in a tenth of a second
        assert not directory.is_search_due("a", 1, number / 1000)
    assert directory.is_search_due("a", RELAYED_FROM, 0.1)
    assert not directory.may_start("a")


def test_machines_that_were_looked_at_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEPT_MACHINES", 3)
    directory = RelayDirectory()
    for number, node in enumerate("abcad"):
        assert directory.is_search_due(node, RELAYED_FROM, number * SEARCH_S)
        directory.add(node, f"relay of {node}", f"socket of {node}")
    assert [node for node in "abcd" if directory.address(node) is not None] == ["a", "c", "d"]
    assert [node for node in "abcd" if directory.relay(f"relay of {node}") is not None] == ["a", "c", "d"]
    assert directory.is_search_due("b", RELAYED_FROM, 5 * SEARCH_S), "one that calls again is looked for again"
    assert not directory.may_start("b")


def test_of_a_machine_without_a_relay_nothing_is_known() -> None:
    directory = RelayDirectory()
    directory.add("node", "relay", "socket")
    assert directory.address("another") is None
    assert directory.relay("another") is None
