"""Boxes: the field that contains them, and their format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np
from annotated_types import Ge

from mbaas.errors import ConfigError, shown
from mbaas.samples.fields import Field
from mbaas.transforms import checks

BoxFormat: TypeAlias = Literal["xyxy", "xywh", "cxcywh"]
"""Left, top, right, bottom; left, top, width, height (as in COCO); centre x, centre y, width, height."""


@dataclass(frozen=True)
class Boxes:
    """Boxes on the image: crops, resizing and flips transform them together with the pixels.

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
    format: BoxFormat = "xyxy"
    beside: tuple[str, ...] = ()
    min_size: Annotated[float, Ge(0)] = 1.0

    def __post_init__(self) -> None:
        if self.format not in get_args(BoxFormat):
            raise checks.refused("Boxes's format", 'must be "xyxy", "xywh" or "cxcywh"', self.format)
        beside: object = self.beside  # an object, or type checkers would report the check below as unnecessary
        if isinstance(beside, str) or not all(isinstance(name, str) for name in self.beside):
            raise checks.refused("Boxes's beside", "must hold names of fields", beside)
        object.__setattr__(self, "beside", tuple(self.beside))
        if checks.number("Boxes's min_size", self.min_size) < 0:
            raise checks.refused("Boxes's min_size", "must not be negative", self.min_size)

    def moved(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Return the fields of a prepared sample, which may have fewer boxes; raise ConfigError for unfit fields."""
        by_name = {field.name: field for field in fields}
        for name in (self.field, *self.beside):
            if name not in by_name:
                raise ConfigError(
                    f"Boxes names the field {shown(name)}, but samples have {', '.join(by_name) or 'none'}"
                )
            if not by_name[name].shape:
                raise ConfigError(f"field {name!r} must have a value for each box, but has one for each sample")
        boxes = by_name[self.field]
        if boxes.shape[1:] != (4,):
            shape = ["k" if length is None else length for length in boxes.shape]
            raise ConfigError(f"field {self.field!r} must have boxes, [k, 4], got {boxes.dtype} {shape}")
        made = {name: _packed(by_name[name]) for name in (self.field, *self.beside)}
        made[self.field] = replace(made[self.field], dtype=moved_dtype(boxes.dtype).name)
        return tuple(made.get(field.name, field) for field in fields)


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
