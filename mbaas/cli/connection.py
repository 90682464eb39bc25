"""Find and join the Ray cluster of a command."""

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
"""Feeds and their snapshots; for a feed that is starting, ending or silent, the error instead."""

REACH_TIMEOUT_S = 3.0
"""Connection timeout of a cluster's head; Ray itself would try for 20 s."""

_TRIES = ("RAY_NUM_REDIS_GET_RETRIES", "5")
"""Environment of a process that joins a cluster and never starts one: Ray tries for 5 s instead of 20 s."""


def is_named(address: str | None) -> bool:
    """Return whether the user named a cluster, by ``--address`` or ``RAY_ADDRESS``."""
    return (address or os.environ.get("RAY_ADDRESS") or "auto") != "auto"


def connect(address: str | None, *, start: bool) -> None:
    """Connect this process to a cluster; with ``start``, start one if none is running here.

    Args:
        address: "host:port" of the head; None: environment variable ``RAY_ADDRESS``, else the cluster of this machine.
        start: start an embedded cluster if there is none. A named cluster must be running.

    Raises:
        ConfigError: the address is not "host:port".
        ResourceError: no cluster answers there.
    """
    named = address or os.environ.get("RAY_ADDRESS") or "auto"
    if named != "auto":
        _check_reachable(named)
        # In the environment, so that child processes join the same cluster.
        os.environ["RAY_ADDRESS"] = named
    # Not if a cluster may be started here, because its processes would inherit the setting.
    if named != "auto" or not start:
        os.environ.setdefault(*_TRIES)
    from mbaas import runtime

    try:
        runtime.ensure_ray(start=start)
    except ResourceError as error:
        if not isinstance(error.__context__, ConnectionError):
            raise
        # Ray has one class for "no cluster" and "no answer"; only the messages differ.
        is_gone = isinstance(error.__context__, runtime.NoAnswerError)  # its address is still in Ray's folder
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
    """Return whether a feed was stopped, and did not die with its coordinator."""
    return not isinstance(error, FeedGoneError) and isinstance(error.__cause__, FeedGoneError)


def snapshot(name: str, *, within_s: float | None = None) -> FeedStatus | MbaasError:
    """Return a feed's status, or the error if it is starting, ending or silent.

    Args:
        name: the feed's.
        within_s: time limit for the answer; None: the time limit of a starting feed.
    """
    import mbaas

    try:
        feed = mbaas.connect(name)
        return feed.status() if within_s is None else feed.status(timeout_s=within_s)
    except (FeedNotFoundError, FeedFailedError, WaitTimeoutError) as error:
        return error


def look(name: str | None, *, within_s: float | None = None) -> Look:
    """Return the status of one feed, or of all.

    Raises:
        FeedNotFoundError: no feed with this name; the message lists the running feeds.
    """
    import mbaas

    found = mbaas.feeds() if name is None else [mbaas.connect(name)]
    return {feed.name: snapshot(feed.name, within_s=within_s) for feed in found}
