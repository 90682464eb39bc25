"""Every error that mbaas raises on purpose.

::

    MbaasError
    ├── ConfigError            an argument, option or pipeline that cannot work (also a ValueError)
    ├── DatasetError           a folder or URI that is missing, empty or cannot be listed
    ├── BadSampleError         one sample that cannot be read or prepared; names its URI and the reason
    ├── PrepFailedError        samples over which prep workers died, or met a bug, again and again
    ├── FeedNotFoundError      no feed of that name runs on this cluster
    ├── FeedExistsError        a feed of that name already runs
    ├── FeedFailedError        the feed stopped serving; carries the cause
    │   ├── FeedRestartingError    its coordinator starts, or died and is coming back; loaders wait by themselves
    │   └── FeedGoneError          it ended, or its program did; loaders wait until it is served again, unless stopped
    ├── ResourceError          the cluster cannot give the CPUs, GPUs or memory that were asked for
    ├── WaitTimeoutError       a wait reached its deadline (also a TimeoutError); says for whom it waited
    ├── StateError             a state, iterator or loader used where it does not belong
    └── ConsumerRemovedError   the service removed this consumer; says when and why

Messages are sentences that name the thing, the value it has and the value it must have.
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
    """Base of every error that mbaas raises on purpose."""


class ConfigError(MbaasError, ValueError):
    """An argument, option or pipeline that cannot work.

    Attributes:
        option: the one that is wrong, where a check of several names one; files say its line.
    """

    def __init__(self, sentence: str, *, option: str = "") -> None:
        super().__init__(sentence)
        self.option = option


class DatasetError(MbaasError):
    """A dataset that is missing, empty, or cannot be listed."""


class BadSampleError(MbaasError):
    """One sample that cannot be read or prepared.

    Attributes:
        uri: where the sample's bytes come from.
        reason: one clause that says what is wrong with them.
    """

    def __init__(self, uri: str, reason: str) -> None:
        # a name with a line break in it would forge a line of a log
        super().__init__(f"cannot prepare {uri if uri.isprintable() else ascii(uri)}: {reason}")
        self.uri = uri
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadSampleError], tuple[str, str], dict[str, object]]:
        # Errors cross processes, and pickle would make this one from its message alone.
        return type(self), (self.uri, self.reason), vars(self)


class FeedNotFoundError(MbaasError):
    """No feed of that name runs on this cluster."""


class FeedExistsError(MbaasError):
    """A feed of that name already runs on this cluster."""


class FeedFailedError(MbaasError):
    """The feed stopped serving; the message carries the cause."""


class FeedRestartingError(FeedFailedError):
    """The feed's coordinator is still starting, or died and is coming back."""


class FeedGoneError(FeedFailedError):
    """The feed's coordinator is gone for good: the feed was stopped, or the program that served it ended."""


class ResourceError(MbaasError):
    """The cluster cannot give the CPUs, GPUs or memory that were asked for."""


class WaitTimeoutError(MbaasError, TimeoutError):
    """A wait reached its deadline; the message says for whom, how long, and what to do."""


class StateError(MbaasError):
    """A state, iterator or loader used where it does not belong."""


class PlacementUnknownError(StateError):
    """A part of a block is asked for that was cut by a placement which is not known here; no user meets it."""


class PlacementGoneError(PlacementUnknownError):
    """That placement is older than the newest one that is known here, so it never will be: only the dead knew it."""


class StorageError(BadSampleError):
    """Storage did not give a sample that it may give a little later; no user meets it.

    Attributes:
        is_missing: whether it says that the file is not there, and its folder is.
    """

    def __init__(self, uri: str, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(uri, reason)
        self.is_missing = is_missing


class PrepFailedError(MbaasError):
    """A block could not be made: prep workers died over it, or met a bug, again and again; one may go on after it."""


class ConsumerRemovedError(MbaasError):
    """The service removed this consumer; the message says when and why."""


def shown(value: object) -> str:
    """Write a value for an error: shortened, and only its kind if it cannot be written at all."""
    try:
        return reprlib.repr(value)
    except Exception:  # whatever a stranger's __repr__ raises, or Python itself of an int with thousands of digits
        return f"a value of type {type(value).__name__}"


def last_line(error: BaseException) -> str:
    """Return the last line of an error: that of another process begins with a stack, which is for logs."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
