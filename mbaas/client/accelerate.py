"""What a loader does in a process that uses accelerate: it says where its epochs end, and is not shared out twice.

At the end of an epoch accelerate's `accumulate` steps, however few minibatches are left. It knows of the end of its own
DataLoaders, which enter themselves in its `GradientState` while a loop reads them. A loader does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from mbaas.client.convert import Minibatch
from mbaas.errors import StateError
from mbaas.messages import ConsumerName


def known_to_accelerate(minibatches: Iterator[Minibatch], is_last: Callable[[], bool]) -> Iterator[Minibatch]:
    """Return an epoch's minibatches of which accelerate hears while they are read.

    Args:
        minibatches: of one loop.
        is_last: whether the minibatch that was yielded just now is known to be the epoch's last.
    """
    data_loader = _data_loader()
    return minibatches if data_loader is None else _entered(minibatches, is_last, data_loader)


def check_is_read_once(loader: object, name: ConsumerName) -> None:
    """Refuse a loop of the DataLoader that accelerate's `prepare` makes of one around a rank's loader.

    It would read the loader of the first process only, and give each process a part of that one's samples.

    Raises:
        StateError: it is such a loop that begins.
    """
    data_loader = _data_loader()
    if data_loader is None or name.world_size == 1:
        return
    reader = data_loader.GradientState().active_dataloader
    if isinstance(reader, data_loader.DataLoaderDispatcher) and reader.dataset is loader:
        raise StateError(
            f"loader of consumer {str(name)!r} has a rank's share of {name.world_size} already, and accelerate would "
            "share it out once more: prepare the loader itself, not a DataLoader around it"
        )


def _data_loader() -> Any:
    """Return accelerate's module of DataLoaders, or None if this process does not use it."""
    # Not imported: a process that did not import accelerate itself has no use for it, and it takes a second.
    return sys.modules.get("accelerate.data_loader")


def _entered(minibatches: Iterator[Minibatch], is_last: Callable[[], bool], data_loader: Any) -> Iterator[Minibatch]:
    """Yield minibatches between `begin` and `end` of what accelerate takes for a DataLoader."""
    epoch = _epoch_class(data_loader)()
    epoch.gradient_state = data_loader.GradientState()
    epoch.begin()
    epoch.remainder = 0  # no sample is repeated to fill the last minibatch: `gather_for_metrics` cuts none off
    try:
        for batch in minibatches:
            epoch.end_of_dataloader = is_last()
            yield batch
            del batch  # it may be a view of staging memory
    finally:
        epoch.end()


@cache
def _epoch_class(data_loader: Any) -> type[Any]:
    """Return a class of what is entered: accelerate's own, which is made to be inherited from."""
    return type("Epoch", (data_loader.DataLoaderStateMixin,), {})
