"""Changes of colour."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.transforms import checks
from mbaas.transforms.base import Transform

GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R BT.601), as torchvision and OpenCV use them."""

_ORDERS = np.array(list(permutations(range(3))))


@dataclass(frozen=True)
class ColorJitter(Transform):
    """Change brightness, contrast and saturation by random factors, in random order.

    Each change blends the image x with a reference r: ``clip(round(f * x + (1 - f) * r), 0, 255)``. The
    reference is black for brightness, the mean of the grey image for contrast, the grey image for saturation.
    torchvision's arithmetic, but rounded to the nearest level where torchvision rounds down. Hue is left out:
    DALI's hue rotates in another colour space, so engines would not agree.

    Args:
        brightness: a number b >= 0 draws the factor from [max(0, 1 - b), 1 + b]; (low, high) draws it from
            there.
        contrast: the same for contrast.
        saturation: the same for saturation.
    """

    brightness: float | tuple[float, float] = 0.0
    contrast: float | tuple[float, float] = 0.0
    saturation: float | tuple[float, float] = 0.0

    draws: ClassVar[int] = 4
    keeps_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            self._set(name, _factors(f"ColorJitter's {name}", getattr(self, name)))

    def blends(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Three successive blends for each sample.

        Args:
            u: float64[n, 4] uniform in [0, 1): three factors and the order.

        Returns:
            float64[n, 3, 3]: for stage k the weights (a, b, c) of ``a * x + b * grey(x) + c *
            mean(grey(x))``.
        """
        names = ("brightness", "contrast", "saturation")
        f = np.stack([self._draw(name, u[:, k]) for k, name in enumerate(names)])
        stages = np.zeros((len(u), 3, 3))
        stages[:, :, 0] = f.T
        stages[:, 1, 2] = 1.0 - f[1]
        stages[:, 2, 1] = 1.0 - f[2]
        order = _ORDERS[(u[:, 3] * len(_ORDERS)).astype(np.int64)]
        return np.take_along_axis(stages, order[:, :, None], axis=1)

    def _draw(self, name: str, u: NDArray[np.float64]) -> NDArray[np.float64]:
        low, high = getattr(self, name)
        return low + (high - low) * u


def _factors(where: str, value: object) -> tuple[float, float]:
    if isinstance(value, (list, tuple)):
        low, high = checks.interval(where, value)
        if low < 0.0:
            raise ConfigError(f"{where} must not be negative, got {value!r}")
        return low, high
    spread = checks.number(where, value)
    if spread < 0.0:
        raise ConfigError(f"{where} must not be negative, got {value!r}")
    return max(0.0, 1.0 - spread), 1.0 + spread
