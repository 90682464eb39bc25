"""Retries after transient storage errors: bounded attempts, exponential backoff with full jitter.

`tenacity` implements the retries, and `mbaas.dataset.storage.faults` classifies errors.
A cache node, whose threads must not wait, has its own retries (`mbaas.cache.read_pool`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from mbaas.base.units import counted, seconds
from mbaas.dataset.base import SampleReader
from mbaas.dataset.storage.faults import may_pass
from mbaas.errors import BadSampleError, StorageError

_T = TypeVar("_T")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 5.0
"""A pause is drawn from [0, bound]: the bound of the first one, which doubles after each attempt, and its limit."""

ATTEMPTS, TOTAL_S = 20, 20.0
"""Default limits. Usually the time is the limit: a store has 15 to 20 s to respond."""


def retrying(
    *, attempts: int = ATTEMPTS, total_s: float = TOTAL_S, sleep: Callable[[float], None] = time.sleep
) -> Retrying:
    """Return a caller of functions that retries after transient errors. Safe to share between threads.

    ``retrying()(function, *arguments)`` returns the function's first result. It gives up after ``attempts`` failed
    calls, or if another call would begin later than ``total_s`` after the first, and raises the last error; a
    `BadSampleError` then contains the number of attempts. Calls are not interrupted. Any other error is raised at once.
    Pauses have full jitter, so that readers that failed together do not retry together (AWS Architecture Blog,
    "Exponential Backoff And Jitter", 2015).
    """
    stop = stop_after_attempt(attempts) | stop_before_delay(total_s)
    return Retrying(retry=retry_if_exception(may_pass), stop=stop, sleep=sleep, **_PACE)


async def retry_async(
    total_s: float, read: Callable[[], Awaitable[_T]], *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> _T:
    """Await ``read()`` and return its result; retry with the pauses of `retrying` after a transient `StorageError`.

    No call begins later than ``total_s`` after the first; 0 means a single call. Any other exception is raised at once.

    Raises:
        BadSampleError: all attempts failed; the message contains their number.
    """
    # `may_pass` alone would treat any timeout as a storage error, even one of a hanging actor.
    passes = retry_if_exception(lambda error: isinstance(error, StorageError) and may_pass(error))
    retry = AsyncRetrying(retry=passes, stop=stop_before_delay(total_s), sleep=sleep, **_PACE)

    async def attempt() -> _T:
        return await read()  # tenacity only awaits coroutine functions, and ``read`` may be any callable

    found: _T = await retry(attempt)
    return found


def _give_up(state: RetryCallState) -> NoReturn:
    # tenacity calls this after a failed attempt, so all three are set.
    assert state.outcome is not None
    assert state.seconds_since_start is not None
    last = state.outcome.exception()
    assert last is not None
    if not isinstance(last, BadSampleError):  # a third-party reader
        raise last
    tried = f"{counted(state.attempt_number, 'attempt')} in {seconds(state.seconds_since_start)}"
    raise BadSampleError(last.uri, f"{last.reason} ({tried})") from last


_PACE: dict[str, Any] = {
    "wait": wait_random_exponential(multiplier=FIRST_PAUSE_S, max=MAX_PAUSE_S),
    "retry_error_callback": _give_up,
}


class PatientReader(SampleReader):
    """Retries transient errors of the reader ``inner``; the caller's thread waits meanwhile."""

    def __init__(self, inner: SampleReader, retry: Retrying | None = None) -> None:
        self._inner, self._retry = inner, retry or retrying()

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        self._retry(self._inner.read_into, sample_id, buffer)
