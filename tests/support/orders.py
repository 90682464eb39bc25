"""Sample orders whose blocks are computed once for all tests of a process."""

from __future__ import annotations

from functools import lru_cache

from mbaas.samples.order import Ids, SampleOrder, Shuffle


class Order(SampleOrder, frozen=True):
    """A sample order that is computed once for all schedules."""

    def sample_ids(self, block: int, shuffle: Shuffle | None = None) -> Ids:
        return _ids(self, block, shuffle)


@lru_cache(100_000)
def _ids(order: Order, block: int, shuffle: Shuffle | None) -> Ids:
    return SampleOrder.sample_ids(order, block, shuffle)
