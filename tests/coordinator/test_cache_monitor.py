"""Cache nodes are told how fast prep could take samples, and what they log is noted once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mbaas.cache.stats import Flow
from mbaas.coordinator import cache_monitor
from mbaas.coordinator.cache_monitor import CacheMonitor
from mbaas.coordinator.counters import Counters
from mbaas.model.tiers import FetchSpeeds


class Feed:
    """Two workers on node 1, which prepare 1,000 samples/s each while they prepare, and another on node 2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.incarnation = 0.0, 1
        self.paces: dict[str, list[float]] = {"node-1": [], "node-2": []}
        self.log = list[str]()
        self.noted: dict[int, int] = {}  # incarnation of the cache on node 1 -> lines noted
        self.workers = {
            name: SimpleNamespace(name=name, node=node)
            for name, node in (("one", "node-1"), ("two", "node-1"), ("three", "node-2"))
        }
        monkeypatch.setattr(cache_monitor.time, "monotonic", lambda: self.now)
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """Start the first coordinator, or another one after its death."""
        nodes = {"node-1": 2, "node-2": 1}
        supervision: Any = SimpleNamespace(
            workers=SimpleNamespace(workers=self.workers, per_node=lambda: nodes),
            caches=SimpleNamespace(flow=self._flow),
        )
        self.counters = Counters()
        self.monitor = CacheMonitor(supervision=supervision, counters=self.counters)

    async def _flow(self, node: str, pace_per_s: float, noted: tuple[int, int]) -> Flow:
        self.paces[node].append(pace_per_s)
        log = self.log if node == "node-1" else []
        if node == "node-1":
            self.noted[noted[0]] = max(noted[1], self.noted.get(noted[0], 0))
        return Flow(self.incarnation, FetchSpeeds(), len(log), tuple(log[-2:]), self.noted.get(self.incarnation, 0))

    def second(self, demand_per_s: float, **samples: int) -> None:
        """Advance by one second, in which workers prepare samples."""
        self.now += 1.0
        for name, made in samples.items():
            self.counters.worker_samples[name] += made
            self.counters.worker_prep_s[name] += made / 1000  # type: ignore[assignment]
            self.counters.samples += made
        asyncio.run(self.monitor.poll(demand_per_s))


def test_a_cache_is_told_the_share_of_the_demand_that_its_node_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 prepares 300 of 400 samples, later none. Its two workers could prepare 2,000 samples/s at most."""
    feed = Feed(monkeypatch)
    feed.second(80.0)
    for demand_per_s in (0.0, 80.0, 1e9):
        feed.second(demand_per_s, one=100, two=200, three=100)
    assert feed.paces["node-1"] == [0.0, 0.0, 60.0, pytest.approx(2000.0)], "at first the share is not known"
    assert feed.paces["node-2"][1:] == [0.0, 20.0, pytest.approx(1000.0)]
    for _ in range(25):
        feed.second(80.0, three=100)
    assert (feed.paces["node-1"][-1], feed.paces["node-2"][-1]) == (0.0, 80.0), "the share of the last 20 s"


def test_a_new_worker_counts_from_its_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(monkeypatch)
    feed.second(0.0, one=100, three=300)
    feed.workers["four"] = SimpleNamespace(name="four", node="node-1")
    del feed.workers["one"]
    feed.second(80.0, four=100, three=100)
    assert feed.paces["node-1"][-1] == 40.0


def test_what_a_cache_logs_is_noted_once_also_after_its_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(monkeypatch)
    feed.log = ["first"]
    feed.second(0.0)
    feed.log += ["second", "third"]
    feed.second(0.0)
    feed.second(0.0)
    feed.incarnation, feed.log = 2, ["again"]
    feed.second(0.0)
    assert [note.split(" ", 1)[1] for note in feed.counters.notes] == [
        f"node node-1: {text}" for text in ("first", "second", "third", "again")
    ]


def test_a_restarted_coordinator_notes_only_new_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(monkeypatch)
    feed.log = ["first", "second"]
    feed.second(0.0)
    feed.second(0.0)
    feed.log.append("third")
    feed.start_coordinator()
    feed.second(0.0)
    feed.second(0.0)
    assert [note.split(" ", 1)[1] for note in feed.counters.notes] == ["node node-1: third"]
