"""A coordinator's memory does not grow with the consumers that come and go."""

from __future__ import annotations

import asyncio
import gc
import types
from typing import Any

import pytest

from mbaas.coordinator import counters
from mbaas.coordinator.counters import Counters, add
from mbaas.coordinator.own_pipelines import OwnPipelines
from mbaas.core import ledgers
from mbaas.core.demand import DemandEstimator, Look
from mbaas.core.layout import StagingLimits
from mbaas.core.ranks import RankTable
from mbaas.core.staging import epochs
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import StagingState
from mbaas.errors import ConfigError
from mbaas.samples.order import SampleOrder
from mbaas.wire.blocks import BlockMeta
from mbaas.wire.consumers import ConsumerName, ConsumerReport
from mbaas.wire.ranks import RankReport
from mbaas.wire.samples import EpochLedger, FetchCounts

BLOCKS = 4
ORDER = SampleOrder(24, 0, block_samples=6)
WARM_UP = 2_000
"""Sessions after which every bounded table is full."""


class Feed:
    """The pure parts of a coordinator, with trials that join, read an epoch and a block, report and leave."""

    def __init__(self) -> None:
        self.core = StagingState(StagingLimits(budget_bytes=1000, ahead_blocks=2), BLOCKS, lambda _: 10)
        self.ranks = RankTable(BLOCKS, self.core.consumers.session)
        self.counters, self.demand = Counters(), DemandEstimator()
        self.detached = counters.Counter[str]()
        self.now, self.sessions = 0.0, 0
        self._do(ev.WorkerUp("prep-0", 2))

    def _do(self, event: ev.Event) -> None:
        self.now += 0.01
        for made in self.core.handle(event, self.now):
            if isinstance(made, ev.Prepare):
                meta = BlockMeta(made.block, 0, 6, (), 0.1, 0.1, FetchCounts(), 100)
                self.counters.finished(f"prep-{self.sessions % 5000}", meta.block, meta, ORDER)
                self._do(ev.TaskEnded(made.task, None))
                self.counters.forget_below(self.core.lowest_blocks)

    def session(self) -> None:
        self.sessions += 1
        number, trial = self.sessions, f"trial-{self.sessions}"
        # every third one is a rank of a data-parallel trial whose other rank never joins
        name = f"{trial}" if number % 3 else str(ConsumerName(trial, 0, 2))
        self._do(ev.Join(name, number, None))
        if not number % 3:
            self.ranks.enlist(RankReport(ConsumerName(trial, 0, 2), 6, number, "node", 0, True))
        member = self.core.consumers.by_name[name]
        for _ in range(BLOCKS + 1):  # into the next epoch
            cursor = member.cursor
            self._do(ev.Ask(name, number, cursor, cursor, cursor))
        ledger = EpochLedger(0, 0, 24, 24, 1, 1)
        self.counters.report(name, ConsumerReport(loader=name, samples=18, wait_s=0.1, step_s=1.0, ledgers=(ledger,)))
        add(self.detached, name, 1)
        if number % 20 == 0:  # about as often as the coordinator polls
            look = Look(self.now, dict(self.counters.reports.latest), self.counters.samples, self.counters.prep_s)
            trials = self.ranks.trials()
            self.demand.observe(look, self.core.consumers, workers=1, pending=0, reserved=1, most=4, trial_of=trials)
        self._do(ev.Leave(name, number, number % 2 == 0))
        self.now += 4.0
        self._do(ev.Tick())


def objects(root: object) -> int:
    """Count the objects reachable from ``root``, not following modules, classes and functions."""
    seen, ahead = {id(root)}, [root]
    skip = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    while ahead:
        for part in gc.get_referents(ahead.pop()):
            if id(part) not in seen and not isinstance(part, skip):
                seen.add(id(part))
                ahead.append(part)
    return len(seen)


def grown(feed: Any, sessions: int) -> int:
    """Count the objects that a feed gains in further sessions."""
    before = objects(feed)
    for _ in range(sessions):
        feed.session()
    return objects(feed) - before


@pytest.mark.slow
def test_ten_thousand_sessions_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "KEPT_NAMES", 100)
    monkeypatch.setattr(counters, "KEPT_BLOCKS", 100)
    monkeypatch.setattr(ledgers, "MOST_PAGES", 2)
    monkeypatch.setattr(epochs, "MOST_PAGES", 2)
    monkeypatch.setattr(ledgers, "KNOWN_CONSUMERS", 100)
    feed = Feed()
    assert grown(feed, WARM_UP) > 1000  # the bounded tables fill up
    assert grown(feed, 10_000 - WARM_UP) < 200
    assert feed.counters.reports.total.samples == 10_000 * 18, "sums are complete though reports are forgotten"


def test_growth_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "KEPT_NAMES", 10**9)
    feed = Feed()
    grown(feed, 600)  # the last 512 stories are kept
    assert grown(feed, 300) > 600


def test_of_names_the_one_that_was_heard_of_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "KEPT_NAMES", 2)
    kept = Counters()
    for name in ("ann", "bob", "ann", "eve"):
        kept.report(name, ConsumerReport(loader=name, samples=10))
    assert [*kept.reports.latest] == ["ann", "eve"]
    assert kept.reports.total.samples == 30
    sums = counters.Counter[str]()
    for name in ("a", "b", "a", "c"):
        add(sums, name, 1)
    assert sums == {"a": 2, "c": 1}


def test_refused_pipelines_leave_nothing_behind() -> None:
    async def look_at(dataset: Any, payload: bytes) -> None:
        raise ConfigError("refused")

    info: Any = types.SimpleNamespace(settings=None, pipeline="feeds")
    supervision: Any = types.SimpleNamespace(
        workers=types.SimpleNamespace(look_at=look_at), caches=types.SimpleNamespace(dataset_ref=None)
    )
    pipelines = OwnPipelines(info, supervision, trials=lambda: 1)
    for number in range(3):
        with pytest.raises(ConfigError, match="refused"):
            asyncio.run(pipelines.add(str(number), b""))
    assert not len(pipelines._adding)
    assert pipelines.by_stream() == {}
