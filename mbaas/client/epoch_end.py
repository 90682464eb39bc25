"""Where a loader's epoch ends, for accelerate: its `accumulate` steps there, however few minibatches are left.

accelerate knows it of its own DataLoaders, which enter themselves in its `GradientState` while a loop reads them. A
loader does the same in a process that uses accelerate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from mbaas.client.convert import Minibatch


def known_to_accelerate(minibatches: Iterator[Minibatch], is_last: Callable[[], bool]) -> Iterator[Minibatch]:
    """Return an epoch's minibatches of which accelerate hears while they are read.

    Args:
        minibatches: of one loop.
        is_last: whether the minibatch that was yielded just now is known to be the epoch's last.
    """
    # Not imported: a process that did not import accelerate itself has no use for it, and it takes a second.
    data_loader = sys.modules.get("accelerate.data_loader")
    return minibatches if data_loader is None else _entered(minibatches, is_last, data_loader)


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
