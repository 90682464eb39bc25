"""Waiting for what another actor answers, but not for ever."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray

from mbaas.coordinator.background import InternalErrors


class BugReports:
    """Where bugs are reported that answers bring.

    Attributes:
        errors: those of the coordinator whose process this is; None in a process without one.
    """

    errors: InternalErrors | None = None


def report_bugs_to(errors: InternalErrors) -> None:
    """Have the bugs that `answer_or_none` meets in this process reported.

    For the process, not for each call, like `sys.excepthook`: a process has one coordinator, and who asks goes on in
    any case, so it need not know where bugs are reported.
    """
    BugReports.errors = errors


async def is_set_within(event: asyncio.Event, within_s: float) -> bool:
    """Wait until an event is set, but not for ever; return whether it is. One that is set takes no task of its own."""
    if not event.is_set():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(event.wait(), within_s)
    return event.is_set()


async def answer(ref: Any, within_s: float) -> Any:
    """Wait for an actor's answer.

    Raises:
        asyncio.TimeoutError: there is none in time. In Python 3.10 that is not the built-in `TimeoutError`.
        RayError: the actor is gone, or its method raised.
    """
    return await asyncio.wait_for(ref, within_s)


async def answer_or_none(ref: Any, within_s: float, *, is_reported: bool = False) -> Any:
    """Wait for an actor's answer; None if there is none in time, or none to be had. A bug that it meets is reported.

    Args:
        ref: what the call returned.
        within_s: how long to wait.
        is_reported: whether somebody else reports the bugs that the call meets; else each would be counted twice.
    """
    try:
        return await answer(ref, within_s)
    except (asyncio.TimeoutError, ray.exceptions.RayError) as error:
        # What a method raised is both of its own kind and of Ray's; a time-out of its own is no late answer.
        if isinstance(error, ray.exceptions.RayError) and not is_reported and BugReports.errors is not None:
            BugReports.errors.report_bug(error, "in a worker or cache node")
        return None
