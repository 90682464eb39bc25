"""Every worker's access sequence R, epoch by epoch."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from mbaas.order import Sweep

Samples = NDArray[np.int32]

KEPT_BYTES = 1 << 30
_PIECE = 1 << 20


class Orders:
    """The order of the samples in each epoch, by mbaas's own keyed permutation; those made last are kept.

    Args:
        samples: F.
        seed: chooses the orders.
        kept_bytes: how much memory kept orders may take; one is kept in any case.
    """

    def __init__(self, samples: int, *, seed: int, kept_bytes: int = KEPT_BYTES) -> None:
        self.samples = samples
        self.seed = seed
        self._sweep = Sweep(num_samples=samples, seed=seed, block_samples=1)
        self._kept: OrderedDict[int, Samples] = OrderedDict()
        self._room = max(kept_bytes // (4 * samples), 1)

    def __call__(self, epoch: int) -> Samples:
        """Sample ids in the order of ``epoch``: int32[F], read-only."""
        if epoch not in self._kept:
            while len(self._kept) >= self._room:
                self._kept.popitem(last=False)
            self._kept[epoch] = self._made(epoch)
        self._kept.move_to_end(epoch)
        return self._kept[epoch]

    def _made(self, epoch: int) -> Samples:
        order = np.empty(self.samples, dtype=np.int32)
        for start in range(0, self.samples, _PIECE):
            stop = min(start + _PIECE, self.samples)
            order[start:stop] = self._sweep.samples_at(epoch, start, stop)
        order.flags.writeable = False
        return order
