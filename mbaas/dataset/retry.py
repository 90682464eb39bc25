"""Asking storage again after a fault that may pass: bounded attempts, backoff with full jitter.

`tenacity` does the asking again. What is ours is the decision which error may pass (`mbaas.dataset.faults`) and how
patient a reader is (`RetryPolicy`). A cache node, whose threads must not wait, asks again in its own way
(`mbaas.cache.troubles`).
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

from mbaas.dataset.base import SampleReader
from mbaas.dataset.faults import may_pass
from mbaas.errors import BadSampleError, ConfigError, StorageError
from mbaas.units import counted, seconds

_T = TypeVar("_T")

UNCOUNTED = 1_000_000
"""Attempts of a policy that only its time ends."""


@dataclass(frozen=True)
class RetryPolicy:
    """The number of times that a store is asked again, and how long this may go on.

    The time is what usually ends it, not the number of attempts: a store that throttles or restarts is back within
    seconds, and random pauses say little about how long six attempts take (from 0.5 s to 6 s). With these numbers a
    store has between 15 and 20 s to answer.

    Attributes:
        attempts: the most calls, the first included; at least 1.
        first_pause_s: the first pause is drawn from [0, first_pause_s]; the bound doubles after each attempt.
        max_pause_s: the bound grows no further.
        total_s: no attempt begins later than this after the first one began. An attempt itself is not cut off: it ends
            by its own time limits.

    Raises:
        ConfigError: no attempts, or a negative time.
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
    """The error of a read that failed with every attempt that was allowed.

    Attributes:
        attempts: how many there were.
        elapsed_s: from the first attempt's start to the last one's end.
        last: what the last attempt raised.
    """

    def __init__(self, attempts: int, elapsed_s: float, last: BaseException) -> None:
        super().__init__(f"{counted(attempts, 'attempt')} in {seconds(elapsed_s)}, the last answer was: {last}")
        self.attempts = attempts
        self.elapsed_s = elapsed_s
        self.last = last


def retrying(policy: RetryPolicy = RetryPolicy(), *, sleep: Callable[[float], None] = time.sleep) -> Retrying:
    """Make a caller of functions that asks again as the policy says; threads may share one.

    ``retrying()(function, *arguments)`` returns the function's first result. It raises `GaveUpError` when every allowed
    attempt failed and each might have passed, and what the function raised where no retry can mend it.

    Pauses have full jitter: each is drawn from zero to a bound that doubles, so that readers that failed together do
    not come back together (AWS Architecture Blog, "Exponential Backoff And Jitter", 2015).

    Args:
        sleep: waits for a number of seconds.
    """
    return Retrying(retry=retry_if_exception(may_pass), **_pace(policy), sleep=sleep)


def _pace(policy: RetryPolicy) -> dict[str, Any]:
    return {
        "wait": wait_random_exponential(multiplier=policy.first_pause_s, max=policy.max_pause_s),
        # One limit over attempts and pauses together: a pause that would end too late is not begun.
        "stop": stop_after_attempt(policy.attempts) | stop_before_delay(policy.total_s),
        "retry_error_callback": _give_up,
    }


async def ask_for(
    total_s: float,
    read: Callable[[], Awaitable[_T]],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> _T:
    """Return what ``read`` gives; call it again, with the pauses of `retrying`, as long as storage may give it later.

    Only a `StorageError` says that: any other error that ``read`` raises is raised at once.

    Args:
        total_s: no call begins later than this after the first one; 0: it is called once.

    Raises:
        BadSampleError: storage did not give the sample in that time: says how often it was asked.
    """
    # Not by `may_pass` alone, which takes any time-out for storage's: one may be that of an actor that hangs.
    passes = retry_if_exception(lambda error: isinstance(error, StorageError) and may_pass(error))
    pace = _pace(RetryPolicy(attempts=UNCOUNTED, total_s=total_s))
    retry = AsyncRetrying(retry=passes, **pace, sleep=sleep)

    async def attempt() -> _T:
        return await read()  # tenacity awaits coroutine functions only, and ``read`` may be any function

    try:
        found: _T = await retry(attempt)
    except GaveUpError as gave_up:
        raise _verdict(gave_up) from gave_up.last
    return found


def _give_up(state: RetryCallState) -> NoReturn:
    # tenacity calls this after a failed attempt, so all three are there.
    assert state.outcome is not None
    assert state.seconds_since_start is not None
    last = state.outcome.exception()
    assert last is not None
    raise GaveUpError(state.attempt_number, state.seconds_since_start, last) from last


class PatientReader(SampleReader):
    """A reader that asks another one again as long as what it raises may pass; it holds the caller's thread meanwhile.

    Args:
        inner: the reader.
        retry: how often it is asked, and with which pauses.
    """

    def __init__(self, inner: SampleReader, retry: Retrying | None = None) -> None:
        self._inner, self._retry = inner, retry or retrying()

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        try:
            self._retry(self._inner.read_into, sample_id, buffer)
        except GaveUpError as gave_up:
            raise _verdict(gave_up) from gave_up.last


def _verdict(gave_up: GaveUpError) -> BaseException:
    """Return the error that says of a sample how often it was asked for."""
    last = gave_up.last
    if not isinstance(last, BadSampleError):  # a reader of somebody else's
        return last
    tried = f"{counted(gave_up.attempts, 'attempt')} in {seconds(gave_up.elapsed_s)}"
    return BadSampleError(last.uri, f"{last.reason} ({tried})")
