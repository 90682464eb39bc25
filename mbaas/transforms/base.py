"""Base classes of transforms, and the parameters that they pass to engines for n samples at a time.

Transforms compute their random parameters and engines only apply them. So all engines crop the same windows.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, get_type_hints

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.transforms import checks

Size = tuple[int, int]
"""(height, width) in pixels."""


class Parameters:
    """Base of frozen dataclasses that check their parameters and store each in its canonical type.

    A parameter's type may be annotated with one of `checks`, which replaces the value; a default of None stays.
    """

    def __post_init__(self) -> None:
        for name, check in _checks_of(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is not None or getattr(type(self), name, ...) is not None:
                self._set(name, check(f"{type(self).__name__}'s {name}", value))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _refused(self, name: str, must: str) -> ConfigError:
        return checks.refused(f"{type(self).__name__}'s {name}", must, getattr(self, name))


@functools.cache
def _checks_of(kind: type) -> dict[str, Callable[[str, object], object]]:
    types = get_type_hints(kind, include_extras=True)
    return {name: check for name in types for check in getattr(types[name], "__metadata__", ()) if callable(check)}


class Transform(Parameters):
    """A step of a pipeline: immutable, comparable, with a repr that evaluates to an equal transform.

    Attributes:
        keeps_size: True if the result always has the image's size.
        needs_boxes: True if the parameters depend on the boxes of the image.
        dali_limit: what only the cpu engine can do, such as "runs no Map"; "" if DALI runs the transform.
    """

    keeps_size: ClassVar[bool] = False
    needs_boxes: ClassVar[bool] = False

    @property
    def dali_limit(self) -> str:
        return ""

    @property
    def draws(self) -> int:
        """Number of uniform random numbers in [0, 1) per sample. It is constant, so a block is drawn in one call."""
        return 0

    @property
    def fixed_size(self) -> Size | None:
        """Size of every result; None if it depends on the image."""
        return None

    def identity(self) -> str:
        """Return the transform's part of the pipeline fingerprint: equal exactly for equivalent transforms."""
        return repr(self)


@dataclass(frozen=True)
class BoxState:
    """The boxes of n images between two transforms.

    Attributes:
        edges: float64[total, 4]: left, top, right and bottom in pixels.
        owner: int64[total], the image of each box, ascending.
        kept: bool[total], False for boxes that a transform dropped.
    """

    edges: NDArray[np.float64]
    owner: NDArray[np.int64]
    kept: NDArray[np.bool_]


@dataclass(frozen=True)
class DrawInputs:
    """Inputs from which a transform computes its parameters for n samples.

    Attributes:
        u: float64[n, draws], uniform in [0, 1).
        heights, widths: int64[n], image sizes in pixels.
        boxes: boxes of the images; None without boxes, or if no transform of the pipeline needs them.
        more: (rows, first, count) -> float64[len(rows), count]: further uniform numbers for these samples, starting
            with number ``first``. Numbers 0 to ``draws`` - 1 are in ``u``.
    """

    u: NDArray[np.float64]
    heights: NDArray[np.int64]
    widths: NDArray[np.int64]
    boxes: BoxState | None = None
    more: Callable[[NDArray[np.int64], int, int], NDArray[np.float64]] | None = None

    @property
    def whole(self) -> NDArray[np.int64]:
        """Return the windows that are the whole images, int64[n, 4]."""
        zeros = np.zeros_like(self.heights)
        return np.stack([zeros, zeros, self.heights, self.widths], axis=1)


@dataclass(frozen=True)
class Windows:
    """A window of the image for each sample, and the size to which it is resampled.

    Attributes:
        boxes: int64[n, 4], (top, left, height, width) in pixels. A window may extend beyond the image, as in a
            CenterCrop of a small image; the outside is black.
        sizes: int64[n, 2], (height, width) of the result in pixels; the window's size if nothing is resampled.
        kept: bool[total], the boxes to keep; None: all boxes that overlap their window.
    """

    boxes: NDArray[np.int64]
    sizes: NDArray[np.int64]
    kept: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Flips:
    """The samples to mirror left to right: ``which``, bool[n]."""

    which: NDArray[np.bool_]


@dataclass(frozen=True)
class Recolorings:
    """Colour changes of each sample: ``changes``, float64[n, s, 4], as returned by ``ColorJitter.changes``."""

    changes: NDArray[np.float64]


Step: TypeAlias = Windows | Flips | Recolorings
"""The effect of one transform on n samples."""


class WindowTransform(Transform, ABC):
    """A transform that crops a window of the image and resamples it.

    Results have its parameter ``size``, if there is one that is (height, width).
    """

    @property
    def fixed_size(self) -> Size | None:
        size = getattr(self, "size", None)
        return size if isinstance(size, tuple) else None

    @abstractmethod
    def windows(self, drawn: DrawInputs) -> Windows: ...
