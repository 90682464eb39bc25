"""Reads of staged parts, from the object store and from slots, with timeouts."""

from __future__ import annotations

from typing import Any

import ray

from mbaas import slots
from mbaas.calls.client import get
from mbaas.fields import Arrays
from mbaas.messages import Slot


class UnreadableError(Exception):
    """Parts of a block are lost (``for_good``) or late. Users never see this error: streams request the block again."""

    def __init__(self, *, for_good: bool) -> None:
        super().__init__()
        self.for_good = for_good


def read(refs: list[Any], timeout_s: float) -> list[Arrays]:
    """Return the arrays for ``refs``: object references, and slots of this node's workers.

    Raises:
        UnreadableError: data is not available within ``timeout_s``, or is lost.
    """
    in_store = _of_store(refs)
    try:
        values = iter(get(in_store, timeout_s) if in_store else [])
    except ray.exceptions.GetTimeoutError:
        raise UnreadableError(for_good=False) from None
    except ray.exceptions.ObjectLostError:
        raise UnreadableError(for_good=True) from None
    return [_in_slot(ref) if isinstance(ref, Slot) else next(values) for ref in refs]


def _in_slot(slot: Slot) -> Arrays:
    arrays = slots.arrays_in(slot)
    if arrays is None:
        raise UnreadableError(for_good=True)
    return arrays


def _of_store(refs: list[Any]) -> list[Any]:
    return [ref for ref in refs if not isinstance(ref, Slot)]


def bring(refs: list[Any]) -> None:
    """Have Ray copy existing objects in ``refs`` to this node, without waiting.

    `ray.get` with a timeout is not enough: at the timeout Ray discards the received bytes, so a large block would never
    arrive over a slow link. A transfer started by `ray.wait` continues.
    """
    refs = _of_store(refs)
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=0)
