"""Integration of a loader with accelerate.

At an epoch's end accelerate's `accumulate` steps the optimizer, however few minibatches have accumulated. It detects
the end of its own DataLoaders, which enter themselves in its `GradientState` while a loop reads them. A loader does
the same.
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
