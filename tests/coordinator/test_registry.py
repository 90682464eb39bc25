"""Programs divide a cluster one at a time under a lock in the key-value store, which also holds each feed's claims."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mbaas.coordinator import registry
from mbaas.memory.budgets import MemoryClaim
from mbaas.ray_cluster import store
from mbaas.wire.consumers import Claims

PROGRAMS, TURNS = 6, 5


@pytest.fixture
def unlocked(ray_session: None) -> Iterator[None]:
    """A store without any key of the lock, before and after the test."""
    for number in registry._numbers():
        store.delete(None, registry._lock(number))
    yield
    for number in registry._numbers():
        store.delete(None, registry._lock(number))


class Holders:
    """Programs that hold the lock in turn. ``most`` is the highest number of holders at once."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.most = self._now = 0
        self._counting = threading.Lock()

    def hold(self, turns: int) -> None:
        for _ in range(turns):
            with registry.dividing() as number:
                with self._counting:
                    self._now += 1
                    self.most = max(self.most, self._now)
                    self.numbers.append(number)
                registry._numbers()  # takes time, so that others could enter
                with self._counting:
                    self._now -= 1

    def run(self, programs: int, turns: int) -> None:
        threads = [threading.Thread(target=self.hold, args=(turns,)) for _ in range(programs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def test_one_program_divides_the_cluster_at_a_time(unlocked: None) -> None:
    holders = Holders()
    holders.run(PROGRAMS, TURNS)
    assert holders.most == 1
    assert holders.numbers == list(range(1, PROGRAMS * TURNS + 1)), "each has the next number"
    assert registry._numbers() == [PROGRAMS * TURNS], "earlier numbers are removed"


def test_of_those_who_wait_for_one_that_died_one_takes_over(unlocked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease of 0.3 s is longer than a program holds the lock, even on a busy machine."""
    monkeypatch.setattr(registry, "LEASE_S", 0.3)
    registry._acquire()
    holders = Holders()
    holders.run(PROGRAMS, 1)
    assert holders.most == 1
    assert holders.numbers == list(range(2, PROGRAMS + 2))


def test_who_was_away_for_some_turns_waits_for_its_own(unlocked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saw the lock free after turn 1. Two programs had turns since then, and the key of turn 2 is deleted again."""
    with registry.dividing():
        pass
    seen, look = registry._numbers(), registry._numbers
    with registry.dividing():
        pass
    looked: list[bool] = []

    def late() -> list[int]:
        looked.append(True)
        return seen if len(looked) == 1 else look()

    with registry.dividing() as third:
        monkeypatch.setattr(registry, "_numbers", late)
        monkeypatch.setattr(store, "get", _free_at_first(store.get))
        entered = threading.Event()
        thread = threading.Thread(target=lambda: _enter(entered))
        thread.start()
        assert not entered.wait(0.5)
    thread.join(60)
    assert (third, entered.is_set()) == (3, True)


def _free_at_first(get):
    """Read the lock of turn 1 as it was before its deletion."""
    return lambda feed, name: b"" if (feed, name) == (None, registry._lock(1)) else get(feed, name)


def _enter(entered: threading.Event) -> None:
    with registry.dividing():
        entered.set()


def test_what_a_feed_that_has_ended_keeps_comes_not_back(ray_session: None, feed_name: str) -> None:
    """The feed's coordinator may still send a change."""
    before, after = (Claims(memory=MemoryClaim(5, 6), cpus=cpus, gpus=0.0) for cpus in (1.5, 2.5))
    registry.enter(feed_name, before, 7)
    assert registry.claims_of(feed_name) == before
    registry.update(feed_name, after)
    assert registry.claims_of(feed_name) == after
    registry.forget(feed_name)
    registry.update(feed_name, after)
    assert registry.claims_of(feed_name) is None
