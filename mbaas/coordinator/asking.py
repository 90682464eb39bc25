"""Waits for other actors' answers, with timeouts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray

from mbaas.coordinator.background import InternalErrors


class BugReports:
    """The process-wide collector of bugs found in answers; None in a process without a coordinator."""

    errors: InternalErrors | None = None


def report_bugs_to(errors: InternalErrors) -> None:
    """Set the collector for bugs that `answer_or_none` meets in this process.

    It is process-wide, like `sys.excepthook`, because a process has one coordinator.
    """
    BugReports.errors = errors


async def is_set_within(event: asyncio.Event, within_s: float) -> bool:
    """Wait until an event is set or the timeout passes. Return whether it is set. A set event costs no task."""
    if not event.is_set():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(event.wait(), within_s)
    return event.is_set()


async def answer(ref: Any, within_s: float) -> Any:
    """Wait for an actor's answer.

    Raises:
        asyncio.TimeoutError: no answer in time. In Python 3.10 this is not the built-in `TimeoutError`.
        RayError: the actor is gone, or its method raised.
    """
    return await asyncio.wait_for(ref, within_s)


async def answer_or_none(ref: Any, within_s: float, *, is_reported: bool = False) -> Any:
    """Wait for an actor's answer; return None after a timeout or an error. A bug in the call is reported.

    ``is_reported`` is True if bugs in the call are reported elsewhere, so that they are not counted twice.
    """
    try:
        return await answer(ref, within_s)
    except (asyncio.TimeoutError, ray.exceptions.RayError) as error:
        # A method's exception is both of its own class and a Ray error, so a timeout inside the method is not a late
        # answer.
        if isinstance(error, ray.exceptions.RayError) and not is_reported and BugReports.errors is not None:
            BugReports.errors.report_bug(error, "in a worker or cache node")
        return None
