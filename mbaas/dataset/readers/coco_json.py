"""Converts COCO JSON annotations to arrays.

Numbers exist as Python objects only while the file is read, because hundreds of thousands of annotations have millions.
Segmentations, most of a file, are never parsed: their JSON text is copied unchanged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mbaas.errors import DatasetError, shown

_MOST_PIXELS = 1e9
"""Largest coordinate: beyond any image, within float32. Larger values are clipped, as boxes are to the image."""

_Id = int | float | str
"""An id in a file: some writers use 7.0 or "7" for 7, and camera traps use UUIDs."""


class _Image(msgspec.Struct, gc=False):
    id: _Id
    file_name: str
    width: int | float | str | None = None
    height: int | float | str | None = None


class _Category(msgspec.Struct, gc=False):
    id: _Id
    name: str | int | float | None = None


class _Annotation(msgspec.Struct, gc=False):
    image_id: _Id
    category_id: _Id | None = None
    bbox: list[float | str | None] | None = None
    area: float | str | None = None
    iscrowd: float | bool | str | None = None
    keypoints: list[float | str | None] | None = None
    segmentation: msgspec.Raw = msgspec.Raw(b"null")


class _File(msgspec.Struct):
    images: list[_Image]
    categories: list[_Category] = []
    annotations: list[_Annotation] = []


@dataclass(frozen=True)
class CocoFile:
    """The images of a file in file order, and the objects of each image in file order.

    Attributes:
        file_names: of the n images.
        image_ids: int64[n] if all are numbers, else a dictionary array of strings.
        sizes: int32[n, 2], height and width of each image; zeros if the file has none.
        class_names: category names in the order of the category ids.
        unlisted: names of used categories that are missing from the file's list of categories; empty if it lists none.
        left_out: reason -> number of annotations left out.
        bounds: int64[n + 1]; the objects of image i are ``bounds[i]`` to ``bounds[i + 1]``.
        objects: field name -> array with one value per object, as documented in `read_coco`, without ``segmentation``.
        segmentations: uint8 text and int64[n + 1] bounds: for each image a JSON list with one segmentation, or null,
            per object.
    """

    file_names: list[str]
    image_ids: pa.Array
    sizes: NDArray[np.int32]
    class_names: tuple[str, ...]
    unlisted: tuple[str, ...]
    left_out: dict[str, int]
    bounds: NDArray[np.int64]
    objects: dict[str, NDArray[Any]]
    segmentations: tuple[NDArray[np.uint8], NDArray[np.int64]]


def read_coco_json(content: Any, name: str, fields: Sequence[str] | None) -> CocoFile:
    """Parse the contents of an annotation file; ``name`` is its name in messages.

    ``fields`` are the requested fields of objects. None: all but segmentations, and keypoints only if the file has
    them.

    Raises:
        DatasetError: invalid JSON, another format than COCO, a requested value that is missing, or a duplicate id.
    """
    read = _decoded(content, name)
    if not read.images:
        raise DatasetError(f"{name} has no images")
    rows = _numbered(name, "image", [image.id for image in read.images])
    found, owner, left_out = _kept(name, read.annotations, rows, _wanted(read.annotations, fields))
    order = np.argsort(owner, kind="stable")  # objects grouped by image, in file order
    bounds = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=len(rows)), out=bounds[1:])
    classes = _classes(name, read.categories, found)
    objects = _objects(name, found, classes, fields)
    return CocoFile(
        file_names=[image.file_name for image in read.images],
        image_ids=_id_array(name, [*rows]),
        sizes=np.array([_size(image) for image in read.images], np.int32),
        class_names=tuple(classes.values()),
        unlisted=_unlisted(name, read.categories, classes),
        left_out=left_out,
        bounds=bounds,
        objects={key: values[order] for key, values in objects.items()},
        segmentations=_segmentations(found, order, bounds) if fields and "segmentation" in fields else _NONE,
    )


def _size(image: _Image) -> tuple[int, int]:
    """Return (height, width); zeros if missing or invalid."""
    try:
        size = [float(length) for length in (image.height, image.width) if length is not None]
    except ValueError:
        return 0, 0
    if len(size) < 2 or not all(1 <= length <= _MOST_PIXELS for length in size):
        return 0, 0
    return int(size[0]), int(size[1])


def _decoded(content: Any, name: str) -> _File:
    try:
        try:
            return msgspec.json.decode(content, type=_File)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            # pycocotools reads with Python's json module, which accepts NaN and Infinity; JSON does not. They become
            # null here.
            return msgspec.json.decode(msgspec.json.encode(json.loads(bytes(content))), type=_File)
    except (ValueError, RecursionError) as error:  # invalid JSON, types or UTF-8
        raise DatasetError(f"{name} is no JSON of COCO's instances or key points: {error}") from None


def _wanted(annotations: Sequence[_Annotation], fields: Sequence[str] | None) -> frozenset[str]:
    # By default, keypoints only if there are any.
    if fields is not None:
        return frozenset(fields)
    points = {"keypoints"} if any(each.keypoints for each in annotations) else set()
    return frozenset({"boxes", "labels", "area", "iscrowd"} | points)


def _kept(
    name: str, annotations: Sequence[_Annotation], rows: Mapping[int | str, int], wanted: Collection[str]
) -> tuple[list[_Annotation], NDArray[np.int64], dict[str, int]]:
    # Filtered files often keep annotations of removed images. Annotations of a whole image have no box.
    needs_box = not {"boxes", "area"}.isdisjoint(wanted)
    kept, owner, left_out = [], [], Counter[str]()
    for number, each in enumerate(annotations):
        row = rows.get(_key(name, "image", each.image_id))
        if row is None:
            left_out["of images that the file does not list"] += 1
        elif needs_box and (not each.bbox or None in each.bbox):
            left_out["without a box"] += 1
        elif needs_box and len(each.bbox or ()) != 4:
            raise DatasetError(
                f"the bbox of annotation {number} (from 0) of {name} must have 4 numbers, got {shown(each.bbox)}"
            )
        elif "labels" in wanted and each.category_id is None:
            raise DatasetError(f"annotation {number} (counted from 0) of {name} has no category_id")
        else:
            kept.append(each)
            owner.append(row)
    return kept, np.array(owner, np.int64), dict(left_out)


def _classes(name: str, categories: Sequence[_Category], found: Sequence[_Annotation]) -> dict[int | str, str]:
    # Categories without a name, or missing from the file's list, are named after their ids.
    listed = _numbered(name, "category", [each.id for each in categories])
    names = {key: each.name for key, each in zip(listed, categories, strict=True)}
    for each in found:
        if each.category_id is not None:
            names.setdefault(_key(name, "category", each.category_id), None)
    ordered = sorted(names, key=lambda key: (isinstance(key, str), key))
    return {key: str(key if names[key] is None else names[key]) for key in ordered}


def _unlisted(name: str, categories: Sequence[_Category], classes: Mapping[int | str, str]) -> tuple[str, ...]:
    listed = {_key(name, "category", each.id) for each in categories}
    return tuple(label for key, label in classes.items() if listed and key not in listed)


_NONE = (np.zeros(0, np.uint8), np.zeros(1, np.int64))


def _objects(
    name: str, found: Sequence[_Annotation], classes: Mapping[int | str, str], fields: Sequence[str] | None
) -> dict[str, NDArray[Any]]:
    wanted = _wanted(found, fields)
    objects: dict[str, NDArray[Any]] = {}
    if "boxes" in wanted or "area" in wanted:
        boxes = _boxes(name, found)
    if "boxes" in wanted:
        objects["boxes"] = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1).astype(np.float32)
    if "labels" in wanted:
        numbers = {key: number for number, key in enumerate(classes)}
        labels = [numbers[_key(name, "category", each.category_id)] for each in found if each.category_id is not None]
        objects["labels"] = np.array(labels, np.int64)
    if "area" in wanted:
        areas = _numbers(name, "area", [np.nan if each.area is None else each.area for each in found])
        areas = np.where(np.isnan(areas), boxes[:, 2] * boxes[:, 3], areas)
        objects["area"] = np.clip(areas, -(_MOST_PIXELS**2), _MOST_PIXELS**2).astype(np.float32)
    if "iscrowd" in wanted:
        crowds = _numbers(name, "iscrowd", [each.iscrowd or 0 for each in found])
        objects["iscrowd"] = (crowds != 0).astype(np.uint8)
    if "keypoints" in wanted:
        objects["keypoints"] = _keypoints(name, found)
    return objects


def _boxes(name: str, found: Sequence[_Annotation]) -> NDArray[np.float64]:
    """Return float64[objects, 4]: left, top, width and height."""
    boxes = _numbers(name, "bbox", [each.bbox for each in found]).reshape(-1, 4)
    return np.clip(boxes, -_MOST_PIXELS, _MOST_PIXELS)


def _numbers(name: str, key: str, given: Sequence[Any]) -> NDArray[np.float64]:
    try:
        return np.array(given, np.float64)
    except ValueError as error:
        raise DatasetError(f"each {key} of {name} must be of numbers: {error}") from None


def _keypoints(name: str, found: Sequence[_Annotation]) -> NDArray[np.float32]:
    """Return float32[objects, points, 3]; zeros for objects without keypoints, as COCO defines unlabelled points."""
    lengths = {len(each.keypoints) for each in found if each.keypoints}
    if len(lengths) != 1 or (most := max(lengths)) % 3 or not most:
        has = ", ".join(map(str, sorted(lengths))) or "none"
        raise DatasetError(f"the key points of {name} must be equally many, three numbers each, got lists of {has}")
    values = np.zeros((len(found), most), np.float64)
    for row, each in enumerate(found):
        if each.keypoints:
            values[row] = _numbers(name, "keypoints", each.keypoints)
    return np.clip(np.nan_to_num(values), -_MOST_PIXELS, _MOST_PIXELS).astype(np.float32).reshape(len(found), -1, 3)


def _segmentations(
    found: Sequence[_Annotation], order: NDArray[np.int64], bounds: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    texts = [bytes(found[index].segmentation) for index in order.tolist()]
    lists = [b"[" + b",".join(texts[start:end]) + b"]" for start, end in pairwise(bounds.tolist())]
    lengths = np.zeros(len(bounds), np.int64)
    np.cumsum([len(text) for text in lists], out=lengths[1:])
    return np.frombuffer(b"".join(lists), np.uint8), lengths


def _numbered(name: str, what: str, given: Sequence[_Id]) -> dict[int | str, int]:
    rows: dict[int | str, int] = {}
    for row, each in enumerate(given):
        if rows.setdefault(key := _key(name, what, each), row) != row:
            raise DatasetError(f"{name} has the {what} {key} more than once")
    return rows


def _key(name: str, what: str, given: _Id) -> int | str:
    # Ids are compared in one form: 7, 7.0 and "7" are equal.
    if isinstance(given, str):
        return int(given) if given.isdecimal() and str(int(given)) == given else given
    if given != int(given):
        raise DatasetError(f"the ids of each {what} in {name} must be whole numbers or strings, got {given!r}")
    return int(given)


def _id_array(name: str, ids: Sequence[int | str]) -> pa.Array:
    if any(isinstance(each, str) for each in ids):
        texts, numbers = np.unique([str(each) for each in ids], return_inverse=True)
        return pa.DictionaryArray.from_arrays(numbers.astype(np.int64), texts)
    try:
        return pa.array(ids, pa.int64())
    except OverflowError:
        got = shown(max(map(int, ids), key=abs))
        raise DatasetError(f"the ids of each image in {name} must have at most 64 bits, got {got}") from None
