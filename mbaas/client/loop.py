"""The iterator that a loader returns; it survives errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mbaas.client.convert import Minibatch


class EpochLoop(Iterator[Minibatch]):
    """The minibatches of one epoch, which continue after an error or Ctrl-C within `next`.

    A generator that raised is finished, so `next` would silently end the epoch. This iterator continues after the last
    minibatch returned, so a lasting error, such as a bad sample, is raised again.

    Args:
        run: returns the minibatches from the loader's position; they must be read before the next call.
        recover: moves the loader back to the end of the last minibatch returned.
    """

    def __init__(self, run: Callable[[], Iterator[Minibatch]], recover: Callable[[], None]) -> None:
        self._run, self._recover = run, recover
        self._minibatches: Iterator[Minibatch] | None = run()  # None after an error

    def close(self) -> None:
        """End the loop, like closing a generator; another ``next`` raises StopIteration."""
        self._minibatches = iter(())

    def __next__(self) -> Minibatch:
        if self._minibatches is None:
            self._recover()
            self._minibatches = self._run()
        try:
            return next(self._minibatches)
        except StopIteration:
            raise
        except BaseException:  # KeyboardInterrupt too: a notebook continues after it
            self._minibatches = None
            raise
