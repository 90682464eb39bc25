"""Geometry of images and their boxes: the plan of a block's steps, and boxes moved by it.

All random parameters of a block are drawn before any pixel is touched, so all engines execute the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import DatasetError
from mbaas.samples.fields import Arrays, Column, Packed
from mbaas.samples.order import uniforms
from mbaas.transforms import ColorJitter, Map, RandomHorizontalFlip, Transform
from mbaas.transforms.base import BoxState, DrawInputs, Flips, Recolorings, Step, Windows, WindowTransform
from mbaas.transforms.on_image import Boxes, BoxFormat, moved_dtype

Edges = NDArray[np.float64]
"""[total, 4]: left, top, right and bottom of each box, in pixels."""


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
        u = uniforms(seed, epoch, sample_ids, substream=substream, draws=transform.draws)
        if isinstance(transform, WindowTransform):
            steps.append(transform.windows(DrawInputs(u, sizes[:, 0], sizes[:, 1], boxes, further(substream))))
        elif isinstance(transform, RandomHorizontalFlip):
            steps.append(Flips(transform.flips(u)))
        elif isinstance(transform, ColorJitter):
            steps.append(Recolorings(transform.changes(u)))
        else:  # Normalize, which runs elsewhere
            continue
        # Input of the next transform.
        boxes = None if boxes is None else boxes_after(boxes, sizes, steps[-1])
        sizes = sizes_after(sizes, steps[-1])
    return steps


def move_boxes(
    boxes: Boxes, known: Arrays, sizes: NDArray[np.int64], steps: Sequence[Step], *, is_last: bool = True
) -> tuple[Arrays, NDArray[np.bool_]]:
    """Return the fields of n samples with transformed boxes, and a mask of the boxes that remain.

    Args:
        boxes: specifies the field with the boxes.
        known: the dataset's fields.
        sizes: int64[n, 2], (height, width) of the images in pixels.
        steps: the steps applied to the images.
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
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(np.bincount(now.owner[kept], minlength=len(sizes)), out=bounds[1:])
    fields = {name: packed(known[name]) for name in (boxes.field, *boxes.beside)}
    new = {name: Packed(column.own()[0][kept], bounds) for name, column in fields.items()}
    written = _written(now.edges[kept], boxes.format)
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
        mirrored, widths = step.which[owner], sizes[owner, 1]
        left, right = edges[:, 0], edges[:, 2]
        edges = edges.copy()
        edges[:, 0] = np.where(mirrored, widths - right, left)
        edges[:, 2] = np.where(mirrored, widths - left, right)
    return BoxState(edges, owner, kept)


def sizes_after(sizes: NDArray[np.int64], step: Step) -> NDArray[np.int64]:
    """Return int64[n, 2], (height, width) of images with these sizes after a step."""
    return step.sizes if isinstance(step, Windows) else sizes


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


def edges_of(values: NDArray[Any], format: BoxFormat) -> Edges:
    """Return the edges [total, 4] of boxes stored in ``format``."""
    edges = values.astype(np.float64)
    if format == "cxcywh":
        edges[:, :2] -= edges[:, 2:] / 2
    if format != "xyxy":
        edges[:, 2:] += edges[:, :2]
    return edges


def _written(edges: Edges, format: BoxFormat) -> Edges:
    written = edges.copy()
    if format != "xyxy":
        written[:, 2:] -= written[:, :2]
    if format == "cxcywh":
        written[:, :2] += written[:, 2:] / 2
    return written
