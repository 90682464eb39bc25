"""Iterators over a loader's epoch, for loops and trainers, and a callback for the Hugging Face Trainer.

`EpochLoop` survives errors. Trainers need more than an iterator. The Hugging Face Trainer resumes within an epoch with
`accelerate.skip_first_batches`, which takes minibatches by number: it builds a DataLoader from a loader's `dataset`,
`batch_sampler` and `collate_fn`, without the sampler's first numbers. And accelerate's `accumulate` must know that an
epoch has ended, because it steps the optimizer then, however few minibatches have accumulated. Its own DataLoaders
enter themselves in its `GradientState` while a loop reads them. A loader does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

from mbaas.client.convert import Minibatch
from mbaas.errors import StateError
from mbaas.wire.consumers import ConsumerName

T = TypeVar("T")


class NumberedMinibatches:
    """An epoch's minibatches by ascending number, read from a `mbaas.Loader` on demand. Its length is in samples."""

    def __init__(self, loader: Any, *, samples: int) -> None:
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

    def __init__(self, loader: Any) -> None:
        self.sampler = loader
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] for number in range(len(self.sampler)))


def as_it_is(minibatch: T) -> T:
    """Return the minibatch unchanged: it is already collated."""
    return minibatch


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


def known_to_accelerate(minibatches: Iterator[Minibatch], is_last: Callable[[], bool]) -> Iterator[Minibatch]:
    """Return an epoch's minibatches, registered with accelerate while they are read.

    ``is_last`` returns True if the minibatch just yielded is known to be the epoch's last.
    """
    data_loader = _data_loader()
    return minibatches if data_loader is None else _entered(minibatches, is_last, data_loader)


def check_is_read_once(loader: object, name: ConsumerName) -> None:
    """Reject a loop over the DataLoader that accelerate's `prepare` makes of a DataLoader around a rank's loader.

    It would read only the first process's loader, and divide its samples among all processes.

    Raises:
        StateError: such a loop is starting.
    """
    data_loader = _data_loader()
    if data_loader is None or name.world_size == 1:
        return
    reader = data_loader.GradientState().active_dataloader
    if isinstance(reader, data_loader.DataLoaderDispatcher) and reader.dataset is loader:
        raise StateError(
            f"loader of consumer {str(name)!r} has a rank's share of {name.world_size} already, and accelerate would "
            "divide it again: prepare the loader itself, not a DataLoader around it"
        )


def transformers_callback() -> Any:
    """Return a callback of the Hugging Face Trainer that keeps the train loader's state in the trainer's checkpoints.

    ``train(resume_from_checkpoint=...)`` then continues after the checkpoint's last minibatch. The state is in
    ``trainer_state.json``, so it is also in the checkpoints that ``hyperparameter_search(backend="ray")`` reports to
    Ray Tune. Written for transformers 5.

    Example:
        >>> trainer = transformers.Trainer(..., callbacks=[mbaas.transformers_callback()])
        >>> trainer.get_train_dataloader = lambda: mbaas.join("train", consumer="me")
    """
    from transformers import TrainerCallback

    class LoaderState(TrainerCallback):
        def on_train_begin(self, _args: Any, state: Any, _control: Any, train_dataloader: Any, **_: Any) -> None:
            if saved := state.stateful_callbacks.get(type(self).__name__):
                train_dataloader.load_state_dict(saved["loader"])

        def on_step_end(self, _args: Any, state: Any, _control: Any, train_dataloader: Any, **_: Any) -> None:
            # After each step: the trainer calls `on_save` only after it has written a checkpoint, and not at all for
            # Tune's. Entries under the name of a callback's class raise no warning.
            state.stateful_callbacks[type(self).__name__] = {"loader": train_dataloader.state_dict()}

    return LoaderState()


def _data_loader() -> Any:
    # accelerate is not imported here, because that takes a second, and a process that has not imported it does not use
    # it.
    return sys.modules.get("accelerate.data_loader")


def _entered(minibatches: Iterator[Minibatch], is_last: Callable[[], bool], data_loader: Any) -> Iterator[Minibatch]:
    epoch = _epoch_class(data_loader)()
    epoch.gradient_state = data_loader.GradientState()
    epoch.begin()
    epoch.remainder = 0  # no sample is repeated to fill the last minibatch, so `gather_for_metrics` must cut none off
    try:
        for batch in minibatches:
            epoch.end_of_dataloader = is_last()
            yield batch
            del batch  # it may be a view of staging memory
    finally:
        epoch.end()


@cache
def _epoch_class(data_loader: Any) -> type[Any]:
    return type("Epoch", (data_loader.DataLoaderStateMixin,), {})
