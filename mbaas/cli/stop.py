"""``mbaas stop``: end a feed and wait until it is gone."""

from __future__ import annotations

import time

from mbaas.cli.cluster import connect
from mbaas.cli.console import err, line, out, plain
from mbaas.errors import WaitTimeoutError

GONE_TIMEOUT_S = 30.0
GONE_LOOK_S = 0.05


def stop(name: str, *, address: str | None) -> None:
    """End feed ``name``; its name is free when this returns.

    Raises:
        FeedNotFoundError: there is none of that name; the message lists those that run.
        WaitTimeoutError: it is still there after `GONE_TIMEOUT_S`.
    """
    with err.status("connecting to Ray ..."):
        connect(address, start=False)
    import mbaas

    with err.status(plain(f"stopping feed {name!r} ...")):
        mbaas.stop(name)
        _wait_until_gone(name)
    line(out, f"feed {name!r} is stopped")


def _wait_until_gone(name: str) -> None:
    from mbaas import runtime

    deadline = time.monotonic() + GONE_TIMEOUT_S
    while runtime.find_coordinator(name) is not None:
        if time.monotonic() > deadline:
            raise WaitTimeoutError(
                f"feed {name!r} was told to stop and is still there after {GONE_TIMEOUT_S:g} s; try again"
            )
        time.sleep(GONE_LOOK_S)
