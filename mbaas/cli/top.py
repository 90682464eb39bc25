"""``mbaas top`` shows feeds live: an update per second, and each trial's recent activity."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import RenderableType
from rich.live import Live

from mbaas.cli import top_view
from mbaas.cli.connection import Look, connect, look
from mbaas.cli.console import err, out
from mbaas.cli.feed_view import RateWindow
from mbaas.errors import FeedNotFoundError
from mbaas.status import FeedStatus

LOOK_S = 1.0
"""Period of updates."""

ANSWER_S = 10.0
"""Time without an answer after which a feed is shown as silent."""


def top(name: str | None, *, address: str | None) -> None:
    """Show one feed or all until Ctrl-C or the feed's end; once if stdout is not a terminal.

    Raises:
        FeedNotFoundError: no feed with this name; the message lists the running feeds.
        ResourceError: no cluster.
    """
    with err.status("connecting to Ray ..."):
        connect(address, start=False)
        seen = look(name, within_s=ANSWER_S)  # outside of the loop: an unknown feed is an error
    windows: dict[str, RateWindow] = defaultdict(RateWindow)
    with _display() as show, suppress(KeyboardInterrupt, FeedNotFoundError):  # the feed may end
        while True:
            began = time.monotonic()
            show(_page(seen, windows))
            if not out.is_terminal:
                return
            time.sleep(max(0.0, LOOK_S - (time.monotonic() - began)))
            seen = look(name, within_s=ANSWER_S)


def _page(seen: Look, windows: dict[str, RateWindow]) -> RenderableType:
    shown: list[top_view.Seen] = []
    for feed, status in seen.items():
        if isinstance(status, FeedStatus):
            windows[feed].add(status)
            shown.append((feed, status, windows[feed].first))
        else:
            shown.append((feed, status, None))
    return top_view.page(shown, lines=out.height if out.is_terminal else None)


@contextmanager
def _display() -> Iterator[Callable[[RenderableType], None]]:
    if not out.is_terminal:
        yield out.print
        return
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda page: live.update(page, refresh=True)
