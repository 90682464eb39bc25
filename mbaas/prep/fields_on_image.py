"""Moves all fields with image coordinates along with the pixels, for every engine: boxes, keypoints and masks.

Masks are drawn from COCO segmentations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ResourceError
from mbaas.prep.geometry import move_boxes, packed, sizes_after, sizes_after_all
from mbaas.prep.header import UndecodableError
from mbaas.samples.fields import Arrays, Column, Packed
from mbaas.transforms import Pipeline
from mbaas.transforms.base import Flips, Step, Windows
from mbaas.transforms.on_image import Keypoints

_LONGEST_COUNT = 7  # characters of one compressed run length

_MOST_OUTSIDE = 1.0
"""Maximum distance of polygons from the image, as a fraction of its size: drawing costs grow with edge lengths."""


def moved_fields(
    pipeline: Pipeline, known: Arrays, sizes: NDArray[np.int64], steps: Sequence[Step], lost: NDArray[np.bool_]
) -> tuple[Arrays, dict[int, str]]:
    """Return the fields of n prepared samples, and the samples whose fields do not fit their images: row -> reason.

    Args:
        pipeline: specifies the fields with image coordinates.
        known: the dataset's fields.
        sizes: int64[n, 2], (height, width) of the images in pixels.
        steps: all steps applied to the images, if there are fields with image coordinates.
        lost: bool[n], samples that are already bad; no masks are drawn for them.

    Raises:
        DatasetError: a field does not have one value per box.
    """
    boxes, masks = pipeline.boxes, pipeline.masks
    known = _with_keypoints(pipeline, known, sizes, steps)
    if boxes is None:
        return known, {}
    bounds = packed(known[boxes.field]).own()[1]
    known, kept = move_boxes(boxes, known, sizes, steps)
    if masks is None:
        return known, {}
    kept &= ~np.repeat(lost, np.diff(bounds))
    result = None if pipeline.output_shape is None else pipeline.output_shape[:2]
    made, bad = make_masks(known[masks.source], kept, bounds, sizes, steps, result)
    # Replace the source field in place, which keeps the order of fields.
    renamed = {masks.source: masks.field}
    return {renamed.get(name, name): made if name in renamed else column for name, column in known.items()}, bad


def fields_between(pipeline: Pipeline, known: Arrays, sizes: NDArray[np.int64], steps: Sequence[Step]) -> Arrays:
    """Return the fields of n samples after some of the steps, as input for a Map. See `moved_fields`."""
    known = _with_keypoints(pipeline, known, sizes, steps)
    return known if pipeline.boxes is None else move_boxes(pipeline.boxes, known, sizes, steps, is_last=False)[0]


def _with_keypoints(pipeline: Pipeline, known: Arrays, sizes: NDArray[np.int64], steps: Sequence[Step]) -> Arrays:
    keypoints = pipeline.keypoints
    if keypoints is None:
        return known
    return {**known, keypoints.field: move_keypoints(keypoints, known[keypoints.field], sizes, steps)}


def move_keypoints(keypoints: Keypoints, column: Column, sizes: NDArray[np.int64], steps: Sequence[Step]) -> Column:
    """Return the keypoints ``column`` of n samples after ``steps``; ``sizes`` int64[n, 2] are (height, width)."""
    if isinstance(column, Packed):
        values, bounds = column.own()
        owner = np.repeat(np.arange(len(sizes)), np.diff(bounds))
        return Packed(_moved(keypoints, values, owner, sizes, steps), bounds)
    return _moved(keypoints, column, np.arange(len(sizes)), sizes, steps)


def _moved(
    keypoints: Keypoints,
    values: NDArray[np.floating],
    owner: NDArray[np.int64],
    sizes: NDArray[np.int64],
    steps: Sequence[Step],
) -> NDArray[np.floating]:
    """Move values [total, ..., points, 2 or 3]; ``owner``, int64[total], is the image of each."""
    points = values.astype(np.float64)
    axes = (len(values),) + (1,) * (points.ndim - 2)  # shape that broadcasts one number per image
    swapped = np.arange(points.shape[-2])
    for one, other in keypoints.swaps:
        swapped[[one, other]] = other, one
    _leave_outside(points, sizes[owner], axes)
    for step in steps:
        if isinstance(step, Windows):
            windows, results = step.boxes[owner], step.sizes[owner]
            points[..., 0] -= windows[:, 1].reshape(axes)
            points[..., 1] -= windows[:, 0].reshape(axes)
            _leave_outside(points, windows[:, 2:], axes)
            scale = results / windows[:, 2:]
            points[..., 0] *= scale[:, 1].reshape(axes)
            points[..., 1] *= scale[:, 0].reshape(axes)
        elif isinstance(step, Flips):
            mirrored = step.which[owner]
            # Pixels are numbered from 0, so x becomes width - 1 - x.
            flipped = points[mirrored][..., swapped, :]
            flipped[..., 0] = sizes[owner][mirrored, 1].reshape(-1, *axes[1:]) - 1 - flipped[..., 0]
            points[mirrored] = flipped
        sizes = sizes_after(sizes, step)
    if points.shape[-1] == 3:
        points[points[..., 2] == 0] = 0.0
    return points.astype(values.dtype)


def _leave_outside(points: NDArray[np.float64], sizes: NDArray[np.int64], axes: tuple[int, ...]) -> None:
    """Clip points to images with these sizes (height, width); clear the visibility, if any, of points outside."""
    x, y = points[..., 0], points[..., 1]
    heights, widths = sizes[:, 0].reshape(axes), sizes[:, 1].reshape(axes)
    if points.shape[-1] == 3:
        points[..., 2][(x < 0) | (x >= widths) | (y < 0) | (y >= heights)] = 0.0
    np.clip(x, 0, widths - 1, out=x)
    np.clip(y, 0, heights - 1, out=y)


def make_masks(
    texts: Packed,
    kept: NDArray[np.bool_],
    bounds: NDArray[np.int64],
    sizes: NDArray[np.int64],
    steps: Sequence[Step],
    result: tuple[int, int] | None,
) -> tuple[Packed, dict[int, str]]:
    """Draw the masks of n samples, uint8 [objects, height, width] each.

    Samples with invalid segmentations have zeros as masks, and are returned as bad: row -> reason.

    Args:
        texts: uint8, per sample a JSON list with one segmentation per object.
        kept: bool[total], the objects to draw.
        bounds: int64[n + 1], the objects of sample i are ``bounds[i]`` to ``bounds[i + 1]``.
        sizes: int64[n, 2], (height, width) of the images in pixels.
        steps: the steps applied to the images.
        result: (height, width) of the images after these steps; None if sizes differ.

    Raises:
        ResourceError: there are polygons, and pycocotools is not installed.
    """
    new_bounds = np.concatenate([[0], np.cumsum(kept)])[bounds]
    shapes = np.column_stack([np.diff(new_bounds), sizes_after_all(sizes, steps)])
    starts = np.concatenate([[0], np.cumsum(shapes.prod(axis=1))])
    masks, bad = np.zeros(int(starts[-1]), np.uint8), dict[int, str]()
    for row, (height, width) in enumerate(sizes.tolist()):
        own = kept[bounds[row] : bounds[row + 1]]
        if not own.any():
            continue
        try:
            found = _segmentations(texts[row : row + 1].own()[0], len(own))
            drawn = [_drawn(found[number], height, width) for number in np.flatnonzero(own)]
        except UndecodableError as error:
            bad[row] = str(error)
            continue
        ys, xs = _looked_up(row, height, width, steps)
        into = masks[starts[row] : starts[row + 1]].reshape(shapes[row])
        for number, mask in enumerate(drawn):
            # Whole columns, then whole rows: four times as fast as pixel by pixel.
            columns = cv2.transpose(np.take(mask, np.maximum(xs, 0), axis=0))
            np.take(columns, np.maximum(ys, 0), axis=0, out=into[number])
        into[:, ys < 0] = 0
        into[:, :, xs < 0] = 0
    if result is None:
        return Packed(masks, starts, shapes), bad
    return Packed(masks.reshape(int(new_bounds[-1]), *result), new_bounds), bad


def _segmentations(text: NDArray[np.uint8], count: int) -> list[Any]:
    try:
        found = json.loads(text.tobytes())
    except (ValueError, RecursionError) as error:
        raise UndecodableError(f"its segmentations are no JSON: {error}") from None
    if not isinstance(found, list) or len(found) != count:
        has = f"{len(found)}" if isinstance(found, list) else "no list"
        raise UndecodableError(f"it must have a segmentation for each of its {count} boxes, got {has}")
    return found


def _drawn(segmentation: Any, height: int, width: int) -> NDArray[np.uint8]:
    """Draw a segmentation like ``COCO.annToMask`` of pycocotools: uint8 [width, height], the order of run lengths."""
    if segmentation is None or segmentation == []:
        raise UndecodableError("one of its boxes has no segmentation")
    try:
        counts = _counts_of(segmentation, height, width)
    except (TypeError, KeyError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise UndecodableError(f"a segmentation is neither polygons nor run lengths: {error!r}") from None
    # Check and draw here: for pixels not covered by run lengths, pycocotools returns uninitialized memory.
    if counts.ndim != 1 or not np.issubdtype(counts.dtype, np.integer) or (counts < 0).any():
        raise UndecodableError("run lengths must be whole numbers, at least 0")
    total = sum(counts.tolist())  # Python integers, because NumPy's sum would overflow
    if total != height * width:
        raise UndecodableError(f"run lengths must add up to the {height * width} pixels of the image, got {total}")
    drawn = np.repeat((np.arange(len(counts)) & 1).astype(np.uint8), counts)
    return drawn.reshape(width, height)


def _counts_of(segmentation: Any, height: int, width: int) -> NDArray[Any]:
    """Return the run lengths of a segmentation: pixels outside and inside, alternating."""
    if isinstance(segmentation, list):
        return _counts_of_polygons(segmentation, height, width)
    size = list(segmentation["size"])
    if size != [height, width]:
        raise UndecodableError(f"a segmentation is of an image of {size}, and this one has [{height}, {width}]")
    counts = segmentation["counts"]
    return np.array(counts) if isinstance(counts, list) else _decompressed(counts.encode("ascii"))


def _counts_of_polygons(polygons: list[Any], height: int, width: int) -> NDArray[Any]:
    try:
        from pycocotools import mask  # lazy: an optional package, for masks only
    except ModuleNotFoundError:
        wanted = "prep workers draw masks with pycocotools: pip install 'mbaas[coco]' on their nodes, too"
        raise ResourceError(wanted) from None
    for polygon in polygons:
        corners = np.array(polygon, np.float64)
        if corners.ndim != 1 or len(corners) % 2:
            raise UndecodableError(f"a polygon must be a list of x, y, x, y, ..., got {len(polygon)} values")
        corners = corners.reshape(-1, 2) / (width, height)
        if not (np.abs(corners - 0.5) <= 0.5 + _MOST_OUTSIDE).all():
            raise UndecodableError(f"a polygon reaches far out of the image of {width}x{height}")
    # Fewer than three corners have no area, and pycocotools takes four numbers for a box.
    areas = [polygon for polygon in polygons if len(polygon) >= 6]
    if not areas:
        return np.array([height * width])
    merged: Any = mask.merge(mask.frPyObjects(areas, height, width))
    return _decompressed(merged["counts"])


def _decompressed(text: bytes) -> NDArray[np.int64]:
    # As ``rleFrString`` of COCO: each character holds 5 bits of a number, lowest first, and a continuation bit. From
    # the fourth on, numbers are differences to the number two before.
    codes = np.frombuffer(text, np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero((codes & 0x20) == 0)
    if not len(codes) or codes.min() < 0 or codes.max() > 0x3F or not len(ends) or ends[-1] != len(codes) - 1:
        raise ValueError("compressed run lengths that end within a number, or have other characters")
    lengths = np.diff(ends, prepend=-1)
    if lengths.max() > _LONGEST_COUNT:
        raise ValueError("a compressed run length of more than 32 bits")
    firsts = ends - lengths + 1
    bits = (codes & 0x1F) << 5 * (np.arange(len(codes)) - np.repeat(firsts, lengths))
    counts = np.add.reduceat(bits, firsts)
    counts -= np.where(codes[ends] & 0x10, np.int64(1) << 5 * lengths, 0)  # the highest bit is the sign
    counts[1::2], counts[2::2] = np.cumsum(counts[1::2]), np.cumsum(counts[2::2])
    return counts


def _looked_up(row: int, height: int, width: int, steps: Sequence[Step]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    # Source row and column of each row and column of the result; -1 for none. Windows and flips act on rows and columns
    # separately, with the nearest pixel, so all steps together need a single lookup per mask.
    ys, xs = np.arange(height), np.arange(width)
    for step in steps:
        if isinstance(step, Windows):
            (top, left, h, w), (to_h, to_w) = step.boxes[row].tolist(), step.sizes[row].tolist()
            ys, xs = _window(ys, top, h, to_h), _window(xs, left, w, to_w)
        elif isinstance(step, Flips) and step.which[row]:
            xs = xs[::-1]
    return ys, xs


def _window(places: NDArray[np.int64], first: int, length: int, result: int) -> NDArray[np.int64]:
    """Cut ``length`` positions from ``first`` on, and stretch them to ``result``; -1 outside."""
    at = first + np.arange(result) * length // result
    return np.where((at >= 0) & (at < len(places)), places[np.clip(at, 0, len(places) - 1)], -1)
