"""``mbaas status`` shows all feeds of a cluster, or one feed."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live

from mbaas.cli import feed_view
from mbaas.cli.connection import Look, connect, look
from mbaas.cli.console import err, out, write_json
from mbaas.errors import FeedNotFoundError, MbaasError
from mbaas.status import FeedStatus


def status(name: str | None, *, as_json: bool, watch_s: float | None, address: str | None) -> None:
    """Show one feed or all; with ``watch_s``, repeat with this period until Ctrl-C or the feed's end.

    Raises:
        FeedNotFoundError: no feed with this name; the message lists the running feeds.
        ResourceError: no cluster.
    """
    with err.status("connecting to Ray ..."):
        connect(address, start=False)
    seen = look(name)  # outside of the block: an unknown feed is an error
    windows: dict[str, feed_view.RateWindow] = defaultdict(feed_view.RateWindow)
    with (
        _display(watching=watch_s is not None, as_json=as_json) as show,
        suppress(KeyboardInterrupt, FeedNotFoundError),  # a watched feed may end
    ):
        while True:
            show(_json(name, seen) if as_json else _page(name, seen, windows))
            if watch_s is None:
                return
            time.sleep(watch_s)
            seen = look(name)


def tell(name: str, thing: str, *, as_json: bool, address: str | None) -> None:
    """Show the history of one part of a feed; see `mbaas.control.FeedControl.story`.

    Raises:
        FeedNotFoundError: no feed with this name.
        ConfigError: unknown thing; the message lists the known ones.
        ResourceError: no cluster.
    """
    from mbaas.control import FeedControl

    with err.status("connecting to Ray ..."):
        connect(address, start=False)
    lines = FeedControl.of(name).story(thing)
    if as_json:
        write_json(json.dumps(lines))
    else:
        out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _page(name: str | None, found: Look, windows: dict[str, feed_view.RateWindow]) -> RenderableType:
    rows = [
        (feed, seen, windows[feed].add(seen) if isinstance(seen, FeedStatus) else None) for feed, seen in found.items()
    ]
    if name is None:
        return feed_view.feeds(rows)
    pages = [feed_view.feed(seen, rates) for _, seen, rates in rows if isinstance(seen, FeedStatus) and rates]
    return Group(*pages) if pages else feed_view.feeds(rows)


def _json(name: str | None, found: Look) -> str:
    feeds = [to_json(feed, seen) for feed, seen in found.items()]
    return json.dumps(feeds if name is None else feeds[0])


def to_json(name: str, status: FeedStatus | MbaasError | None) -> dict[str, Any]:
    """Return a snapshot as JSON types: the fields of `FeedStatus`, and values derived from them.

    Args:
        name: the feed's.
        status: the snapshot, or the error instead.
    """
    if not isinstance(status, FeedStatus):
        # Every key is always present: unknown lists are empty, other unknown values null.
        unknown = {field.name: _nothing(str(field.type)) for field in fields(FeedStatus)}
        waits_for = [str(status)] if status else []
        return {**unknown, "name": name, "state": feed_view.state_of(status), "hit_rate": None, "waits_for": waits_for}
    plain: dict[str, Any] = {"name": name, "state": status.state, **asdict(status), "hit_rate": status.hit_rate}
    for consumer, shown in zip(status.consumers, plain["consumers"], strict=True):
        shown["stall_share"] = consumer.report.stall_share
        shown["exact"] = consumer.last_ledger.exact if consumer.last_ledger is not None else None
    plain["ledgers"] = [{"consumer": who, **asdict(ledger), "exact": ledger.exact} for who, ledger in status.ledgers]
    return plain


def _nothing(kind: str) -> list[Any] | None:
    # Annotations are strings, because `mbaas.status` imports annotations from __future__; its lists are tuples.
    return [] if kind.startswith("tuple") else None


@contextmanager
def _display(*, watching: bool, as_json: bool) -> Iterator[Callable[[Any], None]]:
    if as_json:
        yield write_json
    elif watching and out.is_terminal:
        with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
            yield lambda page: live.update(page, refresh=True)
    else:
        yield out.print
