"""Base classes of transforms, and the parameters that they pass to engines for n samples at a time.

Transforms compute their random parameters and engines only apply them. So all engines crop the same windows.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias, get_type_hints

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.transforms import checks

Size = tuple[int, int]
"""(height, width) in pixels."""

Colour = tuple[float, float, float]
"""Levels of red, green and blue, 0 to 255."""

PaddingMode: TypeAlias = Literal["constant", "edge", "reflect", "symmetric"]
Interpolation: TypeAlias = Literal["nearest", "bilinear"]


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
        runs_on_dali: False if DALI lacks the transform. It and all transforms after it are then applied on CPUs to
            DALI's results.
        dali_limit: what the dali engine cannot do at all, such as "runs no Map"; "" if it can prepare the samples.
    """

    keeps_size: ClassVar[bool] = False
    needs_boxes: ClassVar[bool] = False

    @property
    def runs_on_dali(self) -> bool:
        return True

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


More: TypeAlias = Callable[[NDArray[np.int64], int, int], NDArray[np.float64]]
"""(rows, first, count) -> float64[len(rows), count], uniform in [0, 1): a sample's random numbers from ``first`` on."""


@dataclass(frozen=True)
class DrawInputs:
    """Inputs from which a transform computes its parameters for n samples.

    Attributes:
        u: float64[n, draws], uniform in [0, 1).
        sizes: int64[n, 2], (height, width) of the images in pixels.
        boxes: boxes of the images; None without boxes, or if no transform of the pipeline needs them.
        more: further random numbers of these samples. Numbers 0 to ``draws`` - 1 are in ``u``.
    """

    u: NDArray[np.float64]
    sizes: NDArray[np.int64]
    boxes: BoxState | None = None
    more: More | None = None

    @property
    def whole(self) -> NDArray[np.int64]:
        """The windows that are the whole images, int64[n, 4]."""
        return np.column_stack([np.zeros_like(self.sizes), self.sizes])


class Padding(NamedTuple):
    """Pixels outside of an image: the colour ``fill`` if ``mode`` is "constant"; otherwise they repeat the image.

    "edge" repeats the outermost pixel. "reflect" mirrors the image at that pixel, "symmetric" at its outer edge.
    """

    mode: PaddingMode = "constant"
    fill: Colour = (0.0, 0.0, 0.0)


BLACK = Padding()


@dataclass(frozen=True)
class Windows:
    """A window of the image for each sample, and the size to which it is resampled.

    Attributes:
        boxes: int64[n, 4], (top, left, height, width) in pixels. A window may extend beyond the image, as in a
            CenterCrop of a small image.
        sizes: int64[n, 2], (height, width) of the result in pixels; the window's size if nothing is resampled.
        kept: bool[total], the boxes to keep; None: all boxes that overlap their window.
        padding: pixels of a window outside of its image.
    """

    boxes: NDArray[np.int64]
    sizes: NDArray[np.int64]
    kept: NDArray[np.bool_] | None = None
    padding: Padding = BLACK


@dataclass(frozen=True)
class Flips:
    """The samples to mirror, ``which``, bool[n]: left to right, or if ``vertical`` upside down."""

    which: NDArray[np.bool_]
    vertical: bool = False


@dataclass(frozen=True)
class Recolorings:
    """Colour changes of each sample: ``changes``, float64[n, s, 4], as returned by ``ColorJitter.changes``."""

    changes: NDArray[np.float64]


@dataclass(frozen=True)
class Warps:
    """A projective map of each sample, such as a rotation.

    Attributes:
        which: bool[n], the samples that change.
        to_source: float64[n, 3, 3], maps a place (x, y, 1) in the result to its place in the image, up to a factor.
            Places are in pixels from the left and upper edge.
        sizes: int64[n, 2], (height, width) of the result in pixels.
        nearest: True for the nearest pixel, False for a bilinear mean of four.
        fill: colour outside of the image.
    """

    which: NDArray[np.bool_]
    to_source: NDArray[np.float64]
    sizes: NDArray[np.int64]
    nearest: bool
    fill: Colour

    @functools.cached_property
    def from_source(self) -> NDArray[np.float64]:
        """The inverse of ``to_source``."""
        return np.asarray(np.linalg.pinv(self.to_source), np.float64)  # also of a tiny image whose corners coincide


class Operation(NamedTuple):
    """A change of one image, named as in torchvision's AutoAugment: "Solarize", "ShearX", ..."""

    name: str
    value: float = 0.0


class Blur(NamedTuple):
    """A Gaussian blur by a kernel of (width, height) and ``sigma``, in pixels."""

    kernel_size: tuple[int, int]
    sigma: float


class Erasure(NamedTuple):
    """A window ``box``, (top, left, height, width) in pixels, that gets one colour."""

    box: tuple[int, int, int, int]
    value: Colour


class Mixture(NamedTuple):
    """The mean of an image, with weight ``own``, and of its changes by each of ``chains``, with one of ``weights``."""

    own: float
    weights: tuple[float, ...]
    chains: tuple[Chain, ...]


Chain: TypeAlias = "tuple[Operation | Blur | Erasure | Mixture, ...]"
"""Successive changes of one image, which keep its size."""


@dataclass(frozen=True)
class Operations:
    """Successive changes of each of n samples: ``chains``.

    ``nearest`` and ``fill`` as in `Warps`, for operations that move pixels; for None, see `mbaas.prep.pixels.warp`.
    """

    chains: Sequence[Chain]
    nearest: bool = True
    fill: Colour | None = None


Step: TypeAlias = Windows | Flips | Recolorings | Warps | Operations
"""The effect of one transform on n samples."""


class ImageTransform(Transform, ABC):
    """A transform of images that runs in prep workers.

    Attributes:
        leaves_fields: a change that boxes, keypoints and masks cannot follow, as in "moves pixels"; "" if they can.
    """

    @property
    def leaves_fields(self) -> str:
        return ""

    @abstractmethod
    def step(self, drawn: DrawInputs) -> Step:
        """Return the effect on n samples."""


class CpuTransform(ImageTransform):
    """A random transform of images that DALI lacks."""

    @property
    def runs_on_dali(self) -> bool:
        return False


class WindowTransform(ImageTransform):
    """A transform that crops a window of the image and resamples it.

    Results have its parameter ``size``, if there is one that is (height, width).
    """

    @property
    def fixed_size(self) -> Size | None:
        size = getattr(self, "size", None)
        return size if isinstance(size, tuple) else None

    @abstractmethod
    def step(self, drawn: DrawInputs) -> Windows: ...
