"""Options of the side-by-side benchmark, and the summary of its runs: medians, and shares of N x P."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from statistics import median

from mbaas.tools.bench.cpu import cpu_model
from mbaas.tools.bench.host import Figures, RowRun
from mbaas.tools.bench.peers import PEERS
from mbaas.tools.bench.rows import DECODED_ROWS, PREP_ROWS, READ_ROW, ROWS, BenchSettings


@dataclass(frozen=True)
class Machine:
    """The machine and the libraries of a measurement, without which figures mean little."""

    cpu: str = field(default_factory=cpu_model)
    cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    memory_bytes: int = field(default_factory=lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    gpu: str = ""
    python: str = field(default_factory=platform.python_version)
    libraries: tuple[str, ...] = field(
        default_factory=lambda: tuple(f"{name} {version(name)}" for name in ("ray", "torch", "nvidia-dali-cuda120"))
    )
    when: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))


@dataclass(frozen=True)
class Round:
    """Rows that ran one after the other, with the same number of trials and batch size."""

    runs: tuple[RowRun, ...]

    def run(self, row: str) -> RowRun | None:
        """Return the run of a row; None if it was not requested, or failed."""
        return next((run for run in self.runs if run.row == row and not run.error), None)


@dataclass(frozen=True, kw_only=True)
class RowResult(Figures):
    """Result of a row with N trials and a batch size: medians over all successful runs.

    Attributes:
        rounds: number of successful runs.
        share: samples/s divided by N x P of the same round, N being the trials that share a pipeline; may be above 1
            with decoded samples. None if P is unknown, or for rows that deliver nothing.
        decoded_share: the same with N x P', for rows with decoded samples only.
        cpu_share: P's CPU seconds per sample divided by N x this row's: the fraction of N x P that this row's CPU time
            allows. Other programs on the machine hardly change it. None as above.
        decoded_cpu_share: the same with N x P'; None as above.
        best_share: samples/s divided by the machine's limit: all cores prepare each sample once (P, or P' for rows with
            decoded samples), and then N trials read it. None as above, or if reading was not measured.
        best_cpu_share: the same by CPU seconds, like `cpu_share`.
        cpu_s_per_1000: CPU seconds of all processes of the row per 1,000 delivered samples.
        errors: errors of failed runs.
    """

    rounds: int
    share: float | None
    decoded_share: float | None
    cpu_share: float | None
    decoded_cpu_share: float | None
    best_share: float | None
    best_cpu_share: float | None
    cpu_s_per_1000: float
    errors: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """True if every run succeeded, every epoch had each sample exactly once, and nothing was spilled."""
        return not (self.errors or self.missing or self.repeated or self.spilled_bytes)


@dataclass(frozen=True)
class BenchReport:
    """Result of the benchmark.

    Attributes:
        samples: samples per epoch.
        results: one for each row, number of trials and batch size.
        peers: names and versions of the peers that ran.
        left_out: one sentence for each row of a peer that was not run.
    """

    settings: BenchSettings
    machine: Machine
    samples: int
    results: tuple[RowResult, ...]
    peers: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """True if every result is sound (see `RowResult.is_sound`), except for peers: their losses are a finding."""
        return all(result.is_sound for result in self.results if result.row not in PEERS)


def summarize(rounds: Sequence[Round], trials: int, pipelines: int = 1) -> tuple[RowResult, ...]:
    """Summarize the rounds with N = ``trials`` and one batch size, in the order of `ROWS`."""
    rows = [row for row in ROWS if any(run.row == row for run in rounds[0].runs)]
    return tuple(_summarize_row(rounds, row, trials, trials / min(trials, pipelines)) for row in rows)


def _summarize_row(rounds: Sequence[Round], row: str, trials: int, sharing: float) -> RowResult:
    runs = [run for one in rounds for run in one.runs if run.row == row]
    good = [run for run in runs if not run.error]
    # compare with P of the same round: both met the machine in the same state
    pairs = [(run, one) for one in rounds if (run := one.run(row)) and row not in (*PREP_ROWS, READ_ROW)]
    against = [(run, prep) for run, one in pairs if (prep := one.run("prep"))]
    is_decoded = row in DECODED_ROWS
    decoded = [(run, prep) for run, one in pairs if is_decoded and (prep := one.run("prep-decoded"))]
    limit = "prep-decoded" if is_decoded else "prep"
    reading = [(run, prep, reads) for run, one in pairs if (prep := one.run(limit)) and (reads := one.run(READ_ROW))]

    def total(name: str) -> int:
        return sum(getattr(run, name) for run in good)

    def middle(name: str) -> float:
        return _median(getattr(run, name) for run in good) or 0.0

    return RowResult(
        row,
        trials,
        runs[0].batch,
        rounds=len(good),
        samples_per_s=middle("samples_per_s"),
        share=_median(_share(run, prep, sharing) for run, prep in against),
        decoded_share=_median(_share(run, prep, sharing) for run, prep in decoded),
        cpu_share=_median(_cpu_share(run, prep, sharing) for run, prep in against),
        decoded_cpu_share=_median(_cpu_share(run, prep, sharing) for run, prep in decoded),
        # the fewest seconds of the machine per delivered sample, relative to those that it took
        best_share=_median(
            run.samples_per_s * (1 / (sharing * prep.samples_per_s) + 1 / reads.samples_per_s)
            for run, prep, reads in reading
        ),
        best_cpu_share=_median(
            (prep.cpu_s_per_1000 / sharing + reads.cpu_s_per_1000) / run.cpu_s_per_1000 for run, prep, reads in reading
        ),
        cpu_s_per_1000=middle("cpu_s_per_1000"),
        cores_by_kind=_medians(good),
        trial_us=middle("trial_us"),
        peak_bytes=int(middle("peak_bytes")),
        spilled_bytes=max((run.spilled_bytes for run in good), default=0),
        epochs=total("epochs"),
        missing=total("missing"),
        repeated=total("repeated"),
        errors=tuple(run.error for run in runs if run.error),
    )


def _share(run: RowRun, prep: RowRun, sharing: float) -> float:
    return run.samples_per_s / (sharing * prep.samples_per_s)


def _cpu_share(run: RowRun, prep: RowRun, sharing: float) -> float:
    return prep.cpu_s_per_1000 / (sharing * run.cpu_s_per_1000)


def _medians(runs: Sequence[RowRun]) -> tuple[tuple[str, float], ...]:
    """Return the median cores of each kind of process, busiest first; a kind missing from a run counts as 0."""
    kinds = {kind for run in runs for kind, _ in run.cores_by_kind}
    medians = {kind: median(dict(run.cores_by_kind).get(kind, 0.0) for run in runs) for kind in kinds}
    return tuple(sorted(medians.items(), key=lambda item: -item[1]))


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return median(listed) if listed else None
