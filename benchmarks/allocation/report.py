"""The results of `python -m benchmarks allocation`, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Group
from rich.table import Table

from benchmarks.allocation import real, simulation
from mbaas.base.units import counted, number, percent, seconds
from mbaas.model.gains import WorkerChange
from mbaas.tools.bench.render import figure_table


@dataclass(frozen=True)
class Report:
    """Simulated workloads, jobs that all train at once, and runs of the small workload on real feeds."""

    outcomes: tuple[simulation.Outcome, ...]
    static: tuple[simulation.StaticOutcome, ...]
    runs: tuple[real.RealRun, ...]


def figures(report: Report) -> dict[str, Any]:
    """Return the results as plain values."""
    return {
        "outcomes": [asdict(outcome) for outcome in report.outcomes],
        "static": [asdict(outcome) for outcome in report.static],
        "runs": [{**asdict(run), "stall": run.stall} for run in report.runs],
    }


def tables(report: Report) -> Group:
    """Return a table for each number of jobs, and those of the real runs."""
    sizes = dict.fromkeys(outcome.jobs for outcome in report.outcomes)
    shown = [_simulated([each for each in report.outcomes if each.jobs == jobs]) for jobs in sizes]
    shown += [_static([each for each in report.static if each.jobs == jobs]) for jobs in sizes]
    if report.runs:
        shown += [_real(report.runs), _gains(report.runs)]
    return Group(*shown)


def _simulated(outcomes: Sequence[simulation.Outcome]) -> Table:
    first = outcomes[0]
    headings = ("policy", "makespan", "stall", "job", "slowdown", "changes")
    title = f"{counted(first.jobs, 'job')}, {counted(first.pool, 'worker')}, simulated"
    table = figure_table(title, headings, words=("policy",))
    for each in outcomes:
        table.add_row(
            each.policy,
            f"{each.makespan_s:,.0f} s",
            percent(each.stall),
            f"{each.job_s:,.0f} s",
            number(each.slowdown),
            number(each.changes),
        )
    return table


def _static(outcomes: Sequence[simulation.StaticOutcome]) -> Table:
    first = outcomes[0]
    equal = next(each.samples_per_s for each in outcomes if each.policy == simulation.EQUAL)
    title = f"{counted(first.jobs, 'job')} at once, {counted(first.pool, 'worker')}, simulated"
    table = figure_table(title, ("policy", "samples/s", "gain", "slowest"), words=("policy",))
    for each in outcomes:
        gain = f"{each.samples_per_s / equal - 1:+.0%}"
        table.add_row(each.policy, number(each.samples_per_s), gain, percent(each.least))
    return table


def _real(runs: Sequence[real.RealRun]) -> Table:
    headings = ("policy", "makespan", "simulated", "stall", "moves", "move")
    table = figure_table(f"{counted(len(runs[0].jobs), 'job')} on real feeds", headings, words=("policy",))
    for run in runs:
        moved = seconds(median(run.moves_s)) if run.moves_s else "-"
        made = f"{len(run.moves_s)}"
        table.add_row(run.policy, seconds(run.makespan_s), seconds(run.simulated_s), percent(run.stall), made, moved)
    return table


def _gains(runs: Sequence[real.RealRun]) -> Table:
    headings = ("feed", "workers", "number", "predicted", "gained")
    table = figure_table("changes of the workers, samples/s", headings, words=("feed", "workers"))
    for run in runs:
        for feed, changes in run.changes.items():
            for change in changes:
                table.add_row(feed, *_cells(change))
    return table


def _cells(change: WorkerChange) -> tuple[str, ...]:
    gained = "-" if change.gained_per_s is None else f"{change.gained_per_s:+.0f}"
    return (
        " and ".join(change.causes),
        f"{change.before} to {change.after}",
        f"{change.predicted_per_s:+.0f}",
        gained,
    )
