"""A node's load follows from running sums, and threads are taken away before they are given."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mbaas.cache.stats import Flow, TransferSums
from mbaas.coordinator import thread_tuning as tuning
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.thread_tuning import NodeLooks, NodeSums, ThreadTuning
from mbaas.model.tiers import FetchSpeeds
from mbaas.settings import FeedSettings, Threads

SETTINGS = FeedSettings(
    name="feed",
    batch_size=100,
    cache_bytes=0,
    staging_bytes=1,
    prep_workers=2,
    threads=Threads(prep=3, fetch=10, window_s=4.0, hold_s=2.0),
)


NOTHING = TransferSums()


def flow(threads: int = 8, storage: TransferSums = NOTHING, *, incarnation: int = 1, log: tuple[str, ...] = ()) -> Flow:
    return Flow(incarnation, threads, storage, NOTHING, NOTHING, FetchSpeeds(), len(log), log)


def sums(now: float, found: Flow, **samples: float) -> NodeSums:
    return NodeSums(now, found, samples, dict.fromkeys(samples, now), sum(samples.values()))


def test_a_window_begins_when_the_threads_are_the_same_and_the_work_when_the_workers_are() -> None:
    looks = NodeLooks(Threads(window_s=4.0))
    spans = {}
    for now in range(30):
        spans[now] = looks.add(sums(float(now), flow(8 if now < 10 else 16), one=1.0 * now))
    assert [now for now, span in spans.items() if span is None] == [0, 1, 2, 3, 10, 11, 12, 13]
    assert (spans[9].before.now, spans[9].first.now) == (0, 5)
    assert (spans[14].before.now, spans[14].first.now) == (0, 10)
    assert (spans[29].before.now, spans[29].first.now) == (9, 25), "twenty and four seconds ago"
    assert looks.add(sums(30.0, flow(16), one=30.0, two=0.0)) is None, "a worker came"
    assert looks.add(sums(34.0, flow(16), one=34.0, two=0.0)) is not None
    assert looks.add(sums(35.0, flow(16, incarnation=2), one=34.0, two=0.0)) is None, "another cache"
    assert looks.add(sums(39.0, flow(16, incarnation=2), one=34.0, two=0.0)) is not None
    looks.forget_rates()
    assert looks.add(sums(40.0, flow(16, incarnation=2), one=34.0, two=0.0)) is None


class Feed:
    """A node with two workers. A storage thread delivers 10 samples/s, and a prep thread prepares 1,000."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.threads, self.calls = 0.0, 8, list[tuple[str, int]]()
        self.prep = {"one": 3, "two": 3}
        self.paces, self.log = list[float](), list[str]()
        self.storage = TransferSums()
        self.counters = Counters()
        workers = {name: SimpleNamespace(name=name, node="node-1") for name in self.prep}
        worker_pool = SimpleNamespace(workers=workers, per_node=lambda: {"node-1": 2}, set_threads=self._set_prep)
        cache_pool = SimpleNamespace(flow=self._flow, set_threads=self._set_fetch)
        supervision: Any = SimpleNamespace(workers=worker_pool, caches=cache_pool)
        self.tuning = ThreadTuning(SETTINGS, supervision=supervision, counters=self.counters)
        monkeypatch.setattr(tuning.time, "monotonic", lambda: self.now)

    async def _set_prep(self, worker: Any, threads: int) -> None:
        self.calls.append((worker.name, threads))
        self.prep[worker.name] = threads
        self._check()

    async def _set_fetch(self, node: str, threads: int) -> None:
        self.calls.append((node, threads))
        self.threads = threads
        self._check()

    def _check(self) -> None:
        assert sum(self.prep.values()) + self.threads <= 2 * SETTINGS.threads.prep + SETTINGS.threads.fetch

    async def _flow(self, node: str, pace_per_s: float) -> Flow:
        self.paces.append(pace_per_s)
        return Flow(
            1,
            self.threads,
            self.storage,
            TransferSums(),
            TransferSums(),
            FetchSpeeds(),
            len(self.log),
            tuple(self.log[-2:]),
        )

    def second(self, demand_per_s: float) -> None:
        """Advance by one second. All samples from storage are prepared."""
        made = 10.0 * self.threads
        self.now += 1.0
        self.storage = TransferSums(
            self.storage.nbytes + int(made * 1000), self.storage.thread_s + self.threads, self.now
        )
        for name in self.prep:
            self.counters.worker_samples[name] += int(made / 2)
            self.counters.worker_prep_s[name] += made / 2 / (1000 * self.prep[name])  # type: ignore[assignment]
        self.counters.samples += int(made)
        asyncio.run(self.tuning.look(demand_per_s))


def test_who_gives_threads_goes_first_and_the_log_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 + 6 of 16 threads are in use. Fetch gets the two free ones and all but one of each worker's."""
    feed = Feed(monkeypatch)
    for _ in range(40):
        feed.second(demand_per_s=10_000.0)
    assert feed.calls[:2] == [("one", 3), ("two", 3)], "the first calls repeat the current numbers"
    assert feed.calls[2:] == [("one", 1), ("two", 1), ("node-1", 14)]
    assert feed.threads == 14
    assert feed.prep == {"one": 1, "two": 1}
    (note,) = feed.counters.notes
    assert "node node-1: 14 instead of 8 threads read storage and 2 instead of 6 threads prepare: a minibatch" in note


def test_a_cache_is_told_what_prep_could_take_and_what_it_says_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(monkeypatch)
    feed.log = ["first"]
    feed.second(0.0)
    feed.log += ["second", "third"]
    for demand_per_s in (5.0, 6.0, 7.0, 8.0, 120.0, 1e9):
        feed.second(demand_per_s)
    assert feed.paces[:5] == [0.0] * 5, "it is not known how much of the work is done here"
    assert feed.paces[5:] == [120.0, pytest.approx(6000.0)], "two workers of three threads, 1,000 samples/s each"
    assert [note.split(" ", 1)[1] for note in feed.counters.notes] == [
        f"node node-1: {text}" for text in ("first", "second", "third")
    ]


def test_nothing_is_changed_when_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(monkeypatch)
    off = FeedSettings(**{**vars(SETTINGS), "threads": Threads(prep=1, fetch=10, tuned=False)})
    feed.tuning = ThreadTuning(off, supervision=feed.tuning._supervision, counters=feed.counters)
    for _ in range(30):
        feed.second(10_000.0)
    assert feed.calls == []
