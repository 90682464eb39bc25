"""Transforms of colours: ColorJitter in prep workers, and Normalize in consumers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.transforms import checks
from mbaas.transforms.base import DrawInputs, ImageTransform, Recolorings, Transform

if TYPE_CHECKING:
    import torch

GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R BT.601), as in torchvision and OpenCV."""

# One uniform number selects the order: 6 orders of three changes, 24 of four.
_ORDERS = {stages: np.array(list(permutations(range(stages)))) for stages in (3, 4)}
_FACTORS = ("brightness", "contrast", "saturation")


@dataclass(frozen=True)
class ColorJitter(ImageTransform):
    """Change brightness, contrast, saturation and hue by random amounts, in random order.

    The first three blend the image x with a reference r: ``clip(round(f * x + (1 - f) * r), 0, 255)``. The reference is
    black for brightness, the mean of the grey image for contrast, and the grey image for saturation. This matches
    torchvision, except that torchvision rounds down instead of to the nearest level. Hue is shifted in HSV, as in
    torchvision; with the dali engine on CPUs, because DALI uses another colour space.

    Args:
        brightness: a number b >= 0 draws the factor from [max(0, 1 - b), 1 + b]; (low, high) is the range itself.
        contrast: the same for contrast.
        saturation: the same for saturation.
        hue: a number h in [0, 0.5] draws the shift, in turns of the colour circle, from [-h, h]; (low, high) is the
            range itself, within [-0.5, 0.5]. Both 0.5 and -0.5 give complementary colours.
    """

    brightness: Annotated[float | tuple[float, float], _factors] = 0.0
    contrast: Annotated[float | tuple[float, float], _factors] = 0.0
    saturation: Annotated[float | tuple[float, float], _factors] = 0.0
    hue: Annotated[float | tuple[float, float], _turns] = 0.0

    draws: ClassVar[int] = 5
    keeps_size: ClassVar[bool] = True

    @property
    def runs_on_dali(self) -> bool:
        return not self.turns_hue

    @property
    def turns_hue(self) -> bool:
        return self.hue != (0.0, 0.0)

    def step(self, drawn: DrawInputs) -> Recolorings:
        return Recolorings(self.changes(drawn.u))

    def changes(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute the successive changes of each sample: s = 4 with hue, else 3.

        Args:
            u: float64[n, 5], uniform in [0, 1): three factors, the order, and the hue shift.

        Returns:
            float64[n, s, 4]: (a, b, c, turn) for each stage. A stage either replaces the image with ``a * x + b *
                grey(x) + c * mean(grey(x))``, or shifts its hue by ``turn`` turns.
        """
        f = np.stack([self._draw(name, u[:, k]) for k, name in enumerate(_FACTORS)])
        stages = np.zeros((len(u), 4, 4))
        # Stages in default order: brightness, contrast, saturation, hue. Brightness blends with black, so only a is
        # set. The others give the reference the weight 1 - f.
        stages[:, :3, 0] = f.T
        stages[:, 1, 2] = 1.0 - f[1]
        stages[:, 2, 1] = 1.0 - f[2]
        stages[:, 3, 0] = 1.0
        stages[:, 3, 3] = self._draw("hue", u[:, 4])
        # Without hue, the orders have three stages and its stage is dropped.
        orders = _ORDERS[4 if self.turns_hue else 3]
        order = orders[(u[:, 3] * len(orders)).astype(np.int64)]
        return np.take_along_axis(stages, order[:, :, None], axis=1)

    def _draw(self, name: str, u: NDArray[np.float64]) -> NDArray[np.float64]:
        low, high = getattr(self, name)
        return low + (high - low) * u


def _factors(where: str, value: object) -> tuple[float, float]:
    if isinstance(value, (list, tuple)):
        return checks.interval(where, value, least=0.0)
    spread = checks.number(where, value, least=0.0)
    return max(0.0, 1.0 - spread), 1.0 + spread


def _turns(where: str, value: object) -> tuple[float, float]:
    if isinstance(value, (list, tuple)):
        return checks.interval(where, value, least=-0.5, upto=0.5)
    spread = checks.number(where, value)
    if not 0.0 <= spread <= 0.5:
        raise checks.refused(where, "must be in [0, 0.5], or (low, high) within [-0.5, 0.5]", value)
    # Not -spread: the repr of -0.0 differs from 0.0, and so would the fingerprint.
    return 0.0 - spread, spread


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

    mean: Annotated[tuple[float, float, float], partial(checks.numbers, length=3)]
    std: Annotated[tuple[float, float, float], partial(checks.numbers, length=3)]
    dtype: Annotated[str, partial(checks.one_of, names=DTYPES)] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.std) <= 0.0:
            raise self._refused("std", "must be above 0")

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


@dataclass(frozen=True)
class ToFloat(Normalize):
    """Compute ``x / 255``: levels from 0 to 1, as torchvision's ``ToDtype(torch.float32, scale=True)``.

    Like Normalize, it must be the last transform, and runs in the consumer. Normalize divides by 255 itself, so that a
    pipeline has one of both.

    Args:
        dtype: "float32", "float16" or "bfloat16" (torch only).
    """

    mean: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0), init=False, repr=False)
    std: tuple[float, float, float] = field(default=(1.0, 1.0, 1.0), init=False, repr=False)
    dtype: str = "float32"
