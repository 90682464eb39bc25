"""The whole analysis: measure, predict, split, check, and say what it means."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbaas.analysis.changes import Change, recommend
from mbaas.analysis.measuring.effort import Effort
from mbaas.analysis.measuring.service import Workload
from mbaas.analysis.measuring.system import Measured, measure, trained_on
from mbaas.analysis.measuring.verify import Split, Verification, points, split_epoch, verify
from mbaas.analysis.rates import MeasuredCurve, Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.verdict import verdict
from mbaas.analysis.whatif import Prediction, predict

DISAGREEMENT = 0.1
"""Both ways to split an epoch should agree to this share of it."""


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
        rates: what was measured; every prediction rests on it.
        setup: how the workload is run.
        prediction: with that setup.
        sentence: the verdict.
        changes: what would help, the recommended one first.
        prep_threads: P of one worker against its threads; None if it was not measured.
        split: an epoch's time by the differential method, and by the loaders; None if no feed was run.
        verification: predicted points that were run; None if none were.
        notes: what makes a figure doubtful, a sentence each.
    """

    subject: Subject
    rates: Rates
    setup: Setup
    prediction: Prediction
    sentence: str
    changes: tuple[Change, ...]
    prep_threads: MeasuredCurve | None = None
    split: Split | None = None
    verification: Verification | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Keys ``subject``, ``verdict``, ``rates``, ``setup``, ``prediction``, ``changes``, ``prep_threads``,
        ``split``, ``verification``, ``notes``.
        """
        return {
            "subject": vars(self.subject).copy(),
            "verdict": self.sentence,
            "rates": self.rates.to_json(),
            "setup": self.setup.to_json(),
            "prediction": self.prediction.to_json(),
            "changes": [change.to_json() for change in self.changes],
            "prep_threads": self.prep_threads.to_json() if self.prep_threads is not None else None,
            "split": self.split.to_json() if self.split is not None else None,
            "verification": self.verification.to_json() if self.verification is not None else None,
            "notes": list(self.notes),
        }


def analyze(
    workload: Workload,
    *,
    setup: Setup,
    step: str,
    rate_per_s: float | None = None,
    check: bool = False,
    run: bool = True,
    gpus: int = 0,
    effort: Effort | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Analysis:
    """Measures the workload on this machine and answers. Ray has to run.

    Args:
        setup: how the workload is to be run.
        step: what the step is, in words.
        rate_per_s: G as somebody stated it; None: the workload's step is measured.
        check: run some of the predicted points, and report the error.
        run: also run the workload, to split an epoch.
        gpus: that prep may use.
    """
    found = measure(workload, rate_per_s=rate_per_s, gpus=gpus, effort=effort, say=say)
    part = trained_on(workload, found.rates)
    split = None
    if run:
        say("splitting an epoch into compute, prep stall and fetch stall")
        split = split_epoch(
            part,
            found.rates,
            trials=setup.trials,
            prep_workers=setup.workers_of(found.rates.cores),
            cache_share=min(1.0, setup.cache_bytes / found.rates.dataset_bytes),
            disk_share=setup.disk_bytes / found.rates.dataset_bytes,
        )
    checked = verify(part, found.rates, points(found.rates, setup), say=say) if check else None
    return conclude(workload, found, setup=setup, step=step, split=split, verification=checked)


def conclude(
    workload: Workload,
    found: Measured,
    *,
    setup: Setup,
    step: str,
    split: Split | None = None,
    verification: Verification | None = None,
) -> Analysis:
    """What follows from the measurements."""
    changes = recommend(found.rates, setup)
    prediction = predict(found.rates, setup)
    notes = [*found.notes, *prediction.notes]
    if split is not None and split.disagreement > DISAGREEMENT:
        notes.append(
            f"the differential split of an epoch and what loaders say differ by {split.disagreement:.0%} of the epoch"
        )
    dataset = workload.dataset
    return Analysis(
        subject=Subject(
            data=f"{dataset.root}, {len(dataset):,} samples, {dataset.total_bytes / 1e6:,.0f} MB",
            pipeline=repr(workload.pipeline),
            step=step,
            machine=machine(found.rates.cores),
            date=time.strftime("%d %B %Y"),
        ),
        rates=found.rates,
        setup=setup,
        prediction=prediction,
        sentence=verdict(found.rates, setup, changes=changes),
        changes=tuple(changes),
        prep_threads=found.prep.threads,
        split=split,
        verification=verification,
        notes=tuple(notes),
    )


def machine(cores: int) -> str:
    """This machine in words: cores, and what they are."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{cores} cores, {model}"
