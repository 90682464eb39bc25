"""The history of a block, consumer, worker or cache node of a feed; see `mbaas.core.story`."""

from __future__ import annotations

import time

from mbaas.core.story import Stories, names_meant, shown_name, unknown_thing


def story_of(staging: Stories, supervisor: Stories, thing: str) -> list[str]:
    """Return the history of a thing, oldest line first.

    ``thing`` is a block ("block 17"), or the name of a consumer, a worker or a cache node. The supervisor has the
    history of cache nodes, and of workers before the staging core gets them.

    Raises:
        ConfigError: the thing is unknown; the message lists known names.
    """
    names = supervisor.names()
    lines = [line for name in names_meant(thing, names) for line in supervisor.lines(name, _time_of_day)]
    staged = staging.lines(thing, _time_of_day)
    if not lines and not staged:
        raise unknown_thing(thing, dict.fromkeys((*staging.names(), *map(shown_name, names))))
    if lines and staged:
        lines = ["as the supervisor saw it:", *lines, "as the staging core saw it:"]
    return lines + staged


def _time_of_day(now: float) -> str:
    seconds = time.time() - time.monotonic() + now
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"
