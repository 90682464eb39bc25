"""The whole analysis: of a workload that is measured here, or of a running feed from its counters.

A workload is measured, predicted, split into stalls and verified. A running feed is not disturbed. It measures how fast
its trials step while they do not wait, how fast its workers prepare, and how fast storage has answered so far. It has
no rates for more workers or readers, so each additional one is assumed to add the same rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mbaas.base import units
from mbaas.coordinator.control import FeedControl
from mbaas.core.demand import of_trials
from mbaas.errors import StateError
from mbaas.model.curves import MeasuredCurve
from mbaas.model.gpu_stages import DevicePlan, crossing
from mbaas.model.pace import Prediction, Waits, predict
from mbaas.model.quantity import Quantity, measured, plain_fields
from mbaas.model.rates import Rates, Setup
from mbaas.status import FeedStatus
from mbaas.tools.analysis.advice import DISAGREEMENT, Change, EpochCosts, costs_so_far, epoch_costs, recommend, verdict
from mbaas.tools.analysis.decoding import Decoding, decoding, largest_cache
from mbaas.tools.analysis.measuring import verify
from mbaas.tools.analysis.measuring.effort import Effort, Progress, SavedStages
from mbaas.tools.analysis.measuring.prep import MachineSpeed
from mbaas.tools.analysis.measuring.service import Workload
from mbaas.tools.analysis.measuring.storage import memory_rate
from mbaas.tools.analysis.measuring.system import EPOCH_S, FEED_S, Survey, trained_on
from mbaas.tools.bench.cpu import cpu_model
from mbaas.tools.simulator import simulate, system_of
from mbaas.tools.simulator.simulation import Outcome, simulated_epoch_s
from mbaas.tools.simulator.system import EPOCHS, System
from mbaas.wire.consumers import ConsumerReport, FeedInfo

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
    split: verify.EpochSplit | None = None
    verification: verify.Verification | None = None
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
    feed_s = FEED_S + verify.SPLIT_EPOCHS * EPOCH_S
    expected = {
        "pace": PACE_S if effort.is_whole else 0.0,
        **survey.expected_s(),
        "split": 2 * feed_s if run else 0.0,
        "check": verify.MOST_POINTS * verify.ROUNDS * feed_s if check else 0.0,
    }
    progress = Progress({name: 0.0 if name in saved.earlier else s for name, s in expected.items()}, tell)
    with ExitStack() as stack:
        speed = None
        if effort.is_whole:
            progress.begin("pace", "how fast the machine prepares, to compare with later")
            speed = stack.enter_context(closing(MachineSpeed(workload.dataset, workload.pipeline, survey.cores)))
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
                split = saved.result("split", verify.EpochSplit, lambda: verify.split_epoch(part, rates, setup))
            if check and speed is not None:
                chosen = verify.points(rates, setup)
                verification = saved.result(
                    "check",
                    verify.Verification,
                    lambda: verify.verify(part, rates, chosen, speed=speed, progress=progress),
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
    split: verify.EpochSplit | None = None,
    verification: verify.Verification | None = None,
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


BRIEF = Effort(least=6, most=6, window_s=0.02)
"""Effort for the rate of memory, the only rate measured here; small, so as not to disturb the feed."""

LEAST_REST = 0.001
"""Minimum time of a decoded sample as a share of an encoded sample's time; a probe may be too short to measure it."""

NOTED_SHARE = 0.02
"""Waits for other trials beyond this share of the time add a note."""


def analyze_feed(name: str) -> Analysis:
    """Analyze a running feed: stalls of its trials and worthwhile changes.

    Raises:
        FeedNotFoundError: no feed of that name is running.
        StateError: the feed has not done enough work yet.
    """
    feed = FeedControl.of(name)
    status = feed.status()
    rates, setup = _observed(feed, status)
    return conclude(
        rates,
        setup,
        data=f"feed {name!r}, {units.counted(status.samples, 'sample')}",
        pipeline="as the feed says",
        step=f"{units.counted(setup.trials, 'trial')}, as they report",
        notes=_notes(status),
        seen=seen_by_loaders(status),
        knows_cores=False,  # only the cores of prep workers are counted
        costs=costs_so_far(status.costs, status.samples, status.prepared_samples),
    )


def simulate_feed(
    name: str, policies: Sequence[str] | None = None, *, epochs: int = EPOCHS
) -> tuple[System, list[Outcome]]:
    """Simulate a running feed from its rates, and send the predicted epoch time to the feed.

    The feed compares its next epoch with it: `FeedStatus.prediction_error`, metric ``mbaas_prediction_error``.
    """
    feed = FeedControl.of(name)
    rates, setup = _observed(feed, feed.status())
    feed.expect(simulated_epoch_s(rates, setup))
    system = system_of(rates, setup, name=f"feed {name}", epochs=epochs)
    return system, list(simulate(system, policies))


def _observed(feed: FeedControl, status: FeedStatus) -> tuple[Rates, Setup]:
    # the only rate missing from a feed's counters
    cache = memory_rate(round(sample_bytes(status)), BRIEF)
    return rates_of(status, feed.info(), cache), setup_of(status)


def sample_bytes(status: FeedStatus) -> float:
    """Return the mean bytes of an encoded sample, over the prepared samples."""
    fetched = status.fetched
    if not fetched.all.samples:
        raise StateError(f"feed {status.name!r} has prepared nothing yet; analyze it when its trials have begun")
    encoded = fetched.all - fetched.decoded
    if encoded.samples or status.decoded_costs is None:
        return encoded.nbytes / encoded.samples
    return status.decoded_costs.encoded_bytes  # since its restart, the coordinator counted only decoded samples


def rates_of(status: FeedStatus, info: FeedInfo, cache: Quantity) -> Rates:
    """Derive G, P, S and C of a running feed from its counters.

    Each trial (all its ranks together) is one measurement of G, each worker one of P, and each node that has read
    storage one of S. If no node has, all samples came from caches, and S is assumed to equal the rate of memory.
    """
    # A trial that steps does not wait for data, so its steps run at G, the rate on synthetic data.
    steps = [each.samples / each.step_s for each in _trials(status) if each.step_s > 0 and each.samples > 0]
    workers = [worker.samples_per_s for worker in status.workers if worker.samples_per_s > 0]
    if not steps or not workers:
        who = "no trial has trained" if not steps else "no worker has prepared anything"
        raise StateError(f"feed {status.name!r}: {who} yet; analyze it after some minibatches")
    each_bytes = sample_bytes(status)
    prep, decoded_prep = _prep_rates(status, measured(workers, unit="samples/s"))
    # A feed cannot detect whether storage is shared. Each node's rate was measured while all nodes read, so S is the
    # rate per node (`setup_of`), and its interval is the spread over nodes.
    read = [node.storage_bytes / node.storage_s / each_bytes for node in status.nodes if node.storage_s > 0]
    storage = measured(read, unit="samples/s") if read else cache.scaled(1 / each_bytes, unit="samples/s")
    return Rates(
        samples=status.samples,
        sample_bytes=each_bytes,
        pixel_bytes=float(info.spec.made.nbytes),
        # each prep worker has a core; a feed has no count of other cores
        cores=max(1, max((node.workers for node in status.nodes), default=1)),
        batch_size=status.batch_size,
        step=measured(steps, unit="samples/s"),
        prep=MeasuredCurve.linear(prep),
        storage=MeasuredCurve.linear(storage),
        cache=cache,
        decoded_prep=None if decoded_prep is None else MeasuredCurve.linear(decoded_prep),
        decoded_bytes=None if status.decoded_costs is None else status.decoded_costs.decoded_bytes,
    )


def _prep_rates(status: FeedStatus, worker: Quantity) -> tuple[Quantity, Quantity | None]:
    """Split a worker's rate into those of encoded and decoded samples; the latter is None without decoded samples."""
    # Workers prepared both forms, and the counts of each are known. The ratio of their times was measured when the feed
    # was started, on an otherwise idle worker.
    costs = status.decoded_costs
    if costs is None:
        return worker, None
    ratio = max(costs.decoded_s, LEAST_REST * costs.encoded_s) / costs.encoded_s
    decoded = status.fetched.decoded.samples / status.fetched.all.samples
    encoded = worker.scaled(1 - decoded + decoded * ratio)
    return encoded, encoded.scaled(1 / ratio)


def setup_of(status: FeedStatus) -> Setup:
    """Return the nodes, workers, caches and trials of a running feed."""
    nodes = max(1, len(status.nodes))  # a feed that has no node or trial right now can still be analyzed
    return Setup(
        nodes=nodes,
        prep_workers=max(1, round(len(status.workers) / nodes)),
        cache_bytes=status.cache_bytes / nodes,
        trials=max(1, len(_trials(status))),
        storage_shared=False,  # S is the rate per node (`rates_of`)
        decoded=status.decoded_costs is not None,
    )


def seen_by_loaders(status: FeedStatus) -> dict[str, Waits]:
    """Return the stall shares of trials after their first minibatch, weighted by time; empty without reports.

    The first minibatch is excluded because predictions are for a feed at full speed. The rest of a first epoch, with
    empty caches, is included, because reports contain only sums.
    """
    busy_s = prep_s = fetch_s = peers_s = 0.0
    for each in _trials(status):
        # The time until the first minibatch may be all waiting. Its causes are not recorded; they are assumed to be
        # those of all waits.
        later = max(0.0, 1 - each.time_to_first_batch_s / each.wait_s) if each.wait_s else 0.0
        busy_s += each.step_s + later * each.wait_s
        prep_s += later * each.prep_stall_s
        fetch_s += later * each.fetch_stall_s
        peers_s += later * each.peer_stall_s
    if not busy_s:
        return {}
    return {"loaders since they joined": Waits(prep=prep_s / busy_s, fetch=fetch_s / busy_s, peers=peers_s / busy_s)}


def _trials(status: FeedStatus) -> list[ConsumerReport]:
    """Return the report of each trial since it joined, all ranks together, without reservations."""
    there = [consumer for consumer in status.consumers if consumer.state != "reserved"]
    return list(of_trials({m.name: m.report for m in there}, {m.name: m.trial for m in there}).values())


def _notes(status: FeedStatus) -> list[str]:
    notes = ["rates are those of the running feed: more workers are assumed to be as fast each, while there are cores"]
    if not any(node.storage_s > 0 for node in status.nodes):
        notes.append("the feed has not read storage: S is not known, and taken to be as fast as memory")
    reports = _trials(status)
    busy_s, peers_s = sum(r.wait_s + r.step_s for r in reports), sum(r.peer_stall_s for r in reports)
    if peers_s > NOTED_SHARE * busy_s:
        notes.append(
            f"trials waited {units.percent(peers_s / busy_s)} of their time for each other while prep was idle; none "
            "of the changes below helps there"
        )
    return notes
