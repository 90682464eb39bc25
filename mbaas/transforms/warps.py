"""Rotations, affine and perspective maps of images, as in torchvision's v2 transforms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mbaas.transforms import checks
from mbaas.transforms.base import Colour, CpuTransform, DrawInputs, Interpolation, Operation, Warps

Floats = NDArray[np.float64]

_STEPS = 1e4
"""Sizes of rotated images are computed in steps of this fraction of a pixel, so that rounding errors add none."""


@dataclass(frozen=True)
class RandomRotation(CpuTransform):
    """Rotate the image by a random angle.

    Args:
        degrees: counter-clockwise: (low, high), or a number d for (-d, d).
        interpolation: "nearest" or "bilinear".
        expand: make the result as large as the rotated image; otherwise it has the image's size.
        center: (x, y) in pixels from the upper left corner; default: the image's centre.
        fill: level outside of the image, 0 to 255, one or (red, green, blue).
    """

    degrees: Annotated[float | tuple[float, float], checks.spread]
    interpolation: Annotated[Interpolation, checks.interpolation] = "nearest"
    expand: Annotated[bool, checks.flag] = False
    center: Annotated[tuple[float, float] | None, partial(checks.numbers, length=2)] = None
    fill: Annotated[float | Colour, checks.colour] = 0

    draws: ClassVar[int] = 1

    @property
    def keeps_size(self) -> bool:  # type: ignore[override]
        return not self.expand

    def step(self, drawn: DrawInputs) -> Warps:
        sizes = drawn.sizes
        matrices = inverse_affine(-_between(self.degrees, drawn.u[:, 0]), center=_from_centre(self.center, sizes))
        results = _rotated_sizes(matrices, sizes) if self.expand else sizes
        return Warps(
            np.ones(len(sizes), np.bool_),
            between_centres(matrices, sizes, results),
            results,
            self.interpolation == "nearest",
            self.fill,  # type: ignore[arg-type]  # canonical since the check
        )


@dataclass(frozen=True)
class RandomAffine(CpuTransform):
    """Rotate, move, scale and shear the image by random amounts; the result has its size.

    Args:
        degrees: clockwise rotation: (low, high), or a number d for (-d, d).
        translate: greatest shift as fractions of (width, height), each way; None for none.
        scale: (low, high) of the scale; None for 1.
        shear: shear in degrees, parallel to the x-axis: a number s for (-s, s), or (low, high); with four numbers, the
            last two are parallel to the y-axis. None for none.
        interpolation: "nearest" or "bilinear".
        fill: level outside of the image, 0 to 255, one or (red, green, blue).
        center: (x, y) in pixels from the upper left corner; default: the image's centre.
    """

    degrees: Annotated[float | tuple[float, float], checks.spread]
    translate: Annotated[tuple[float, float] | None, partial(checks.fractions, length=2)] = None
    scale: Annotated[tuple[float, float] | None, partial(checks.interval, above=0.0)] = None
    shear: Annotated[float | tuple[float, ...] | None, _shears] = None
    interpolation: Annotated[Interpolation, checks.interpolation] = "nearest"
    fill: Annotated[float | Colour, checks.colour] = 0
    center: Annotated[tuple[float, float] | None, partial(checks.numbers, length=2)] = None

    draws: ClassVar[int] = 6
    keeps_size: ClassVar[bool] = True

    def step(self, drawn: DrawInputs) -> Warps:
        sizes, u = drawn.sizes, drawn.u
        most = np.array(self.translate or (0.0, 0.0)) * sizes[:, ::-1]
        shear: tuple[float, ...] = self.shear or (0.0, 0.0, 0.0, 0.0)  # type: ignore[assignment]
        matrices = inverse_affine(
            _between(self.degrees, u[:, 0]),
            translate=np.rint((2 * u[:, 1:3] - 1) * most),
            scale=_between(self.scale or (1.0, 1.0), u[:, 3]),
            shear=np.column_stack([_between(shear[:2], u[:, 4]), _between(shear[2:], u[:, 5])]),
            center=_from_centre(self.center, sizes),
        )
        return Warps(
            np.ones(len(sizes), np.bool_),
            between_centres(matrices, sizes, sizes),
            sizes,
            self.interpolation == "nearest",
            self.fill,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class RandomPerspective(CpuTransform):
    """Show the image in a random perspective with probability ``p``; the result has its size.

    Args:
        distortion_scale: in [0, 1]; each corner moves inwards by up to this fraction of half the size.
        p: probability in [0, 1].
        interpolation: "nearest" or "bilinear".
        fill: level outside of the image, 0 to 255, one or (red, green, blue).
    """

    distortion_scale: Annotated[float, checks.fraction] = 0.5
    p: Annotated[float, checks.fraction] = 0.5
    interpolation: Annotated[Interpolation, checks.interpolation] = "bilinear"
    fill: Annotated[float | Colour, checks.colour] = 0

    draws: ClassVar[int] = 9
    keeps_size: ClassVar[bool] = True

    def step(self, drawn: DrawInputs) -> Warps:
        sizes = drawn.sizes
        last = (sizes[:, None, ::-1] - 1).astype(np.float64)  # the last pixel of a row, and of a column
        corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
        # Whole pixels, as in torchvision: from 0 to ``reach``, counted from the corner inwards.
        reach = (self.distortion_scale * (sizes[:, None, ::-1] // 2)).astype(np.int64)
        inwards = np.floor(drawn.u[:, 1:].reshape(-1, 4, 2) * (reach + 1))
        moved = np.where(corners, last - inwards, inwards)
        return Warps(
            drawn.u[:, 0] < self.p,
            perspective(moved, corners * last),
            sizes,
            self.interpolation == "nearest",
            self.fill,  # type: ignore[arg-type]
        )


def inverse_affine(
    angle: Floats,
    *,
    translate: Floats | tuple[float, float] = (0.0, 0.0),
    scale: Floats | float = 1.0,
    shear: Floats | tuple[float, float] = (0.0, 0.0),
    center: Floats | tuple[float, float] = (0.0, 0.0),
) -> Floats:
    """Return the map from the result back to the image, for rotation, scale and shear about ``center``: [n, 3, 3].

    Coordinates are counted from the image's centre, in pixels; angles in degrees, clockwise. As torchvision's
    ``_get_inverse_affine_matrix``.
    """
    rotation, (shear_x, shear_y) = np.radians(angle), np.radians(np.broadcast_to(shear, (len(angle), 2))).T
    a = np.cos(rotation - shear_y) / np.cos(shear_y)
    b = -a * np.tan(shear_x) - np.sin(rotation)
    c = np.sin(rotation - shear_y) / np.cos(shear_y)
    d = -c * np.tan(shear_x) + np.cos(rotation)
    linear = np.array([[d, -b], [-c, a]]).transpose(2, 0, 1) / np.broadcast_to(scale, len(angle))[:, None, None]
    about = np.broadcast_to(center, (len(angle), 2))
    matrices = np.tile(np.eye(3), (len(angle), 1, 1))
    matrices[:, :2, :2] = linear
    matrices[:, :2, 2] = about - (linear @ (about + translate)[:, :, None])[:, :, 0]
    return matrices


def moved(operation: Operation, height: int, width: int) -> Floats:
    """Return the map of one of AutoAugment's operations from the result back to the image; see `Warps.to_source`."""
    sizes, value = np.array([[height, width]]), operation.value
    angle, translate, shear, center = np.zeros(1), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)
    corner = (-width / 2, -height / 2)
    match operation.name:
        case "ShearX":
            shear, center = (np.degrees(np.arctan(value)), 0.0), corner
        case "ShearY":
            shear, center = (0.0, np.degrees(np.arctan(value))), corner
        case "TranslateX":
            translate = (value, 0.0)
        case "TranslateY":
            translate = (0.0, value)
        case "Rotate":
            angle = np.array([-value])
        case _:
            raise ValueError(f"no operation is called {operation.name!r}")
    matrices = inverse_affine(angle, translate=translate, shear=shear, center=center)
    return between_centres(matrices, sizes, sizes)[0]


def between_centres(matrices: Floats, sizes: NDArray[np.int64], results: NDArray[np.int64]) -> Floats:
    """Return maps between centres as maps between upper left corners, for images and results with these sizes."""
    moved = matrices.copy()
    moved[:, :2, 2] += sizes[:, ::-1] / 2 - (matrices[:, :2, :2] @ (results[:, ::-1] / 2)[:, :, None])[:, :, 0]
    return moved


def perspective(corners: Floats, sources: Floats) -> Floats:
    """Return the map of four ``corners`` to their ``sources``, float64[n, 4, 2] each: float64[n, 3, 3]."""
    equations = np.zeros((len(corners), 8, 8))
    for axis in range(2):
        rows = equations[:, axis::2]
        rows[:, :, 3 * axis : 3 * axis + 2], rows[:, :, 3 * axis + 2] = corners, 1
        rows[:, :, 6:] = -sources[:, :, axis, None] * corners
    wanted = sources.reshape(-1, 8, 1)
    try:
        found = np.linalg.solve(equations, wanted)
    except np.linalg.LinAlgError:  # two corners of a tiny image coincide
        found = np.linalg.pinv(equations) @ wanted
    return np.concatenate([found[:, :, 0], np.ones((len(corners), 1))], axis=1).reshape(-1, 3, 3)


def _rotated_sizes(matrices: Floats, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    halves = sizes[:, None, ::-1] / 2
    corners = halves * np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]])
    moved = corners @ matrices[:, :2, :2].transpose(0, 2, 1) + matrices[:, None, :2, 2] + halves
    least, most = (np.rint(edge * _STEPS) / _STEPS for edge in (moved.min(axis=1), moved.max(axis=1)))
    return np.asarray((np.ceil(most) - np.floor(least))[:, ::-1].astype(np.int64))


def _from_centre(center: tuple[float, float] | None, sizes: NDArray[np.int64]) -> Floats:
    halves = sizes[:, ::-1] / 2
    return np.zeros_like(halves) if center is None else np.array(center) - halves


def _between(interval: Any, u: Floats) -> Floats:
    low, high = interval
    return np.asarray(low + (high - low) * u)


def _shears(where: str, value: object) -> tuple[float, ...]:
    if isinstance(value, (list, tuple)) and len(value) == 4:
        return (*checks.interval(where, value[:2]), *checks.interval(where, value[2:]))
    return (*checks.spread(where, value), 0.0, 0.0)
