"""What lies on the image besides boxes: key points and masks, and which fields of a sample have them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

from mbaas.errors import ConfigError, shown
from mbaas.fields import Field
from mbaas.transforms import checks
from mbaas.transforms.base import Size
from mbaas.transforms.boxes import Boxes


@dataclass(frozen=True)
class Keypoints:
    """Key points that lie on the image: crops, resizing and mirror images move them with its pixels.

    As torchvision's (v2) transforms do: coordinates count pixels from 0, and a point that a crop leaves outside is set
    to the nearest pixel inside. If points have a third value, how visible they are, as COCO's have, such a point
    becomes (0, 0, 0) instead: COCO's way to say that it is not labelled. Points that are not labelled stay so.

    Args:
        field: the dataset's field that has them: floats [..., points, 2], x and y in pixels of the upright image, or
            [..., points, 3] with COCO's visibility: 0 not labelled, 1 hidden, 2 visible. If objects have points each,
            name the field in `Boxes.beside`, too: where a box is dropped, so are its points.
        swaps: pairs of points that change places in a mirror image, such as left and right eye, by their numbers.
    """

    field: str = "keypoints"
    swaps: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        where, swaps = "Keypoints's swaps", self.swaps
        try:
            pairs = tuple((int(one), int(other)) for one, other in swaps)
        except (TypeError, ValueError):
            raise checks.refused(where, "must be pairs of points", swaps) from None
        points = [point for pair in pairs for point in pair]
        if len(set(points)) < len(points) or min(points, default=0) < 0:
            raise checks.refused(where, "must be pairs of points, each point once, counted from 0", swaps)
        object.__setattr__(self, "swaps", pairs)

    def check(self, fields: tuple[Field, ...]) -> None:
        """Check that samples have such a field.

        Raises:
            ConfigError: there is none, or it has no points, or fewer than are to change places.
        """
        found = _field(fields, "Keypoints", self.field)
        shape = ["k" if length is None else length for length in found.shape]
        if len(shape) < 2 or shape[-1] not in (2, 3) or not found.dtype.startswith("float"):
            raise ConfigError(
                f"field {self.field!r} must have key points, float [..., points, 2 or 3], got {found.dtype} {shape}"
            )
        most = max((point for pair in self.swaps for point in pair), default=-1)
        points = found.shape[-2]
        if points is not None and most >= points:
            raise ConfigError(f"Keypoints swaps point {most}, but field {self.field!r} has {points} points")


@dataclass(frozen=True)
class Masks:
    """Masks of objects, made from COCO's segmentations: crops, resizing and mirror images move them with the pixels.

    A minibatch has them as uint8 [objects, height, width] of each sample, of the image's size, 1 where the object is;
    resizing takes the nearest pixel, as torchvision's does. Each object has one, in the order of its boxes: where a box
    is dropped, so is its mask. pycocotools makes them of polygons or run lengths, in prep workers.

    Args:
        source: the dataset's field with the segmentations: of each sample a JSON list with one for each box, as
            `mbaas.read_coco` has it. Minibatches do not have it.
        field: the name that minibatches have masks by.

    Raises:
        ConfigError: pycocotools is not installed.
    """

    source: str = "segmentation"
    field: str = "masks"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("pycocotools") is None:
            raise ConfigError("Masks needs pycocotools: pip install 'mbaas[coco]'")

    def made(
        self, fields: tuple[Field, ...], boxes: Boxes, size: Size | None, most_pixels: int = 0
    ) -> tuple[Field, ...]:
        """Return the fields of a prepared sample, which has masks of this (height, width) in place of segmentations; if
        there is none, each image has its own, of at most so many pixels.

        Raises:
            ConfigError: there are no segmentations, or there is another field of that name.
        """
        source = _field(fields, "Masks", self.source)
        if source.shape != (None,) or source.dtype != "uint8":
            shape = ["k" if length is None else length for length in source.shape]
            raise ConfigError(
                f"field {self.source!r} must have segmentations as text, uint8 ['k'], got {source.dtype} {shape}"
            )
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
