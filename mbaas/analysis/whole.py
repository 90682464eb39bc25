"""The whole analysis of a workload: measure, predict, split an epoch, check, and say what it means."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mbaas import units
from mbaas.allocation.devices import DevicePlan
from mbaas.analysis.changes import DISAGREEMENT, Change, recommend, verdict
from mbaas.analysis.costs import EpochCosts, epoch_costs
from mbaas.analysis.crossing import crossing
from mbaas.analysis.decoding import Decoding, decoding, largest_cache
from mbaas.analysis.measuring.effort import Effort
from mbaas.analysis.measuring.pace import Pace
from mbaas.analysis.measuring.progress import Progress
from mbaas.analysis.measuring.service import Workload
from mbaas.analysis.measuring.so_far import SoFar
from mbaas.analysis.measuring.system import (
    EPOCH_S,
    FEED_S,
    Measured,
    begun,
    cores_here,
    expected_s,
    measure,
    trained_on,
)
from mbaas.analysis.measuring.verify import (
    MOST_POINTS,
    ROUNDS,
    SPLIT_EPOCHS,
    Split,
    Verification,
    points,
    split_epoch,
    verify,
)
from mbaas.analysis.quantity import plain_fields
from mbaas.analysis.rates import MeasuredCurve, Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.whatif import Prediction, Waits, predict

STOPPED = "the analysis was stopped before the workload was run to its end: predictions are not compared with that"
"""A note that says so."""


PACE_S = 5.0
"""About how long it takes until the machine's pace is known for the first time."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What was analyzed, in words."""

    data: str
    pipeline: str
    step: str
    machine: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """An analysis: where the time goes, and what would help.

    Attributes:
        subject: what was analyzed.
        sentence: the verdict.
        rates: what was measured; every prediction rests on it.
        setup: how the workload is run.
        prediction: with that setup.
        changes: what would help, the recommended one first.
        costs: what loading costs each trial, beside a DataLoader for each.
        decoding: what keeping samples decoded is worth; None if that was not measured.
        devices: at which stage samples should cross to the GPU; None if no GPU was measured.
        prep_threads: P of one worker against its threads; None if it was not measured.
        split: an epoch's time by the differential method, and by the loaders; None if no feed was run.
        verification: predicted points that were run; None if none were.
        notes: what makes a figure doubtful, a sentence each.
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
    split: Split | None = None
    verification: Verification | None = None
    notes: tuple[str, ...] = ()

    @property
    def was_stopped(self) -> bool:
        """Return whether somebody stopped it before it had all."""
        return STOPPED in self.notes

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; the sentence is called ``verdict``."""
        said = plain_fields(self)
        return {"subject": said.pop("subject"), "verdict": said.pop("sentence"), **said}


@dataclass(frozen=True, kw_only=True)
class StoppedAnalysis:
    """What there is of an analysis that was stopped before there were enough rates to predict from.

    Attributes:
        subject: what was analyzed.
        rates: those that were measured.
        setup: how the workload was to be run.
        notes: what is to be known of it, a sentence each.
    """

    subject: Subject
    rates: SoFar
    setup: Setup
    notes: tuple[str, ...] = ()

    was_stopped = True

    @property
    def sentence(self) -> str:
        """Say what is missing, and what cannot be said without it."""
        *others, last = self.rates.missing or ("the last of them",)
        missing = f"{', '.join(others)} and {last}" if others else last
        return (
            f"The analysis was stopped before all rates were measured: without {missing} nothing can be predicted, and "
            "there is no verdict and no advice."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, ``verdict`` and ``missing``; ``rates`` holds those that were measured."""
        said = plain_fields(self)
        return {"subject": said.pop("subject"), "verdict": self.sentence, **said, "missing": list(self.rates.missing)}


class AnalysisStoppedError(KeyboardInterrupt):
    """Ctrl-C while rates are measured: ends a program as Ctrl-C does, and has what was measured until then.

    Attributes:
        found: that.
    """

    def __init__(self, found: StoppedAnalysis) -> None:
        super().__init__(found.sentence)
        self.found = found


@dataclass(kw_only=True)
class Findings:
    """What an analysis that is under way has found.

    Attributes:
        words: what is analyzed: ``data``, ``pipeline`` and ``step``.
        cores: of this machine.
        setup: how the workload is to be run.
        so_far: rates, as they are measured.
        memory_bytes: see `analyze`.
        measured: all rates, as soon as they are.
        split, verification: see `Analysis`.
    """

    words: Mapping[str, Any]
    cores: int
    setup: Setup
    so_far: SoFar
    memory_bytes: float = math.inf
    measured: Measured | None = None
    split: Split | None = None
    verification: Verification | None = None

    def conclude(self, *notes: str) -> Analysis | StoppedAnalysis | None:
        """Say what follows from it, and ``notes``; None if there is nothing yet."""
        found = self.measured
        if found is None:
            subject = _subject(**self.words, cores=self.cores)
            nothing = self.so_far.is_empty
            return None if nothing else StoppedAnalysis(subject=subject, rates=self.so_far, setup=self.setup)
        return conclude(
            found.rates,
            self.setup,
            **self.words,
            notes=(*found.notes, *notes),
            memory_bytes=self.memory_bytes,
            prep_threads=found.prep.threads,
            split=self.split,
            verification=self.verification,
        )


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
    keep: Callable[[Findings], None] = lambda _: None,
) -> Analysis:
    """Measure the workload on this machine and answer. Ray has to run.

    Args:
        setup: how the workload is to be run.
        step: what the step is, in words.
        rate_per_s: G as somebody stated it; None: the workload's step is measured.
        check: run some of the predicted points, and report the error.
        run: also run the workload, to split an epoch.
        gpus: that prep may use.
        memory_bytes: that a feed's cache may have on this machine; infinite where nobody knows.
        effort: how exact the rates are to be; `QUICK` also runs no feed, so it neither checks nor splits anything.
        tell: gets a line whenever something else is measured: what, and how long the rest will take.
        keep: gets what is found, at the beginning: for a caller that may have to end without an answer.

    Raises:
        AnalysisStoppedError: a KeyboardInterrupt came when something was measured, but not all rates.
        KeyboardInterrupt: one came when nothing was measured.
    """
    effort, cores = effort or Effort(), cores_here()
    if not effort.is_whole:
        run = check = False
    feed_s = FEED_S + SPLIT_EPOCHS * EPOCH_S
    progress = Progress(
        {
            "pace": PACE_S if effort.is_whole else 0.0,
            **expected_s(workload, effort, cores=cores, rate_per_s=rate_per_s, gpus=gpus),
            "split": 2 * feed_s if run else 0.0,
            "check": MOST_POINTS * ROUNDS * feed_s if check else 0.0,
        },
        tell,
    )
    dataset = workload.dataset
    words = {
        "data": f"{dataset.root}, {units.counted(len(dataset), 'sample')}, {units.size(dataset.total_bytes)}",
        "pipeline": repr(workload.pipeline),
        "step": step,
    }
    so_far = begun(workload, effort, rate_per_s=rate_per_s, cores=cores, gpus=gpus)
    findings = Findings(words=words, cores=cores, setup=setup, so_far=so_far, memory_bytes=memory_bytes)
    keep(findings)
    with ExitStack() as stack:
        try:
            pace = None
            if effort.is_whole:
                progress.begin("pace", "how fast the machine prepares, to compare with later")
                pace = stack.enter_context(Pace(workload, cores))
            found = measure(
                workload,
                rate_per_s=rate_per_s,
                cores=cores,
                gpus=gpus,
                effort=effort,
                progress=progress,
                pace=pace,
                so_far=so_far,
            )
        except KeyboardInterrupt:
            stopped = findings.conclude()
            if not isinstance(stopped, StoppedAnalysis):
                raise
            raise AnalysisStoppedError(stopped) from None
        findings.measured = found
        # What a cache would not use is no part of the answer; how large decoded samples are is known only now.
        setup = findings.setup = replace(setup, cache_bytes=min(setup.cache_bytes, largest_cache(found.rates, setup)))
        # On a part, because every run has several epochs; predictions are about shares of a dataset and rates, which do
        # not depend on its size.
        part = trained_on(workload, found.rates, prep_workers=setup.workers_of(cores))
        notes: tuple[str, ...] = ()
        if found.was_stopped:
            run = check = False
            notes = (STOPPED,)
        try:
            if run:
                progress.begin("split", "splitting an epoch into compute, prep stall and fetch stall")
                findings.split = split_epoch(part, found.rates, setup)
            if check and pace is not None:
                chosen = points(found.rates, setup)
                findings.verification = verify(part, found.rates, chosen, pace=pace, progress=progress)
        except KeyboardInterrupt:  # all rates are there: what follows from them is worth having
            notes = (STOPPED,)
    answer = findings.conclude(*notes)
    assert isinstance(answer, Analysis)  # all rates are there
    return answer


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
    split: Split | None = None,
    verification: Verification | None = None,
    seen: Mapping[str, Waits] = MappingProxyType({}),
    knows_cores: bool = True,
    costs: EpochCosts | None = None,
) -> Analysis:
    """Say what follows from rates that were measured, here or by a running feed.

    Args:
        data, pipeline, step: what was analyzed, in words.
        notes: what makes the rates doubtful.
        memory_bytes: see `recommend`.
        prep_threads, split, verification: what else was measured.
        seen: what trials wait for, by who says so, beside the ``split``.
        knows_cores: see `verdict`.
        costs: what loading was seen to cost; None: it follows from the rates.
    """
    prediction, views = predict(rates, setup), {**seen, **(split.waits if split is not None else {})}
    changes = recommend(rates, setup, memory_bytes=memory_bytes, seen=views)
    doubts = [*notes, *prediction.notes]
    # two ways that have nothing in common: where they differ, one of them did not see what really happened
    if split is not None and split.disagreement > DISAGREEMENT:
        differ = f"differ by {units.percent(split.disagreement)} of the epoch"
        doubts.append(f"the differential split of an epoch and what loaders say {differ}")
    return Analysis(
        subject=_subject(data=data, pipeline=pipeline, step=step, cores=rates.cores),
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


def _subject(*, data: str, pipeline: str, step: str, cores: int) -> Subject:
    return Subject(data=data, pipeline=pipeline, step=step, machine=machine(cores), date=time.strftime("%d %B %Y"))


def machine(cores: int) -> str:
    """Name this machine: cores, and what they are."""
    model = platform.machine()  # "x86_64", where the kernel does not tell the processor's name
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{cores} cores, {model}"
