"""Normalize: standardizes pixels on the consumer's side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.transforms import checks
from mbaas.transforms.base import Transform

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Normalize(Transform):
    """Compute ``(x / 255 - mean) / std`` for each channel: torchvision's ToTensor and Normalize in one.

    Must be the last transform. It runs in the consumer: pixels are sent as uint8, and each consumer converts its copy
    on its device. Computed in float32, then cast to ``dtype``.

    Args:
        mean: mean of red, green and blue, with white at 1.0.
        std: standard deviation of red, green and blue, above 0.
        dtype: "float32", "float16" or "bfloat16" (torch only).
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        self._check("mean", checks.numbers, length=3)
        self._check("std", checks.numbers, length=3)
        if min(self.std) <= 0.0:
            raise self._refused("std", "must be above 0")
        self._check("dtype", checks.one_of, names=DTYPES)

    def apply_numpy(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """Return a new array, ``dtype`` [n, height, width, 3], from ``images``, uint8 with the same shape.

        Raises:
            ConfigError: ``dtype`` is "bfloat16", which NumPy lacks.
        """
        if self.dtype == "bfloat16":
            raise ConfigError("Normalize(dtype='bfloat16') needs format='torch': NumPy has no bfloat16")
        if images.dtype != np.uint8:
            raise ConfigError(f"Normalize needs uint8 images, got {images.dtype}")
        # One multiplication and one addition per value, instead of two divisions and a subtraction.
        scale, offset = self._scale_offset()
        result = np.multiply(images, scale, dtype=np.float32)
        result += offset
        return result.astype(self.dtype, copy=False)

    def apply_torch(self, images: torch.Tensor) -> torch.Tensor:
        """Return a new tensor, ``dtype`` [n, 3, height, width], from ``images``, uint8 with the same shape.

        The result has the device and memory format (channels-last) of ``images``.
        """
        import torch  # here: it takes 1.5 s, and consumers of NumPy arrays do not need it

        if images.dtype != torch.uint8:
            raise ConfigError(f"Normalize needs uint8 images, got {images.dtype}")
        scale, offset = (torch.from_numpy(v).to(images.device).view(1, 3, 1, 1) for v in self._scale_offset())
        # In place on the copy made by the cast: a minibatch is in memory once as floats, not three times.
        result = images.to(torch.float32).mul_(scale).add_(offset)
        return result.to(getattr(torch, self.dtype))

    def _scale_offset(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (scale, offset), float32[3] each: the result is ``x * scale + offset``."""
        std = np.array(self.std)  # float64, so that only the results are rounded
        return (1.0 / (255.0 * std)).astype(np.float32), (-np.array(self.mean) / std).astype(np.float32)
