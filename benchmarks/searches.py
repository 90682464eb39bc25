"""Measures what Ray Tune's schedulers leave of sharing: searches by each, over a feed to train and one to validate.

A trial trains for an epoch, evaluates with a loader that it opens anew, saves its state and reports. A step is a pause,
so several trials fit a small machine. What a scheduler decides follows from the trials' configurations alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler, PopulationBasedTraining
from rich.table import Table

import mbaas
from mbaas import runtime
from mbaas import transforms as T
from mbaas.bench.render import figure_table
from mbaas.dataset import synthetic
from mbaas.messages import ID_BYTES
from tune_integration import FeedCallback, get_loader

SAMPLES, HELD_OUT, SIDE, BATCH = 1728, 288, 64, 32
TRAIN, VALIDATE = "train", "validation"
EPOCHS = 9
"""Of a trial that no scheduler stops."""

STAGED = 16
"""Minibatches of the training feed that may be staged: less than an epoch, as with a large dataset."""

EVALUATION_STEP = 0.1
"""A step of an evaluation takes this share of a training step."""

SCHEDULERS: dict[str, Callable[[], Any]] = {
    "FIFO": FIFOScheduler,
    "ASHA": lambda: ASHAScheduler(time_attr="epoch", max_t=EPOCHS, grace_period=1, reduction_factor=3),
    "HyperBand": lambda: HyperBandScheduler(time_attr="training_iteration", max_t=EPOCHS, reduction_factor=3),
    "PBT": lambda: PopulationBasedTraining(
        time_attr="epoch", perturbation_interval=2, hyperparam_mutations={"rate": [0.1, 0.01]}, quantile_fraction=0.25
    ),
}


@dataclass(frozen=True)
class Search:
    """What came of a search; medians over rounds.

    Attributes:
        scheduler: who decided which trials go on.
        epochs: epochs of training that trials finished.
        seconds: how long it took.
        train_prepared, validation_prepared: samples that were prepared for each that was delivered, times the trials
            that run at once: 1 is the least that is possible if all of them run all the time.
        waited: share of the trials' time in which they waited for either feed.
        first_batch_s: from joining to the first minibatch of training, mean over trials.
    """

    scheduler: str
    epochs: int
    seconds: float
    train_prepared: float
    validation_prepared: float
    waited: float
    first_batch_s: float


def measure(*, schedulers: tuple[str, ...], trials: int, slots: int, step_s: float, rounds: int) -> list[Search]:
    """Run each search ``rounds`` times, with ``trials`` trials, ``slots`` of them at once."""
    runtime.start_ray(slots + 2)  # a CPU for each slot, and one for the prep worker of each feed
    try:
        found = [_search(name, trials, slots, step_s) for _ in range(rounds) for name in schedulers]
    finally:
        ray.shutdown()
    return [_median([each for each in found if each.scheduler == name]) for name in schedulers]


def _median(rounds: list[Search]) -> Search:
    figures = {name: median(getattr(each, name) for each in rounds) for name in vars(rounds[0]) if name != "scheduler"}
    return Search(rounds[0].scheduler, **{**figures, "epochs": int(figures["epochs"])})


def _search(scheduler: str, trials: int, slots: int, step_s: float) -> Search:
    plain = T.Pipeline([T.DecodeImage()])
    augmented = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
    data, held_out = (synthetic(samples, height=SIDE, width=SIDE) for samples in (SAMPLES, HELD_OUT))
    staging_bytes = STAGED * BATCH * (SIDE * SIDE * 3 + ID_BYTES)
    with (
        mbaas.serve(TRAIN, data, augmented, batch_size=BATCH, prep_workers=1, staging_bytes=staging_bytes) as training,
        mbaas.serve(VALIDATE, held_out, plain, batch_size=BATCH, prep_workers=1, shuffle=False) as validation,
        tempfile.TemporaryDirectory() as folder,
    ):
        began = time.perf_counter()
        tuner = tune.Tuner(
            tune.with_resources(_train, {"cpu": 1}),
            param_space={"step_s": step_s, "quality": tune.grid_search(list(range(trials))), "rate": 0.1},
            tune_config=tune.TuneConfig(
                metric="score", mode="max", scheduler=SCHEDULERS[scheduler](), max_concurrent_trials=slots
            ),
            run_config=tune.RunConfig(storage_path=folder, callbacks=[FeedCallback(TRAIN, VALIDATE)], verbose=0),
        )
        with contextlib.redirect_stdout(sys.stderr):  # what Tune says of itself is not what was asked for
            results = tuner.fit()
        seconds = time.perf_counter() - began
        if results.num_errors:
            raise results.errors[0]
        statuses = training.status(), validation.status()
        metrics = [results[number].metrics or {} for number in range(len(results))]
        first_s = [each["mbaas"][TRAIN]["time_to_first_batch_s"] for each in metrics]
        return Search(
            scheduler,
            epochs=statuses[0].delivered_samples // SAMPLES,
            seconds=seconds,
            train_prepared=slots * statuses[0].prepared_samples / statuses[0].delivered_samples,
            validation_prepared=slots * statuses[1].prepared_samples / statuses[1].delivered_samples,
            waited=sum(each["mbaas/stall_share"] for each in metrics) / len(metrics),
            first_batch_s=sum(first_s) / len(first_s),
        )


def _train(config: dict[str, Any]) -> None:
    """Train, evaluate, save and report; go on where a checkpoint was taken."""
    step_s, state = config["step_s"], _restored()
    loader = get_loader(TRAIN, format="numpy", state=state)
    while loader.epoch < EPOCHS:
        for batch in loader:
            del batch
            time.sleep(step_s)
        with get_loader(VALIDATE, format="numpy") as evaluation:
            for batch in evaluation:
                del batch
                time.sleep(EVALUATION_STEP * step_s)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state.json").write_text(json.dumps(loader.state_dict()))
            # From the configuration alone, so that each round stops the same trials; it grows as a real score does.
            score = config["quality"] + loader.epoch / 100
            tune.report({"score": score, "epoch": loader.epoch}, checkpoint=tune.Checkpoint.from_directory(folder))


def _restored() -> dict[str, Any] | None:
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        state: dict[str, Any] = json.loads((Path(folder) / "state.json").read_text())
        return state


def table(results: list[Search]) -> Table:
    """Show what was measured."""
    headings = ("scheduler", "epochs", "seconds", "train", "validation", "waited", "first batch")
    shown = figure_table("prepared over the least possible; waiting", headings, words=("scheduler",))
    for each in results:
        shown.add_row(
            each.scheduler,
            str(each.epochs),
            f"{each.seconds:.0f}",
            f"{each.train_prepared:.2f}",
            f"{each.validation_prepared:.2f}",
            f"{each.waited:.0%}",
            f"{each.first_batch_s:.2f} s",
        )
    return shown
