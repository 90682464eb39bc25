"""``mbaas plan`` shows workers, threads, caches and nodes for the searches and jobs in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from mbaas.base import units
from mbaas.cli.console import DECISIONS, AsJson, Cell, Rows, app, command, stack, write_result

if TYPE_CHECKING:
    from mbaas.tools.plan.planner import FitQuality, JobPlan, Plan

GOOD_FIT = 0.05
"""Relative error at a point above which a fit is coloured."""


@command(app, DECISIONS)
def plan(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.yaml")],
    as_json: AsJson = False,
) -> None:
    """Plan workers, threads, caches and nodes for several searches and jobs, before anything runs.

    Args:
        jobs: YAML: cluster, datasets, jobs.

    Examples:
        mbaas plan examples/plan/jobs.yaml
        mbaas plan jobs.yaml --json | jq '.jobs\\[] | {job, workers, limit}'
    """
    from mbaas.tools.plan import planner
    from mbaas.tools.plan.jobs import load

    made = planner.plan(*load(jobs))
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
    return Rows(plan.jobs).table(
        ("*job", lambda job: job.job),
        (">workers", lambda job: job.workers),
        (">needs", lambda job: units.number(job.needed)),
        (">prep/s", lambda job: units.number(job.prep_per_s)),
        (">fetch/s", lambda job: units.number(job.fetch_per_s)),
        (">step/s", lambda job: units.number(job.step_per_s)),
        (">trial/s", lambda job: units.number(job.trial_per_s)),
        *([(">between", _between)] if measured else []),
        (">epoch", lambda job: units.seconds(job.epoch_s)),
        ("limit", lambda job: (job.limit, "green" if job.limit == "training" else "yellow")),
        text_folds=True,
    )


def _between(job: JobPlan) -> str:
    return units.interval(job.trial_low_per_s, job.trial_high_per_s)


def _limits(plan: Plan) -> RenderableType:
    said = ((job.job, f"{job.reason}; {job.decoding}" if job.decoding else job.reason) for job in plan.jobs)
    return Group(*(Text.assemble((name, "bold"), f": {reason}") for name, reason in said))


def _threads(plan: Plan) -> RenderableType:
    return Rows(plan.jobs).table(
        ("*threads of a node", lambda job: job.job),
        (">prepare", lambda job: job.threads.prep),
        (">read", lambda job: job.threads.fetch),
        ("~why", lambda job: job.threads.reason),
        text_folds=True,
    )


def _costs(plan: Plan) -> RenderableType:
    priced = any(job.price is not None for job in plan.jobs)
    prices: list[tuple[str, Callable[[JobPlan], Cell]]] = [
        (">cost", lambda job: units.number(job.price or 0.0)),
        (">DataLoaders", lambda job: units.number(job.alone_price or 0.0)),
    ]
    return Rows(plan.jobs).table(
        ("*an epoch of each trial", lambda job: job.job),
        (">share", lambda job: units.percent(job.cpu_s / job.alone_cpu_s)),
        (">CPU time", lambda job: units.seconds(job.cpu_s)),
        (">DataLoaders", lambda job: units.seconds(job.alone_cpu_s)),
        *(prices if priced else ()),
        text_folds=True,
    )


def _caches(plan: Plan) -> RenderableType:
    table = Rows(plan.caches).table(
        ("*cache of a node", lambda cache: cache.dataset),
        (">dataset", lambda cache: units.size(cache.dataset_bytes)),
        (">in memory", lambda cache: units.size(cache.memory_bytes)),
        (">on disk", lambda cache: units.size(cache.disk_bytes)),
        (">kept", lambda cache: units.percent(cache.memory_share + cache.disk_share)),
        (">epochs/h", lambda cache: units.number(cache.epochs_per_h)),
        text_folds=True,
    )
    return Group(table, Text(f"  of {units.size(plan.cache_memory_bytes)} of memory available to caches", "dim"))


def _fits(plan: Plan) -> RenderableType:
    of_prep = [(f"prep of {job.job}", job.fit, units.number) for job in plan.jobs]
    return Rows([*of_prep, ("storage", plan.storage, units.size)]).table(
        ("*fit", lambda row: row[0]),
        (">points", lambda row: row[1].points),
        (">R²", lambda row: units.number(row[1].r_squared)),
        (">worst error", lambda row: _worst_error(row[1])),
        ("~straight lines through (count, rate)", lambda row: _lines(row[1], row[2])),
        text_folds=True,
    )


def _worst_error(fit: FitQuality) -> Cell:
    return units.percent(fit.worst_error), "yellow" if fit.worst_error > GOOD_FIT else ""


def _lines(fit: FitQuality, rate: Callable[[float], str]) -> str:
    lines = ", ".join(f"({units.number(count)}, {rate(per_s)}/s)" for count, per_s in fit.lines)
    beyond = f"{rate(abs(fit.slope))}/s {'less' if fit.slope < 0 else 'more'} for each" if fit.slope else "flat"
    return f"{lines}, then {beyond}" if lines else beyond
