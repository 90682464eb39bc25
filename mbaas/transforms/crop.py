"""Crops: RandomResizedCrop and CenterCrop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mbaas.transforms import checks
from mbaas.transforms.base import Drawn, Size, Windows, WindowTransform

ATTEMPTS = 10
"""Windows that are tried before the largest central one is taken, as torchvision does."""

Pixels = NDArray[np.int64]


def _rounded(values: NDArray[np.floating[Any]]) -> Pixels:
    """Nearest whole number, halves to even: Python's ``round``, as torchvision uses it."""
    return np.rint(values).astype(np.int64)


def _repeated(size: Size, n: int) -> Pixels:
    return np.tile(np.array(size, dtype=np.int64), (n, 1))


@dataclass(frozen=True)
class RandomResizedCrop(WindowTransform):
    """Cut out a window of random area and aspect ratio, and resize it to ``size``.

    As torchvision's (Szegedy et al., 2015): ten attempts to find a window inside the image; if all fail, the
    largest central window whose aspect ratio is in range.

    Args:
        size: (height, width) of the result in pixels; one integer means a square.
        scale: (low, high) share of the image's area, in (0, 1].
        ratio: (low, high) aspect ratio, width over height, drawn uniformly on a log scale.
    """

    size: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3.0 / 4.0, 4.0 / 3.0)

    draws: ClassVar[int] = 2 * ATTEMPTS + 2

    def __post_init__(self) -> None:
        self._set("size", checks.height_width("RandomResizedCrop's size", self.size))
        self._set("scale", checks.interval("RandomResizedCrop's scale", self.scale, above=0.0, upto=1.0))
        self._set("ratio", checks.interval("RandomResizedCrop's ratio", self.ratio, above=0.0))

    @property
    def fixed_size(self) -> Size:
        return self.size  # type: ignore[return-value]  # canonical since __post_init__

    def windows(self, drawn: Drawn) -> Windows:
        u, heights, widths = drawn.u, drawn.heights, drawn.widths
        # All attempts are drawn at once and the first that fits is taken: the same distribution as trying one after the
        # other, without a loop, and with a number of draws that is known beforehand.
        tries_h, tries_w = self._attempts(u[:, :ATTEMPTS], u[:, ATTEMPTS : 2 * ATTEMPTS], heights * widths)
        fits = (tries_h > 0) & (tries_h <= heights[:, None]) & (tries_w > 0) & (tries_w <= widths[:, None])
        rows, first = np.arange(len(u)), fits.argmax(axis=1)
        crop_h, crop_w = tries_h[rows, first], tries_w[rows, first]
        top = (u[:, -2] * (heights - crop_h + 1)).astype(np.int64)
        left = (u[:, -1] * (widths - crop_w + 1)).astype(np.int64)
        boxes = np.stack([top, left, crop_h, crop_w], axis=1)
        found = fits[rows, first]
        if not found.all():
            boxes[~found] = self._central(heights[~found], widths[~found])
        return Windows(boxes, _repeated(self.fixed_size, len(u)))

    def _attempts(
        self, u_area: NDArray[np.float64], u_ratio: NDArray[np.float64], area: Pixels
    ) -> tuple[Pixels, Pixels]:
        """Heights and widths of all attempts, int64[n, ATTEMPTS]."""
        target = area[:, None] * (self.scale[0] + (self.scale[1] - self.scale[0]) * u_area)
        low, high = np.log(self.ratio)
        aspect = np.exp(low + (high - low) * u_ratio)
        return _rounded(np.sqrt(target / aspect)), _rounded(np.sqrt(target * aspect))

    def _central(self, heights: Pixels, widths: Pixels) -> Pixels:
        """The fallback: int64[n, 4] boxes around the centre."""
        shape = widths / heights
        crop_h = np.where(shape < self.ratio[0], np.maximum(_rounded(widths / self.ratio[0]), 1), heights)
        crop_w = np.where(shape > self.ratio[1], np.maximum(_rounded(heights * self.ratio[1]), 1), widths)
        return np.stack([(heights - crop_h) // 2, (widths - crop_w) // 2, crop_h, crop_w], axis=1)


@dataclass(frozen=True)
class CenterCrop(WindowTransform):
    """Cut ``size`` out of the middle; an image that is smaller is first padded with black on both sides.

    Args:
        size: (height, width) of the result in pixels; one integer means a square.
    """

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        self._set("size", checks.height_width("CenterCrop's size", self.size))

    @property
    def fixed_size(self) -> Size:
        return self.size  # type: ignore[return-value]  # canonical since __post_init__

    def windows(self, drawn: Drawn) -> Windows:
        sizes = _repeated(self.fixed_size, len(drawn.heights))
        top, left = self._offset(drawn.heights, sizes[:, 0]), self._offset(drawn.widths, sizes[:, 1])
        return Windows(np.column_stack([top, left, sizes]), sizes)

    @staticmethod
    def _offset(image: Pixels, crop: Pixels) -> Pixels:
        """First pixel: torchvision pads the lesser half before the image, and rounds half a pixel to even."""
        return np.where(crop > image, -((crop - image) // 2), _rounded((image - crop) / 2.0))
