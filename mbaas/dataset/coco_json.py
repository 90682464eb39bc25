"""What COCO's JSON says of images and the objects on them, as arrays.

Numbers become Python objects only while the file is read: hundreds of thousands of annotations have millions. The
segmentations, most of a file, are never taken apart: the text of each is cut out as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from mbaas.errors import DatasetError, shown

_MOST_PIXELS = 1e9
"""How far from an image's corner anything may lie: beyond any image, and within float32."""

_Number = int | float
"""An id may be either: some writers have 7.0 for 7."""


class _Image(msgspec.Struct, gc=False):
    id: _Number
    file_name: str


class _Category(msgspec.Struct, gc=False):
    id: _Number
    name: str


class _Annotation(msgspec.Struct, gc=False):
    image_id: _Number
    category_id: _Number | None = None
    bbox: tuple[float, float, float, float] | None = None
    area: float | None = None
    iscrowd: _Number | bool = 0
    keypoints: list[float] | None = None
    segmentation: msgspec.Raw = msgspec.Raw(b"null")


class _File(msgspec.Struct):
    images: list[_Image]
    categories: list[_Category] = []
    annotations: list[_Annotation] = []


@dataclass(frozen=True)
class CocoFile:
    """The images of a file in its order, and their objects, in its order for each image.

    Attributes:
        file_names: of the n images.
        image_ids: int64[n].
        class_names: of the categories, in the order of their ids.
        bounds: int64[n + 1]: the objects of image i are those from ``bounds[i]`` to ``bounds[i + 1]``.
        objects: by the name of the field, an array with a value for each object: what `read_coco` says, without
            ``segmentation``.
        segmentations: uint8, of each image a JSON list with a segmentation, or null, for each of its objects; and
            int64[n + 1], where each begins and the last one ends.
    """

    file_names: list[str]
    image_ids: NDArray[np.int64]
    class_names: tuple[str, ...]
    bounds: NDArray[np.int64]
    objects: dict[str, NDArray[Any]]
    segmentations: tuple[NDArray[np.uint8], NDArray[np.int64]]


def read_coco_json(content: Any, name: str, fields: Sequence[str] | None) -> CocoFile:
    """Read what stands in a file.

    Args:
        content: its bytes.
        name: of the file, for messages.
        fields: of the objects that are wanted; None: all but segmentations, and key points only if there are some.

    Raises:
        DatasetError: it is no JSON or none of COCO's, an object lacks a value that is wanted, or an id is there twice
            or nowhere.
    """
    try:
        read = msgspec.json.decode(content, type=_File)
    except (ValueError, RecursionError) as error:  # of JSON, of kinds, of UTF-8
        raise DatasetError(f"{name} is no JSON of COCO's instances or key points: {error}") from None
    if not read.images:
        raise DatasetError(f"{name} has no images")
    image_ids = _ids(name, "image", [image.id for image in read.images])
    found = read.annotations
    owner = _places(name, "image", image_ids, [each.image_id for each in found])
    order = np.argsort(owner, kind="stable")  # the objects of an image together, in the order of the file
    bounds = np.zeros(len(image_ids) + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=len(image_ids)), out=bounds[1:])
    categories = sorted(read.categories, key=lambda category: category.id)
    objects = _objects(name, found, _ids(name, "category", [each.id for each in categories]), fields)
    return CocoFile(
        file_names=[image.file_name for image in read.images],
        image_ids=image_ids,
        class_names=tuple(category.name for category in categories),
        bounds=bounds,
        objects={key: values[order] for key, values in objects.items()},
        segmentations=_segmentations(found, order, bounds) if fields and "segmentation" in fields else _NONE,
    )


_NONE = (np.zeros(0, np.uint8), np.zeros(1, np.int64))


def _objects(
    name: str, found: Sequence[_Annotation], category_ids: NDArray[np.int64], fields: Sequence[str] | None
) -> dict[str, NDArray[Any]]:
    """Return the values of all objects, in the order of the file."""
    wanted = ("boxes", "labels", "area", "iscrowd") if fields is None else fields
    objects: dict[str, NDArray[Any]] = {}
    if "boxes" in wanted or "area" in wanted:
        _refuse_missing(name, "bbox", [each.bbox is None for each in found])
        boxes = np.array([each.bbox for each in found], np.float64).reshape(-1, 4)
        _refuse_far(name, "bbox", boxes)
    if "boxes" in wanted:
        objects["boxes"] = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1).astype(np.float32)
    if "labels" in wanted:
        _refuse_missing(name, "category_id", [each.category_id is None for each in found])
        objects["labels"] = _places(name, "category", category_ids, [each.category_id for each in found])
    if "area" in wanted:
        given = [np.nan if each.area is None else each.area for each in found]
        areas = np.array(given, np.float64)
        _refuse_far(name, "area", areas[:, None], most=_MOST_PIXELS**2)
        objects["area"] = np.where(np.isnan(areas), boxes[:, 2] * boxes[:, 3], areas).astype(np.float32)
    if "iscrowd" in wanted:
        objects["iscrowd"] = np.array([each.iscrowd != 0 for each in found], np.uint8)
    if "keypoints" in wanted or (fields is None and any(each.keypoints is not None for each in found)):
        objects["keypoints"] = _keypoints(name, found)
    return objects


def _keypoints(name: str, found: Sequence[_Annotation]) -> NDArray[np.float32]:
    """Return float32[objects, points, 3]; zeros of objects that have none, as COCO says of points not labelled."""
    lengths = {len(each.keypoints) for each in found if each.keypoints is not None}
    if len(lengths) != 1 or (most := max(lengths)) % 3 or not most:
        has = ", ".join(map(str, sorted(lengths))) or "none"
        raise DatasetError(f"the key points of {name} must be equally many, three numbers each, got lists of {has}")
    values = np.zeros((len(found), most), np.float64)
    for row, each in enumerate(found):
        if each.keypoints is not None:
            values[row] = each.keypoints
    _refuse_far(name, "keypoints", values)
    return values.astype(np.float32).reshape(len(found), -1, 3)


def _segmentations(
    found: Sequence[_Annotation], order: NDArray[np.int64], bounds: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    texts = [bytes(found[index].segmentation) for index in order.tolist()]
    lists = [b"[" + b",".join(texts[start:end]) + b"]" for start, end in pairwise(bounds.tolist())]
    lengths = np.zeros(len(bounds), np.int64)
    np.cumsum([len(text) for text in lists], out=lengths[1:])
    return np.frombuffer(b"".join(lists), np.uint8), lengths


def _ids(name: str, what: str, given: Sequence[_Number]) -> NDArray[np.int64]:
    """Return the ids of images or categories, of which each is there once."""
    ids = _whole(name, what, given)
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise DatasetError(f"{name} has the {what} {values[counts > 1][0]} more than once")
    return ids


def _places(name: str, what: str, ids: NDArray[np.int64], named: Sequence[Any]) -> NDArray[np.int64]:
    """Return the index into ``ids`` of each id that annotations name."""
    wanted = _whole(name, what, named)
    if not len(wanted):
        return wanted
    order = np.argsort(ids)
    at = np.minimum(np.searchsorted(ids[order], wanted), max(len(ids) - 1, 0))
    there = ids[order][at] == wanted if len(ids) else np.zeros(len(wanted), np.bool_)
    if not there.all():
        row = int(np.flatnonzero(~there)[0])
        raise DatasetError(
            f"annotation {row} (counted from 0) of {name} is of {what} {wanted[row]}, which is not there"
        )
    places: NDArray[np.int64] = order[at]
    return places


def _whole(name: str, what: str, given: Sequence[_Number]) -> NDArray[np.int64]:
    odd = next((each for each in given if each != int(each)), None)
    if odd is not None:
        raise DatasetError(f"the ids of each {what} in {name} must be whole numbers, got {odd!r}")
    try:
        return np.array([*map(int, given)], np.int64)
    except OverflowError:
        got = shown(max(given, key=abs))
        raise DatasetError(f"the ids of each {what} in {name} must have at most 64 bits, got {got}") from None


def _refuse_far(name: str, key: str, values: NDArray[np.float64], *, most: float = _MOST_PIXELS) -> None:
    """Refuse numbers that lie in no image; of a row for each annotation."""
    far = (np.abs(values) > most).any(axis=1)
    if far.any():
        row = int(np.flatnonzero(far)[0])
        raise DatasetError(f"annotation {row} (counted from 0) of {name} has the {key} {shown(values[row].tolist())}")


def _refuse_missing(name: str, key: str, missing: Sequence[bool]) -> None:
    if any(missing):
        raise DatasetError(f"annotation {missing.index(True)} (counted from 0) of {name} has no {key}")
