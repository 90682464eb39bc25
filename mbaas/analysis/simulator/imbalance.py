"""What locality-aware loading moves between nodes: imbalance traffic (section III of "Accelerating Data Loading in
Deep Neural Network Training", 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.order import check_seed


@dataclass(frozen=True)
class Imbalance:
    """The share of each global minibatch that travels.

    Attributes:
        fractions: of each step, sum of deficits / samples of the global minibatch: float64[K].
    """

    fractions: NDArray[np.float64]

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.fractions, share))

    @property
    def median(self) -> float:
        return self.quantile(0.5)


def imbalance(*, nodes: int, local_batch: int, steps: int, seed: int = 0) -> Imbalance:
    """Steps in which each sample of the global minibatch is cached on a node by chance, all nodes alike.

    Args:
        nodes: P.
        local_batch: B, samples that each node trains on.
        steps: K.
        seed: of chance.

    Raises:
        ConfigError: an argument is out of range.
    """
    for name, value in (("nodes", nodes), ("local_batch", local_batch), ("steps", steps)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    check_seed(seed)
    chance = np.random.default_rng(seed)
    owned = chance.multinomial(nodes * local_batch, [1 / nodes] * nodes, size=steps)
    return Imbalance(np.maximum(local_batch - owned, 0).sum(axis=1) / (nodes * local_batch))
