"""A trial's reports contain its data stalls, and Tune's table shows the most important ones."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.dict import flatten_dict
from ray.tune.experimental.output import _infer_user_metrics

import mbaas
from mbaas.model.sharing import LoadingCosts
from mbaas.model.waits import WaitCounts
from mbaas.wire.consumers import ConsumerReport
from tune_integration import trial


class FixedLoader:
    """A loader whose trial waited 3 of 4 seconds: 1 s for bytes and 0.5 s for other trials."""

    pipeline = "1a2b3c4d" * 4

    def report(self) -> ConsumerReport:
        stalls = {"wait_s": 3.0, "fetch_stall_s": 1.0, "peer_stall_s": 0.5}
        waits = WaitCounts((9, 0, 0, 0, 1, 0, 0, 0, 0, 0))  # of ten minibatches one came after 30 to 100 ms
        return ConsumerReport(samples=90, prepared=30, **stalls, step_s=1.0, time_to_first_batch_s=0.25, waits=waits)

    def flush(self) -> None:
        pass


class FixedFeed:
    """A feed that used 450 s of prep and 50 s of other CPU time for 900 delivered samples, and decoded 200 in 300 s."""

    def __init__(self, price: float | None = 3.6) -> None:
        self.price = price
        self.is_there = True

    def costs(self, *, timeout_s: float) -> LoadingCosts:
        if not self.is_there:
            raise mbaas.WaitTimeoutError(f"it did not answer within {timeout_s} s")
        return LoadingCosts(450.0, 40.0, 10.0, 900, 300.0, 200, cpu_price_per_h=self.price)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The metrics that Tune receives from a trial with two feeds; its session is ``trial._run.session``."""
    sent: list[dict[str, Any]] = []
    session = SimpleNamespace(trial_id="t1", report=lambda metrics, checkpoint: sent.append(metrics))
    loader: Any = FixedLoader()
    feeds: dict[str, Any] = {"train": FixedFeed(), "val": FixedFeed()}
    run = trial._Run(session, "t1", {("train", "t1"): loader, ("val", "t1"): loader}, feeds)
    monkeypatch.setattr(trial, "_run", run)
    trial._report_stalls(session)
    return sent


def report(**metrics: Any) -> None:
    assert trial._run is not None
    trial._run.session.report(metrics)


def columns(metrics: dict[str, Any]) -> list[str]:
    """The columns that Tune selects for its table."""
    shown: Any = SimpleNamespace(last_result=metrics)
    return _infer_user_metrics([shown])


def test_the_trials_own_metrics_come_first_in_tunes_table(reported: list[dict[str, Any]]) -> None:
    report(loss=0.5, accuracy=0.9)
    report(a=1, b=2, c=3, loss=0.5)
    assert [columns(metrics) for metrics in reported] == [
        ["loss", "accuracy", "mbaas/stall_share", "mbaas/cpu_s"],
        ["a", "b", "c", "loss"],
    ]


def test_shares_of_each_feed_and_of_all(reported: list[dict[str, Any]]) -> None:
    report(loss=0.5)
    assert reported[0]["mbaas/stall_share"] == 0.75
    assert reported[0]["mbaas"] == {
        feed: {
            "stall_share": 0.75,
            "fetch_stall_share": 0.25,
            "prep_stall_share": 0.375,
            "peer_stall_share": 0.125,
            "wait_s": 3.0,
            "wait_p95_s": 0.1,
            "delivered_samples": 90,
            "prepared_samples": 30,
            "pipeline": "1a2b3c4d",
            "time_to_first_batch_s": 0.25,
            "cpu_s": pytest.approx(90 * 500 / 900),
            "dataloader_cpu_s": pytest.approx(90 * 450 / 300),
            "cost": pytest.approx(0.05),
            "dataloader_cost": pytest.approx(0.135),
        }
        for feed in ("train", "val")
    }
    # names in loggers and in the data frame of results
    names = flatten_dict(reported[0]).keys()
    assert names >= {"mbaas/stall_share", "mbaas/train/stall_share", "mbaas/val/prep_stall_share"}


def test_a_trial_without_a_pipeline_of_its_own_names_the_feeds(
    reported: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedLoader, "pipeline", "")
    report(loss=0.5)
    assert reported[0]["mbaas"]["train"]["pipeline"] == "the feed's"


def test_results_are_json_if_minibatches_come_later_than_the_last_class(
    reported: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = ConsumerReport(samples=90, waits=WaitCounts((0,) * 9 + (10,)))
    monkeypatch.setattr(FixedLoader, "report", lambda self: late)
    report(loss=0.5)
    assert json.loads(json.dumps(reported[0], allow_nan=False))["mbaas"]["train"]["wait_p95_s"] is None


def test_costs_of_all_feeds_are_told_only_if_all_are_known(reported: list[dict[str, Any]]) -> None:
    """The cost of one feed would look cheap for both. A feed that stops answering keeps its last values."""
    assert trial._run is not None
    train, val = trial._run.feeds.values()
    val.is_there = False
    report(loss=0.5)
    val.is_there, val.price, train.is_there = True, None, False
    report(loss=0.5)
    train.is_there = True
    train.price = None
    report(loss=0.5)
    sums = [{name for name in sent if name.startswith("mbaas/")} for sent in reported]
    known = {"mbaas/stall_share", "mbaas/cpu_s"}
    assert sums == [{"mbaas/stall_share"}, known, known]
    assert "cpu_s" not in reported[0]["mbaas"]["val"]
    assert reported[1]["mbaas/cpu_s"] == pytest.approx(2 * 90 * 500 / 900)
    assert [sorted(name for name in sent["mbaas"]["train"] if "cost" in name) for sent in reported] == [
        ["cost", "dataloader_cost"], ["cost", "dataloader_cost"], []
    ]  # fmt: skip


def test_what_a_trial_reports_itself_wins(reported: list[dict[str, Any]]) -> None:
    own = {"mbaas/stall_share": 0.1, "mbaas/cpu_s": 7, "mbaas/cost": 8, "mbaas": "mine"}
    report(**own)
    assert reported == [own]


def test_what_a_dataloader_would_take_is_missing_while_it_is_not_known() -> None:
    """As after a first block: 0 would mean that loading alone is free."""
    known = trial._costs(LoadingCosts(prep_cpu_s=36.0, delivered_samples=100, cpu_price_per_h=2.0), [(50, "")])
    assert known == {"cpu_s": pytest.approx(18), "cost": pytest.approx(0.01)}
