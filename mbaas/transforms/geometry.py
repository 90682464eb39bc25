"""Geometric transforms of images: crops, resizing and flips."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mbaas.transforms import checks
from mbaas.transforms.base import DrawInputs, Size, Transform, Windows, WindowTransform

ATTEMPTS = 10
"""Windows tried before falling back to the largest central one, as in torchvision."""

Pixels = NDArray[np.int64]


@dataclass(frozen=True)
class RandomResizedCrop(WindowTransform):
    """Crop a window of random area and aspect ratio, and resize it to ``size``.

    This matches torchvision (Szegedy et al., 2015): ten attempts to find a window inside the image, then the largest
    central window with a valid aspect ratio.

    Args:
        size: (height, width) of the result in pixels; an integer means a square.
        scale: (low, high) fraction of the image's area, in (0, 1].
        ratio: (low, high) aspect ratio, width / height, drawn uniformly on a log scale.
    """

    size: Annotated[int | tuple[int, int], checks.height_width]
    scale: Annotated[tuple[float, float], partial(checks.interval, above=0.0, upto=1.0)] = (0.08, 1.0)
    ratio: Annotated[tuple[float, float], partial(checks.interval, above=0.0)] = (3.0 / 4.0, 4.0 / 3.0)

    draws: ClassVar[int] = 2 * ATTEMPTS + 2

    def windows(self, drawn: DrawInputs) -> Windows:
        u, heights, widths = drawn.u, drawn.heights, drawn.widths
        # All attempts are drawn together and the first that fits is used. This has the same distribution as trying one
        # after another, but needs no loop and a constant number of draws.
        tries_h, tries_w = self._attempts(u[:, :ATTEMPTS], u[:, ATTEMPTS : 2 * ATTEMPTS], heights * widths)
        fits = (tries_h > 0) & (tries_h <= heights[:, None]) & (tries_w > 0) & (tries_w <= widths[:, None])
        # argmax returns the first True of a row, or 0 if there is no True; those rows are replaced below.
        rows, first = np.arange(len(u)), fits.argmax(axis=1)
        crop_h, crop_w = tries_h[rows, first], tries_w[rows, first]
        # The difference plus one, because a window as large as the image has one position.
        top = (u[:, -2] * (heights - crop_h + 1)).astype(np.int64)
        left = (u[:, -1] * (widths - crop_w + 1)).astype(np.int64)
        boxes = np.stack([top, left, crop_h, crop_w], axis=1)
        found = fits[rows, first]
        if not found.all():
            boxes[~found] = self._central(heights[~found], widths[~found])
        return Windows(boxes, _repeated(self.size, len(u)))

    def _attempts(
        self, u_area: NDArray[np.float64], u_ratio: NDArray[np.float64], area: Pixels
    ) -> tuple[Pixels, Pixels]:
        """Return heights and widths, int64[n, ATTEMPTS] each."""
        target = area[:, None] * (self.scale[0] + (self.scale[1] - self.scale[0]) * u_area)
        # On a log scale, so that a window twice as wide as high is as likely as one twice as high as wide.
        low, high = np.log(self.ratio)
        aspect = np.exp(low + (high - low) * u_ratio)
        return _rounded(np.sqrt(target / aspect)), _rounded(np.sqrt(target * aspect))

    def _central(self, heights: Pixels, widths: Pixels) -> Pixels:
        shape = widths / heights
        # At least 1: with an extreme ratio, a narrow strip would have no pixels.
        crop_h = np.where(shape < self.ratio[0], np.maximum(_rounded(widths / self.ratio[0]), 1), heights)
        crop_w = np.where(shape > self.ratio[1], np.maximum(_rounded(heights * self.ratio[1]), 1), widths)
        return np.stack([(heights - crop_h) // 2, (widths - crop_w) // 2, crop_h, crop_w], axis=1)


@dataclass(frozen=True)
class CenterCrop(WindowTransform):
    """Crop the central ``size``; a smaller image is first padded with black on both sides.

    Args:
        size: (height, width) of the result in pixels; an integer means a square.
    """

    size: Annotated[int | tuple[int, int], checks.height_width]

    def windows(self, drawn: DrawInputs) -> Windows:
        sizes = _repeated(self.size, len(drawn.heights))
        top, left = _centred(drawn.heights, sizes[:, 0]), _centred(drawn.widths, sizes[:, 1])
        return Windows(np.column_stack([top, left, sizes]), sizes)


@dataclass(frozen=True)
class Resize(WindowTransform):
    """Resize the image, bilinearly with antialiasing.

    Args:
        size: an integer is the length of the shorter side in pixels; the aspect ratio is kept, and the longer side is
            rounded down, as in torchvision. (height, width) is the exact size.
    """

    size: Annotated[int | tuple[int, int], checks.side_or_size]

    def windows(self, drawn: DrawInputs) -> Windows:
        heights, widths = drawn.heights, drawn.widths
        zeros = np.zeros_like(heights)
        return Windows(np.stack([zeros, zeros, heights, widths], axis=1), self._sizes(heights, widths))

    def _sizes(self, heights: Pixels, widths: Pixels) -> Pixels:
        if isinstance(self.size, tuple):
            return _repeated(self.size, len(heights))
        longer = self.size * np.maximum(heights, widths) // np.minimum(heights, widths)
        tall = heights > widths
        return np.stack([np.where(tall, longer, self.size), np.where(tall, self.size, longer)], axis=1)


@dataclass(frozen=True)
class RandomHorizontalFlip(Transform):
    """Mirror the image left to right with probability ``p``.

    Args:
        p: probability in [0, 1].
    """

    p: Annotated[float, checks.fraction] = 0.5

    draws: ClassVar[int] = 1
    keeps_size: ClassVar[bool] = True

    def flips(self, u: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return the samples to mirror: bool[n] from ``u``, float64[n, 1]."""
        # u is in [0, 1), so p = 1 means always, and p = 0 never.
        return u[:, 0] < self.p


def _rounded(values: NDArray[np.floating[Any]]) -> Pixels:
    # Halves to even, like Python's ``round``, which torchvision uses.
    return np.rint(values).astype(np.int64)


def _repeated(size: int | Size, n: int) -> Pixels:
    # A pair since the check of parameters.
    return np.tile(np.array(size, dtype=np.int64), (n, 1))


def _centred(image: Pixels, crop: Pixels) -> Pixels:
    # Negative if the crop is larger than the image. As in torchvision, the smaller half of the padding comes first, and
    # half a pixel is rounded to even.
    return np.where(crop > image, -((crop - image) // 2), _rounded((image - crop) / 2.0))
