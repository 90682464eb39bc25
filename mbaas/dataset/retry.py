"""Trying again what a passing fault of a remote store broke: bounded attempts, backoff with full jitter.

"Full jitter" draws each pause from [0, bound) and doubles the bound, so that callers that failed together do
not come back together (AWS Architecture Blog, "Exponential Backoff And Jitter", 2015).
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import pyarrow.fs

from mbaas.errors import ConfigError

T = TypeVar("T")

_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_STATUS = re.compile(r"HTTP status (\d{3})")
_CODE = re.compile(r"AWS Error ([A-Z0-9_]+)")
_PASSING_STATUS = (408, 425, 429)
_FINAL_CODES = frozenset(
    [
        "ACCESS_DENIED",
        "AUTH_FAILURE",
        "CLIENT_SIGNING_FAILURE",
        "EXPIRED_TOKEN",
        "INCOMPLETE_SIGNATURE",
        "INVALID_ACCESS_KEY_ID",
        "INVALID_ACTION",
        "INVALID_CLIENT_TOKEN_ID",
        "INVALID_OBJECT_STATE",
        "INVALID_PARAMETER_COMBINATION",
        "INVALID_PARAMETER_VALUE",
        "INVALID_QUERY_PARAMETER",
        "INVALID_SIGNATURE",
        "MALFORMED_QUERY_STRING",
        "MISSING_ACTION",
        "MISSING_AUTHENTICATION_TOKEN",
        "MISSING_PARAMETER",
        "NO_SUCH_BUCKET",
        "NO_SUCH_KEY",
        "NOT_INITIALIZED",
        "OPT_IN_REQUIRED",
        "RESOURCE_NOT_FOUND",
        "SIGNATURE_DOES_NOT_MATCH",
        "UNRECOGNIZED_CLIENT",
        "USER_AGENT_REQUIRED",
        "VALIDATION",
    ]
)


def may_pass(error: Exception) -> bool:
    """Whether the same read may succeed a little later.

    An HTTP status decides if the error tells one (5xx, 408, 425 and 429 pass), then the name that the AWS SDK
    gives it. Anything else of an `OSError` (a reset, a timeout, no route) may pass; what says that the file is
    missing, forbidden or a folder does not.
    """
    if not isinstance(error, OSError) or isinstance(error, _FINAL):
        return False
    if status := _STATUS.search(str(error)):
        return int(status[1]) >= 500 or int(status[1]) in _PASSING_STATUS
    code = _CODE.search(str(error))
    return code is None or code[1] not in _FINAL_CODES


def s3_attempts(filesystem: pyarrow.fs.FileSystem, attempts: int) -> pyarrow.fs.FileSystem:
    """The same S3 file system, whose AWS SDK sends each request at most so often; others as they are.

    The SDK retries below us, and what it does unasked differs (pyarrow 26, measured): a file system made from
    a URI asks again every 200 ms for 6 s, one made by `S3FileSystem(...)`, or that went through a pickle, three
    times within up to 3 s. Retries on two levels multiply, to minutes for one sample. So each caller chooses one
    level: reads retry themselves, since only here all attempts and pauses are counted against one limit, and ask
    for one attempt; a listing, which is one call but many requests, leaves it to the SDK.
    """
    if not isinstance(filesystem, getattr(pyarrow.fs, "S3FileSystem", ())):
        return filesystem
    # What a pickle would hold is the only way to learn a file system's options.
    options = cast("dict[str, Any]", filesystem.__reduce__()[1][0])
    strategy = pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=attempts)
    return pyarrow.fs.S3FileSystem(**options, retry_strategy=strategy)


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how patiently.

    Attributes:
        attempts: the most calls, the first included; at least 1.
        first_pause_s: the first pause is drawn from [0, first_pause_s); the bound doubles after each attempt.
        max_pause_s: the bound grows no further.
        total_s: no attempt begins later than so long after the first one. An attempt itself is not cut off:
            it ends by its own time limits.

    Raises:
        ConfigError: no attempts, or a negative time.
    """

    attempts: int = 6
    first_pause_s: float = 0.2
    max_pause_s: float = 5.0
    total_s: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts must be at least 1, got {self.attempts}")
        for name in ("first_pause_s", "max_pause_s", "total_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    def pause_s(self, failures: int, chance: float) -> float:
        """The pause after so many failures, at least 1, for `chance` in [0, 1)."""
        # 2**63 is past every bound; without the cap a float would overflow after a thousand failures.
        return chance * min(self.max_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, 63))


class GaveUpError(Exception):
    """No further attempt was allowed.

    Attributes:
        attempts: how many there were.
        elapsed_s: from the first attempt's start to the last one's end.
        last: what the last attempt raised.
    """

    def __init__(self, attempts: int, elapsed_s: float, last: Exception) -> None:
        super().__init__(f"{attempts} attempts in {elapsed_s:.1f} s, the last answer was: {last}")
        self.attempts = attempts
        self.elapsed_s = elapsed_s
        self.last = last


class Retry:
    """Calls with retries. Threads may share one.

    Args:
        policy: how often.
        chances: where jitter is drawn from. The default is seeded by the operating system: machines that
            draw the same pauses would come back together.
        sleep: waits so many seconds.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        policy: RetryPolicy = RetryPolicy(),  # frozen
        *,
        chances: random.Random | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._chances = chances or random.Random()
        self._sleep = sleep
        self._clock = clock

    def call(self, attempt: Callable[[], T]) -> T:
        """The first result that `attempt` returns.

        Raises:
            GaveUpError: every allowed attempt failed, and each might have passed.
            Exception: what `attempt` raised and no retry can mend, as it is.
        """
        begun = self._clock()
        for failures in range(1, self._policy.attempts + 1):
            try:
                return attempt()
            except Exception as error:
                if not may_pass(error):
                    raise
                pause_s = self._policy.pause_s(failures, self._chances.random())
                elapsed_s = self._clock() - begun
                if failures == self._policy.attempts or elapsed_s + pause_s > self._policy.total_s:
                    raise GaveUpError(failures, elapsed_s, error) from error
            self._sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")
