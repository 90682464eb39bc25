"""The whole analysis of a workload: measurement, prediction, stall split, verification and verdict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mbaas.base import units
from mbaas.model.curves import MeasuredCurve
from mbaas.model.gpu_stages import DevicePlan, crossing
from mbaas.model.pace import Prediction, Waits, predict
from mbaas.model.quantity import plain_fields
from mbaas.model.rates import Rates, Setup
from mbaas.tools.analysis.advice import DISAGREEMENT, Change, EpochCosts, epoch_costs, recommend, verdict
from mbaas.tools.analysis.decoding import Decoding, decoding, largest_cache
from mbaas.tools.analysis.measuring.effort import Effort, Progress, SavedStages
from mbaas.tools.analysis.measuring.prep import MachineSpeed
from mbaas.tools.analysis.measuring.service import Workload
from mbaas.tools.analysis.measuring.system import EPOCH_S, FEED_S, Survey, trained_on
from mbaas.tools.analysis.measuring.verify import (
    MOST_POINTS,
    ROUNDS,
    SPLIT_EPOCHS,
    EpochSplit,
    Verification,
    points,
    split_epoch,
    verify,
)
from mbaas.tools.bench.cpu import cpu_model

STOPPED = "the analysis was stopped before the workload was run to its end: predictions are not compared with that"
"""Note of an analysis that was stopped early."""


PACE_S = 5.0
"""Approximate seconds of the first pace measurement."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Description of the analyzed workload."""

    data: str
    pipeline: str
    step: str
    machine: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Result of an analysis. Parts that were not measured or run are None.

    Attributes:
        sentence: the verdict.
        changes: worthwhile changes, the recommended one first.
        costs: cost of loading for each trial, compared with a DataLoader per trial.
        devices: best stage at which samples cross to the GPU.
        prep_threads: P of one worker against its threads.
        split: time of an epoch by the differential method and by the loaders.
        verification: measured runs of predicted points.
        notes: reasons to doubt a figure, one sentence each.
    """

    subject: Subject
    sentence: str
    rates: Rates
    setup: Setup
    prediction: Prediction
    changes: tuple[Change, ...]
    costs: EpochCosts
    decoding: Decoding | None = None
    devices: DevicePlan | None = None
    prep_threads: MeasuredCurve | None = None
    split: EpochSplit | None = None
    verification: Verification | None = None
    notes: tuple[str, ...] = ()

    @property
    def was_stopped(self) -> bool:
        return STOPPED in self.notes

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; ``sentence`` becomes ``verdict``."""
        said = plain_fields(self)
        return {"subject": said.pop("subject"), "verdict": said.pop("sentence"), **said}


def analyze(
    workload: Workload,
    *,
    setup: Setup,
    step: str,
    rate_per_s: float | None = None,
    check: bool = False,
    run: bool = True,
    gpus: int = 0,
    memory_bytes: float = math.inf,
    effort: Effort | None = None,
    tell: Callable[[str], None] = lambda _: None,
    saved: SavedStages | None = None,
) -> Analysis:
    """Measure the workload on this machine and analyze it. Ray must be running.

    If a KeyboardInterrupt arrives when all rates are measured, the analysis is concluded without the missing parts.

    Args:
        step: description of the training step.
        rate_per_s: G in samples/s as given by the user; None: measure the workload's step.
        check: run some of the predicted points and report the error.
        run: run the workload to split the time of an epoch.
        gpus: number of GPUs available to prep.
        memory_bytes: memory available to a feed's cache on this machine; infinite if unknown.
        effort: precision of the rates. `QUICK` runs no feed, so it overrides ``check`` and ``run``.
        tell: called with a progress line at each new measurement, including the time remaining.
        saved: receives the result of each stage, and provides those of an interrupted analysis.

    Raises:
        KeyboardInterrupt: interrupted before all rates were measured.
    """
    effort, saved = effort or Effort(), saved or SavedStages()
    survey = Survey(workload=workload, rate_per_s=rate_per_s, gpus=gpus, effort=effort, saved=saved)
    if not effort.is_whole:
        run = check = False
    feed_s = FEED_S + SPLIT_EPOCHS * EPOCH_S
    expected = {
        "pace": PACE_S if effort.is_whole else 0.0,
        **survey.expected_s(),
        "split": 2 * feed_s if run else 0.0,
        "check": MOST_POINTS * ROUNDS * feed_s if check else 0.0,
    }
    progress = Progress({name: 0.0 if name in saved.earlier else s for name, s in expected.items()}, tell)
    with ExitStack() as stack:
        speed = None
        if effort.is_whole:
            progress.begin("pace", "how fast the machine prepares, to compare with later")
            speed = stack.enter_context(MachineSpeed(workload.dataset, workload.pipeline, survey.cores))
        found = survey.measure(progress, speed)
        rates, notes = found.rates, list(found.notes)
        # Report only cache bytes that can be used. The size of decoded samples is known only now.
        setup = replace(setup, cache_bytes=min(setup.cache_bytes, largest_cache(rates, setup)))
        # On a part of the dataset, because every run has several epochs. Predictions are in rates and shares of a
        # dataset, so they do not depend on its size.
        part = trained_on(workload, rates, prep_workers=setup.workers_of(survey.cores))
        split, verification = None, None
        try:
            if found.was_stopped:
                raise KeyboardInterrupt
            if run:
                progress.begin("split", "splitting an epoch into compute, prep stall and fetch stall")
                split = saved.result("split", EpochSplit, lambda: split_epoch(part, rates, setup))
            if check and speed is not None:
                chosen = points(rates, setup)
                verification = saved.result(
                    "check", Verification, lambda: verify(part, rates, chosen, speed=speed, progress=progress)
                )
        except KeyboardInterrupt:  # all rates are measured, so the analysis is complete enough to return
            notes.append(STOPPED)
        else:
            saved.end()
    dataset = workload.dataset
    return conclude(
        rates,
        setup,
        data=f"{dataset.root}, {units.counted(len(dataset), 'sample')}, {units.size(dataset.total_bytes)}",
        pipeline=repr(workload.pipeline),
        step=step,
        notes=notes,
        memory_bytes=memory_bytes,
        prep_threads=found.prep_threads,
        split=split,
        verification=verification,
    )


def conclude(
    rates: Rates,
    setup: Setup,
    *,
    data: str,
    pipeline: str,
    step: str,
    notes: Sequence[str],
    memory_bytes: float = math.inf,
    prep_threads: MeasuredCurve | None = None,
    split: EpochSplit | None = None,
    verification: Verification | None = None,
    seen: Mapping[str, Waits] = MappingProxyType({}),
    knows_cores: bool = True,
    costs: EpochCosts | None = None,
) -> Analysis:
    """Return the analysis that follows from rates measured here or by a running feed.

    Args:
        data, pipeline, step: descriptions of the workload.
        notes: reasons to doubt the rates.
        memory_bytes, knows_cores: see `recommend` and `verdict`.
        seen: observed stall shares by source, in addition to the ``split``.
        costs: observed costs of loading; None: derive them from the rates.
    """
    prediction, views = predict(rates, setup), {**seen, **(split.waits if split is not None else {})}
    changes = recommend(rates, setup, memory_bytes=memory_bytes, seen=views)
    doubts = [*notes, *prediction.notes]
    # the two methods are independent, so a large difference means that at least one is wrong
    if split is not None and split.disagreement > DISAGREEMENT:
        differ = f"differ by {units.percent(split.disagreement)} of the epoch"
        doubts.append(f"the differential split of an epoch and what loaders say {differ}")
    return Analysis(
        subject=Subject(
            data=data,
            pipeline=pipeline,
            step=step,
            machine=f"{rates.cores} cores, {cpu_model()}",
            date=time.strftime("%d %B %Y"),
        ),
        sentence=verdict(rates, setup, changes=changes, seen=views, knows_cores=knows_cores),
        rates=rates,
        setup=setup,
        prediction=prediction,
        changes=tuple(changes),
        costs=epoch_costs(rates, setup) if costs is None else costs,
        decoding=decoding(rates, setup),
        devices=None if rates.on_gpu is None else crossing(rates, setup, rates.on_gpu),
        prep_threads=prep_threads,
        split=split,
        verification=verification,
        notes=tuple(doubts),
    )
