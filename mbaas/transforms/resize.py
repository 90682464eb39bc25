"""Resize: the whole image to another size."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from mbaas.transforms import checks
from mbaas.transforms.base import Drawn, Size, Windows, WindowTransform


@dataclass(frozen=True)
class Resize(WindowTransform):
    """Resize the image, bilinear with antialiasing.

    Args:
        size: one integer is the length of the shorter side in pixels, the aspect ratio stays (the longer side
            is rounded down, as torchvision does); (height, width) is the exact size.
    """

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        where = "Resize's size"
        one = isinstance(self.size, Integral)
        self._set("size", checks.pixels(where, self.size) if one else checks.height_width(where, self.size))

    @property
    def fixed_size(self) -> Size | None:
        return self.size if isinstance(self.size, tuple) else None

    def windows(self, drawn: Drawn) -> Windows:
        heights, widths = drawn.heights, drawn.widths
        zeros = np.zeros_like(heights)
        return Windows(np.stack([zeros, zeros, heights, widths], axis=1), self._sizes(heights, widths))

    def _sizes(self, heights: NDArray[np.int64], widths: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[n, 2] (height, width) of the results."""
        if isinstance(self.size, tuple):
            return np.tile(np.array(self.size, dtype=np.int64), (len(heights), 1))
        longer = self.size * np.maximum(heights, widths) // np.minimum(heights, widths)
        tall = heights > widths
        return np.stack([np.where(tall, longer, self.size), np.where(tall, self.size, longer)], axis=1)
