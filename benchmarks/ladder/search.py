"""The search of appendix C.2.3: Ray Tune, HyperBand, 16 samples; wall time from the first trial to the last."""

# ruff: noqa: ARG002 - the signatures are Tune's

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import HyperBandScheduler

from benchmarks.ladder.cells import Cell, CellResult, Workload
from benchmarks.ladder.metered import ANY_NODE
from benchmarks.ladder.runs import Bench, feed_of, storage_of, with_cache
from benchmarks.ladder.trials import FEED, FEED_STEPS, Training, TrialSpec, faults, feed_source, local_source
from benchmarks.tune_trials import report_with_state, restored_state, stop_at
from mbaas.ray_cluster import connection
from mbaas.tools.bench.cpu import TreeCpu
from mbaas.tools.bench.rows.dataloader import workers_for
from tune_integration import FeedCallback, get_loader

REDUCTION_FACTOR = 3
"""Eta of HyperBand: a third of a bracket's trials continue at each halving."""


@dataclass
class SearchCounts:
    """Epochs of all trials, and the faults in them."""

    epochs: int = 0
    missing: int = 0
    repeated: int = 0


class EpochRecorder(tune.Callback):
    """Adds up the reports of all trials."""

    def __init__(self) -> None:
        self.counts = SearchCounts()

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        self.counts.epochs += 1
        self.counts.missing += result["missing"]
        self.counts.repeated += result["repeated"]


def run_search(cell: Cell, bench: Bench) -> CellResult:
    """Measure a whole search, including the filling of caches.

    Raises:
        Exception: a trial failed; Ray Tune defines the error.
    """
    workload = bench.workload
    workers = workers_for(workload.cores, workload.trials)
    with storage_of(cell, bench) as stores, ExitStack() as stack:
        spec = TrialSpec(cell.step, workload, bench.folder, socket=stores.sockets[ANY_NODE], workers=workers)
        is_fed = cell.step in FEED_STEPS
        # Ray's CPUs only bound the concurrent trials. `max_concurrent_trials` would count paused ones, too.
        stack.enter_context(connection.separate_ray(workload.trials + (workload.cores if is_fed else 0)))
        feed = stack.enter_context(feed_of(cell, bench, stores, prep_workers=workload.cores)) if is_fed else None
        recorder, cpu = EpochRecorder(), stack.enter_context(TreeCpu())
        before, began = stores.counts(), time.monotonic()
        _fit(workload, spec, [recorder, *([FeedCallback(FEED)] if is_fed else [])])
        seconds, cpu_s, reads = time.monotonic() - began, cpu.seconds(), stores.counts() - before
        counts = recorder.counts
        result = CellResult(
            seconds=seconds,
            rounds=1,
            epochs=counts.epochs,
            samples=counts.epochs * workload.images - counts.missing + counts.repeated,
            compute_s=0.0,
            storage_bytes=reads.read_bytes,
            storage_reads=reads.reads,
            cpu_s=cpu_s - reads.cpu_us / 1e6,
            checked_epochs=counts.epochs,
            missing=counts.missing,
            repeated=counts.repeated,
        )
        return result if feed is None else with_cache(result, feed)


def _fit(workload: Workload, spec: TrialSpec, callbacks: list[tune.Callback]) -> None:
    max_t, quality = workload.search_epochs, list(range(workload.search_samples))
    # If each trial were better than the ones before, HyperBand would stop none of the last.
    random.Random(workload.seed).shuffle(quality)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):  # stdout is for results
        results = tune.Tuner(
            tune.with_resources(_train, {"cpu": 1}),
            param_space={"spec": spec, "quality": tune.grid_search(quality)},
            tune_config=tune.TuneConfig(
                metric="score",
                mode="max",
                scheduler=HyperBandScheduler(
                    time_attr="training_iteration", max_t=max_t, reduction_factor=REDUCTION_FACTOR
                ),
            ),
            run_config=tune.RunConfig(storage_path=folder, callbacks=callbacks, stop=stop_at(max_t), verbose=0),
        ).fit()
    if results.num_errors:
        raise results.errors[0]


def _train(config: dict[str, Any]) -> None:
    """Train and report each epoch, until Tune stops the trial; resume from a checkpoint if there is one."""
    spec: TrialSpec = replace(config["spec"], trial=config["quality"])
    state = restored_state() or {"epoch": 0, "loader": None}
    loader = None
    if spec.step in FEED_STEPS:
        loader = get_loader(FEED, format="numpy", pipeline=spec.pipeline, state=state["loader"])
    epoch = local_source(spec, state["epoch"]) if loader is None else feed_source(loader)
    training = Training(epoch, spec.workload)
    for number in itertools.count(state["epoch"] + 1):
        missing, repeated = faults(training.run(1))
        # From the configuration alone, so that each search stops the same trials; it grows as a real score does.
        metrics = {"score": config["quality"] + number / 100, "missing": missing, "repeated": repeated}
        report_with_state(metrics, {"epoch": number, "loader": None if loader is None else loader.state_dict()})
