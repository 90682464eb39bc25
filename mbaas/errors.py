"""Every error that mbaas raises on purpose.

::

    MbaasError
    ├── ConfigError            an invalid argument, option or pipeline (also a ValueError)
    ├── DatasetError           a folder or URI that is missing, empty or cannot be listed
    ├── BadSampleError         one sample that cannot be read or prepared; contains its URI and the reason
    ├── PrepFailedError        samples on which prep workers repeatedly died or hit a bug
    ├── FeedNotFoundError      no feed with that name runs on this cluster
    ├── FeedExistsError        a feed with that name is already running
    ├── FeedFailedError        the feed stopped serving; contains the cause
    │   ├── FeedRestartingError    its coordinator is starting or restarting; loaders wait automatically
    │   └── FeedGoneError          the feed or its program ended; loaders wait for a feed restart, unless it was stopped
    ├── ResourceError          the cluster cannot provide the requested CPUs, GPUs or memory
    ├── WaitTimeoutError       a wait reached its deadline (also a TimeoutError); contains the reason for the wait
    ├── StateError             a state, iterator or loader used where it does not belong
    └── ConsumerRemovedError   the service removed this consumer; contains time and reason

Messages are sentences with the name of the thing, its value and the expected value.
"""

from __future__ import annotations

import reprlib

__all__ = [
    "BadSampleError",
    "ConfigError",
    "ConsumerRemovedError",
    "DatasetError",
    "FeedExistsError",
    "FeedFailedError",
    "FeedGoneError",
    "FeedNotFoundError",
    "FeedRestartingError",
    "MbaasError",
    "PrepFailedError",
    "ResourceError",
    "StateError",
    "WaitTimeoutError",
]


class MbaasError(Exception):
    """Base class of every error that mbaas raises on purpose."""


class ConfigError(MbaasError, ValueError):
    """An invalid argument, option or pipeline.

    Attributes:
        option: the invalid option, if a check covers several; files report its line.
    """

    def __init__(self, sentence: str, *, option: str = "") -> None:
        super().__init__(sentence)
        self.option = option


class DatasetError(MbaasError):
    """A dataset that is missing, empty, or cannot be listed."""


class BadSampleError(MbaasError):
    """One sample that cannot be read or prepared.

    Attributes:
        uri: source of the sample's bytes.
        reason: one clause that describes the problem.
        remedy: what the user can do about it, or "".
    """

    def __init__(self, uri: str, reason: str, remedy: str = "") -> None:
        # a name with a line break could forge a log line
        what = f"cannot prepare {uri if uri.isprintable() else ascii(uri)}: {reason}"
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.uri = uri
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[BadSampleError], tuple[str, str, str], dict[str, object]]:
        # Errors cross processes, and the default pickle has only the message.
        return type(self), (self.uri, self.reason, self.remedy), vars(self)


class FeedNotFoundError(MbaasError):
    """No feed with that name runs on this cluster."""


class FeedExistsError(MbaasError):
    """A feed with that name is already running on this cluster."""


class FeedFailedError(MbaasError):
    """The feed stopped serving; the message contains the cause."""


class FeedRestartingError(FeedFailedError):
    """The feed's coordinator is still starting, or restarting after it died."""


class FeedGoneError(FeedFailedError):
    """The feed's coordinator is gone for good: the feed was stopped, or the program that served it ended."""


class ResourceError(MbaasError):
    """The cluster cannot provide the requested CPUs, GPUs or memory."""


class WaitTimeoutError(MbaasError, TimeoutError):
    """A wait reached its deadline; the message contains the reason, the time waited and a remedy."""


class StateError(MbaasError):
    """A state, iterator or loader used where it does not belong."""


class PlacementUnknownError(StateError):
    """A request for a part cut by a placement that has not arrived here yet; internal."""


class PlacementGoneError(PlacementUnknownError):
    """A placement older than the newest one here, which will never arrive; internal."""


class StorageError(BadSampleError):
    """Storage did not return a sample that it may return later; internal.

    Attributes:
        is_missing: True if the file is missing and its folder exists.
    """

    def __init__(self, uri: str, reason: str, remedy: str = "", *, is_missing: bool = False) -> None:
        super().__init__(uri, reason, remedy)
        self.is_missing = is_missing


class PrepFailedError(MbaasError):
    """A block could not be prepared: workers repeatedly died or hit a bug. A consumer may continue after it."""


class ConsumerRemovedError(MbaasError):
    """The service removed this consumer; the message contains time and reason."""


def shown(value: object) -> str:
    """Format a value for an error: shortened, or only its type if its repr fails."""
    try:
        if isinstance(value, int):
            str(value)  # fails for thousands of digits, which reprlib shortens since Python 3.14
        return reprlib.repr(value)
    except Exception:  # any error of a foreign __repr__, or Python's for a long int
        return f"a value of type {type(value).__name__}"


def last_line(error: BaseException) -> str:
    """Return the last line of an error: errors from other processes start with a stack trace, which belongs in logs."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
