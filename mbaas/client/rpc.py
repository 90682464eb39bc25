"""A consumer's calls to coordinators, with timeouts and mbaas errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from mbaas import runtime
from mbaas.errors import FeedGoneError, FeedRestartingError, MbaasError, WaitTimeoutError
from mbaas.runtime import get
from mbaas.units import seconds

RESTART_LOOK_S = 0.1
"""Pause between two checks of a restarting coordinator, in seconds."""

CALL_TIMEOUT_S = 60.0
"""Timeout in seconds of calls without a timeout set by the caller."""

ANSWER_S = 10.0
"""Shortest timeout of any call, and extra wait for an answer after a consumer's own timeout, in seconds.

A coordinator on a busy node may be slow without being dead.
"""


def call(ref: Any, timeout_s: float, what: str) -> Any:
    """Return the result of a call to the coordinator, or raise the mbaas error raised there.

    Raises:
        WaitTimeoutError: no answer within ``timeout_s``.
        FeedRestartingError: the coordinator died and is restarting.
        FeedGoneError: the coordinator is gone for good.
    """
    try:
        return answer(ref, timeout_s, what)
    except ray.exceptions.GetTimeoutError:
        late = f"{what}: the feed's coordinator did not answer within {seconds(timeout_s)}"
        raise WaitTimeoutError(": ".join(filter(None, (late, runtime.lost_cluster())))) from None


def answer(ref: Any, timeout_s: float, what: str) -> Any:
    """Like `call`, but raise `ray.exceptions.GetTimeoutError` without an answer within ``timeout_s``."""
    try:
        return get(ref, timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, MbaasError):
            raise error.cause from None
        raise
    except ray.exceptions.ActorUnavailableError as error:  # a subclass of RayActorError, so it must come first
        raise FeedRestartingError(f"{what}: the feed's coordinator does not answer, it may be restarting") from error
    except ray.exceptions.RayActorError as error:
        reason = runtime.lost_cluster() or "the feed's coordinator is gone; it was stopped or its driver ended"
        raise FeedGoneError(f"{what}: {reason}") from error


def call_patiently(coordinator: Any, ask: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Return the result of `call`, repeating it while the coordinator is starting or restarting.

    Args:
        ask: makes a call and returns its reference; the call may be made twice.
        timeout_s: total timeout in seconds; each call gets at least `ANSWER_S`.

    Raises:
        FeedRestartingError: the coordinator was still away at the timeout.
        FeedGoneError: it is gone for good, perhaps with its cluster.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            return call(ask(), max(end - time.monotonic(), ANSWER_S), what)
        except FeedRestartingError as error:
            if time.monotonic() > end:
                # Only now: a restarting head node looks like one that has ended.
                if reason := runtime.lost_cluster():
                    raise FeedGoneError(f"{what}: {reason}") from error.__cause__
                raise FeedRestartingError(f"{error}; waited {seconds(timeout_s)} for it") from error.__cause__
            await_restart(coordinator, end)


def await_restart(coordinator: Any, end: float) -> None:
    """Wait until a restarting coordinator answers or is gone for good, or until the time ``end`` (`time.monotonic`)."""
    # A call during a restart hangs for up to two seconds before Ray reports it, but a call made after the restart
    # succeeds at once. So make a new call at every check.
    looks: list[Any] = []
    while time.monotonic() < end:
        looks.append(coordinator.__ray_ready__.remote())
        time.sleep(RESTART_LOOK_S)
        answered, looks = ray.wait(looks, num_returns=len(looks), timeout=0)
        if not all(map(_met_restart, answered)):
            return


def _met_restart(answered: Any) -> bool:
    try:
        get(answered, CALL_TIMEOUT_S)
    except ray.exceptions.ActorUnavailableError:
        return True
    except ray.exceptions.RayActorError:  # the next call raises the reason
        return False
    return False
