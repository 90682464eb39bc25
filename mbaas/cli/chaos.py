"""``mbaas chaos`` runs a search under faults, and checks the samples that its trials received."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from mbaas.base.units import count, counted, exact, number, seconds, size
from mbaas.cli.console import CLUSTERS, AsJson, Rows, app, command, end_as_ctrl_c, err, line, stack, write_result
from mbaas.errors import ConfigError, MbaasError

if TYPE_CHECKING:
    from mbaas.tools.chaos.report import Checked, Report
    from mbaas.tools.chaos.usage import Growth

SENTENCES = 10
"""Upper bound on the flaws, errors and bugs of one kind that are printed."""


@command(app, CLUSTERS)
def chaos(
    program: Annotated[list[str] | None, typer.Argument(metavar="COMMAND")] = None,
    seed: int = 0,
    faults: int | None = None,
    minutes: float | None = None,
    every: Annotated[float, typer.Option(metavar="SECONDS")] = 6.0,
    kinds: Annotated[str | None, typer.Option(metavar="KIND,KIND")] = None,
    ranks: Annotated[int, typer.Option(metavar="RANKS")] = 0,
    pipelines: bool = False,
    as_json: AsJson = False,
) -> None:
    """Run a search on a separate Ray cluster, kill and disturb its parts, and check the samples that trials
    received.

    Prep workers, cache nodes, coordinators, trials and nodes are killed, stopped and restored, one or several at a
    time, and storage fails. The trials' samples are then compared, one by one, with the same feed without faults. Exit
    code 1: a sample was missing, repeated or different, a feed ended, or a trial hung.

    Args:
        program: After --: a program to run in place of the search; it finds the cluster by RAY_ADDRESS.
        seed: Seed of the plan: the same seed and options give the same faults.
        faults: Number of faults. Default: 20.
        minutes: Instead of --faults: inject them for this long.
        every: Mean time between two faults, in seconds.
        kinds: Kinds of faults, as names or patterns. Default: all kinds that are possible here.
        ranks: Ranks of a data-parallel trial in the search, with newcomers that join in the middle of epochs.
        pipelines: Trials bring pipelines of their own, and one changes its pipeline with each epoch.

    Examples:
        mbaas chaos                            [dim]20 faults, in about three minutes[/]
        mbaas chaos --seed 7 --minutes 60 --json > chaos.json
        mbaas chaos --kinds 'kill-*,pause-coordinator' --every 3
        mbaas chaos --ranks 2 --kinds 'kill-*'
        mbaas chaos --ranks 2 --pipelines
        mbaas chaos --faults 50 -- python my_search.py
    """
    from mbaas.tools.chaos.runner import ChaosSettings, run

    if faults is not None and minutes is not None:
        given = f"--faults {faults} and --minutes {exact(minutes)}"
        raise ConfigError(f"{given} exclude each other")
    settings = ChaosSettings(
        seed=seed,
        faults=_faults_in(minutes, every) if minutes is not None else 20 if faults is None else faults,
        every_s=every,
        kinds=tuple(kind.strip() for kind in kinds.split(",")) if kinds is not None else (),
        ranks=ranks,
        with_pipelines=pipelines,
        command=tuple(program or ()),
    )
    with end_as_ctrl_c():
        report = run(settings, lambda text: line(err, text, style="dim"))
    write_result(plain(report), lambda: render(report), as_json=as_json)
    # After the report, so that a person reads the findings first, and a script gets the exit code.
    if not report.is_sound:
        raise MbaasError(f"the search did not survive the faults; records and logs are in {report.kept}")


def _faults_in(minutes: float, every_s: float) -> int:
    if not every_s > 0 or not minutes > 0:
        raise ConfigError(f"--minutes and --every must be above 0, got {exact(minutes)} and {exact(every_s)}")
    return max(1, round(60 * minutes / every_s))


def plain(report: Report) -> dict[str, object]:
    """Return a report as JSON types, including all counts."""
    from dataclasses import asdict

    from mbaas.tools.chaos.report import COUNTED

    counts: dict[str, object] = {kind: report.checked.count(kind) for kind in COUNTED}
    return {**asdict(report), **counts, "happened": report.happened, "is_sound": report.is_sound}


def render(report: Report) -> RenderableType:
    parts: list[RenderableType] = [_kinds(report), _samples(report)]
    if report.growth:
        parts.append(_growth(report.growth))
    for title, sentences in (
        ("flaws", tuple(map(str, report.checked.flaws))),
        ("feeds that ended", report.feeds_ended),
        ("trials that hung", report.hung),
        ("errors that trials survived", report.checked.told),
        ("internal errors in the logs", report.bugs),
        ("left behind", report.left_behind),
    ):
        if sentences:
            more = [f"... {len(sentences) - SENTENCES} more"] if len(sentences) > SENTENCES else []
            parts.append(Text("\n  ".join([f"{title}:", *sentences[:SENTENCES], *more])))
    return stack(parts)


def _kinds(report: Report) -> RenderableType:
    kinds = sorted(report.kinds.items())
    table = Rows(kinds).table(
        ("fault", lambda each: each[0]),
        (">planned", lambda each: count(each[1].planned)),
        (">happened", lambda each: count(each[1].happened)),
        (">median wait", lambda each: seconds(median(each[1].waits_s)) if each[1].waits_s else ""),
        (">longest wait", lambda each: seconds(max(each[1].waits_s)) if each[1].waits_s else ""),
    )
    table.add_section()
    table.add_row("all", count(sum(kind.planned for _, kind in kinds)), count(report.happened), "", "")
    return table


def _samples(report: Report) -> RenderableType:
    from mbaas.tools.chaos.report import COUNTED

    found = report.checked
    ended = " (interrupted)" if report.was_interrupted else ""
    lines = [f"seed {report.seed}, {counted(report.happened, 'fault')} in {seconds(report.seconds)}{ended}"]
    if found.trials:
        lines += [_what_was_checked(found), ", ".join(f"{found.count(kind):,} {kind}" for kind in COUNTED)]
    else:
        lines.append(
            "trials recorded nothing, so their samples were not compared; according to their loaders' ledgers, "
            f"{counted(report.inexact_epochs, 'epoch')} were not exact"
        )
    if report.command_code is not None:
        lines.append(f"the command ended with exit code {report.command_code}")
    lines.append(f"{counted(len(report.feeds_ended), 'feed')} ended, {counted(len(report.hung), 'trial')} hung")
    return Text("\n".join(lines))


def _what_was_checked(found: Checked) -> str:
    compared = "a run without faults" if found.is_independent else "each other"
    cut = f" ({count(found.cut_epochs)} with cuts)" if found.cut_epochs else ""
    return (
        f"{counted(found.samples, 'sample')} in {counted(found.epochs, 'epoch')}{cut} of "
        f"{counted(found.trials, 'trial')} in {count(found.incarnations)} processes, compared with {compared}"
    )


def _growth(growth: tuple[Growth, ...]) -> RenderableType:
    def write(each: Growth, value: float) -> str:
        return size(value) if each.thing.endswith("_bytes") else number(value)

    return Rows(growth).table(
        ("of all processes together", lambda each: each.thing.removesuffix("_bytes").replace("_", " ")),
        (">first quarter", lambda each: write(each, each.first)),
        (">last quarter", lambda each: write(each, each.last)),
        (">slope in a minute", lambda each: f"{'-' if each.per_min < 0 else '+'}{write(each, abs(each.per_min))}"),
    )
