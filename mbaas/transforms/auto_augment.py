"""Random chains of operations: RandAugment, TrivialAugmentWide, AutoAugment and AugMix, as in torchvision's v2.

They move pixels in ways that boxes, keypoints and masks do not follow, in torchvision as here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mbaas.transforms import checks
from mbaas.transforms.base import (
    Chain,
    Colour,
    CpuTransform,
    DrawInputs,
    Interpolation,
    Mixture,
    More,
    Operation,
    Operations,
)

Floats = NDArray[np.float64]

_FACTORS = ("Brightness", "Color", "Contrast", "Sharpness")
"""Operations whose value is 1 plus the magnitude."""


class _Range(NamedTuple):
    """Magnitudes of an operation, in equal steps from ``first`` to ``last``.

    Attributes:
        is_signed: whether half of them are negative.
        of: 0 or 1 if they are fractions of the image's height or width; otherwise None.
        is_whole: whether they are rounded.
    """

    first: float = 0.0
    last: float = 0.0
    is_signed: bool = False
    of: int | None = None
    is_whole: bool = False

    def at(self, number: int, count: int, size: Sequence[int]) -> float:
        """Return magnitude ``number`` of ``count``, for an image of (height, width) ``size``."""
        # In the arithmetic of torch.linspace, because a threshold of 50.999998 is another one than 51.
        unit = 1.0 if self.of is None else size[self.of]
        first, last = np.float32(self.first * unit), np.float32(self.last * unit)
        step = (last - first) / np.float32(max(1, count - 1))
        found = (
            first + step * np.float32(number) if number < count // 2 else last - step * np.float32(count - 1 - number)
        )
        return float(np.rint(found)) if self.is_whole else float(found)


Space: TypeAlias = Mapping[str, _Range]
"""Operations to choose from, with their magnitudes."""


def _space(
    *more: str, shear: float = 0.3, shift: float, is_fraction: bool = True, rotation: float = 30.0, factor: float = 0.9,
    bits: tuple[int, int] = (8, 4),
) -> Space:  # fmt: skip
    height, width = (0, 1) if is_fraction else (None, None)
    return {
        **dict.fromkeys(("ShearX", "ShearY"), _Range(0.0, shear, is_signed=True)),
        "TranslateX": _Range(0.0, shift, is_signed=True, of=width),
        "TranslateY": _Range(0.0, shift, is_signed=True, of=height),
        "Rotate": _Range(0.0, rotation, is_signed=True),
        **dict.fromkeys(_FACTORS, _Range(0.0, factor, is_signed=True)),
        "Posterize": _Range(*bits, is_whole=True),
        "Solarize": _Range(1.0, 0.0),
        **dict.fromkeys(("AutoContrast", "Equalize", *more), _Range()),
    }


_RAND = _space("Identity", shift=150 / 331)
_WIDE = _space("Identity", shear=0.99, shift=32.0, is_fraction=False, rotation=135.0, factor=0.99, bits=(8, 2))
_AUTO = _space("Invert", shift=150 / 331)
_MIXED = _space(shift=1 / 3, bits=(4, 0))
_MIXED_WITHOUT_FACTORS = {name: each for name, each in _MIXED.items() if name not in _FACTORS}


def _operation(name: str, magnitude: float) -> Operation:
    if name in _FACTORS:
        magnitude += 1.0
    elif name == "Solarize":
        magnitude *= 255.0
    elif name.startswith("Translate"):
        magnitude = float(int(magnitude))
    return Operation(name, magnitude)


class _Chosen(NamedTuple):
    """An operation chosen from a space, by uniform numbers in [0, 1)."""

    space: Space
    bins: int
    size: Sequence[int]

    def one(self, choice: float, number: int, sign: float) -> tuple[Operation, ...]:
        """Return the operation that ``choice`` selects, with magnitude ``number``; () for none."""
        name = [*self.space][int(choice * len(self.space))]
        return self.named(name, number, sign)

    def named(self, name: str, number: int, sign: float) -> tuple[Operation, ...]:
        if name == "Identity":
            return ()
        magnitudes = self.space[name]
        magnitude = magnitudes.at(number, self.bins, self.size)
        return (_operation(name, -magnitude if magnitudes.is_signed and sign < 0.5 else magnitude),)


class _AutoAugment(CpuTransform):
    keeps_size: ClassVar[bool] = True
    interpolation: Interpolation
    fill: float | Colour | None

    @property
    def leaves_fields(self) -> str:
        return "moves pixels"

    def step(self, drawn: DrawInputs) -> Operations:
        sizes = drawn.sizes.tolist()
        fill: Colour | None = self.fill  # type: ignore[assignment]  # canonical since the check
        return Operations(self.chains(drawn, sizes), self.interpolation == "nearest", fill)

    @abstractmethod
    def chains(self, drawn: DrawInputs, sizes: list[list[int]]) -> list[Chain]:
        """Return the operations of n samples with these sizes, (height, width)."""


class _SampleBySample(_AutoAugment):
    def chains(self, drawn: DrawInputs, sizes: list[list[int]]) -> list[Chain]:
        return [self.chain(u, size) for u, size in zip(drawn.u.tolist(), sizes, strict=True)]

    @abstractmethod
    def chain(self, u: list[float], size: Sequence[int]) -> Chain:
        """Return the operations of one sample from its ``draws`` uniform numbers."""


@dataclass(frozen=True)
class RandAugment(_SampleBySample):
    """Apply ``num_ops`` random operations of one magnitude (Cubuk et al., 2020).

    Args:
        num_ops: number of operations.
        magnitude: of all operations, in [0, num_magnitude_bins - 1].
        num_magnitude_bins: number of magnitudes.
        interpolation: "nearest" or "bilinear".
        fill: level outside of a moved image, 0 to 255, one or (red, green, blue); None for black.
    """

    num_ops: Annotated[int, partial(checks.whole, least=0, most=100)] = 2
    magnitude: int = 9
    num_magnitude_bins: Annotated[int, partial(checks.whole, least=2, most=1000)] = 31
    interpolation: Annotated[Interpolation, checks.interpolation] = "nearest"
    fill: Annotated[float | Colour | None, checks.colour] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole("RandAugment's magnitude", self.magnitude, least=0, most=self.num_magnitude_bins - 1)

    @property
    def draws(self) -> int:
        return 2 * self.num_ops

    def chain(self, u: list[float], size: Sequence[int]) -> Chain:
        chosen = _Chosen(_RAND, self.num_magnitude_bins, size)
        found: Chain = ()
        for choice, sign in zip(u[::2], u[1::2], strict=True):
            found += chosen.one(choice, self.magnitude, sign)
        return found


@dataclass(frozen=True)
class TrivialAugmentWide(_SampleBySample):
    """Apply one random operation of random magnitude (Müller and Hutter, 2021).

    Args:
        num_magnitude_bins: number of magnitudes.
        interpolation: "nearest" or "bilinear".
        fill: level outside of a moved image, 0 to 255, one or (red, green, blue); None for black.
    """

    num_magnitude_bins: Annotated[int, partial(checks.whole, least=2, most=1000)] = 31
    interpolation: Annotated[Interpolation, checks.interpolation] = "nearest"
    fill: Annotated[float | Colour | None, checks.colour] = None

    draws: ClassVar[int] = 3

    def chain(self, u: list[float], size: Sequence[int]) -> Chain:
        choice, strength, sign = u
        return _Chosen(_WIDE, self.num_magnitude_bins, size).one(choice, int(strength * self.num_magnitude_bins), sign)


@dataclass(frozen=True)
class AutoAugment(_SampleBySample):
    """Apply one of 25 learned pairs of operations (Cubuk et al., 2019).

    Args:
        policy: "imagenet", "cifar10" or "svhn", the dataset from which the pairs were learned.
        interpolation: "nearest" or "bilinear".
        fill: level outside of a moved image, 0 to 255, one or (red, green, blue); None for black.
    """

    policy: Annotated[Literal["imagenet", "cifar10", "svhn"], partial(checks.named, names=[*_POLICIES])] = "imagenet"
    interpolation: Annotated[Interpolation, checks.interpolation] = "nearest"
    fill: Annotated[float | Colour | None, checks.colour] = None

    draws: ClassVar[int] = 5

    def chain(self, u: list[float], size: Sequence[int]) -> Chain:
        pairs, chosen = _POLICIES[self.policy], _Chosen(_AUTO, 10, size)
        found: Chain = ()
        for (name, probability, number), chance, sign in zip(
            pairs[int(u[0] * len(pairs))], u[1::2], u[2::2], strict=True
        ):
            if chance < probability:
                found += chosen.named(name, number, sign)
        return found


@dataclass(frozen=True)
class AugMix(_AutoAugment):
    """Mix the image with several chains of random operations on it (Hendrycks et al., 2020).

    Args:
        severity: greatest magnitude, in [1, 10].
        mixture_width: number of chains.
        chain_depth: operations of a chain; -1 draws 1, 2 or 3 for each.
        alpha: parameter of the Dirichlet distribution of the chains' weights, and of the Beta distribution of the
            image's own.
        all_ops: also change brightness, colour, contrast and sharpness.
        interpolation: "nearest" or "bilinear".
        fill: level outside of a moved image, 0 to 255, one or (red, green, blue); None for black.
    """

    severity: Annotated[int, partial(checks.whole, most=_MIX_COUNT)] = 3
    mixture_width: Annotated[int, partial(checks.whole, most=100)] = 3
    chain_depth: Annotated[int, partial(checks.whole, least=-1, most=100)] = -1
    alpha: Annotated[float, checks.number] = 1.0
    all_ops: Annotated[bool, checks.flag] = True
    interpolation: Annotated[Interpolation, checks.interpolation] = "bilinear"
    fill: Annotated[float | Colour | None, checks.colour] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha <= 0.0:
            raise self._refused("alpha", "must be above 0")

    @property
    def _deepest(self) -> int:
        return self.chain_depth if self.chain_depth > 0 else 3

    @property
    def draws(self) -> int:
        return self.mixture_width * (1 + 3 * self._deepest)

    def chains(self, drawn: DrawInputs, sizes: list[list[int]]) -> list[Chain]:
        assert drawn.more is not None
        shares = gamma(drawn.more, len(sizes), self.draws, self.mixture_width + 2, self.alpha)
        own = shares[:, 0] / shares[:, :2].sum(axis=1)
        weights = shares[:, 2:] / shares[:, 2:].sum(axis=1, keepdims=True) * (1 - own)[:, None]
        numbers = drawn.u.reshape(len(sizes), self.mixture_width, 1 + 3 * self._deepest).tolist()
        return [
            (Mixture(each_own, tuple(each_weights), tuple(self._one(u, size) for u in each_numbers)),)
            for each_own, each_weights, each_numbers, size in zip(
                own.tolist(), weights.tolist(), numbers, sizes, strict=True
            )
        ]

    def _one(self, u: list[float], size: Sequence[int]) -> Chain:
        depth = self.chain_depth if self.chain_depth > 0 else 1 + int(u[0] * 3)
        chosen = _Chosen(_MIXED if self.all_ops else _MIXED_WITHOUT_FACTORS, _MIX_COUNT, size)
        found: Chain = ()
        for k in range(1, 1 + 3 * depth, 3):
            found += chosen.one(u[k], int(u[k + 1] * self.severity), u[k + 2])
        return found


_MIX_COUNT = 10
"""Number of magnitudes of AugMix."""


def gamma(more: More, rows: int, first: int, count: int, shape: float) -> Floats:
    """Return numbers of the Gamma distribution with ``shape``: float64[rows, count], above 0.

    By the rejection method of Marsaglia and Tsang (2000), whose proposals are accepted in at least 95 % of cases. The
    uniform numbers of a sample are those from ``first`` on.
    """
    is_small = shape < 1.0
    d = (shape + 1.0 if is_small else shape) - 1 / 3
    c = 1 / np.sqrt(9 * d)
    found, is_open = np.zeros((rows, count)), np.ones((rows, count), np.bool_)
    boost = (1 - more(np.arange(rows), first, count)) ** (1 / shape) if is_small else 1.0
    first += count
    while is_open.any():
        (left,) = np.nonzero(is_open.any(axis=1))
        u = more(left, first, 3 * count).reshape(len(left), 3, count)
        first += 3 * count
        normal = np.sqrt(-2 * np.log1p(-u[:, 0])) * np.cos(2 * np.pi * u[:, 1])
        cube = (1 + c * normal) ** 3
        with np.errstate(divide="ignore", invalid="ignore"):
            accepts = (cube > 0) & (np.log1p(-u[:, 2]) < normal**2 / 2 + d - d * cube + d * np.log(cube))
        accepts &= is_open[left]
        found[left] = np.where(accepts, d * cube, found[left])
        is_open[left] &= ~accepts
    return np.maximum(found * boost, np.finfo(np.float64).tiny)


_Part = tuple[str, float, int]

_POLICIES: dict[str, tuple[tuple[_Part, _Part], ...]] = {
    "imagenet": (
        (("Posterize", 0.4, 8), ("Rotate", 0.6, 9)),
        (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
        (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
        (("Posterize", 0.6, 7), ("Posterize", 0.6, 6)),
        (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
        (("Equalize", 0.4, 0), ("Rotate", 0.8, 8)),
        (("Solarize", 0.6, 3), ("Equalize", 0.6, 0)),
        (("Posterize", 0.8, 5), ("Equalize", 1.0, 0)),
        (("Rotate", 0.2, 3), ("Solarize", 0.6, 8)),
        (("Equalize", 0.6, 0), ("Posterize", 0.4, 6)),
        (("Rotate", 0.8, 8), ("Color", 0.4, 0)),
        (("Rotate", 0.4, 9), ("Equalize", 0.6, 0)),
        (("Equalize", 0.0, 0), ("Equalize", 0.8, 0)),
        (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
        (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
        (("Rotate", 0.8, 8), ("Color", 1.0, 2)),
        (("Color", 0.8, 8), ("Solarize", 0.8, 7)),
        (("Sharpness", 0.4, 7), ("Invert", 0.6, 0)),
        (("ShearX", 0.6, 5), ("Equalize", 1.0, 0)),
        (("Color", 0.4, 0), ("Equalize", 0.6, 0)),
        (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
        (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
        (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
        (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
        (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
    ),
    "cifar10": (
        (("Invert", 0.1, 0), ("Contrast", 0.2, 6)),
        (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
        (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
        (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
        (("AutoContrast", 0.5, 0), ("Equalize", 0.9, 0)),
        (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
        (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
        (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
        (("Equalize", 0.6, 0), ("Equalize", 0.5, 0)),
        (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
        (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
        (("Equalize", 0.3, 0), ("AutoContrast", 0.4, 0)),
        (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
        (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
        (("Solarize", 0.5, 2), ("Invert", 0.0, 0)),
        (("Equalize", 0.2, 0), ("AutoContrast", 0.6, 0)),
        (("Equalize", 0.2, 0), ("Equalize", 0.6, 0)),
        (("Color", 0.9, 9), ("Equalize", 0.6, 0)),
        (("AutoContrast", 0.8, 0), ("Solarize", 0.2, 8)),
        (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
        (("Solarize", 0.4, 5), ("AutoContrast", 0.9, 0)),
        (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
        (("AutoContrast", 0.9, 0), ("Solarize", 0.8, 3)),
        (("Equalize", 0.8, 0), ("Invert", 0.1, 0)),
        (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, 0)),
    ),
    "svhn": (
        (("ShearX", 0.9, 4), ("Invert", 0.2, 0)),
        (("ShearY", 0.9, 8), ("Invert", 0.7, 0)),
        (("Equalize", 0.6, 0), ("Solarize", 0.6, 6)),
        (("Invert", 0.9, 0), ("Equalize", 0.6, 0)),
        (("Equalize", 0.6, 0), ("Rotate", 0.9, 3)),
        (("ShearX", 0.9, 4), ("AutoContrast", 0.8, 0)),
        (("ShearY", 0.9, 8), ("Invert", 0.4, 0)),
        (("ShearY", 0.9, 5), ("Solarize", 0.2, 6)),
        (("Invert", 0.9, 0), ("AutoContrast", 0.8, 0)),
        (("Equalize", 0.6, 0), ("Rotate", 0.9, 3)),
        (("ShearX", 0.9, 4), ("Solarize", 0.3, 3)),
        (("ShearY", 0.8, 8), ("Invert", 0.7, 0)),
        (("Equalize", 0.9, 0), ("TranslateY", 0.6, 6)),
        (("Invert", 0.9, 0), ("Equalize", 0.6, 0)),
        (("Contrast", 0.3, 3), ("Rotate", 0.8, 4)),
        (("Invert", 0.8, 0), ("TranslateY", 0.0, 2)),
        (("ShearY", 0.7, 6), ("Solarize", 0.4, 8)),
        (("Invert", 0.6, 0), ("Rotate", 0.8, 4)),
        (("ShearY", 0.3, 7), ("TranslateX", 0.9, 3)),
        (("ShearX", 0.1, 6), ("Invert", 0.6, 0)),
        (("Solarize", 0.7, 2), ("TranslateY", 0.6, 7)),
        (("ShearY", 0.8, 4), ("Invert", 0.8, 0)),
        (("ShearX", 0.7, 9), ("TranslateY", 0.8, 3)),
        (("ShearY", 0.8, 5), ("AutoContrast", 0.7, 0)),
        (("ShearX", 0.7, 2), ("Invert", 0.1, 0)),
    ),
}
"""Policy -> pairs of (operation, its probability, number of its magnitude)."""
