"""Geometry of images: the plan of a block's steps, and boxes, keypoints and masks moved by it.

All random parameters of a block are drawn before any pixel is touched, so all engines execute the same plan. Masks are
drawn from COCO segmentations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mbaas.errors import DatasetError, ResourceError
from mbaas.prep.header import UndecodableError
from mbaas.prep.pixels import warp
from mbaas.samples.fields import Arrays, Column, Packed, bounds_of
from mbaas.samples.order import uniforms
from mbaas.transforms import Map, Pipeline, Transform
from mbaas.transforms.base import BoxState, DrawInputs, Flips, ImageTransform, Step, Warps, Windows
from mbaas.transforms.on_image import Boxes, Edges, Keypoints, boxes_of, edges_of, moved_dtype

Stage = tuple[int, Transform]
"""A transform and its index in the pipeline, which is also its substream of random numbers."""


def stages_of(transforms: Sequence[Transform]) -> tuple[tuple[Stage, ...], ...]:
    """Split the transforms after DecodeImage into runs, before each Map, because later steps depend on its result."""
    runs: list[list[Stage]] = [[]]
    # Enumerate before dropping DecodeImage, so that an index here is the index in the pipeline.
    for stage in list(enumerate(transforms))[1:]:
        if isinstance(stage[1], Map):
            runs.append([])
        runs[-1].append(stage)
    return tuple(tuple(run) for run in runs)


def plan(
    stages: Sequence[Stage],
    seed: int,
    epoch: int,
    sample_ids: NDArray[np.int64],
    sizes: NDArray[np.int64],
    boxes: BoxState | None = None,
) -> list[Step]:
    """Draw the steps of ``stages`` (without Maps) for n samples at once; one by one would be slower.

    Args:
        sizes: int64[n, 2], (height, width) of the images in pixels.
        boxes: boxes before the first step; required if a transform depends on boxes.
    """

    def further(substream: int) -> Callable[[NDArray[np.int64], int, int], NDArray[np.float64]]:
        return lambda rows, first, count: uniforms(
            seed, epoch, sample_ids[rows], substream=substream, draws=count, first=first
        )

    steps: list[Step] = []
    for substream, transform in stages:
        if not isinstance(transform, ImageTransform):  # Normalize, which runs elsewhere
            continue
        u = uniforms(seed, epoch, sample_ids, substream=substream, draws=transform.draws)
        steps.append(transform.step(DrawInputs(u, sizes, boxes, further(substream))))
        # Input of the next transform.
        boxes = None if boxes is None else boxes_after(boxes, sizes, steps[-1])
        sizes = sizes_after(sizes, steps[-1])
    return steps


def move_boxes(
    boxes: Boxes, known: Arrays, sizes: NDArray[np.int64], steps: Sequence[Step], *, is_last: bool = True
) -> tuple[Arrays, NDArray[np.bool_]]:
    """Return the fields of n samples with transformed boxes, and a mask of the boxes that remain.

    Args:
        sizes: int64[n, 2], (height, width) of the images in pixels.
        is_last: True if no further steps follow. Otherwise only empty boxes are dropped.

    Raises:
        DatasetError: a field does not have one value per box.
    """
    now = boxes_before(boxes, known, sizes)
    for step in steps:
        now, sizes = boxes_after(now, sizes, step), sizes_after(sizes, step)
    lengths = now.edges[:, 2:] - now.edges[:, :2]
    large = lengths >= boxes.min_size if is_last or not boxes.min_size else lengths > 0
    kept = now.kept & large.all(axis=1)
    bounds = bounds_of(np.bincount(now.owner[kept], minlength=len(sizes)))
    fields = {name: packed(known[name]) for name in (boxes.field, *boxes.beside)}
    new = {name: Packed(column.own()[0][kept], bounds) for name, column in fields.items()}
    written = boxes_of(now.edges[kept], boxes.format)
    new[boxes.field] = Packed(written.astype(moved_dtype(fields[boxes.field].dtype)), bounds)
    return {**known, **new}, kept


def boxes_before(boxes: Boxes, known: Arrays, sizes: NDArray[np.int64]) -> BoxState:
    """Return the boxes of n samples before the first step. Arguments and errors as for `move_boxes`."""
    column = packed(known[boxes.field])
    lengths = column.lengths
    for name in boxes.beside:
        others = packed(known[name]).lengths
        if not np.array_equal(others, lengths):
            row = int(np.flatnonzero(others != lengths)[0])
            raise DatasetError(
                f"field {name!r} must have a value for each of a sample's boxes, but one has {int(lengths[row])} boxes "
                f"and {int(others[row])} values"
            )
    owner = np.repeat(np.arange(len(lengths)), lengths)
    edges = _clipped(edges_of(column.own()[0], boxes.format), sizes[owner])
    return BoxState(edges, owner, np.ones(len(owner), np.bool_))


def boxes_after(boxes: BoxState, sizes: NDArray[np.int64], step: Step) -> BoxState:
    """Apply a step to the boxes of n images with these sizes (height, width)."""
    edges, owner, kept = boxes.edges, boxes.owner, boxes.kept
    if isinstance(step, Windows):
        windows, results = step.boxes[owner], step.sizes[owner]
        scale = results / windows[:, 2:]
        corners = (edges.reshape(-1, 2, 2) - windows[:, None, 1::-1]) * scale[:, None, ::-1]
        edges = _clipped(corners.reshape(-1, 4), results)
        kept = kept if step.kept is None else kept & step.kept
    elif isinstance(step, Flips):
        mirrored, axis = step.which[owner], int(step.vertical)
        first, last, lengths = edges[:, axis], edges[:, axis + 2], sizes[owner, 1 - axis]
        edges = edges.copy()
        edges[:, [axis, axis + 2]] = np.where(
            mirrored[:, None], np.stack([lengths - last, lengths - first], axis=1), np.stack([first, last], axis=1)
        )
    elif isinstance(step, Warps):
        corners = _warped(edges[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2), step, owner)
        edges = _clipped(np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1), step.sizes[owner])
    return BoxState(edges, owner, kept)


def _warped(points: NDArray[np.float64], step: Warps, owner: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return where ``points``, float64[total, k, 2], of the images ``owner`` are after a step; (x, y) in pixels."""
    found = points @ step.from_source[owner, :, :2].transpose(0, 2, 1) + step.from_source[owner, None, :, 2]
    moved = found[:, :, :2] / found[:, :, 2:]
    return np.where(step.which[owner, None, None], moved, points)


def sizes_after(sizes: NDArray[np.int64], step: Step) -> NDArray[np.int64]:
    """Return int64[n, 2], (height, width) of images with these sizes after a step."""
    return step.sizes if isinstance(step, Windows | Warps) else sizes


def sizes_after_all(sizes: NDArray[np.int64], steps: Sequence[Step]) -> NDArray[np.int64]:
    """Return int64[n, 2], (height, width) of images with these sizes after all steps."""
    for step in steps:
        sizes = sizes_after(sizes, step)
    return sizes


def packed(column: Column) -> Packed:
    """Return a column as values of varying number per sample."""
    if isinstance(column, Packed):
        return column
    rows, each = column.shape[:2]
    return Packed(column.reshape(rows * each, *column.shape[2:]), np.arange(rows + 1) * each)


def _clipped(edges: Edges, sizes: NDArray[np.int64]) -> Edges:
    return np.clip(edges, 0.0, sizes[:, [1, 0, 1, 0]])


_LONGEST_COUNT = 7  # characters of one compressed run length

_MOST_OUTSIDE = 1.0
"""Maximum distance of polygons from the image, as a fraction of its size: drawing costs grow with edge lengths."""


def moved_fields(
    pipeline: Pipeline,
    known: Arrays,
    sizes: NDArray[np.int64],
    steps: Sequence[Step],
    lost: NDArray[np.bool_] | None = None,
) -> tuple[Arrays, dict[int, str]]:
    """Return the fields of n samples after ``steps``, and the samples whose fields do not fit: row -> reason.

    Args:
        sizes: int64[n, 2], (height, width) of the images in pixels.
        lost: bool[n], samples that are already bad; no masks are drawn for them. None if further steps follow: only
            empty boxes are dropped, and no masks are drawn at all.

    Raises:
        DatasetError: a field does not have one value per box.
    """
    boxes, keypoints, masks = pipeline.boxes, pipeline.keypoints, pipeline.masks
    if keypoints is not None:
        known = {**known, keypoints.field: move_keypoints(keypoints, known[keypoints.field], sizes, steps)}
    if boxes is None:
        return known, {}
    bounds = packed(known[boxes.field]).own()[1]
    known, kept = move_boxes(boxes, known, sizes, steps, is_last=lost is not None)
    if masks is None or lost is None:
        return known, {}
    kept &= ~np.repeat(lost, np.diff(bounds))
    result = None if pipeline.output_shape is None else pipeline.output_shape[:2]
    made, bad = make_masks(known[masks.source], kept, bounds, sizes, steps, result)
    # Replace the source field in place, which keeps the order of fields.
    renamed = {masks.source: masks.field}
    return {renamed.get(name, name): made if name in renamed else column for name, column in known.items()}, bad


def move_keypoints(keypoints: Keypoints, column: Column, sizes: NDArray[np.int64], steps: Sequence[Step]) -> Column:
    """Return the keypoints ``column`` of n samples after ``steps``; ``sizes`` int64[n, 2] are (height, width)."""
    values, bounds = column.own() if isinstance(column, Packed) else (column, np.arange(len(column) + 1))
    owner = np.repeat(np.arange(len(sizes)), np.diff(bounds))
    points = values.astype(np.float64)  # [total, ..., points, 2 or 3]
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
            mirrored, axis = step.which[owner], int(step.vertical)
            # Pixels are numbered from 0, so x becomes width - 1 - x.
            flipped = points[mirrored][..., swapped, :]
            flipped[..., axis] = sizes[owner][mirrored, 1 - axis].reshape(-1, *axes[1:]) - 1 - flipped[..., axis]
            points[mirrored] = flipped
        elif isinstance(step, Warps):
            # Edges are at whole numbers there, and the centre of the first pixel at a half; torchvision overlooks that.
            places = points[..., :2] + 0.5
            points[..., :2] = _warped(places.reshape(len(places), -1, 2), step, owner).reshape(places.shape) - 0.5
            _leave_outside(points, step.sizes[owner], axes)
        sizes = sizes_after(sizes, step)
    if points.shape[-1] == 3:
        points[points[..., 2] == 0] = 0.0
    moved = points.astype(values.dtype)
    return Packed(moved, bounds) if isinstance(column, Packed) else moved


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
        bounds: int64[n + 1], the objects of sample i are ``bounds[i]`` to ``bounds[i + 1]``.
        sizes: int64[n, 2], (height, width) of the images in pixels.
        result: (height, width) of the images after these steps; None if sizes differ.

    Raises:
        ResourceError: there are polygons, and pycocotools is not installed.
    """
    new_bounds = bounds_of(kept)[bounds]
    shapes = np.column_stack([np.diff(new_bounds), sizes_after_all(sizes, steps)])
    starts = bounds_of(shapes.prod(axis=1))
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
        into = masks[starts[row] : starts[row + 1]].reshape(shapes[row])
        if any(isinstance(step, Warps) and step.which[row] for step in steps):
            for number, mask in enumerate(drawn):
                into[number] = _moved_mask(mask.T, row, steps)
            continue
        ys, xs = _looked_up(row, height, width, steps)
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
        wanted = "prep workers draw masks with pycocotools: pip install pycocotools on their nodes, too"
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


def _moved_mask(mask: NDArray[np.uint8], row: int, steps: Sequence[Step]) -> NDArray[np.uint8]:
    """Return a mask, uint8 [height, width], after steps of which some do not act on rows and columns separately."""
    for step in steps:
        if isinstance(step, Warps):
            if step.which[row]:
                mask = np.ascontiguousarray(mask)
                mask = warp(mask, step.to_source[row], step.sizes[row].tolist(), nearest=True, fill=None)
        else:
            height, width = mask.shape
            ys, xs = _looked_up(row, height, width, [step])
            mask = mask[np.ix_(ys, xs)] * ((ys >= 0)[:, None] & (xs >= 0))
    return mask


def _looked_up(row: int, height: int, width: int, steps: Sequence[Step]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    # Source row and column of each row and column of the result; -1 for none. Windows and flips act on rows and columns
    # separately, with the nearest pixel, so all steps together need a single lookup per mask.
    ys, xs = np.arange(height), np.arange(width)
    for step in steps:
        if isinstance(step, Windows):
            (top, left, h, w), (to_h, to_w) = step.boxes[row].tolist(), step.sizes[row].tolist()
            ys, xs = _window(ys, top, h, to_h), _window(xs, left, w, to_w)
        elif isinstance(step, Flips) and step.which[row]:
            ys, xs = (ys[::-1], xs) if step.vertical else (ys, xs[::-1])
    return ys, xs


def _window(places: NDArray[np.int64], first: int, length: int, result: int) -> NDArray[np.int64]:
    """Cut ``length`` positions from ``first`` on, and stretch them to ``result``; -1 outside."""
    at = first + np.arange(result) * length // result
    return np.where((at >= 0) & (at < len(places)), places[np.clip(at, 0, len(places) - 1)], -1)
