"""The minibatches of a loader's epoch by number, as a trainer that resumes asks a DataLoader for them.

`accelerate.skip_first_batches`, with which Hugging Face's Trainer resumes in the middle of an epoch, makes a DataLoader
of a loader's `dataset`, `batch_sampler` and `collate_fn`, without the first numbers of that sampler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from mbaas.client.convert import Minibatch
from mbaas.errors import StateError

T = TypeVar("T")


class EpochSource(Protocol):
    """What is asked of a loader here."""

    @property
    def batch_size(self) -> int:
        """Samples in a minibatch."""

    @property
    def drop_last(self) -> bool:
        """Whether an epoch's last minibatch is left out if it is not full."""

    @property
    def minibatches(self) -> int:
        """Minibatches of the epoch that lie behind it."""

    def __len__(self) -> int:
        """Minibatches in an epoch."""

    def __iter__(self) -> Iterator[Minibatch]:
        """Begin an epoch, or go on in one."""


class NumberedMinibatches:
    """An epoch's minibatches by ascending number, each when the loader comes to it.

    Args:
        loader: whose minibatches they are.
        samples: in an epoch; that is the length of this.
    """

    def __init__(self, loader: EpochSource, *, samples: int) -> None:
        self._loader, self._samples = loader, samples
        self._loop: Iterator[Minibatch] | None = None
        self._next = 0  # number of the minibatch that the loop yields next

    def __len__(self) -> int:
        return self._samples

    def __getitems__(self, numbers: list[int]) -> Minibatch:
        """Return a minibatch; those between it and the one before are passed over.

        Args:
            numbers: its number in the epoch, as `MinibatchNumbers` gives it.

        Raises:
            StateError: it lies before the place where the loader goes on.
            StopIteration: the epoch has no such minibatch, because samples of it are left out as bad.
        """
        (number,) = numbers
        if self._loop is None or number < self._next:
            self._loop = iter(self._loader)
            self._next = self._loader.minibatches
            if number < self._next:
                raise StateError(
                    f"minibatch {number} of the epoch was asked for, but the loader goes on at minibatch {self._next}: "
                    "load the loader's state from the checkpoint from which the trainer resumes"
                )
        while True:
            batch = next(self._loop)
            self._next += 1
            if self._next > number:
                return batch
            del batch


class MinibatchNumbers:
    """What stands for a loader's batch sampler: for each minibatch of an epoch a list of its number alone.

    Attributes:
        sampler: the loader: trainers look here for ``set_epoch``.
        batch_size, drop_last: the loader's.
    """

    def __init__(self, loader: EpochSource) -> None:
        self.sampler = loader
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] for number in range(len(self.sampler)))


def as_it_is(minibatch: T) -> T:
    """Return a minibatch that is put together already."""
    return minibatch
