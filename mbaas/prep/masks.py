"""Makes the masks of objects from COCO's segmentations, where an engine moves the pixels under them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ResourceError
from mbaas.fields import Packed
from mbaas.prep.boxes import sizes_after_all
from mbaas.prep.engine import BadRow
from mbaas.prep.header import UndecodableError
from mbaas.transforms.base import Flips, Step, Windows

_LONGEST_COUNT = 7  # characters of a compressed run length

_MOST_OUTSIDE = 1.0
"""How far outside the image a corner of a polygon may lie, as a share of its size: drawing takes time and memory with
the length of its edges.
"""


def make_masks(
    texts: Packed,
    kept: NDArray[np.bool_],
    bounds: NDArray[np.int64],
    sizes: NDArray[np.int64],
    steps: Sequence[Step],
    result: tuple[int, int] | None,
) -> tuple[Packed, list[BadRow]]:
    """Make the masks of n samples.

    Args:
        texts: uint8, of each sample a JSON list with the segmentation of each object.
        kept: bool[total], the objects of which a mask is made.
        bounds: int64[n + 1], the objects of sample i are those from ``bounds[i]`` to ``bounds[i + 1]``.
        sizes: int64[n, 2], (height, width) of the images in pixels.
        steps: what is done to the images.
        result: (height, width) of the images after that; None if each has its own.

    Returns:
        The masks, uint8 [objects, height, width] of each sample; and the samples whose segmentations make no masks,
        which have zeros.

    Raises:
        ResourceError: pycocotools is not installed here, and there are polygons.
    """
    new_bounds = np.concatenate([[0], np.cumsum(kept)])[bounds]
    shapes = np.column_stack([np.diff(new_bounds), sizes_after_all(sizes, steps)])
    starts = np.concatenate([[0], np.cumsum(shapes.prod(axis=1))])
    masks, bad = np.zeros(int(starts[-1]), np.uint8), []
    for row, (height, width) in enumerate(sizes.tolist()):
        own = kept[bounds[row] : bounds[row + 1]]
        if not own.any():
            continue
        try:
            found = _segmentations(texts[row : row + 1].own()[0], len(own))
            drawn = [_drawn(found[number], height, width) for number in np.flatnonzero(own)]
        except UndecodableError as error:
            bad.append(BadRow(row, str(error)))
            continue
        ys, xs = _looked_up(row, height, width, steps)
        into = masks[starts[row] : starts[row + 1]].reshape(shapes[row])
        for number, mask in enumerate(drawn):
            # Whole columns and then whole rows: four times as fast as pixel by pixel.
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
    """Draw a segmentation as pycocotools' ``COCO.annToMask`` does: uint8 [width, height], as run lengths go."""
    if segmentation is None or segmentation == []:
        raise UndecodableError("one of its boxes has no segmentation")
    try:
        counts = _counts_of(segmentation, height, width)
    except UndecodableError:
        raise
    except (TypeError, KeyError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise UndecodableError(f"a segmentation is neither polygons nor run lengths: {error!r}") from None
    # Checked and drawn here: for pixels that run lengths do not reach, pycocotools returns memory as it finds it.
    if counts.ndim != 1 or not np.issubdtype(counts.dtype, np.integer) or (counts < 0).any():
        raise UndecodableError("run lengths must be whole numbers, at least 0")
    total = sum(counts.tolist())  # of any size, where NumPy's sum would wrap around
    if total != height * width:
        raise UndecodableError(f"run lengths must add up to the {height * width} pixels of the image, got {total}")
    drawn = np.repeat((np.arange(len(counts)) & 1).astype(np.uint8), counts)
    return drawn.reshape(width, height)


def _counts_of(segmentation: Any, height: int, width: int) -> NDArray[Any]:
    """Return the run lengths of a segmentation: of pixels outside of it and inside, by turns."""
    if isinstance(segmentation, list):
        return _counts_of_polygons(segmentation, height, width)
    size = list(segmentation["size"])
    if size != [height, width]:
        raise UndecodableError(f"a segmentation is of an image of {size}, and this one has [{height}, {width}]")
    counts = segmentation["counts"]
    return np.array(counts) if isinstance(counts, list) else _decompressed(counts.encode("ascii"))


def _counts_of_polygons(polygons: list[Any], height: int, width: int) -> NDArray[Any]:
    try:
        from pycocotools import mask  # here: only who makes masks has it
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
    # Of fewer than three corners there is no area; pycocotools takes four numbers for a box.
    areas = [polygon for polygon in polygons if len(polygon) >= 6]
    if not areas:
        return np.array([height * width])
    merged: Any = mask.merge(mask.frPyObjects(areas, height, width))
    return _decompressed(merged["counts"])


def _decompressed(text: bytes) -> NDArray[np.int64]:
    """Return compressed run lengths as numbers, as COCO's ``rleFrString`` reads them.

    A number has 5 bits in each character, the lowest first, and one more says whether another character follows. From
    the fourth on, numbers are differences to the one before the last.
    """
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
    counts -= np.where(codes[ends] & 0x10, np.int64(1) << 5 * lengths, 0)  # the highest bit of all is the sign
    counts[1::2], counts[2::2] = np.cumsum(counts[1::2]), np.cumsum(counts[2::2])
    return counts


def _looked_up(row: int, height: int, width: int, steps: Sequence[Step]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return from which row, and from which column, of a sample's image those of the result come; -1 from none.

    Windows and mirror images work on rows and columns apart, and take the nearest pixel: so however many there are, a
    mask is looked up once.
    """
    ys, xs = np.arange(height), np.arange(width)
    for step in steps:
        if isinstance(step, Windows):
            (top, left, h, w), (to_h, to_w) = step.boxes[row].tolist(), step.sizes[row].tolist()
            ys, xs = _window(ys, top, h, to_h), _window(xs, left, w, to_w)
        elif isinstance(step, Flips) and step.which[row]:
            xs = xs[::-1]
    return ys, xs


def _window(places: NDArray[np.int64], first: int, length: int, result: int) -> NDArray[np.int64]:
    """Cut ``length`` places out, from ``first`` on, and stretch them to ``result``; -1 where there are none."""
    at = first + np.arange(result) * length // result
    return np.where((at >= 0) & (at < len(places)), places[np.clip(at, 0, len(places) - 1)], -1)
