"""Reads COCO annotations: a JSON file that lists images and the objects in them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
from numpy.typing import NDArray
from pyarrow.fs import FileType

from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.coco_json import read_coco_json
from mbaas.dataset.readers.columns import checked_fields
from mbaas.dataset.readers.listing import Listing, listed_once
from mbaas.dataset.storage.faults import message_of
from mbaas.dataset.storage.location import Location, file_infos, join, locate, missing
from mbaas.dataset.table import table_of
from mbaas.errors import ConfigError, DatasetError
from mbaas.fields import ANNOTATED_SIZE, LABELS, Packed
from mbaas.units import counted

_FIELDS = ("boxes", LABELS, "area", "iscrowd", "keypoints", "segmentation", "image_id")


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
    asked = _asked(fields)
    where, root = locate(path, filesystem), locate(images, filesystem)
    file = _look_up(where)
    options = {"annotations": where.root, "fields": asked, "keep_empty": bool(keep_empty)}

    def make() -> Listing:
        class_names, table = _read(where, root, asked, keep_empty)
        return Listing.of(class_names, table, file)

    found = listed_once(
        listing,
        make,
        writer="read_coco",
        root=root.root,
        options=options,
        is_current=lambda saved: saved.files == file,
    )
    return found.dataset(root)


def _asked(fields: Sequence[str] | None) -> tuple[str, ...] | None:
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
        raise DatasetError(f"the annotations {where.root}: {why}")
    return [info.size, info.mtime_ns]


def _read(
    where: Location, root: Location, asked: tuple[str, ...] | None, keep_empty: bool
) -> tuple[tuple[str, ...], pa.Table]:
    try:
        with where.filesystem.open_input_file(where.base) as stream:
            content = stream.read_buffer()
    except Exception as error:  # third-party file systems raise any exception
        raise DatasetError(f"cannot read the annotations {where.root}: {message_of(error)}") from error
    found = read_coco_json(content, where.root, asked)
    counts = np.diff(found.bounds)
    rows = np.arange(len(counts)) if keep_empty else np.flatnonzero(counts)
    if not len(rows):
        raise DatasetError(f"{where.root} has annotations of none of its {len(counts)} images")
    # Images that are left out have no objects, so the objects of the others stay contiguous.
    bounds = found.bounds[np.append(rows, len(counts))]
    known = {name: _lists(bounds, values) for name, values in found.objects.items()}
    if asked is not None and "segmentation" in asked:
        texts, ends = found.segmentations
        if len(rows) < len(counts):
            texts, ends = _chosen(texts, ends, rows)
        known["segmentation"] = _lists(ends, texts)
    if asked is None or "image_id" in asked:
        known["image_id"] = found.image_ids.take(pa.array(rows))
    if found.sizes.any() and (asked is None or not {"boxes", "keypoints", "segmentation"}.isdisjoint(asked)):
        sizes = pa.array(np.ascontiguousarray(found.sizes[rows]).ravel())
        known[ANNOTATED_SIZE] = pa.FixedSizeListArray.from_arrays(sizes, 2)
    if found.left_out:
        counts_by_reason = ", ".join(f"{count:,} {reason}" for reason, count in found.left_out.items())
        warnings.warn(f"{where.root}: annotations left out: {counts_by_reason}", stacklevel=4)
    if found.unlisted and LABELS in known:
        ids, some = counted(len(found.unlisted), "category id"), ", ".join(found.unlisted[:5])
        warnings.warn(
            f"{where.root}: annotations have {ids} that the file does not list, for instance {some}; "
            "each is a class with that name",
            stacklevel=4,
        )
    names = _names_below(root, [found.file_names[row] for row in rows.tolist()])
    places = [pa.array(names, pa.large_string()), pa.array(np.zeros(len(rows), np.int64)), _lengths(where, root, names)]
    return found.class_names if LABELS in known else (), table_of(places, known)


def _chosen(
    texts: NDArray[np.uint8], ends: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    return Packed(texts, ends)[rows].own()


def _lists(bounds: NDArray[np.int64], values: NDArray[Any]) -> pa.Array:
    """Return a list array with one list per image and one value per object."""
    items = pa.array(np.ascontiguousarray(values).ravel())
    for size in reversed(values.shape[1:]):
        items = pa.FixedSizeListArray.from_arrays(items, size)
    return pa.LargeListArray.from_arrays(pa.array(bounds), items)


def _names_below(root: Location, names: list[str]) -> list[str]:
    # Annotation files may have absolute paths or Windows separators.
    prefix = root.root.rstrip("/") + "/"
    names = [name.removeprefix(prefix) for name in names]
    there = _existing(root, [name for name in names if "\\" in name])  # valid in a name on Linux
    names = [name if name in there else name.replace("\\", "/") for name in names]
    elsewhere = next((name for name in names if _is_absolute(name)), None)
    return names if elsewhere is None else _moved(root, names, elsewhere)


def _existing(root: Location, names: list[str]) -> set[str]:
    return {name for name, info in zip(names, file_infos(root, names), strict=True) if info.type == FileType.File}


def _is_absolute(name: str) -> bool:
    return name.startswith("/") or re.match("[A-Za-z]:/", name) is not None


def _moved(root: Location, names: list[str], elsewhere: str) -> list[str]:
    # Names begin with the folders of another machine. Remove the fewest that turn the first absolute name into a file
    # below ``root``.
    parts = elsewhere.split("/")
    tails = ["/".join(parts[start:]) for start in range(1, len(parts))]
    there = _existing(root, [tail for tail in tails if tail])
    found = next((tail for tail in tails if tail in there), None)
    return names if found is None else [name.removeprefix(elsewhere.removesuffix(found)) for name in names]


def _lengths(where: Location, root: Location, names: list[str]) -> pa.Array:
    for name in names:
        if "://" in name or name.startswith("/") or ".." in name.split("/") or not name:
            raise DatasetError(f"{where.root} must name images below {root.root}, got {name!r}")
    infos = file_infos(root, names)
    if gone := [row for row, info in enumerate(infos) if missing(info)]:
        raise DatasetError(
            f"{len(gone)} of {len(infos)} images of {where.root} are not there, the first one "
            f"{join(root.root, names[gone[0]])}"
        )
    return pa.array([info.size for info in infos], pa.int64())
