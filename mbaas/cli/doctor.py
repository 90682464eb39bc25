"""``mbaas doctor`` checks this machine, a cluster and its data, before or when something fails."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Column
from rich.text import Text

from mbaas.base.units import counted
from mbaas.cli import console
from mbaas.errors import ResourceError

if TYPE_CHECKING:
    from mbaas.tools.doctor.checks import Finding
    from mbaas.tools.doctor.facts import Facts, StorageFacts

FEED_FILES = (".yaml", ".yml")
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@console.command(console.app, console.FIRST)
def doctor(
    data: Annotated[str | None, typer.Argument(metavar="[FEED.yaml|PATH]")] = None,
    as_json: console.AsJson = False,
    address: console.Address = None,
) -> None:
    """Check this machine, or each node of a running cluster, and say what to change.

    Covers memory, CPUs, limits, versions, the address and token of the cluster, feeds that are already running, GPUs
    and DALI, clocks, and storage. Each line has a verdict: ok, note (it may matter) or problem (a feed would fail or be
    much slower). The exit code is 1 if there is a problem. It takes a few seconds and changes nothing.

    Args:
        data: Also read a few samples of this feed file, or files below this path or URI.

    Examples:
        mbaas doctor
        mbaas doctor feed.yaml                   [dim]with its data[/]
        mbaas doctor s3://bucket/train           [dim]with the files there[/]
        mbaas doctor --address 10.0.0.1:6379     [dim]each node of this cluster[/]
        mbaas doctor --json | jq '.findings\\[] | select(.verdict != "ok")'
    """
    storage = None if data is None else _storage(data)  # first: a mistake in the file needs no cluster
    from mbaas.tools.doctor.checks import Verdict, findings, worst

    facts = replace(_collected(address), storage=storage)
    found = findings(facts)
    verdict = worst(found)
    shown = {"verdict": verdict.value, "findings": [asdict(each) for each in found]}
    console.write_result(shown, lambda: _page(found), as_json=as_json)
    if verdict is Verdict.PROBLEM:
        raise typer.Exit(console.FAILED)


def _storage(data: str) -> StorageFacts:
    if not data.lower().endswith(FEED_FILES):
        from mbaas.tools.doctor.collect import storage_of_path

        with console.doing(f"reading files of {data}"):
            return storage_of_path(data)
    from mbaas.cli import feed_file
    from mbaas.tools.doctor.collect import storage_of_feed, storage_of_path

    described = feed_file.load(Path(data)).data
    with console.doing(f"reading samples of {described.where}"):
        if described.unpacks:  # listing would unpack the whole dataset
            return storage_of_path(described.where)
        return storage_of_feed(described.where, described.read)


def _collected(address: str | None) -> Facts:
    from mbaas.tools.doctor.collect import facts_here, facts_of_cluster

    named = address or os.environ.get("RAY_ADDRESS") or ""
    try:
        console.join_cluster(address)
    except ResourceError as error:
        has_none = isinstance(error, console.NoClusterError)
        named = "" if has_none else named  # "local" names none
        with console.doing("looking at this machine"):
            return replace(facts_here(), named_address=named, cluster_error="" if has_none else str(error))
    with console.doing("looking at the nodes"):
        return replace(facts_of_cluster(), named_address=named)


def _page(found: list[Finding]) -> RenderableType:
    rows: list[tuple[RenderableType, ...]] = []
    for check, group in groupby(found, key=lambda each: each.check):
        rows += [(check if not number else "", *cells) for number, cells in enumerate(_rows([*group]))]
    counts = {verdict: sum(each.verdict == verdict for each in found) for verdict in ("problem", "note")}
    total = " and ".join(counted(number, verdict) for verdict, number in counts.items() if number)
    return console.stack([console.facts(rows, Column(width=7), Column(overflow="fold")), Text(total or "no problems")])


def _rows(found: list[Finding]) -> list[tuple[RenderableType, RenderableType]]:
    """Return the lines of one check. All nodes without a note or problem share one line."""
    passed = [each for each in found if each.verdict == "ok" and each.node]
    rows: list[tuple[RenderableType, RenderableType]] = []
    for each in found:
        if each in passed[1:]:
            continue
        node = f"{each.node}: " if each.node and len(found) > 1 else ""
        more = f" ({counted(len(passed) - 1, 'more node')})" if len(passed) > 1 and each is passed[0] else ""
        rows.append((Text(each.verdict.value, _STYLES[each.verdict.value]), Text(f"{node}{each.found}{more}")))
        rows += [
            (Text(name, "dim"), Text(text)) for name, text in (("needs", each.wanted), ("fix", each.remedy)) if text
        ]
    return rows
