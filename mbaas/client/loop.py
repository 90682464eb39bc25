"""The iterator that a loader returns: it survives errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mbaas.client.convert import Minibatch


class EpochLoop(Iterator[Minibatch]):
    """The minibatches of one epoch, also after an error or Ctrl-C in the middle of `next`.

    A generator that raised is finished, and `next` would end the epoch without a word. Here it goes on after the last
    minibatch that was handed out, so a lasting error, such as a bad sample, is raised again.

    Args:
        run: returns the minibatches from where the loader stands; they must be read before the next call.
        recover: brings the loader back to the end of the last minibatch that was handed out.
    """

    def __init__(self, run: Callable[[], Iterator[Minibatch]], recover: Callable[[], None]) -> None:
        self._run, self._recover = run, recover
        self._minibatches: Iterator[Minibatch] | None = run()  # None after an error

    def close(self) -> None:
        """End the loop, as that of a generator; another ``next`` raises StopIteration."""
        self._minibatches = iter(())

    def __next__(self) -> Minibatch:
        if self._minibatches is None:
            self._recover()
            self._minibatches = self._run()
        try:
            return next(self._minibatches)
        except StopIteration:
            raise
        except BaseException:  # KeyboardInterrupt too: a notebook goes on after it
            self._minibatches = None
            raise
