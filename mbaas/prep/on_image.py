"""Moves all fields with image coordinates along with the pixels, for every engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbaas.fields import Arrays
from mbaas.prep.boxes import move_boxes, packed
from mbaas.prep.engine import BadRow
from mbaas.prep.keypoints import move_keypoints
from mbaas.prep.masks import make_masks
from mbaas.transforms import Pipeline
from mbaas.transforms.base import Step


def moved_fields(
    pipeline: Pipeline, known: Arrays, sizes: NDArray[np.int64], steps: Sequence[Step], lost: NDArray[np.bool_]
) -> tuple[Arrays, list[BadRow]]:
    """Return the fields of n prepared samples, and the samples whose fields do not fit their images.

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
        return known, []
    bounds = packed(known[boxes.field]).own()[1]
    known, kept = move_boxes(boxes, known, sizes, steps)
    if masks is None:
        return known, []
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
