"""Boxes, keypoints and masks on the image, and the fields that contain them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from mbaas.errors import ConfigError, shown
from mbaas.samples.fields import Field
from mbaas.transforms import checks
from mbaas.transforms.base import Parameters, Size

BoxFormat: TypeAlias = Literal["xyxy", "xywh", "cxcywh"]
"""Left, top, right, bottom; left, top, width, height (as in COCO); centre x, centre y, width, height."""

Edges: TypeAlias = NDArray[np.float64]
"""Left, top, right and bottom of boxes: [k, 4]."""


def edges_of(values: NDArray[Any], format: BoxFormat) -> Edges:
    """Return the edges of boxes stored in ``format``, [k, 4]."""
    edges = values.astype(np.float64)
    if format == "cxcywh":
        edges[:, :2] -= edges[:, 2:] / 2
    if format != "xyxy":
        edges[:, 2:] += edges[:, :2]
    return edges


def boxes_of(edges: Edges, format: BoxFormat) -> NDArray[np.float64]:
    """Return boxes in ``format``, [k, 4], from their edges."""
    boxes = edges.copy()
    if format != "xyxy":
        boxes[:, 2:] -= boxes[:, :2]
    if format == "cxcywh":
        boxes[:, :2] += boxes[:, 2:] / 2
    return boxes


@dataclass(frozen=True)
class Boxes(Parameters):
    """Boxes on the image: crops, resizing, flips and rotations transform them together with the pixels.

    As in torchvision's v2 transforms, a box is clipped to the window, and dropped if less than ``min_size`` pixels
    remain (`SanitizeBoundingBoxes`). Coordinates are pixels of the upright image and may be fractional; the left edge
    of the first pixel is 0.

    Args:
        field: dataset field with the boxes: numbers [k, 4] for each sample. Integers become float32, because resized
            boxes have fractional coordinates.
        format: "xyxy", "xywh" or "cxcywh".
        beside: fields with one value per box, such as its class. When a box is dropped, so are its values.
        min_size: minimum width and height of a box after all transforms, in pixels.
    """

    field: str = "boxes"
    format: Annotated[BoxFormat, partial(checks.one_of, names=get_args(BoxFormat))] = "xyxy"
    beside: tuple[str, ...] = ()
    min_size: Annotated[float, Ge(0)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        beside: object = self.beside  # an object, or type checkers would report the check below as unnecessary
        if isinstance(beside, str) or not all(isinstance(name, str) for name in self.beside):
            raise self._refused("beside", "must hold names of fields")
        self._set("beside", tuple(self.beside))
        checks.number("Boxes's min_size", self.min_size, least=0.0)  # as given: its repr is part of fingerprints

    def moved(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Return the fields of a prepared sample, which may have fewer boxes; raise ConfigError for unfit fields."""
        by_name = {field.name: field for field in fields}
        for name in (self.field, *self.beside):
            if not _field(fields, "Boxes", name).shape:
                raise ConfigError(f"field {name!r} must have a value for each box, but has one for each sample")
        boxes = by_name[self.field]
        if boxes.shape[1:] != (4,):
            raise ConfigError(f"field {self.field!r} must have boxes, [k, 4], got {boxes.kind}")
        made = {name: _packed(by_name[name]) for name in (self.field, *self.beside)}
        made[self.field] = replace(made[self.field], dtype=moved_dtype(boxes.dtype).name)
        return tuple(made.get(field.name, field) for field in fields)


@dataclass(frozen=True)
class Keypoints(Parameters):
    """Keypoints on the image: crops, resizing, flips and rotations transform them together with the pixels.

    As in torchvision's v2 transforms, coordinates are pixels counted from 0, and a point outside a crop is moved to the
    nearest pixel inside. If points have a third value, COCO's visibility, a point outside becomes (0, 0, 0) instead,
    which means unlabelled in COCO. Unlabelled points stay unlabelled.

    Args:
        field: dataset field with the points: floats [..., points, 2], x and y in pixels of the upright image; or [...,
            points, 3] with COCO's visibility: 0 unlabelled, 1 hidden, 2 visible. If each object has points, also list
            the field in `Boxes.beside`, so that the points of dropped boxes are dropped.
        swaps: pairs of point indices that are swapped in a flip, such as left and right eye.
    """

    field: str = "keypoints"
    swaps: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        try:
            pairs = tuple((int(one), int(other)) for one, other in self.swaps)
        except (TypeError, ValueError):
            raise self._refused("swaps", "must be pairs of points") from None
        points = [point for pair in pairs for point in pair]
        if len(set(points)) < len(points) or min(points, default=0) < 0:
            raise self._refused("swaps", "must be pairs of points, each point once, counted from 0")
        self._set("swaps", pairs)

    def check(self, fields: tuple[Field, ...]) -> None:
        """Raise ConfigError for an unknown field, one without points, or one with fewer points than ``swaps`` needs."""
        found = _field(fields, "Keypoints", self.field)
        if len(found.shape) < 2 or found.shape[-1] not in (2, 3) or not found.dtype.startswith("float"):
            wanted = "key points, float [..., points, 2 or 3]"
            raise ConfigError(f"field {self.field!r} must have {wanted}, got {found.kind}")
        most = max((point for pair in self.swaps for point in pair), default=-1)
        points = found.shape[-2]
        if points is not None and most >= points:
            raise ConfigError(f"Keypoints swaps point {most}, but field {self.field!r} has {points} points")


@dataclass(frozen=True)
class Masks:
    """Object masks from COCO segmentations: crops, resizing, flips and rotations transform them, too.

    Minibatches have them for each sample as uint8 [objects, height, width] of the image's size, 1 on the object.
    Resizing takes the nearest pixel, as in torchvision. Masks are in the order of the boxes, and a dropped box drops
    its mask. In prep workers, pycocotools converts polygons or run lengths.

    Args:
        source: dataset field with the segmentations: for each sample a JSON list with one entry per box, as from
            `mbaas.read_coco`. It is not part of minibatches.
        field: name of the masks in minibatches.

    Raises:
        ConfigError: pycocotools is not installed.
    """

    source: str = "segmentation"
    field: str = "masks"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("pycocotools") is None:
            raise ConfigError("Masks needs pycocotools: pip install pycocotools")

    def made(
        self, fields: tuple[Field, ...], boxes: Boxes, size: Size | None, most_pixels: int = 0
    ) -> tuple[Field, ...]:
        """Return the fields of a prepared sample, with masks instead of segmentations.

        ``size`` is the (height, width) of all masks. If it is None, images differ in size and have at most
        ``most_pixels``.

        Raises:
            ConfigError: no field with segmentations, or another field named like the masks.
        """
        source = _field(fields, "Masks", self.source)
        if source.shape != (None,) or source.dtype != "uint8":
            raise ConfigError(f"field {self.source!r} must have segmentations as text, uint8 [k], got {source.kind}")
        if any(field.name == self.field != self.source for field in fields):
            raise ConfigError(f"Masks makes the field {self.field!r}, which samples have already")
        longest = _field(fields, "Boxes", boxes.field).longest
        masks = replace(source, name=self.field, shape=(None, None, None), longest=longest * most_pixels)
        if size is not None:
            masks = replace(masks, shape=(None, *size), longest=longest)
        return tuple(masks if field is source else field for field in fields)


def _field(fields: tuple[Field, ...], who: str, name: str) -> Field:
    found = next((field for field in fields if field.name == name), None)
    if found is None:
        there = ", ".join(field.name for field in fields) or "none"
        raise ConfigError(f"{who} names the field {shown(name)}, but samples have {there}")
    return found


def moved_dtype(dtype: str | np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of delivered boxes."""
    before: np.dtype[Any] = np.dtype(dtype)
    return before if before.kind == "f" else np.dtype(np.float32)


def _packed(field: Field) -> Field:
    # Boxes may be dropped, so values vary in length.
    if field.is_packed:
        return field
    longest, *tail = field.shape
    return replace(field, shape=(None, *tail), longest=longest or 0)
