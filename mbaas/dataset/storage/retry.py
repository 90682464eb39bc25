"""Retries after transient storage errors: bounded attempts, exponential backoff with full jitter.

`tenacity` implements the retries, `mbaas.dataset.storage.faults` classifies errors, and `RetryPolicy` sets the limits.
A cache node, whose threads must not wait, has its own retries (`mbaas.cache.retries`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
from mbaas.errors import BadSampleError, ConfigError, StorageError

_T = TypeVar("_T")

UNCOUNTED = 1_000_000
"""Attempts of a policy that only ends by time."""


@dataclass(frozen=True)
class RetryPolicy:
    """Limits on the number and total time of attempts.

    Usually the time is the limit. With these defaults a store has 15 to 20 s to respond.

    Attributes:
        attempts: maximum number of calls, including the first; at least 1.
        first_pause_s: the first pause is drawn from [0, first_pause_s]; the bound doubles after each attempt.
        max_pause_s: upper limit of the bound.
        total_s: no attempt begins later than this after the start of the first. Attempts are not interrupted; they have
            their own time limits.
    """

    attempts: int = 20
    first_pause_s: float = 0.2
    max_pause_s: float = 5.0
    total_s: float = 20.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts must be at least 1, got {self.attempts}")
        for name in ("first_pause_s", "max_pause_s", "total_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")


class GaveUpError(Exception):
    """A read that failed in all allowed attempts within ``elapsed_s``; ``last`` is the last exception."""

    def __init__(self, attempts: int, elapsed_s: float, last: BaseException) -> None:
        super().__init__(f"{counted(attempts, 'attempt')} in {seconds(elapsed_s)}, the last answer was: {last}")
        self.attempts = attempts
        self.elapsed_s = elapsed_s
        self.last = last


def retrying(policy: RetryPolicy = RetryPolicy(), *, sleep: Callable[[float], None] = time.sleep) -> Retrying:
    """Return a caller of functions that retries according to the policy. Safe to share between threads.

    ``retrying()(function, *arguments)`` returns the function's first result, or raises `GaveUpError` when every allowed
    attempt failed with a transient error. Any other error is raised at once. Pauses have full jitter, so that readers
    that failed together do not retry together (AWS Architecture Blog, "Exponential Backoff And Jitter", 2015).
    """
    return Retrying(retry=retry_if_exception(may_pass), **_pace(policy), sleep=sleep)


def _pace(policy: RetryPolicy) -> dict[str, Any]:
    return {
        "wait": wait_random_exponential(multiplier=policy.first_pause_s, max=policy.max_pause_s),
        # One limit for attempts and pauses together: a pause that would end too late is not begun.
        "stop": stop_after_attempt(policy.attempts) | stop_before_delay(policy.total_s),
        "retry_error_callback": _give_up,
    }


async def retry_async(
    total_s: float,
    read: Callable[[], Awaitable[_T]],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> _T:
    """Await ``read()`` and return its result; retry with the pauses of `retrying` after a transient `StorageError`.

    No call begins later than ``total_s`` after the first; 0 means a single call. Any other exception is raised at once.

    Raises:
        BadSampleError: all attempts failed; the message contains their number.
    """
    # `may_pass` alone would treat any timeout as a storage error, even one of a hanging actor.
    passes = retry_if_exception(lambda error: isinstance(error, StorageError) and may_pass(error))
    pace = _pace(RetryPolicy(attempts=UNCOUNTED, total_s=total_s))
    retry = AsyncRetrying(retry=passes, **pace, sleep=sleep)

    async def attempt() -> _T:
        return await read()  # tenacity only awaits coroutine functions, and ``read`` may be any callable

    try:
        found: _T = await retry(attempt)
    except GaveUpError as gave_up:
        raise _error_of(gave_up) from gave_up.last
    return found


def _give_up(state: RetryCallState) -> NoReturn:
    # tenacity calls this after a failed attempt, so all three are set.
    assert state.outcome is not None
    assert state.seconds_since_start is not None
    last = state.outcome.exception()
    assert last is not None
    raise GaveUpError(state.attempt_number, state.seconds_since_start, last) from last


class PatientReader(SampleReader):
    """Retries transient errors of the reader ``inner``; the caller's thread waits meanwhile."""

    def __init__(self, inner: SampleReader, retry: Retrying | None = None) -> None:
        self._inner, self._retry = inner, retry or retrying()

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        try:
            self._retry(self._inner.read_into, sample_id, buffer)
        except GaveUpError as gave_up:
            raise _error_of(gave_up) from gave_up.last


def _error_of(gave_up: GaveUpError) -> BaseException:
    last = gave_up.last
    if not isinstance(last, BadSampleError):  # a third-party reader
        return last
    tried = f"{counted(gave_up.attempts, 'attempt')} in {seconds(gave_up.elapsed_s)}"
    return BadSampleError(last.uri, f"{last.reason} ({tried})")
