"""The callback sends the right calls to feeds, which are fakes as trials are, without Ray."""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import mbaas
from mbaas.coordinator.control import FeedControl
from mbaas.errors import FeedRestartingError
from mbaas.memory.budgets import MemoryClaim
from mbaas.wire.consumers import Claims
from tune_integration import FeedCallback, callback
from tune_integration.shortage import Node


@dataclass
class FakeFeed:
    """Records the calls that it receives."""

    told: list[tuple[Any, ...]] = field(default_factory=list)
    error: Exception | None = None
    there: tuple[str, ...] = ()

    def _tell(self, *what: Any) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(what)

    def status(self, *, timeout_s: float) -> Any:
        self._tell("status", timeout_s)
        return SimpleNamespace(consumers=[SimpleNamespace(trial=trial) for trial in self.there])

    def announce(self, consumers: list[str], *, others: int) -> None:
        self._tell("announce", *consumers, others)

    def remove(self, consumer: str, *, successors: int = 0) -> None:
        self._tell("remove", consumer, successors)

    def release_reservations(self, most: int) -> None:
        self._tell("release", most)


class Search:
    """A set-up callback with its feeds and trials."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, statuses: str, total: int | None = None) -> None:
        self.feeds = {"train": FakeFeed(), "validation": FakeFeed()}
        monkeypatch.setattr(FeedControl, "of", self.feeds.__getitem__)
        monkeypatch.setattr(callback, "_groups", lambda state: {})
        names = {"P": "PENDING", "R": "RUNNING", "S": "PAUSED", "T": "TERMINATED"}
        self.trials = [
            SimpleNamespace(trial_id=f"t{i}", status=names[s], placement_group_factory=None)
            for i, s in enumerate(statuses)
        ]
        self.callback = FeedCallback("train", "validation")
        self.callback.setup(total_num_samples=total)
        for trial in self.trials:
            if trial.status == "RUNNING":
                self.hook("start", trial)

    def hook(self, name: str, trial: Any) -> None:
        getattr(self.callback, f"on_trial_{name}")(iteration=0, trials=self.trials, trial=trial)

    def told(self, what: str) -> list[list[Any]]:
        """Arguments of all calls of one kind, which both feeds must have received equally."""
        assert self.feeds["train"].told == self.feeds["validation"].told
        return [arguments for kind, *arguments in self.feeds["train"].told if kind == what]

    def removed(self) -> list[tuple[str, int]]:
        """(trial, number of trials still to start), in order."""
        return [(trial, successors) for trial, successors in self.told("remove")]


def test_names_are_needed() -> None:
    with pytest.raises(mbaas.ConfigError, match=r"FeedCallback\('train'\), got \(\)"):
        FeedCallback()
    with pytest.raises(mbaas.ConfigError, match="got \\(\\['train'\\],\\)"):
        FeedCallback(["train"])  # type: ignore[arg-type]


def test_a_pickle_holds_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch, "RP")
    again = pickle.loads(pickle.dumps(search.callback))
    assert vars(again) == vars(FeedCallback("train", "validation"))


def test_starting_trials_are_announced_to_each_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch, "RR")
    for feed in search.feeds.values():
        assert feed.told == [("announce", "t0", 0), ("announce", "t1", 0)]


@pytest.mark.parametrize("hook", ["complete", "error", "recover"])
def test_a_trial_that_ends_leaves_its_place_to_a_pending_one(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    search = Search(monkeypatch, "RP")
    search.hook(hook, search.trials[0])
    search.hook(hook, search.trials[0])
    assert search.removed() == [("t0", 1)]


def test_a_search_that_is_restored_takes_off_what_its_killed_program_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of its trials are on the feeds, one with two ranks, next to a consumer of another program."""
    search = Search(monkeypatch, "PPPT")
    for feed in search.feeds.values():
        feed.there = ("t0", "t2", "t2", "another")
    for step in range(2):
        search.callback.on_step_begin(iteration=step, trials=search.trials)
    assert search.removed() == [("t0", 0), ("t2", 0)]


def test_feeds_are_told_how_many_trials_are_still_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three trials end, one is PENDING and one not yet created; then the PENDING one starts."""
    search = Search(monkeypatch, "RRRRP", total=6)
    for trial in search.trials[:3]:
        search.hook("complete", trial)
    assert search.removed() == [("t0", 2), ("t1", 2), ("t2", 2)]
    search.trials[4].status = "RUNNING"
    search.hook("start", search.trials[4])
    search.hook("complete", search.trials[3])
    assert search.removed()[-1] == ("t3", 1)
    search.callback.on_experiment_end(trials=search.trials)
    assert search.told("release") == [[1]], "no more are held than trials were to start"


def test_a_pause_is_noticed_and_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch, "RR", total=2)
    search.trials[1].status = "PAUSED"
    search.callback.on_step_end(iteration=1, trials=search.trials)
    search.callback.on_step_end(iteration=2, trials=search.trials)
    assert search.removed() == [("t1", 0)]


def test_a_feed_that_fails_is_logged_once_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    search = Search(monkeypatch, "RRP")
    search.feeds["train"].error = mbaas.FeedFailedError("feed 'train' was stopped")
    with caplog.at_level(logging.WARNING):
        search.hook("complete", search.trials[0])
        search.hook("complete", search.trials[1])
    assert len(caplog.records) == 1
    assert "'train'" in caplog.text
    assert search.feeds["validation"].told[-1] == ("remove", "t1", 1)


@pytest.mark.parametrize(
    ("error", "asked_first"),
    [
        (ray.exceptions.RayTaskError("remove", "Traceback ...\nKeyError: 'a bug'", KeyError("a bug")), []),
        (mbaas.WaitTimeoutError("the feed's coordinator did not answer within 150 s"), [("status", 10.0)]),
        (FeedRestartingError("the feed's coordinator does not answer, it may be restarting"), [("status", 10.0)]),
        (mbaas.FeedGoneError("the feed's coordinator is gone"), []),
    ],
    ids=["an internal error", "silent", "restarting", "gone"],
)
def test_a_feed_that_has_not_ended_is_named_once_and_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, asked_first: list[Any]
) -> None:
    search = Search(monkeypatch, "RRRRP")
    train = search.feeds["train"]
    train.told.clear()
    train.error = error
    with caplog.at_level(logging.WARNING):
        search.hook("complete", search.trials[0])
        search.hook("complete", search.trials[1])
        assert len(caplog.records) == 1
        train.error = None
        search.hook("complete", search.trials[2])
        assert train.told == [*asked_first, ("remove", "t2", 1)]
        train.error = error
        search.hook("complete", search.trials[3])
    assert len(caplog.records) == 2, "notified again, because it had answered meanwhile"
    assert all("feed 'train'" in record.getMessage() for record in caplog.records)


def test_the_end_releases_trials_and_own_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """One reservation belongs to this search, others may belong to another search: one is released."""
    search = Search(monkeypatch, "RRP")
    search.hook("complete", search.trials[0])
    search.callback.on_experiment_end(trials=search.trials)
    assert search.removed() == [("t0", 1), ("t1", 0)]
    assert search.told("release") == [[1]]


def test_a_search_that_holds_no_place_releases_none(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch, "RR", total=2)
    search.callback.on_experiment_end(trials=search.trials)
    assert search.told("release") == []


# ---- trials that start together ----


def test_with_the_first_trial_those_are_announced_that_have_a_place_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five trials fit. A placement group of another shape belongs to the user."""
    search, cluster = Search(monkeypatch, "PPPPP"), Cluster(monkeypatch, free=0, held={})
    asking(search, CPU=1)
    cluster.placed = {**{f"of trial {number}": [{"CPU": 1.0}] for number in range(3)}, "another": [{"CPU": 2.0}]}
    cluster.waiting = {f"of trial {number}": [{"CPU": 1.0}] for number in range(3, 5)}
    for trial in search.trials[:2]:
        search.hook("start", trial)
        trial.status = "RUNNING"
    assert search.told("announce") == [["t0", 2], ["t1", 0]]
    search.callback.on_experiment_end(trials=search.trials)
    assert search.told("release") == [[1]], "the third did not start"


def test_no_more_are_announced_than_trials_are_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other placement groups with the same shape may belong to another part of this program."""
    search, cluster = Search(monkeypatch, "PPT"), Cluster(monkeypatch, free=0, held={})
    asking(search, CPU=1)
    cluster.placed = {f"group {number}": [{"CPU": 1.0}] for number in range(9)}
    search.hook("start", search.trials[1])
    assert search.told("announce") == [["t1", 1]]


def test_a_search_whose_places_cannot_be_looked_up_announces_trials_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = Search(monkeypatch, "PP")

    def fail(state: int) -> None:
        raise ray.exceptions.RpcError("the GCS is restarting")

    monkeypatch.setattr(callback, "_groups", fail)
    search.hook("start", search.trials[0])
    assert search.told("announce") == [["t0", 0]]


# ---- trials that wait for resources ----


class Cluster:
    """A node of 8 CPUs, and the bundles of pending and of placed placement groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: float, held: dict[str, float | None]) -> None:
        self.waiting: dict[str, list[dict[str, float]]] = {}
        self.placed: dict[str, list[dict[str, float]]] = {}
        nodes = [Node({"CPU": 8.0}, {"CPU": free})]
        claims = {name: cpus and Claims(memory=MemoryClaim(0, 1), cpus=cpus, gpus=0.0) for name, cpus in held.items()}
        there = {name: each for name, each in claims.items() if each is not None}
        monkeypatch.setattr(callback, "claims", lambda: there)
        monkeypatch.setattr(callback, "_nodes", lambda: nodes)
        states = {callback.Group.PENDING: "waiting", callback.Group.CREATED: "placed"}
        monkeypatch.setattr(callback, "_groups", lambda state: getattr(self, states[state]))


def looks(search: Search, caplog: pytest.LogCaptureFixture, times: int) -> list[str]:
    """Log messages of ``times`` more checks, each slightly after its due time."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(times):
            search.callback._look_for_room(search.trials, search.callback._look_at)
    return [record.getMessage() for record in caplog.records]


def asking(search: Search, **bundle: float) -> None:
    for trial in search.trials:
        trial.placement_group_factory = SimpleNamespace(bundles=[bundle])


def test_a_search_hears_once_which_feeds_of_the_cluster_hold_what_its_trials_need(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Including feeds of other searches. The first check logs nothing, because a trial may be about to start."""
    search, cluster = Search(monkeypatch, "PP"), Cluster(monkeypatch, free=1, held={"other": 7.0, "ended": None})
    asking(search, CPU=2)
    cluster.waiting["of a trial"] = [{"CPU": 2.0}]
    assert looks(search, caplog, 1) == []
    (text,) = looks(search, caplog, 3)
    assert text.startswith("no trial can start: each trial requests 2 CPU, 1 of 8 are free, ")
    assert "prep workers of feeds hold 'other' 7: " in text
    del cluster.waiting["of a trial"]
    assert looks(search, caplog, 1) == []
    cluster.waiting["of the next"] = [{"CPU": 2.0}]
    assert len(looks(search, caplog, 2)) == 1, "another trial waits, which was not reported before"


def test_a_trial_that_runs_while_its_ranks_have_no_place_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    search, cluster = Search(monkeypatch, "RP"), Cluster(monkeypatch, free=1, held={"train": 7.0})
    asking(search, CPU=1)
    cluster.waiting = {"of the waiting trial": [{"CPU": 1.0}], "of ranks": [{"CPU": 1.0}] * 2}
    (text,) = looks(search, caplog, 3)
    assert text.startswith(
        "the ranks of a running trial cannot start: they request 2 CPU in 2 bundles of at most 1, 1 of 8 are free"
    )


def test_a_trial_whose_place_is_there_while_its_process_starts_can_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    search, cluster = Search(monkeypatch, "PP"), Cluster(monkeypatch, free=0, held={"train": 7.0})
    asking(search, CPU=1)
    cluster.placed, cluster.waiting = {"first": [{"CPU": 1.0}]}, {"second": [{"CPU": 1.0}]}
    assert looks(search, caplog, 3) == []
    cluster.placed = {}
    assert len(looks(search, caplog, 3)) == 1


def test_groups_that_come_and_go_wait_for_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each check finds a different pending group, which is placed by the next check."""
    search, cluster = Search(monkeypatch, "R"), Cluster(monkeypatch, free=0, held={"train": 8.0})
    for number in range(4):
        cluster.waiting = {f"group {number}": [{"CPU": 1.0}] * 2}
        assert looks(search, caplog, 1) == []


def test_a_trial_that_waits_while_another_runs_is_no_reason_to_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    search, cluster = Search(monkeypatch, "RP"), Cluster(monkeypatch, free=0, held={"train": 8.0})
    asking(search, CPU=1)
    cluster.waiting = {"of the waiting trial": [{"CPU": 1.0}]}
    assert looks(search, caplog, 3) == []
