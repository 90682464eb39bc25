"""A consumer's calls to coordinators, and its reads from the object store, each with a deadline and errors of mbaas."""

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
"""Pause between two looks whether a coordinator that is restarting has come back."""

CALL_TIMEOUT_S = 60.0
"""How long the coordinator may take for a call for which nobody said how long they will wait."""

ANSWER_S = 10.0
"""The least that any call is given, and what a consumer whose patience is over still waits for an answer: a coordinator
on a busy machine is not one that is silent.
"""


class UnreadableError(Exception):
    """Says that parts of a block cannot be read. Users never meet it: a stream asks for the block again.

    Attributes:
        for_good: whether they never can be; else they may be on their way.
    """

    def __init__(self, *, for_good: bool) -> None:
        super().__init__()
        self.for_good = for_good


def read(refs: list[Any], timeout_s: float) -> list[Arrays]:
    """Return the arrays that ``refs`` stand for: references to objects, and slots of this node's workers.

    Raises:
        UnreadableError: one is not here within ``timeout_s``, or never will be.
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
    """Have Ray copy to this node what ``refs`` stand for, as far as it is made already, and do not wait for it.

    `ray.get` with a deadline alone would not do: when the deadline passes, Ray forgets what has come so far, and on a
    slow link a large block would never arrive. A transfer that `ray.wait` has asked for goes on.
    """
    refs = _of_store(refs)
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=0)


def call(ref: Any, timeout_s: float, what: str) -> Any:
    """Return the result of a call to the coordinator; errors of mbaas come as they were raised there.

    Raises:
        WaitTimeoutError: no answer within ``timeout_s``.
        FeedRestartingError: the coordinator died and is coming back.
        FeedGoneError: the coordinator is gone for good.
    """
    try:
        return answer(ref, timeout_s, what)
    except ray.exceptions.GetTimeoutError:
        late = f"{what}: the feed's coordinator did not answer within {seconds(timeout_s)}"
        raise WaitTimeoutError(": ".join(filter(None, (late, runtime.lost_cluster())))) from None


def answer(ref: Any, timeout_s: float, what: str) -> Any:
    """Do as `call` does, but raise `ray.exceptions.GetTimeoutError` if there is no answer within ``timeout_s``."""
    try:
        return get(ref, timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, MbaasError):
            raise error.cause from None
        raise
    except ray.exceptions.ActorUnavailableError as error:  # a kind of RayActorError, so it has to come first
        raise FeedRestartingError(f"{what}: the feed's coordinator does not answer, it may be restarting") from error
    except ray.exceptions.RayActorError as error:
        reason = runtime.lost_cluster() or "the feed's coordinator is gone; it was stopped or its driver ended"
        raise FeedGoneError(f"{what}: {reason}") from error


def get(refs: Any, timeout_s: float) -> Any:
    """Return what `ray.get` does, and leave nothing alive when it raises.

    `ray.get` leaves a cycle of exception and frames behind: until the next garbage collection that would keep all
    arrays alive which these frames know, and their blocks in staging.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        traceback.clear_frames(error.__traceback__)
        raise


def call_patiently(coordinator: Any, ask: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Return the result of `call`; ask again as long as the coordinator turns out to be starting or restarting.

    Args:
        coordinator: the actor that is called.
        ask: makes a call and returns its reference; the call may be made twice.
        timeout_s: for all of it; but no call is given less than `ANSWER_S`.
        what: for error messages.

    Raises:
        FeedRestartingError: it was still away at the end.
        FeedGoneError: it is gone for good, perhaps with its cluster.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            return call(ask(), max(end - time.monotonic(), ANSWER_S), what)
        except FeedRestartingError as error:
            if time.monotonic() > end:
                # Only now: a head node that is being restarted looks like one that has ended.
                if reason := runtime.lost_cluster():
                    raise FeedGoneError(f"{what}: {reason}") from error.__cause__
                raise FeedRestartingError(f"{error}; waited {seconds(timeout_s)} for it") from error.__cause__
            await_restart(coordinator, end)


def await_restart(coordinator: Any, end: float) -> None:
    """Wait until a coordinator that was restarting answers again, or is gone for good.

    Args:
        coordinator: its actor.
        end: when to give up waiting, by `time.monotonic`.
    """
    # A call that meets a restart hangs for up to two seconds before Ray says so, but one that is made after the return
    # goes through at once. So a new one is made at every look, whatever becomes of those before.
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
    except ray.exceptions.RayActorError:  # the next call hears why
        return False
    return False
