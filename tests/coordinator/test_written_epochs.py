"""Epochs' shuffles and rank plans are written in order, retried on failure, and found by a successor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from mbaas.coordinator import recovery
from mbaas.coordinator.background import InternalErrors
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.recovery import EpochWriter, keep_page, keep_trial, recall_epochs, recall_trials
from mbaas.core.ranks import KeptTrial
from mbaas.core.staging import events as ev
from mbaas.ray_cluster import store
from mbaas.samples.order import Shuffle
from mbaas.samples.placement import NodeWeight, Placement
from mbaas.wire.ranks import RankPlan

WAIT_S = 10.0
CUT = Shuffle(2, (48,), Shuffle(1))


class Pages:
    """The pages that a writer wrote and the epochs that it reported."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[int, Shuffle]]] = []
        self.told: list[tuple[int, ...]] = []
        self.counters = Counters()
        self.tasks: list[asyncio.Task[Any]] = []
        self.writer = EpochWriter(
            "train", "a", tell=self._tell, errors=InternalErrors(self.counters), spawn=self._spawn
        )

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.ensure_future(coroutine))
        return self.tasks[-1]

    def _tell(self, event: ev.Event) -> None:
        assert isinstance(event, ev.EpochsWritten)
        self.told.append(event.epochs)

    async def done(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self.tasks), WAIT_S)


def test_pages_are_written_one_after_the_other_and_the_newest_of_each_last(monkeypatch):
    """The first write is held up. It would undo a second write that overtook it."""
    begun, may_go_on = threading.Event(), threading.Event()

    async def write() -> Pages:
        pages = Pages()

        def keep(_feed: str, _fingerprint: str, page: int, shuffles: dict[int, Shuffle]) -> None:
            begun.set()
            assert may_go_on.wait(WAIT_S)
            pages.written.append((page, shuffles))

        monkeypatch.setattr(recovery, "keep_page", keep)
        pages.writer.write(ev.WriteEpochs(0, {1: Shuffle(1)}))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        pages.writer.write(ev.WriteEpochs(0, {1: Shuffle(1), 2: CUT}))
        pages.writer.write(ev.WriteEpochs(1, {64: Shuffle(64)}))
        pages.writer.write(ev.WriteEpochs(0, {1: Shuffle(1), 2: CUT, 3: Shuffle(3)}))
        assert pages.told == [], "nothing is written yet"
        may_go_on.set()
        await pages.done()
        pages.writer.write(ev.WriteEpochs(1, {}))
        await pages.done()
        return pages

    pages = asyncio.run(write())
    first, newest = {1: Shuffle(1)}, {1: Shuffle(1), 2: CUT, 3: Shuffle(3)}
    assert pages.written == [(0, first), (0, newest), (1, {64: Shuffle(64)}), (1, {})]
    assert pages.told == [(1,), (1, 2, 3), (64,), ()]


def test_a_page_that_could_not_be_written_is_written_again_as_it_is_by_then(monkeypatch):
    monkeypatch.setattr(recovery, "RETRY_S", 0.05)

    async def write() -> Pages:
        pages = Pages()

        def keep(_feed: str, _fingerprint: str, page: int, shuffles: dict[int, Shuffle]) -> None:
            pages.written.append((page, shuffles))
            if len(pages.written) <= 2:
                pages.writer.write(ev.WriteEpochs(0, {1: Shuffle(1), 2: CUT}))
                raise ConnectionError("the head is away")

        monkeypatch.setattr(recovery, "keep_page", keep)
        pages.writer.write(ev.WriteEpochs(0, {1: Shuffle(1)}))
        await pages.done()
        return pages

    pages = asyncio.run(write())
    newest = {1: Shuffle(1), 2: CUT}
    assert pages.written == [(0, {1: Shuffle(1)}), (0, newest), (0, newest)]
    assert pages.told == [(1, 2)]
    assert pages.counters.internal_errors == 2


def test_nothing_is_written_once_writing_has_ended(monkeypatch):
    """The feed is stopped while a page cannot be written. Stored pages are then deleted."""
    monkeypatch.setattr(recovery, "RETRY_S", 0.05)

    async def write() -> Pages:
        pages = Pages()

        def keep(_feed: str, _fingerprint: str, page: int, shuffles: dict[int, Shuffle]) -> None:
            pages.written.append((page, shuffles))
            if page == 0:
                raise ConnectionError("the head is away")

        monkeypatch.setattr(recovery, "keep_page", keep)
        for page in (0, 1):
            pages.writer.write(ev.WriteEpochs(page, {64 * page: Shuffle(64 * page)}))
        await asyncio.sleep(0.01)
        await asyncio.wait_for(pages.writer.end(), WAIT_S)
        written = len(pages.written)
        await asyncio.sleep(0.2)
        assert len(pages.written) == written
        return pages

    assert asyncio.run(write()).told in ([], [(64,)])


def test_what_is_written_down_is_found_by_feeds_of_the_same_fingerprint_only(ray_session, feed_name):
    keep_page(feed_name, "a", 0, {1: Shuffle(1), 2: CUT})
    keep_page(feed_name, "a", 1, {64: Shuffle(64)})
    assert recall_epochs(feed_name, "a") == {1: Shuffle(1), 2: CUT, 64: Shuffle(64)}
    keep_page(feed_name, "a", 1, {})
    assert recall_epochs(feed_name, "a") == {1: Shuffle(1), 2: CUT}
    assert recall_epochs(feed_name, "b") == {}
    assert store.names(feed_name, "") == [], "another feed's epochs do not interfere"


def test_the_plans_of_ranks_are_found_again(ray_session, feed_name):
    placement = Placement(3, (NodeWeight("n0", 50, 2.5), NodeWeight("n1", 50, 2.5)), (-1.0, float("inf")))
    trial = KeptTrial(("t", 2, 64, ""), {7: RankPlan(("n0", "n1"), placement, CUT)}, {0: 7, 1: 9})
    other = KeptTrial(("t", 2, 32, ""), {0: RankPlan(("n0", "n0"))}, {0: 0})
    for each in (trial, other):
        keep_trial(feed_name, "a", each)
    assert sorted(recall_trials(feed_name, "a"), key=lambda kept: kept.group) == [other, trial]
    keep_trial(feed_name, "a", KeptTrial(other.group, {}, {}))
    assert recall_trials(feed_name, "a") == [trial]
    assert recall_trials(feed_name, "b") == []
    keep_trial(feed_name, "a", trial)
    recovery.forget(feed_name)
    assert recall_trials(feed_name, "a") == []


@pytest.mark.parametrize("shuffle", [Shuffle(5), CUT, Shuffle(9, (3, 48), CUT)])
def test_a_shuffle_comes_back_as_it_was(ray_session, feed_name, shuffle):
    keep_page(feed_name, "a", 3, {200: shuffle})
    assert recall_epochs(feed_name, "a")[200] == shuffle
    recovery.forget(feed_name)
