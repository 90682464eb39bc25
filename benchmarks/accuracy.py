"""Effect of starting in mid-epoch on accuracy: real searches, over several seeds.

While a consumer is out of phase, an epoch is shuffled within segments instead of as a whole. Each seed gives a separate
ASHA search, with other configurations, order and augmentations. Searches alternate between `start="epoch"` and
`start="now"`, on scikit-learn's digits, with the network of `examples/tune_digits.py`.
"""

# ruff: noqa: ARG002 - the signatures of callbacks are Tune's

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, get_args

import numpy as np
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler
from rich.table import Table

import mbaas
from benchmarks import ID_BYTES
from examples.tune_digits import SIZE, TRAIN, VALIDATION, Split, learn, split_images, write_digits
from mbaas.ray_cluster import connection
from mbaas.tools.bench.render import figure_table
from mbaas.wire.consumers import JoinStart
from tune_integration import FeedCallback, get_loader

BATCH = 64
STAGED = 16
"""Staging capacity in minibatches: less than an epoch, which then has a dozen blocks. With more, an epoch of this small
dataset would be one block, and trials cannot start inside a block.
"""

AT_ONCE = 4
"""Concurrent trials, with half a CPU each."""

EARLY = 3
"""Least number of epochs before a trial is stopped, so that all trials can be compared after these."""


@dataclass(frozen=True)
class Accuracy:
    """Results of the searches with one way to start: a value for each seed.

    Attributes:
        start: "epoch" or "now".
        best: final validation accuracy of the best trial, from 0 to 1.
        early: mean accuracy of all trials after `EARLY` epochs, or at their end if they have fewer.
        out_of_phase: fraction of the trials' epochs that began in the middle of an epoch of the feed.
    """

    start: JoinStart
    best: tuple[float, ...]
    early: tuple[float, ...]
    out_of_phase: tuple[float, ...]


class _Accuracies(tune.Callback):
    """Records the accuracy of each trial after each epoch."""

    def __init__(self) -> None:
        self.by_trial: dict[str, list[float]] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        self.by_trial.setdefault(trial.trial_id, []).append(result["accuracy"])


def measure(*, seeds: int, trials: int, epochs: int) -> list[Accuracy]:
    """Run a search for each seed and each start, with ``trials`` trials of at most ``epochs`` epochs."""
    ways = get_args(JoinStart)
    with tempfile.TemporaryDirectory() as folder:
        split = split_images(write_digits(Path(folder, "digits")), Path(folder))
        with connection.separate_ray(2 + AT_ONCE // 2):
            found = [(start, _search(start, split, seed, trials, epochs)) for seed in range(seeds) for start in ways]
    return [Accuracy(way, *zip(*(row for start, row in found if start == way), strict=True)) for way in ways]


def _search(start: JoinStart, split: Split, seed: int, trials: int, epochs: int) -> tuple[float, float, float]:
    """Run a search; return its values of `Accuracy`: best, early, out_of_phase."""
    staging_bytes = STAGED * BATCH * (SIZE * SIZE * 3 + ID_BYTES)
    with (
        mbaas.serve(
            "train", split.train, TRAIN, batch_size=BATCH, seed=seed, prep_workers=1, staging_bytes=staging_bytes
        ) as feed,
        mbaas.serve("validation", split.validation, VALIDATION, batch_size=256, shuffle=False, prep_workers=1),
        tempfile.TemporaryDirectory() as folder,
    ):
        seen = _Accuracies()
        np.random.seed(seed)  # Tune's source of configurations: equal for both starts
        tuner = tune.Tuner(
            tune.with_resources(_train, {"cpu": 0.5}),
            param_space={
                "learning_rate": tune.loguniform(1e-3, 1e-2),
                "width": tune.choice([16, 32]),
                "batch_size": tune.choice([32, 50, 64]),
                "epochs": epochs,
                "start": start,
            },
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=trials,
                scheduler=ASHAScheduler(max_t=epochs, grace_period=min(EARLY, epochs), reduction_factor=2),
                max_concurrent_trials=AT_ONCE,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                storage_path=folder, callbacks=[seen, FeedCallback("train", "validation")], verbose=0
            ),
        )
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results, not for Tune's messages
            results = tuner.fit()
        if results.num_errors:
            raise results.errors[0]
        begins = feed.ledger()["begin"].to_pylist()
    accuracies = list(seen.by_trial.values())
    early = mean(each[:EARLY][-1] for each in accuracies)
    return max(each[-1] for each in accuracies), early, mean(begin > 0 for begin in begins)


def _train(config: dict[str, Any]) -> None:
    loader = get_loader("train", batch_size=config["batch_size"], start=config["start"])
    validation = get_loader("validation")
    for accuracy in learn(config, loader, validation, len(loader.class_names)):
        tune.report({"accuracy": accuracy})


def table(results: list[Accuracy]) -> Table:
    """Return a table with a row for each start, means and standard deviations; the caption compares seed by seed."""
    headings = ("start", "best trial %", f"all after {EARLY} epochs %", "epochs out of phase %")
    shown = figure_table(f"Accuracy of searches, {len(results[0].best)} seeds", headings, words=("start",))
    for each in results:
        shown.add_row(each.start, _spread(each.best), _spread(each.early), _spread(each.out_of_phase))
    epoch, now = results
    differences = [
        _spread(tuple(one - other for one, other in zip(ours, theirs, strict=True)), signed=True)
        for ours, theirs in ((now.best, epoch.best), (now.early, epoch.early))
    ]
    shown.caption = f"now less epoch, by seed: best {differences[0]}, all {differences[1]}"
    return shown


def _spread(shares: tuple[float, ...], *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{100 * mean(shares):{sign}.2f} ± {100 * stdev(shares):.2f}"
