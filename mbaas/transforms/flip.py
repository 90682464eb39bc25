"""RandomHorizontalFlip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mbaas.transforms import checks
from mbaas.transforms.base import Transform


@dataclass(frozen=True)
class RandomHorizontalFlip(Transform):
    """Mirror the image left to right with probability ``p``.

    Args:
        p: probability in [0, 1].
    """

    p: float = 0.5

    draws: ClassVar[int] = 1
    keeps_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._set("p", checks.fraction("RandomHorizontalFlip's p", self.p))

    def flips(self, u: NDArray[np.float64]) -> NDArray[np.bool_]:
        """bool[n]: which samples are mirrored, from ``u`` float64[n, 1]."""
        return u[:, 0] < self.p
