"""Random changes of an image's levels, blurring and erasing, as in torchvision's v2 transforms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from mbaas.transforms import checks
from mbaas.transforms.base import Blur, Chain, Colour, CpuTransform, DrawInputs, Erasure, Operation, Operations
from mbaas.transforms.geometry import ATTEMPTS, first_fitting, random_windows


def _deviations(where: str, value: object) -> tuple[float, float]:
    return checks.interval(where, value if isinstance(value, (list, tuple)) else (value, value), above=0.0)


class _RandomOperation(CpuTransform):
    """Applies an operation, of ``value``, with probability ``p``."""

    draws: ClassVar[int] = 1
    keeps_size: ClassVar[bool] = True
    operation: ClassVar[str]
    p: float

    @property
    def value(self) -> float:
        return 0.0

    def step(self, drawn: DrawInputs) -> Operations:
        chains: tuple[Chain, Chain] = (), (Operation(self.operation, self.value),)
        return Operations([chains[changes] for changes in (drawn.u[:, 0] < self.p).tolist()])


@dataclass(frozen=True)
class RandomGrayscale(_RandomOperation):
    """Take the colours away with probability ``p``; the result has three equal channels.

    Args:
        p: probability in [0, 1].
    """

    p: Annotated[float, checks.fraction] = 0.1

    operation: ClassVar[str] = "Grayscale"


@dataclass(frozen=True)
class RandomInvert(_RandomOperation):
    """Replace each level x by 255 - x with probability ``p``.

    Args:
        p: probability in [0, 1].
    """

    p: Annotated[float, checks.fraction] = 0.5

    operation: ClassVar[str] = "Invert"


@dataclass(frozen=True)
class RandomEqualize(_RandomOperation):
    """Spread the levels of each channel evenly, with probability ``p``.

    Args:
        p: probability in [0, 1].
    """

    p: Annotated[float, checks.fraction] = 0.5

    operation: ClassVar[str] = "Equalize"


@dataclass(frozen=True)
class RandomAutocontrast(_RandomOperation):
    """Stretch the levels of each channel to the range from 0 to 255, with probability ``p``.

    Args:
        p: probability in [0, 1].
    """

    p: Annotated[float, checks.fraction] = 0.5

    operation: ClassVar[str] = "AutoContrast"


@dataclass(frozen=True)
class RandomSolarize(_RandomOperation):
    """Invert the levels from ``threshold`` on, with probability ``p``.

    Args:
        threshold: level in [0, 255].
        p: probability in [0, 1].
    """

    threshold: Annotated[float, checks.level]
    p: Annotated[float, checks.fraction] = 0.5

    operation: ClassVar[str] = "Solarize"

    @property
    def value(self) -> float:
        return self.threshold


@dataclass(frozen=True)
class RandomPosterize(_RandomOperation):
    """Keep only the upper ``bits`` of each level, with probability ``p``.

    Args:
        bits: in [0, 8].
        p: probability in [0, 1].
    """

    bits: Annotated[int, partial(checks.whole, least=0, most=8)]
    p: Annotated[float, checks.fraction] = 0.5

    operation: ClassVar[str] = "Posterize"

    @property
    def value(self) -> float:
        return self.bits


@dataclass(frozen=True)
class RandomAdjustSharpness(_RandomOperation):
    """Blur or sharpen the image with probability ``p``.

    Args:
        sharpness_factor: at least 0: 0 blurs, 1 leaves the image as it is, 2 sharpens.
        p: probability in [0, 1].
    """

    sharpness_factor: Annotated[float, partial(checks.number, least=0.0)]
    p: Annotated[float, checks.fraction] = 0.5

    operation: ClassVar[str] = "Sharpness"

    @property
    def value(self) -> float:
        return self.sharpness_factor


@dataclass(frozen=True)
class GaussianBlur(CpuTransform):
    """Blur the image by a Gaussian of random width.

    Args:
        kernel_size: (width, height) of the kernel in pixels, odd numbers; an integer means a square.
        sigma: (low, high) of the standard deviation in pixels; a number is the deviation itself.
    """

    kernel_size: Annotated[int | tuple[int, int], checks.height_width]
    sigma: Annotated[float | tuple[float, float], _deviations] = (0.1, 2.0)

    draws: ClassVar[int] = 1
    keeps_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(length % 2 for length in self.kernel_size):  # type: ignore[union-attr]
            raise self._refused("kernel_size", "must hold odd numbers")

    def step(self, drawn: DrawInputs) -> Operations:
        low, high = self.sigma  # type: ignore[misc]  # canonical since the check
        sigmas = low + (high - low) * drawn.u[:, 0]
        return Operations([(Blur(self.kernel_size, sigma),) for sigma in sigmas.tolist()])  # type: ignore[arg-type]


@dataclass(frozen=True)
class RandomErasing(CpuTransform):
    """Give a random window of the image one colour, with probability ``p`` (Zhong et al., 2020).

    In torchvision it usually follows Normalize, so that 0 is the mean colour. Here Normalize comes last, in the
    consumer: give the mean colour as ``value``, for example (124, 116, 104).

    Args:
        p: probability in [0, 1].
        scale: (low, high) fraction of the image's area, in (0, 1].
        ratio: (low, high) of height / width, drawn uniformly on a log scale.
        value: level, 0 to 255, one or (red, green, blue).
    """

    p: Annotated[float, checks.fraction] = 0.5
    scale: Annotated[tuple[float, float], partial(checks.interval, above=0.0, upto=1.0)] = (0.02, 0.33)
    ratio: Annotated[tuple[float, float], partial(checks.interval, above=0.0)] = (0.3, 3.3)
    value: Annotated[float | Colour, checks.colour] = 0

    draws: ClassVar[int] = 2 * ATTEMPTS + 3
    keeps_size: ClassVar[bool] = True

    def step(self, drawn: DrawInputs) -> Operations:
        sizes = drawn.sizes
        widths_by_heights = (1 / self.ratio[1], 1 / self.ratio[0])
        tries = random_windows(drawn.u[:, 1:], sizes, self.scale, widths_by_heights)
        windows, found = first_fitting(tries, drawn.u[:, -2:], sizes, sizes - 1)
        erased = found & (drawn.u[:, 0] < self.p)
        value: Colour = self.value  # type: ignore[assignment]  # canonical since the check
        return Operations(
            [
                (Erasure(tuple(box), value),) if is_erased else ()
                for box, is_erased in zip(windows.tolist(), erased, strict=True)
            ]
        )
