"""``mbaas plan`` shows workers, threads, caches and nodes for the searches and jobs in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from mbaas.base import units
from mbaas.cli.console import AsJson, Cell, app, command, stack, table_of, write_result

if TYPE_CHECKING:
    from mbaas.tools.plan.planner import FitQuality, JobPlan, Plan

GOOD_FIT = 0.05
"""Relative error at a point above which a fit is coloured."""


@command(
    app, "mbaas plan examples/plan/jobs.yaml", "mbaas plan jobs.yaml --json | jq '.jobs\\[] | {job, workers, limit}'"
)
def plan(
    jobs: Annotated[Path, typer.Argument(help="YAML: cluster, datasets, jobs.", metavar="JOBS.yaml")],
    as_json: AsJson = False,
) -> None:
    """Plan workers, threads, caches and nodes for several searches and jobs, before anything runs."""
    from mbaas.tools.plan import file, planner

    made = planner.plan(*file.load(jobs))
    write_result(made.to_json(), lambda: page(made), as_json=as_json)


def page(plan: Plan) -> RenderableType:
    """Return the whole plan: nodes, jobs, their limits, threads, costs, caches, fits."""
    return stack([part(plan) for part in (_headline, _jobs, _limits, _threads, _costs, _caches, _fits)])


def _headline(plan: Plan) -> Text:
    asked = f"request {units.counted(plan.nodes, 'node')} from the autoscaler"
    idle = f", {plan.idle_workers} left over" if plan.idle_workers else ""
    used = f"{units.counted(plan.pool, 'prep worker')} fit next to the trials{idle}"
    return Text.assemble((asked, "bold"), f" · {used}\n", (plan.why_nodes, "dim"))


def _jobs(plan: Plan) -> RenderableType:
    measured = any(map(_between, plan.jobs))  # stated rates have no interval
    headings = (">workers", ">needs", ">prep/s", ">fetch/s", ">step/s", ">trial/s", *([">between"] if measured else []))
    rows = (
        (
            job.job,
            job.workers,
            units.number(job.needed),
            *map(units.number, (job.prep_per_s, job.fetch_per_s, job.step_per_s, job.trial_per_s)),
            *([_between(job)] if measured else []),
            units.seconds(job.epoch_s),
            (job.limit, "green" if job.limit == "training" else "yellow"),
        )
        for job in plan.jobs
    )
    return table_of("*job", *headings, ">epoch", "limit", rows=rows, text_folds=True)


def _between(job: JobPlan) -> str:
    return units.interval(job.trial_low_per_s, job.trial_high_per_s)


def _limits(plan: Plan) -> RenderableType:
    said = ((job.job, f"{job.reason}; {job.decoding}" if job.decoding else job.reason) for job in plan.jobs)
    return Group(*(Text.assemble((name, "bold"), f": {reason}") for name, reason in said))


def _threads(plan: Plan) -> RenderableType:
    rows = ((job.job, job.threads.prep, job.threads.fetch, job.threads.reason) for job in plan.jobs)
    return table_of("*threads of a node", ">prepare", ">read", "~why", rows=rows, text_folds=True)


def _costs(plan: Plan) -> RenderableType:
    priced = any(job.price is not None for job in plan.jobs)
    headings = (">CPU-hours", ">DataLoaders", *((">cost", ">DataLoaders") if priced else ()))
    rows = (
        (job.job, *map(units.number, (job.cpu_h, job.alone_cpu_h, job.price or 0.0, job.alone_price or 0.0)))
        for job in plan.jobs
    )
    shown = (row[: 1 + len(headings)] for row in rows)
    return table_of("*an epoch of each trial", *headings, rows=shown, text_folds=True)


def _caches(plan: Plan) -> RenderableType:
    rows = (
        (
            cache.dataset,
            *map(units.size, (cache.dataset_bytes, cache.memory_bytes, cache.disk_bytes)),
            units.percent(cache.memory_share + cache.disk_share),
            units.number(cache.epochs_per_h),
        )
        for cache in plan.caches
    )
    headings = "*cache of a node", ">dataset", ">in memory", ">on disk", ">kept", ">epochs/h"
    available = f"  of {units.size(plan.cache_memory_bytes)} of memory available to caches"
    return Group(table_of(*headings, rows=rows, text_folds=True), Text(available, "dim"))


def _fits(plan: Plan) -> RenderableType:
    rows = [_fit(f"prep of {job.job}", job.fit, units.number) for job in plan.jobs]
    rows.append(_fit("storage", plan.storage, units.size))
    headings = "*fit", ">points", ">R²", ">worst error", "~straight lines through (count, rate)"
    return table_of(*headings, rows=rows, text_folds=True)


def _fit(name: str, fit: FitQuality, rate: Callable[[float], str]) -> list[Cell]:
    lines = ", ".join(f"({units.number(count)}, {rate(per_s)}/s)" for count, per_s in fit.lines)
    beyond = f"{rate(abs(fit.slope))}/s {'less' if fit.slope < 0 else 'more'} for each" if fit.slope else "flat"
    return [
        name,
        fit.points,
        units.number(fit.r_squared),
        (units.percent(fit.worst_error), "yellow" if fit.worst_error > GOOD_FIT else ""),
        f"{lines}, then {beyond}" if lines else beyond,
    ]
