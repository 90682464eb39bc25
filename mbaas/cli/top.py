"""``mbaas top`` shows feeds live: an update per second, and each consumer's recent activity."""

from __future__ import annotations

import io
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Column
from rich.text import Text

from mbaas.base.units import count, counted, number, percent, rate, seconds, size
from mbaas.cli import console
from mbaas.cli.feed_view import NO_FEED, Flow, RateWindow, bar, consumer_table, headline, state_of
from mbaas.errors import FeedNotFoundError, MbaasError

if TYPE_CHECKING:
    from mbaas.status import ConsumerStatus, FeedStatus
    from mbaas.wire.consumers import ConsumerReport

POLL_S = 1.0
"""Period of updates."""

ANSWER_S = 10.0
"""Time without an answer after which a feed is shown as silent."""

Snapshots: TypeAlias = "tuple[FeedStatus, FeedStatus] | MbaasError"
"""A feed's last snapshot and an earlier one; without a snapshot, the error instead."""

AROUND_CONSUMERS = 8
"""Lines of a feed in addition to one per consumer: name, figures, headings, and an empty one below."""

REPORT_S = 6.0
"""Longest time between two reports of a consumer; within it, an unchanged report has no meaning."""

COLUMNS = (
    "consumer", "state", ">epoch", ">done", ">samples/s", ">stall", ">prep", ">fetch", ">peer", ">held", "waits for",
)  # fmt: skip

HTML_WIDTH = 140
"""Characters of a line of the page for browsers."""

HTML = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{round(POLL_S)}">
<title>mbaas top</title>
<style>:root {{{{ color-scheme: light dark }}}} pre {{{{ font: 14px/1.3 monospace }}}}</style>
</head><body><pre>{{text}}</pre>{{pictures}}</body></html>
"""
"""The page for browsers, with places for the text and for pictures of samples."""

LEAST_CONSUMERS = 3
"""Consumers of each feed that are shown even on a small terminal."""


@console.command(console.app, console.FEEDS)
def top(
    name: Annotated[str | None, typer.Argument()] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html")] = None,
    address: console.Address = None,
) -> None:
    """Show feeds and their consumers live until Ctrl-C, updated every second; once if stdout is not a terminal.

    Rates and stalls are for the last seconds; [bold]mbaas status[/] shows totals since each consumer joined.

    [bold]samples/s[/]: of the consumer while it trains. [bold]stall[/]: fraction of that time spent waiting for data:
    while prep was computing, while bytes were fetched, or for other consumers, because a slower one must not fall
    behind or another cohort has the staging memory. [bold]done[/]: progress in the feed's epoch.

    Args:
        name: Name of a feed. Default: all feeds.
        html: Also write a page, with each feed's first images, that a browser reloads every second, until Ctrl-C even
            without a terminal.

    Examples:
        mbaas top            [dim]all running feeds[/]
        mbaas top train
        mbaas top train --html train.html    [dim]open train.html in a browser[/]
    """
    console.check_folders(html)
    console.join_cluster(address)
    seen = console.statuses(name, within_s=ANSWER_S)  # outside of the loop: an unknown feed is an error
    windows: dict[str, RateWindow] = defaultdict(RateWindow)
    pictures: dict[str, str] = {}
    with console.updated_page(live=True) as show, suppress(KeyboardInterrupt, FeedNotFoundError):  # the feed may end
        for look in itertools.count():
            began = time.monotonic()
            shown = _snapshots(seen, windows)
            if console.out.is_terminal or look == 0:  # a log file would grow by a page each second
                show(page(shown, lines=console.out.height if console.out.is_terminal else None))
            if html is not None:
                draw_new(seen, pictures)
                write_html(page(shown, lines=None), html, "".join(pictures[feed] for feed in seen if feed in pictures))
            elif not console.out.is_terminal:
                return
            time.sleep(max(0.0, POLL_S - (time.monotonic() - began)))
            seen = console.statuses(name, within_s=ANSWER_S)


def _snapshots(seen: console.Statuses, windows: dict[str, RateWindow]) -> dict[str, Snapshots]:
    shown: dict[str, Snapshots] = {}
    for feed, status in seen.items():
        if isinstance(status, MbaasError):
            shown[feed] = status
        else:
            windows[feed].add(status)
            shown[feed] = status, windows[feed].first
    return shown


def draw_new(seen: console.Statuses, pictures: dict[str, str]) -> None:
    """Draw the first images of feeds that have just appeared: ``pictures``, by feed."""
    from mbaas.coordinator.control import FeedControl
    from mbaas.feed import first_images

    for feed, status in seen.items():
        if feed not in pictures and not isinstance(status, MbaasError):
            with suppress(MbaasError):  # it has just ended, or restarts: the next look draws it
                drawn = first_images(FeedControl.of(feed))
                pictures[feed] = f"<h4>{escape(feed)}</h4>{drawn}" if drawn else ""


def write_html(shown: RenderableType, path: Path, pictures: str = "") -> None:
    """Write a page for browsers, which replaces the last one as a whole; ``pictures`` are HTML."""
    recorder = Console(record=True, file=io.StringIO(), width=HTML_WIDTH, highlight=False)
    recorder.print(shown)
    text = recorder.export_html(code_format="{code}", inline_styles=True)
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(HTML.format(text=text, pictures=pictures))
    written.replace(path)


def recent_report(consumer: ConsumerStatus, before: FeedStatus, over_s: float) -> ConsumerReport:
    """Return a consumer's totals over the ``over_s`` seconds since a snapshot; since it joined, if these are
    unknown.
    """
    for earlier in before.consumers:
        # A loader that joined again under the same name counts from 0.
        if earlier.name == consumer.name and earlier.report.loader == consumer.report.loader:
            is_new = earlier.report != consumer.report
            return consumer.report.since(earlier.report) if is_new or over_s > REPORT_S else consumer.report
    return consumer.report


def page(feeds: Mapping[str, Snapshots], *, lines: int | None) -> RenderableType:
    """Return all feeds by name, stacked.

    If the terminal's ``lines`` have no room for all consumers, those with the most stall are shown; None shows all.
    """
    if not feeds:
        return NO_FEED
    most = None if lines is None else max(LEAST_CONSUMERS, lines // len(feeds) - AROUND_CONSUMERS)
    parts: list[RenderableType] = []
    for name, seen in feeds.items():
        if isinstance(seen, MbaasError):
            words = Text.assemble((name, "bold"), " ", (state_of(seen), "yellow"))
            parts.append(words.append(f" · {seen}", "dim"))
        else:
            parts.append(_feed(*seen, most))
    return console.stack(parts)


def _feed(status: FeedStatus, before: FeedStatus, most: int | None) -> RenderableType:
    reports = {each.name: recent_report(each, before, status.uptime_s - before.uptime_s) for each in status.consumers}
    return Group(headline(status), _figures(status, Flow.between(before, status)), _consumers(status, reports, most))


def _figures(status: FeedStatus, flow: Flow) -> RenderableType:
    over = f"last {seconds(round(flow.over_s))}" if flow.is_recent else "since the start"
    reuse = number(flow.delivered / flow.prepared) if flow.prepared else "-"
    rates = [worker.samples_per_s for worker in status.workers if worker.samples_per_s]
    each = f", {count(sum(rates) / len(rates))}/s each while they prepare" if rates else ""
    workers = f"{status.workers_at_work} of {counted(len(status.workers), 'worker')} at work{each}"
    sources = {"storage": flow.fetched.storage, "disk": flow.fetched.disk, "other nodes": flow.fetched.remote}
    read = ", ".join(f"{name} {rate(came.nbytes / flow.over_s)}" for name, came in sources.items() if came.nbytes)
    hits = percent(flow.fetched.hit_rate) if flow.fetched.all.samples else "-"
    made = f"{count(flow.prepared_per_s)}/s prepared, {count(flow.delivered_per_s)}/s delivered, each {reuse} times"
    staged, cached = bar(status.staged_bytes, status.staging_bytes), bar(status.cached_bytes, status.cache_bytes)
    memory = Text.assemble(
        "staged ", staged, f" {size(status.staged_bytes)} of {size(status.staging_bytes)}  ",
        "cached ", cached, f" {size(status.cached_bytes)} of {size(status.cache_bytes)}",
    )  # fmt: skip
    rows = (
        ("samples", Text.assemble(made, (f"  {over}", "dim"))),
        ("bytes", Text.assemble(read or "nothing read", f", cache hits {hits}", (f"  {workers}", "dim"))),
        ("memory", memory),
    )
    for _, text in rows:  # not a property of the column, or a narrow terminal would also cut the names
        text.no_wrap, text.overflow = True, "ellipsis"
    return console.facts(rows, Column())


def _consumers(status: FeedStatus, reports: Mapping[str, ConsumerReport], most: int | None) -> RenderableType:
    if not status.consumers:
        return Text("  no consumer has joined", "dim")
    by_stall = sorted(status.consumers, key=lambda consumer: -reports[consumer.name].stall_share)
    kept = {consumer.name for consumer in by_stall[:most]}
    shown = [consumer for consumer in status.consumers if consumer.name in kept]
    pipelines = ("pipeline",) if any(consumer.pipeline for consumer in status.consumers) else ()
    table = consumer_table((*COLUMNS[:-1], *pipelines, COLUMNS[-1]), shown, reports)
    table.expand = True
    table.columns[-1].ratio = 1  # it takes the rest of the line, so that a long reason does not squeeze the names
    rest = len(status.consumers) - len(kept)
    return Group(table, Text(f"  and {rest} more with less stall", "dim")) if rest else table
