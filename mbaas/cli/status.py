"""``mbaas status`` shows all feeds of a cluster, one feed, or the history of a part of one."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

from mbaas.cli import console, feed_view
from mbaas.errors import FeedNotFoundError, MbaasError

if TYPE_CHECKING:
    from mbaas.status import FeedStatus


@console.command(console.app, console.FEEDS)
def status(
    name: Annotated[str | None, typer.Argument()] = None,
    as_json: console.AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w")] = False,
    every: Annotated[float, typer.Option(min=0.1)] = 2.0,
    story: Annotated[str | None, typer.Option(metavar="THING")] = None,
    address: console.Address = None,
) -> None:
    """Show the running feeds: consumers, rates, staging, cache, data stalls.

    [bold]stall[/]: fraction of a consumer's time spent waiting for data, and the parts due to fetching bytes and to
    preparing them. [bold]held[/]: blocks of minibatches that a consumer has received and still uses. [bold]exact[/]: in
    its last epoch, the consumer received each sample exactly once.

    [bold]--story[/] takes a name from the tables (a node's name stands for its cache node), or
    "block 17": blocks are counted over all epochs.

    Args:
        name: Name of a feed. Default: a table of all feeds.
        watch: Repeat until Ctrl-C or the feed's end.
        every: Seconds between two updates of --watch.
        story: History of one consumer, prep worker, cache node or block, with times and causes.

    Examples:
        mbaas status
        mbaas status train
        mbaas status train --watch --every 5
        mbaas status train --story trial-3    [dim]its history, with causes[/]
        mbaas status train --json | jq '.consumers\\[] | {name, stall_share}'
    """
    if story is not None and name is None:
        raise typer.BadParameter("needs the name of a feed: mbaas status NAME --story THING", param_hint="--story")
    console.join_cluster(address)
    if story is not None and name is not None:
        _show_story(name, story, as_json=as_json)
        return
    found = console.statuses(name)  # outside of the block: an unknown feed is an error
    windows: dict[str, feed_view.RateWindow] = defaultdict(feed_view.RateWindow)
    with (
        console.updated_page(live=watch) as show,
        suppress(KeyboardInterrupt, FeedNotFoundError),
    ):  # a watched feed may end
        while True:
            if as_json:
                feeds = [to_json(feed, seen) for feed, seen in found.items()]
                console.write_json(feeds if name is None else feeds[0])
            else:
                show(_page(name, found, windows))
            if not watch:
                return
            time.sleep(every)
            found = console.statuses(name)


def _show_story(name: str, thing: str, *, as_json: bool) -> None:
    from mbaas.coordinator.control import FeedControl

    lines = FeedControl.of(name).story(thing)
    if as_json:
        console.write_json(lines)
    else:
        console.out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _page(name: str | None, found: console.Statuses, windows: dict[str, feed_view.RateWindow]) -> RenderableType:
    rows = {
        feed: seen if isinstance(seen, MbaasError) else (seen, windows[feed].add(seen)) for feed, seen in found.items()
    }
    pages = [feed_view.feed(*row) for row in rows.values() if not isinstance(row, MbaasError)]
    return Group(*pages) if pages and name is not None else feed_view.feeds(rows)


def to_json(name: str, status: FeedStatus | MbaasError) -> dict[str, Any]:
    """Return a feed's snapshot, or the error instead, as JSON types: `FeedStatus`, and values derived from it."""
    if isinstance(status, MbaasError):
        from mbaas.status import FeedStatus

        # Every key is always present: unknown lists are empty, other unknown values null.
        unknown = {field.name: _nothing(str(field.type)) for field in fields(FeedStatus)}
        derived = {"state": feed_view.state_of(status), "hit_rate": None, "sharing": None, "waits_for": [str(status)]}
        return {**unknown, "name": name, **derived}
    plain: dict[str, Any] = {"name": name, "state": status.state, **asdict(status), "hit_rate": status.hit_rate}
    sharing, costs = status.sharing, status.costs
    plain["sharing"] = {"times": sharing.times, "trials": len(sharing.received), "reasons": sharing.reasons()}
    plain["costs"] |= {"ratio": costs.ratio, "pays_from": costs.pays_from(status.prepared_samples)}
    for consumer, shown in zip(status.consumers, plain["consumers"], strict=True):
        shown["stall_share"] = consumer.report.stall_share
        shown["exact"] = consumer.last_ledger.exact if consumer.last_ledger is not None else None
    plain["ledgers"] = [{"consumer": who, **asdict(ledger), "exact": ledger.exact} for who, ledger in status.ledgers]
    return plain


def _nothing(kind: str) -> list[Any] | None:
    # Annotations are strings, because `mbaas.status` imports annotations from __future__; its lists are tuples.
    return [] if kind.startswith("tuple") else None
