"""A consumer's calls to coordinators and reads from the object store, with timeouts and mbaas errors."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import ray

from mbaas import runtime, slots
from mbaas.errors import FeedGoneError, FeedRestartingError, MbaasError, WaitTimeoutError
from mbaas.fields import Arrays
from mbaas.messages import Slot
from mbaas.units import seconds

RESTART_LOOK_S = 0.1
"""Pause between two checks of a restarting coordinator, in seconds."""

CALL_TIMEOUT_S = 60.0
"""Timeout in seconds of calls without a timeout set by the caller."""

ANSWER_S = 10.0
"""Shortest timeout of any call, and extra wait for an answer after a consumer's own timeout, in seconds.

A coordinator on a busy node may be slow without being dead.
"""


class UnreadableError(Exception):
    """Parts of a block are lost (``for_good``) or late. Users never see this error: streams request the block again."""

    def __init__(self, *, for_good: bool) -> None:
        super().__init__()
        self.for_good = for_good


def read(refs: list[Any], timeout_s: float) -> list[Arrays]:
    """Return the arrays for ``refs``: object references, and slots of this node's workers.

    Raises:
        UnreadableError: data is not available within ``timeout_s``, or is lost.
    """
    in_store = _of_store(refs)
    try:
        values = iter(get(in_store, timeout_s) if in_store else [])
    except ray.exceptions.GetTimeoutError:
        raise UnreadableError(for_good=False) from None
    except ray.exceptions.ObjectLostError:
        raise UnreadableError(for_good=True) from None
    return [_in_slot(ref) if isinstance(ref, Slot) else next(values) for ref in refs]


def _in_slot(slot: Slot) -> Arrays:
    arrays = slots.arrays_in(slot)
    if arrays is None:
        raise UnreadableError(for_good=True)
    return arrays


def _of_store(refs: list[Any]) -> list[Any]:
    return [ref for ref in refs if not isinstance(ref, Slot)]


def bring(refs: list[Any]) -> None:
    """Have Ray copy existing objects in ``refs`` to this node, without waiting.

    `ray.get` with a timeout is not enough: at the timeout Ray discards the received bytes, so a large block would never
    arrive over a slow link. A transfer started by `ray.wait` continues.
    """
    refs = _of_store(refs)
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=0)


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


def get(refs: Any, timeout_s: float) -> Any:
    """Call `ray.get`, and keep nothing alive if it raises.

    `ray.get` leaves a reference cycle of exception and frames. Until the next garbage collection the cycle would keep
    these frames' arrays alive, and their blocks in staging.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        traceback.clear_frames(error.__traceback__)
        raise


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
