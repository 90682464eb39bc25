"""The minibatches of a loader's epoch by number, for trainers that resume within an epoch.

The Hugging Face Trainer resumes with `accelerate.skip_first_batches`. It builds a DataLoader from a loader's `dataset`,
`batch_sampler` and `collate_fn`, without the sampler's first numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from mbaas.client.convert import Minibatch
from mbaas.errors import StateError

T = TypeVar("T")


class EpochSource(Protocol):
    """The loader interface used here."""

    @property
    def batch_size(self) -> int:
        """Samples in a minibatch."""

    @property
    def drop_last(self) -> bool:
        """True if an incomplete last minibatch is dropped."""

    @property
    def minibatches(self) -> int:
        """Number of minibatches of the epoch that were already read."""

    def __len__(self) -> int:
        """Return the number of minibatches in an epoch."""

    def __iter__(self) -> Iterator[Minibatch]:
        """Start an epoch, or continue the current one."""


class NumberedMinibatches:
    """An epoch's minibatches by ascending number, read from the loader on demand. Its length is in samples."""

    def __init__(self, loader: EpochSource, *, samples: int) -> None:
        self._loader, self._samples = loader, samples
        self._loop: Iterator[Minibatch] | None = None
        self._next = 0  # number of the next minibatch from the loop

    def __len__(self) -> int:
        return self._samples

    def __getitems__(self, numbers: list[int]) -> Minibatch:
        """Return the minibatch of one number, as yielded by `MinibatchNumbers`, skipping earlier minibatches.

        Raises:
            StateError: the minibatch precedes the loader's position.
            StopIteration: the epoch has no such minibatch, because samples are left out as bad.
        """
        (number,) = numbers
        if self._loop is None or number < self._next:
            self._loop = iter(self._loader)
            self._next = self._loader.minibatches
            if number < self._next:
                raise StateError(
                    f"minibatch {number} of the epoch was requested, but the loader continues at minibatch "
                    f"{self._next}: load the loader's state from the trainer's checkpoint"
                )
        while True:
            batch = next(self._loop)
            self._next += 1
            if self._next > number:
                return batch
            del batch


class MinibatchNumbers:
    """A stand-in for a loader's batch sampler: one list per minibatch, containing only its number.

    ``sampler`` is the loader, because trainers call ``set_epoch`` there.
    """

    def __init__(self, loader: EpochSource) -> None:
        self.sampler = loader
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] for number in range(len(self.sampler)))


def as_it_is(minibatch: T) -> T:
    """Return the minibatch unchanged: it is already collated."""
    return minibatch
