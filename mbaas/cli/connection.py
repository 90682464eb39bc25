"""Finds the Ray cluster that a command talks to."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, TypeAlias

from mbaas.errors import (
    ConfigError,
    FeedFailedError,
    FeedGoneError,
    FeedNotFoundError,
    MbaasError,
    ResourceError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from mbaas.status import FeedStatus

Look: TypeAlias = "dict[str, FeedStatus | MbaasError]"
"""Feeds and their snapshots; of a feed that starts, ends or is silent, the error that says why it has none."""

REACH_TIMEOUT_S = 3.0
"""A head that does not take a connection within this time is not there; Ray itself would try for 20 s."""

_TRIES = ("RAY_NUM_REDIS_GET_RETRIES", "5")
"""The environment of a process that joins a cluster and never starts one: Ray tries for 5 s instead of 20 s."""


def is_named(address: str | None) -> bool:
    """Return whether somebody said which cluster is meant: by ``--address``, or by ``RAY_ADDRESS``."""
    return (address or os.environ.get("RAY_ADDRESS") or "auto") != "auto"


def connect(address: str | None, *, start: bool) -> None:
    """Connect this process to a cluster, or with ``start`` to one of its own if none runs here.

    Args:
        address: "host:port" of the head; None: environment variable ``RAY_ADDRESS``, else the cluster of this machine.
        start: start an embedded cluster if there is none. One that was named must be there.

    Raises:
        ConfigError: the address is not "host:port".
        ResourceError: there is no cluster there.
    """
    named = address or os.environ.get("RAY_ADDRESS") or "auto"
    if named != "auto":
        _check_reachable(named)
        # Told by the environment, so that programs which this one starts join the same cluster.
        os.environ["RAY_ADDRESS"] = named
    # Not where a cluster may be started here: the processes of that cluster would have the setting, too.
    if named != "auto" or not start:
        os.environ.setdefault(*_TRIES)
    from mbaas import runtime

    try:
        runtime.ensure_ray(start=start)
    except ResourceError as error:
        if not isinstance(error.__context__, ConnectionError):
            raise
        # Ray has one class for "there is none" and for "it does not answer"; only its words tell them apart.
        is_gone = isinstance(error.__context__, runtime.NoAnswerError)  # it left its address in Ray's folder
        if named == "auto" and (is_gone or "find any running" in str(error.__context__)):
            raise ResourceError(_none_at(named)) from None
        reason = _first_line(error.__context__)
        raise ResourceError(f"cannot join the Ray cluster at {named}: {reason}; {runtime.ABOUT_TOKENS}") from None
    except (ConnectionError, RuntimeError) as error:  # RuntimeError: another version of Ray or Python
        raise ResourceError(f"cannot join the Ray cluster at {named}: {_first_line(error)}") from None


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0]


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ConfigError(
            f"the address of a cluster must be host:port of its head, such as 10.0.0.1:6379, got {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S).close()
    except (OSError, OverflowError):
        raise ResourceError(_none_at(address)) from None


def _none_at(address: str) -> str:
    if address != "auto":
        return f"no Ray cluster answers at {address}; check --address, or RAY_ADDRESS if that is where it comes from"
    return (
        "no Ray cluster is running on this machine, so no feed is; `mbaas serve` starts one if need be, --address or "
        "RAY_ADDRESS names one elsewhere"
    )


def ended_on_purpose(error: FeedFailedError) -> bool:
    """Return whether a feed is gone because somebody stopped it; its coordinator may have died instead."""
    return not isinstance(error, FeedGoneError) and isinstance(error.__cause__, FeedGoneError)


def snapshot(name: str, *, within_s: float | None = None) -> FeedStatus | MbaasError:
    """Ask a feed for its status; the error that says why it has none, if it starts or ends just now, or is silent.

    Args:
        name: the feed's.
        within_s: how long it may take to answer; None: as long as a feed takes that starts.
    """
    import mbaas

    try:
        feed = mbaas.connect(name)
        return feed.status() if within_s is None else feed.status(timeout_s=within_s)
    except (FeedNotFoundError, FeedFailedError, WaitTimeoutError) as error:
        return error


def look(name: str | None, *, within_s: float | None = None) -> Look:
    """Ask one feed, or all that run, for their status.

    Raises:
        FeedNotFoundError: there is none of that name; the message lists those that run.
    """
    import mbaas

    found = mbaas.feeds() if name is None else [mbaas.connect(name)]
    return {feed.name: snapshot(feed.name, within_s=within_s) for feed in found}
