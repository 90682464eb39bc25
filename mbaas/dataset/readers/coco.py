"""Reads COCO annotations: a JSON file that lists images and the objects in them."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
from numpy.typing import NDArray
from pyarrow.fs import FileType

from mbaas.base.units import counted
from mbaas.base.validation import knows_names
from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.columns import checked_fields
from mbaas.dataset.readers.listing import Listing, listed_once
from mbaas.dataset.storage.faults import dataset_errors
from mbaas.dataset.storage.location import Location, NamedFiles, file_infos, locate, missing
from mbaas.dataset.subsets import arrow_array
from mbaas.dataset.table import table_of
from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.samples.fields import ANNOTATED_SIZE, LABELS, Packed, bounds_of

_CALLER = 6  # stack frames from a warning to the caller of `read_coco`
_FIELDS = ("boxes", LABELS, "area", "iscrowd", "keypoints", "segmentation", "image_id")


@knows_names
def read_coco(
    path: str | os.PathLike[str],
    images: str | os.PathLike[str],
    *,
    fields: Sequence[str] | None = None,
    keep_empty: bool = True,
    listing: str | os.PathLike[str] | None = None,
    filesystem: pyarrow.fs.FileSystem | None = None,
) -> Dataset:
    """Read COCO instance or keypoint annotations; the images are not read.

    A sample is an image, in file order. Its fields, for k objects in file order, are:

    - ``boxes``, float32 [k, 4]: left, top, right and bottom in pixels, the default of `Boxes`. (The file has left, top,
      width and height.)
    - ``labels``, int64 [k]: indices into `Dataset.class_names`, the categories in the order of their ids.
    - ``area``, float32 [k]: area of each object in pixels; the area of its box if the file has none.
    - ``iscrowd``, uint8 [k]: 1 for a crowd.
    - ``keypoints``, float32 [k, points, 3]: x, y and visibility; zeros for objects without keypoints. By default only
      if the file has keypoints.
    - ``segmentation``, uint8: polygons or run lengths as JSON text, which `Masks` converts to masks. Only if requested.
    - ``annotated_size``, int32 [2]: the image's height and width according to the file; zeros if missing. Added with
      boxes, keypoints and segmentations. If a photo has this size only before its EXIF orientation is applied, the
      orientation is ignored, because its boxes were drawn that way. An image of another size is a bad sample.
    - ``image_id``, int64: the image's id in the file. String ids are integer-encoded; the loader's
      ``categories["image_id"]`` lists the strings.

    Annotations of images that the file does not list are left out. If boxes or areas are requested, so are annotations
    without a box. A warning counts both. A category without a name is named after its id. So is a category that the
    file does not list, with a warning if it lists others.

    Reading hundreds of thousands of annotations takes seconds. Segmentations take about as much memory as the file,
    plus a copy in the object store of each node. The other fields take about 40 bytes per object.

    Args:
        path: the JSON file: a local path, or a URI that `pyarrow.fs` opens.
        images: path or URI of the folder that contains the images.
        fields: the fields for minibatches; default: as above.
        keep_empty: whether images without annotations are samples, too.
        listing: path or URI of a Parquet file that caches the result. It is written if it does not exist, or if the
            size or time of the JSON file changed. Otherwise it is read instead of the JSON file, without looking up
            images. An image that was removed or changed its length is then a bad sample.
        filesystem: file system of ``path`` and ``images``, for credentials or file systems that a URI cannot
            express.

    Raises:
        ConfigError: an unknown field.
        DatasetError: the file cannot be read, is not in COCO format, or lacks a value; or an image does not exist or is
            not below ``images``.
    """
    fields = _checked(fields)
    where, root = locate(path, filesystem), locate(images, filesystem)
    file = _look_up(where)
    options = {"annotations": where.root, "fields": fields, "keep_empty": bool(keep_empty)}

    found = listed_once(
        listing,
        lambda: Listing.of(*_read(where, root, fields, keep_empty), file),
        writer="read_coco",
        root=root.root,
        options=options,
        is_current=lambda saved: saved.files == file,
    )
    return found.dataset(root)


def _checked(fields: Sequence[str] | None) -> tuple[str, ...] | None:
    fields = checked_fields(fields, "names")
    if fields is None:
        return None
    for field in fields:
        if field not in _FIELDS:
            raise ConfigError(f"fields must be of {', '.join(_FIELDS)}, got {field!r}", option="fields")
    return tuple(field for field in _FIELDS if field in fields)


def _look_up(where: Location) -> list[Any]:
    """Return size in bytes and modification time in ns since 1970 (if known), to detect changes."""
    (info,) = file_infos(Location(where.filesystem, "", where.root), [where.base])
    if why := missing(info):
        raise DatasetError(f"the file of annotations, {where.root}, {why}")
    return [info.size, info.mtime_ns]


def _read(
    where: Location, root: Location, fields: tuple[str, ...] | None, keep_empty: bool
) -> tuple[tuple[str, ...], pa.Table]:
    """Return class names and a table of samples."""
    name = where.root
    with dataset_errors(f"cannot read the annotations {name}"), where.filesystem.open_input_file(where.base) as stream:
        read = _decoded(stream.read_buffer(), name)
    if not read.images:
        raise DatasetError(f"{name} has no images")
    rows = _numbered(name, "image", [image.id for image in read.images])
    wanted = frozenset(("boxes", LABELS, "area", "iscrowd", "image_id") if fields is None else fields)
    found, owner, left_out = _usable(name, read.annotations, rows, wanted)
    if fields is None and any(each.keypoints for each in found):
        wanted |= {"keypoints"}
    counts = np.bincount(owner, minlength=len(rows))
    chosen = np.arange(len(counts)) if keep_empty else np.flatnonzero(counts)
    if not len(chosen):
        raise DatasetError(f"{name} has annotations of none of its {len(counts)} images")
    # Images that are left out have no objects, so the objects of the others stay contiguous.
    bounds = bounds_of(counts[chosen])
    found = [found[index] for index in np.argsort(owner, kind="stable").tolist()]  # by image, in file order
    classes = _classes(name, read.categories, found)
    known = {key: arrow_array(Packed(values, bounds)) for key, values in _objects(name, found, classes, wanted).items()}
    if "segmentation" in wanted:
        known["segmentation"] = arrow_array(_segmentations(found, bounds))
    image_ids = _id_array(name, [*rows])
    if "image_id" in wanted:
        known["image_id"] = image_ids.take(pa.array(chosen))
    sizes = np.array([_size(image) for image in read.images], np.int32)
    if sizes.any() and not wanted.isdisjoint(("boxes", "keypoints", "segmentation")):
        known[ANNOTATED_SIZE] = arrow_array(sizes[chosen])
    if left_out:
        counts_by_reason = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        warnings.warn(f"{name}: annotations left out: {counts_by_reason}", stacklevel=_CALLER)
    listed = {_key(name, "category", each.id) for each in read.categories}
    unlisted = [label for key, label in classes.items() if listed and key not in listed]
    if unlisted and LABELS in known:
        ids, some = counted(len(unlisted), "category id"), ", ".join(unlisted[:5])
        warnings.warn(
            f"{name}: annotations have {ids} that the file does not list, for instance {some}; "
            "each is a class with that name",
            stacklevel=_CALLER,
        )
    names = _names_below(root, [read.images[row].file_name for row in chosen.tolist()])
    for each in names:
        if "://" in each or each.startswith("/") or ".." in each.split("/") or not each:
            raise DatasetError(f"{name} must name images below {root.root}, got {each!r}")
    table = table_of(NamedFiles(root, names, name).spans(), known)
    return tuple(classes.values()) if LABELS in known else (), table


def _names_below(root: Location, names: list[str]) -> list[str]:
    # Annotation files may have absolute paths or Windows separators.
    prefix = root.root.rstrip("/") + "/"
    names = [name.removeprefix(prefix) for name in names]
    there = _existing(root, [name for name in names if "\\" in name])  # valid in a name on Linux
    names = [name if name in there else name.replace("\\", "/") for name in names]
    elsewhere = next((name for name in names if re.match("/|[A-Za-z]:/", name)), None)
    return names if elsewhere is None else _moved(root, names, elsewhere)


def _existing(root: Location, names: list[str]) -> set[str]:
    return {name for name, info in zip(names, file_infos(root, names), strict=True) if info.type == FileType.File}


def _moved(root: Location, names: list[str], elsewhere: str) -> list[str]:
    # Names begin with the folders of another machine. Remove the fewest that turn the first absolute name into a file
    # below ``root``.
    parts = elsewhere.split("/")
    tails = ["/".join(parts[start:]) for start in range(1, len(parts))]
    there = _existing(root, [tail for tail in tails if tail])
    found = next((tail for tail in tails if tail in there), None)
    return names if found is None else [name.removeprefix(elsewhere.removesuffix(found)) for name in names]


# ---- the JSON file ----

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


def _usable(
    name: str, annotations: Sequence[_Annotation], rows: Mapping[int | str, int], requested: Collection[str]
) -> tuple[list[_Annotation], NDArray[np.int64], dict[str, int]]:
    # Filtered files often keep annotations of removed images. Annotations of a whole image have no box.
    needs_box = not {"boxes", "area"}.isdisjoint(requested)
    usable, owner, left_out = [], [], Counter[str]()
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
        elif "labels" in requested and each.category_id is None:
            raise DatasetError(f"annotation {number} (counted from 0) of {name} has no category_id")
        else:
            usable.append(each)
            owner.append(row)
    return usable, np.array(owner, np.int64), dict(left_out)


def _classes(name: str, categories: Sequence[_Category], found: Sequence[_Annotation]) -> dict[int | str, str]:
    # Categories without a name, or missing from the file's list, are named after their ids.
    listed = _numbered(name, "category", [each.id for each in categories])
    names = {key: each.name for key, each in zip(listed, categories, strict=True)}
    for each in found:
        if each.category_id is not None:
            names.setdefault(_key(name, "category", each.category_id), None)
    ordered = sorted(names, key=lambda key: (isinstance(key, str), key))
    return {key: str(key if names[key] is None else names[key]) for key in ordered}


def _objects(
    name: str, found: Sequence[_Annotation], classes: Mapping[int | str, str], wanted: Collection[str]
) -> dict[str, NDArray[Any]]:
    """Return field name -> one value per object, as documented in `read_coco`."""
    objects: dict[str, NDArray[Any]] = {}
    if "boxes" in wanted or "area" in wanted:
        boxes = _numbers(name, "bbox", [each.bbox for each in found]).reshape(-1, 4)
        boxes = np.clip(boxes, -_MOST_PIXELS, _MOST_PIXELS)  # left, top, width and height
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


def _segmentations(found: Sequence[_Annotation], bounds: NDArray[np.int64]) -> Packed:
    """Return for each image a JSON list with one segmentation, or null, per object, as uint8 text."""
    texts = [bytes(each.segmentation) for each in found]
    lists = [b"[" + b",".join(texts[start:end]) + b"]" for start, end in pairwise(bounds.tolist())]
    return Packed(np.frombuffer(b"".join(lists), np.uint8), bounds_of([*map(len, lists)]))


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
