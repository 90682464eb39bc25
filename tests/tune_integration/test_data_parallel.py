"""The ranks of a trial that is a data-parallel Ray Train run share minibatches, and join under the right names."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray import train, tune
from ray.tune.integration.ray_train import TuneReportCallback
from searching import SAMPLES, OneOfMany, check_ledgers, final_status, search
from train_runs import RANKS, fit

import mbaas
from support.ranks import union_flaws
from support.trials import EpochRecord, Recorder, record_epoch
from tune_integration import callback, get_loader

EPOCHS = 2

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers run without this folder on their path


def epochs(config: dict[str, Any]) -> None:
    """The work of a rank in most tests: read and record some epochs."""
    context = train.get_context()
    with get_loader(config["feed"], format="numpy") as loader:
        for _ in range(EPOCHS):
            record = record_epoch(loader)
            ray.get(config["register"].add.remote(context.get_experiment_name(), context.get_world_rank(), record))
            train.report({"score": config.get("score"), "steps": len(record.sizes)})


def check_epochs(ranks: dict[int, list[EpochRecord]]) -> None:
    """Every epoch is exact, and all ranks read the same epoch of the feed."""
    for records in zip(*(ranks[rank] for rank in range(RANKS)), strict=True):
        assert union_flaws(records, range(SAMPLES), batch_size=16) == []
        assert len({record.ledger.feed_epoch for record in records if record.ledger}) == 1


@pytest.mark.slow
def test_the_ranks_of_a_run_share_each_minibatch(feed: OneOfMany, driver: Any, register: Any, tmp_path: Path) -> None:
    """2 workers, 2 epochs of 203 samples: minibatches of 16, 8 per rank; the last one has 11."""
    ray.get(driver.fit.remote(epochs, {"feed": feed.name, "register": register}, str(tmp_path), "run"))
    check_epochs(ray.get(register.seen.remote())["run"])
    status = final_status(feed)
    check_ledgers(status, finished_epochs=RANKS * EPOCHS)
    assert {consumer for consumer, _ in status.ledgers} == {"run[0]", "run[1]"}


@pytest.mark.long
@pytest.mark.chaos
def test_a_run_that_loses_a_rank_goes_on_from_its_checkpoint(
    feed: OneOfMany, driver: Any, register: Any, tmp_path: Path
) -> None:
    """Rank 1 dies after 5 minibatches. The checkpoint is rank 0's after 3: both ranks read the rest, once."""

    def work(config: dict[str, Any]) -> None:
        rank, checkpoint = train.get_context().get_world_rank(), train.get_checkpoint()
        recorder = Recorder()
        with get_loader(config["feed"], format="numpy") as loader:
            if checkpoint is not None:
                with checkpoint.as_directory() as folder:
                    loader.load_state_dict(json.loads((Path(folder) / "state.json").read_text()))
            for step, batch in enumerate(loader, 1):
                recorder.add(batch)
                if checkpoint is None and step == 3:
                    ray.get(config["register"].add.remote("run", rank, recorder.record(None)))
                    with tempfile.TemporaryDirectory() as folder:
                        (Path(folder) / "state.json").write_text(json.dumps(loader.state_dict()))
                        train.report({}, checkpoint=train.Checkpoint.from_directory(folder) if rank == 0 else None)
                if checkpoint is None and step == 5:
                    if rank == 1:
                        train.get_all_reported_checkpoints(train.CheckpointConsistencyMode.COMMITTED)  # waits for it
                        os.kill(os.getpid(), signal.SIGKILL)
                    train.report({})  # waits for rank 1
            ray.get(config["register"].add.remote("run", rank, recorder.record(loader.ledger)))

    config = {"feed": feed.name, "register": register}
    once = train.FailureConfig(max_failures=1)
    ray.get(driver.fit.remote(work, config, str(tmp_path), "run", failure_config=once))
    ranks = ray.get(register.seen.remote())["run"]
    heads, tails = zip(ranks[0], ranks[1], strict=True)
    assert [head.sizes for head in heads] == [(8,) * 3] * 2
    assert [tail.sizes for tail in tails] == [(8,) * 9 + (6,), (8,) * 9 + (5,)]
    assert sorted(np.concatenate([record.sample_ids for record in (*heads, *tails)])) == list(range(SAMPLES))
    status = final_status(feed)
    check_ledgers(status, finished_epochs=RANKS)
    assert {consumer: ledger.samples for consumer, ledger in status.ledgers} == {"run[0]": 102, "run[1]": 77}


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_ranks_of_every_trial_share_each_minibatch(
    train_clean: None, feed: OneOfMany, register: Any, tmp_path: Path
) -> None:
    """2 trials of 2 workers each, announced by the callback."""
    folder = str(tmp_path)

    def trial(config: dict[str, Any]) -> None:
        name = f"train-{tune.get_context().get_trial_id()}"
        fit(epochs, config, folder, name, callbacks=[TuneReportCallback()])

    space = {"score": tune.grid_search([1.0, 2.0]), "feed": feed.name, "register": register}
    results = search(trial, feed.name, space=space)
    assert results.num_errors == 0
    seen = ray.get(register.seen.remote())
    trials = [result.metrics["trial_id"] for result in results]
    assert seen.keys() == {f"train-{trial_id}" for trial_id in trials}
    for ranks in seen.values():
        check_epochs(ranks)
    status = final_status(feed)
    check_ledgers(status, finished_epochs=2 * RANKS * EPOCHS)
    assert status.delivered_samples == 2 * EPOCHS * SAMPLES
    assert {consumer for consumer, _ in status.ledgers} == {f"{t}[{r}]" for t in trials for r in range(RANKS)}


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_search_hears_that_feeds_hold_what_the_ranks_of_its_trial_need(
    train_clean: None,
    feed: OneOfMany,
    own_feed: mbaas.Feed,
    register: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two feeds and a running trial use one of 8 CPUs each, so 5 are free for 2 ranks of 3 CPUs.

    When the log names the feed that the search does not use, it is stopped, and the ranks start.
    """
    monkeypatch.setattr(callback, "LOOK_S", 1.0)
    folder = str(tmp_path)

    class StopsFeed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "ranks of a running trial cannot start" in record.getMessage():
                own_feed.stop()

    def trial(config: dict[str, Any]) -> None:
        name = f"train-{tune.get_context().get_trial_id()}"
        fit(epochs, config, folder, name, cpus=3, callbacks=[TuneReportCallback()])

    handler = StopsFeed()
    callback.logger.addHandler(handler)
    try:
        space = {"score": 1.0, "feed": feed.name, "register": register}
        assert search(trial, feed.name, space=space).num_errors == 0
    finally:
        callback.logger.removeHandler(handler)
    (text,) = [
        record.getMessage()
        for record in caplog.records
        if "ranks of a running trial cannot start" in record.getMessage()
    ]
    assert "they request 6 CPU in 2 bundles of at most 3, 5 of 8 are free, and prep workers of feeds hold " in text
    (ranks,) = ray.get(register.seen.remote()).values()
    check_epochs(ranks)


@pytest.mark.parametrize("run", ["train-1f2e_00003", "train-trial_id=1f2e_00003", "1f2e_00003"])
def test_a_worker_joins_as_its_trial_and_rank(monkeypatch: pytest.MonkeyPatch, run: str) -> None:
    joined: list[Any] = []
    names = ("name", "consumer", "rank", "world_size", "batch_size")
    monkeypatch.setattr(mbaas, "join", lambda **options: joined.append([options[name] for name in names]))
    context = SimpleNamespace(get_world_rank=lambda: 1, get_world_size=lambda: 4, get_experiment_name=lambda: run)
    monkeypatch.setattr(train, "get_context", lambda: context)
    get_loader("feed", batch_size=8)
    get_loader("feed", consumer="me", rank=0, world_size=2)
    assert joined == [["feed", "1f2e_00003", 1, 4, 8], ["feed", "me", 0, 2, None]]
