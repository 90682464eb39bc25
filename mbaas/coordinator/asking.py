"""Waiting for what another actor answers, but not for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import ray


async def answer(ref: Any, within_s: float) -> Any:
    """Wait for an actor's answer.

    Raises:
        asyncio.TimeoutError: there is none in time. In Python 3.10 that is not the built-in `TimeoutError`.
        RayError: the actor is gone, or its method raised.
    """
    return await asyncio.wait_for(ref, within_s)


async def answer_or_none(ref: Any, within_s: float) -> Any:
    """Wait for an actor's answer; None if there is none in time, or none to be had."""
    try:
        return await answer(ref, within_s)
    except (asyncio.TimeoutError, ray.exceptions.RayError):
        return None
