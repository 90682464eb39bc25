"""With each kind of search on a real Ray, epochs stay exact, minibatches are shared, and nothing is left behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
from ray import tune
from searching import (
    SAMPLES,
    Gate,
    OneOfMany,
    Watch,
    check_ledgers,
    final_status,
    pass_gate,
    restored,
    save,
    search,
    wait_at,
)

import mbaas
from mbaas import transforms
from mbaas.samples.order import id_hash, id_hash_of_range
from tune_integration import FeedCallback, callback, get_loader

pytestmark = pytest.mark.slow

MakeGate = Callable[[int], Any]

AHEAD_BLOCKS = 8
"""Blocks prepared for no trial at the end: 4 were already handed out, 4 more prepared ahead."""


def together(
    name: str, gate: Any, *, epochs: int, checkpoints: bool = False, second: Any = None, start: str = "now"
) -> Any:
    """A trial of ``epochs`` epochs that waits for the others at the gate; its score is its config's.

    With a gate ``second``, the trial of score 1 reports its second epoch after the others have reported theirs.
    """

    def train(config: dict[str, Any]) -> None:
        state = restored()
        loader = get_loader(name, batch_size=config.get("batch_size"), format="numpy", start=start)
        if state is not None:
            loader.load_state_dict(state)
        pass_gate(gate)
        while loader.epoch < epochs:
            assert sum(len(batch["label"]) for batch in loader) == SAMPLES
            checkpoint = save(loader.state_dict()) if checkpoints else None
            if second is not None and loader.epoch == 2 and config["score"] == 1:
                wait_at(second)
            tune.report({"score": config["score"], "epoch": loader.epoch, "pid": os.getpid()}, checkpoint=checkpoint)
            if second is not None and loader.epoch == 2 and config["score"] > 1:
                ray.get(second.arrive.remote())

    return train


def scores(n: int) -> dict[str, Any]:
    """Configurations with different scores, best first, which makes a scheduler's decisions predictable."""
    return {"score": tune.grid_search([float(score) for score in range(n, 0, -1)])}


def iterations(watch: Watch) -> int:
    return sum(len(seen) for seen in watch.iterations.values())


def test_lockstep(feed: OneOfMany, make_gate: MakeGate) -> None:
    """3 trials x 3 epochs, different batch sizes: each block is prepared once, and each trial gets 3 x 203 samples."""
    batch_sizes = [16, 21, 50]
    space = {"batch_size": tune.grid_search(batch_sizes), "score": 1.0}
    results = search(together(feed.name, make_gate(3), epochs=3), feed.name, space=space)
    assert results.num_errors == 0
    status = final_status(feed)
    check_ledgers(status, finished_epochs=9)
    assert status.delivered_samples == 9 * SAMPLES
    assert status.remade_blocks == 0
    assert status.prepared_blocks <= 3 * status.blocks_per_epoch + AHEAD_BLOCKS
    for result in results:
        (own,) = result.metrics["mbaas"].values()
        parts = own["fetch_stall_share"] + own["prep_stall_share"] + own["peer_stall_share"]
        assert 0 < result.metrics["mbaas/stall_share"] == own["stall_share"] <= 1
        assert parts == pytest.approx(own["stall_share"])
        assert own["delivered_samples"] == 3 * SAMPLES
        assert own["wait_s"] > 0
        assert 0 < own["cpu_s"] == result.metrics["mbaas/cpu_s"]
        # A search this short may end before the feed has measured the cost of a DataLoader.
        assert own.get("dataloader_cpu_s", 1.0) > 0
    prepared = [result.metrics["mbaas"][feed.name]["prepared_samples"] for result in results]
    assert sum(prepared) == 3 * SAMPLES, f"each sample was prepared for one trial: {prepared}"


@pytest.mark.parametrize("start", ["epoch", "now"])
def test_trials_whose_processes_need_unequal_times_begin_together(
    own_feed: mbaas.Feed, make_gate: MakeGate, start: str
) -> None:
    """One trial's process starts after the other has read two epochs, and both read the same epochs.

    The second search does so, too, when the feed has measured whether trials start immediately.
    """
    name, gates = own_feed.name, [make_gate(1), make_gate(1)]

    class Train(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            if config["score"] == 1:
                wait_at(gates[config["search"]])

        def step(self) -> dict[str, Any]:
            with mbaas.join(name, consumer=self.trial_id, format="numpy", start=start) as loader:
                for _ in range(2):
                    assert sum(len(batch["label"]) for batch in loader) == SAMPLES
            if self.config["score"] == 2:
                ray.get(gates[self.config["search"]].arrive.remote())
            return {"score": self.config["score"], "done": True}

        def save_checkpoint(self, folder: str) -> dict[str, Any]:
            return {}  # Tune saves each class trial at its end

    for number in range(2):
        assert search(Train, name, space={**scores(2), "search": number}).num_errors == 0
        status = own_feed.status()
        epochs = [ledger.feed_epoch for _, ledger in status.ledgers[-4:]]
        assert epochs[:2] == epochs[2:] == [epochs[0], epochs[0] + 1]
        assert status.remade_blocks == 0


@pytest.mark.parametrize("reuse_actors", [False, True])
def test_a_class_trainable_joins_as_its_trial(feed: OneOfMany, reuse_actors: bool) -> None:
    name = feed.name

    class Train(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.loader = get_loader(name, format="numpy")

        def step(self) -> dict[str, Any]:
            assert sum(len(batch["label"]) for batch in self.loader) == SAMPLES
            return {"score": self.config["score"], "done": True}

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.cleanup()
            self.setup(new_config)
            return True

        def save_checkpoint(self, folder: str) -> dict[str, Any]:
            return {}  # Tune saves each class trial at its end

        def cleanup(self) -> None:
            self.loader.close()

    results = search(Train, name, space=scores(3), slots=2, reuse_actors=reuse_actors)
    assert results.num_errors == 0
    status = final_status(feed)
    assert sorted(consumer for consumer, _ in status.ledgers) == sorted(found.metrics["trial_id"] for found in results)


def test_asha(feed: OneOfMany, make_gate: MakeGate) -> None:
    """6 trials on 3 slots: the best run 4 epochs, others are stopped inside a report at epoch 1 or 2.

    An epoch takes milliseconds, but a trial's start half a second: trials share only because of reservations.
    """
    scheduler = tune.schedulers.ASHAScheduler(max_t=4, grace_period=1, reduction_factor=2)
    watch = Watch()
    trial = together(feed.name, make_gate(3), epochs=4, start="epoch")
    results = search(trial, feed.name, space=scores(6), scheduler=scheduler, slots=3, watch=watch)
    assert results.num_errors == 0
    epochs = iterations(watch)
    assert 4 < epochs < 6 * 4
    status = final_status(feed)
    check_ledgers(status, finished_epochs=epochs)
    assert status.delivered_samples > 1.2 * status.prepared_samples


def test_hyperband_pauses(feed: OneOfMany, make_gate: MakeGate) -> None:
    """Brackets of 2 trials: in the second, both pause after an epoch, and the better one continues from its state.

    Trials run one at a time. Otherwise a trial may still be saving its state when its bracket ends, and Ray 2.60 leaves
    it paused (`benchmarks.tune_trials.stop_at`).
    """
    scheduler = tune.schedulers.HyperBandScheduler(max_t=2, reduction_factor=2)
    watch = Watch()
    trial = together(feed.name, make_gate(1), epochs=2, checkpoints=True)
    results = search(trial, feed.name, space=scores(4), scheduler=scheduler, slots=4, cpus=7, watch=watch)
    assert results.num_errors == 0
    assert any(watch.resumed(trial_id) for trial_id in watch.statuses)
    check_ledgers(final_status(feed), finished_epochs=iterations(watch))


def test_population_based_training(feed: OneOfMany, make_gate: MakeGate) -> None:
    """The worst of 3 trials is replaced by a clone of the best, which continues from the donor's state.

    Sharing depends on timing. A clone starts at its donor's position, alone if the others are further. It skips epochs
    if its donor is ahead of the replaced trial. With ``reuse_actors`` a trial may return to its former process.
    """
    scheduler = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.34,
        hyperparam_mutations={"score": [1.0, 2.0, 3.0]},
    )
    watch = Watch()
    trial = together(feed.name, make_gate(3), epochs=6, checkpoints=True, second=make_gate(2))
    results = search(trial, feed.name, space=scores(3), scheduler=scheduler, watch=watch, reuse_actors=True)
    assert results.num_errors == 0
    assert scheduler._num_perturbations > 0
    assert all(result.metrics["epoch"] == 6 for result in results)
    status = final_status(feed)
    check_ledgers(status, finished_epochs=iterations(watch))
    assert status.delivered_samples >= iterations(watch) * SAMPLES


def test_reused_actors_and_more_trials_than_slots(feed: OneOfMany, make_gate: MakeGate) -> None:
    """6 trials in 2 processes. No trial closes its loader; the next trial in the process does."""
    trial = together(feed.name, make_gate(2), epochs=2)
    results = search(trial, feed.name, space=scores(6), slots=2, reuse_actors=True)
    assert results.num_errors == 0
    assert len({result.metrics["pid"] for result in results}) < 6
    status = final_status(feed)
    check_ledgers(status, finished_epochs=12)
    assert status.delivered_samples == 12 * SAMPLES
    assert {name for name, _ in status.ledgers} == {result.metrics["trial_id"] for result in results}


def test_retry_goes_on_in_mid_epoch(feed: OneOfMany, make_gate: MakeGate) -> None:
    """A trial fails after 5 minibatches of 16 in its second epoch; its retry gets the other 203 - 80 samples."""
    name, gate = feed.name, make_gate(2)

    def train(config: dict[str, Any]) -> None:
        state = restored()
        loader = get_loader(name, format="numpy")
        ids = [] if state is None else state["ids"]
        if state is None:
            pass_gate(gate)
        else:
            loader.load_state_dict(state["loader"])
        while loader.epoch < 2:
            for step, batch in enumerate(loader):
                ids += batch["sample_id"].tolist()
                if config["fails"] and state is None and loader.epoch == 1 and step == 4:
                    checkpoint = save({"loader": loader.state_dict(), "ids": ids})
                    tune.report({"score": 0.0}, checkpoint=checkpoint)
                    raise RuntimeError("on purpose")
        tune.report({"score": 1.0, "ids": ids, "resumed": state is not None})

    results = search(train, name, space={"fails": tune.grid_search([True, False])}, max_failures=1)
    assert results.num_errors == 0
    by_config = {result.config["fails"]: result for result in results}
    failed, other = by_config[True], by_config[False]
    assert failed.metrics["resumed"]
    assert not other.metrics["resumed"]
    for result in results:
        ids = np.array(result.metrics["ids"])
        assert len(ids) == 2 * SAMPLES
        assert id_hash(ids[:SAMPLES]) == id_hash(ids[SAMPLES:]) == id_hash_of_range(SAMPLES)
    assert failed.metrics["ids"] == other.metrics["ids"]
    check_ledgers(final_status(feed), finished_epochs=4)


def test_two_feeds_on_a_full_cluster(feed: OneOfMany, images: mbaas.Dataset) -> None:
    """7 of 8 CPUs are taken, including 2 by feeds. 2 trials run one after the other, and each trains and validates."""
    holder = Gate.options(num_cpus=5).remote(0)
    ray.get(holder.open.remote())
    second = f"{feed.name}-validation"
    pipeline = transforms.Pipeline([transforms.DecodeImage()])
    name = feed.name

    def train(config: dict[str, Any]) -> None:
        loader = get_loader(name, format="numpy")
        validation = get_loader(second, format="numpy", batch_size=100)
        for epoch in range(2):
            samples = sum(len(batch["label"]) for part in (loader, validation) for batch in part)
            tune.report({"score": float(epoch), "samples": samples})

    with mbaas.serve(second, images, pipeline, batch_size=16, prep_workers=1, cache_bytes=1 << 20) as check:
        results = search(train, name, second, space={}, samples=2)
        ray.kill(holder)
        assert [result.metrics["samples"] for result in results] == [2 * SAMPLES] * 2
        for result in results:
            assert result.metrics["mbaas"].keys() == {name, second}
        for one in (feed, check):
            check_ledgers(final_status(one), finished_epochs=4)


def test_a_search_hears_that_feeds_hold_what_its_trials_need(
    feed: OneOfMany, own_feed: mbaas.Feed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two feeds hold one of 8 CPUs each, and a trial needs 7.

    When the log names the feed that the search does not use, it is stopped, and the trials start.
    """
    monkeypatch.setattr(callback, "LOOK_S", 1.0)

    class StopsFeed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "no trial can start" in record.getMessage():
                own_feed.stop()

    handler = StopsFeed()
    callback.logger.addHandler(handler)
    try:
        results = search(lambda config: tune.report({"score": 1.0}), feed.name, space={}, samples=2, cpus=7)
    finally:
        callback.logger.removeHandler(handler)
    assert [result.metrics["score"] for result in results] == [1.0, 1.0]
    (text,) = [record.getMessage() for record in caplog.records if "can start" in record.getMessage()]
    held = f"{own_feed.name!r} 1 and {feed.name!r} 1"
    assert f"each trial requests 7 CPU, 6 of 8 are free, and prep workers of feeds hold {held}: " in text


def test_the_feed_stops_during_the_search(own_feed: mbaas.Feed) -> None:
    """The trials raise the feed's error; Tune neither hangs nor crashes."""
    name = own_feed.name

    def train(config: dict[str, Any]) -> None:
        loader = get_loader(name, format="numpy")
        for _ in loader:
            pass
        tune.report({"score": 1.0})
        mbaas.stop(name)
        for _ in range(3):  # it may still read blocks already delivered
            for _ in loader:
                pass

    results = search(train, name, space={})
    assert results.num_errors == 1
    assert "FeedFailedError" in str(results[0].error)


def test_a_feed_that_does_not_run(feed: OneOfMany) -> None:
    def train(config: dict[str, Any]) -> None:
        raise AssertionError("no trial may start")

    with pytest.raises(mbaas.FeedNotFoundError, match=f"no feed 'absent' runs on this cluster; running: '{feed.name}'"):
        search(train, feed.name, "absent", space={})


def test_outside_of_tune(feed: OneOfMany) -> None:
    with get_loader(feed.name, consumer="me", format="numpy", batch_size=50) as loader:
        assert [len(batch["label"]) for batch in loader] == [50, 50, 50, 50, 3]
        assert [member.name for member in feed.status().consumers] == ["me"]


@pytest.mark.long
def test_no_cpu_left_to_serve(ray_clean: None, images: mbaas.Dataset, feed_name: str) -> None:
    """All CPUs are taken: within 35 s a one-sentence error gives the requested and the available CPUs."""
    holder = Gate.options(num_cpus=8).remote(0)
    ray.get(holder.open.remote())
    pipeline = transforms.Pipeline([transforms.DecodeImage()])
    try:
        with pytest.raises(mbaas.ResourceError) as caught:
            mbaas.serve(feed_name, images, pipeline, batch_size=16, prep_workers=1)
    finally:
        ray.kill(holder)
    assert "\n" not in str(caught.value)
    assert f"feed {feed_name!r} needs 1 CPU" in str(caught.value)
    assert "0 of 8 CPUs are free" in str(caught.value)


def test_the_callback_survives_in_the_experiment_state(feed: OneOfMany) -> None:
    """Tune pickles callbacks, so the pickle must not contain anything of a running feed."""
    callback = FeedCallback(feed.name)
    callback.setup()
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(callback))._feeds == {}
