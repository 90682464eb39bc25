"""What all transforms have in common, and the parameters that they hand to engines, for n samples at a time.

Transforms own the arithmetic of their random parameters; engines only execute the numbers. So all engines crop the same
windows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

Size = tuple[int, int]
"""(height, width) in pixels."""


class Transform:
    """A step of a pipeline: frozen, comparable, with a repr that evaluates back to an equal transform.

    Attributes:
        keeps_size: whether the result is always as large as the image.
        needs_boxes: whether it chooses by the boxes on the image.
    """

    keeps_size: ClassVar[bool] = False
    needs_boxes: ClassVar[bool] = False

    @property
    def draws(self) -> int:
        """How many uniform numbers in [0, 1) one sample needs: the same for all, so that those of a block are drawn at
        once.
        """
        return 0

    @property
    def fixed_size(self) -> Size | None:
        """Size of every result, if it is the same for all images; None if it depends on the image."""
        return None

    def identity(self) -> str:
        """Return what goes into the pipeline's fingerprint: equal exactly when the transform does the same."""
        return repr(self)

    def _set(self, name: str, value: Any) -> None:
        """Store a parameter in its canonical form; for ``__post_init__`` of frozen dataclasses only."""
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class BoxesNow:
    """The boxes on n images, where they are between two transforms.

    Attributes:
        edges: float64[total, 4], left, top, right and bottom of each, in pixels.
        owner: int64[total], the image that each lies on, ascending.
        kept: bool[total], whether it is still there: a transform may drop some.
    """

    edges: NDArray[np.float64]
    owner: NDArray[np.int64]
    kept: NDArray[np.bool_]


@dataclass(frozen=True)
class Drawn:
    """What a transform may know of n samples to draw its parameters.

    Attributes:
        u: float64[n, draws] uniform in [0, 1).
        heights: int64[n], of the images in pixels.
        widths: int64[n], of the images in pixels.
        boxes: that lie on the images; None if there are none, or if no transform of the pipeline goes by them.
        more: (rows, first, count) -> float64[len(rows), count], further uniform numbers of these samples, from number
            ``first`` on; ``u`` has those before ``draws``.
    """

    u: NDArray[np.float64]
    heights: NDArray[np.int64]
    widths: NDArray[np.int64]
    boxes: BoxesNow | None = None
    more: Callable[[NDArray[np.int64], int, int], NDArray[np.float64]] | None = None


@dataclass(frozen=True)
class Windows:
    """A window of the image for each sample, and the size that it is resampled to.

    Attributes:
        boxes: int64[n, 4], (top, left, height, width) in pixels. A window may reach over the image's edge
            (CenterCrop of a small image): what lies outside is black.
        sizes: int64[n, 2], (height, width) of the result in pixels; equal to the window's where nothing is
            resampled.
        kept: bool[total], which of the boxes on the images are kept, if not all that a window leaves something of.
    """

    boxes: NDArray[np.int64]
    sizes: NDArray[np.int64]
    kept: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Flips:
    """Which samples are mirrored left to right: ``which``, bool[n]."""

    which: NDArray[np.bool_]


@dataclass(frozen=True)
class Recolorings:
    """How the colours of each sample change: ``changes``, float64[n, s, 4], is what ``ColorJitter.changes`` returns."""

    changes: NDArray[np.float64]


Step: TypeAlias = Windows | Flips | Recolorings
"""What one transform does to n samples."""


class WindowTransform(Transform, ABC):
    """A transform that cuts a window out of the image and resamples it."""

    @abstractmethod
    def windows(self, drawn: Drawn) -> Windows:
        """Choose the windows of n samples."""
