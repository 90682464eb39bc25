"""Moves the boxes of samples as an engine moves the pixels under them: by the same plan, so for all engines alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import DatasetError
from mbaas.fields import Arrays, Column, Packed
from mbaas.transforms.base import Flips, Step, Windows
from mbaas.transforms.boxes import Boxes, BoxFormat

Edges = NDArray[np.float64]
"""[total, 4]: left, top, right and bottom of each box, in pixels."""


def move_boxes(boxes: Boxes, known: Arrays, sizes: NDArray[np.int64], steps: Sequence[Step]) -> Arrays:
    """Return the fields of n samples with their boxes where the pixels are.

    Args:
        boxes: which field has them.
        known: the fields, as the dataset knows them.
        sizes: int64[n, 2], (height, width) of the images in pixels.
        steps: what is done to the images.

    Raises:
        DatasetError: a field does not have a value for each box.
    """
    packed = {name: _packed(known[name]) for name in (boxes.field, *boxes.beside)}
    values, bounds = packed[boxes.field].own()
    lengths = np.diff(bounds)
    for name, column in packed.items():
        if not np.array_equal(column.lengths, lengths):
            row = int(np.flatnonzero(column.lengths != lengths)[0])
            raise DatasetError(
                f"field {name!r} must have a value for each of a sample's boxes, but one has {int(lengths[row])} boxes "
                f"and {int(column.lengths[row])} values"
            )
    owner = np.repeat(np.arange(len(lengths)), lengths)  # of each box, its sample
    edges = _moved(edges_of(values, boxes.format), owner, sizes, steps)
    kept = (edges[:, 2:] - edges[:, :2] >= boxes.min_size).all(axis=1)
    new_bounds = np.zeros(len(bounds), np.int64)
    np.cumsum(np.bincount(owner[kept], minlength=len(lengths)), out=new_bounds[1:])
    moved = {name: Packed(column.own()[0][kept], new_bounds) for name, column in packed.items()}
    moved[boxes.field] = Packed(_written(edges[kept], boxes.format).astype(values.dtype), new_bounds)
    return {**known, **moved}


def _packed(column: Column) -> Packed:
    """Return values as those of samples that may differ in how many they have."""
    if isinstance(column, Packed):
        return column
    rows, each = column.shape[:2]
    return Packed(column.reshape(rows * each, *column.shape[2:]), np.arange(rows + 1) * each)


def _moved(edges: Edges, owner: NDArray[np.int64], sizes: NDArray[np.int64], steps: Sequence[Step]) -> Edges:
    edges = _clipped(edges, sizes[owner])
    for step in steps:
        if isinstance(step, Windows):
            windows, results = step.boxes[owner], step.sizes[owner]
            scale = results / windows[:, 2:]
            moved = (edges.reshape(-1, 2, 2) - windows[:, None, 1::-1]) * scale[:, None, ::-1]
            sizes = step.sizes
            edges = _clipped(moved.reshape(-1, 4), results)
        elif isinstance(step, Flips):
            mirrored, widths = step.which[owner], sizes[owner, 1]
            left, right = edges[:, 0].copy(), edges[:, 2].copy()
            edges[:, 0] = np.where(mirrored, widths - right, left)
            edges[:, 2] = np.where(mirrored, widths - left, right)
    return edges


def _clipped(edges: Edges, sizes: NDArray[np.int64]) -> Edges:
    """Return boxes as far as they lie in images of these (height, width)."""
    return np.clip(edges, 0.0, sizes[:, [1, 0, 1, 0]])


def edges_of(values: NDArray[Any], format: BoxFormat) -> Edges:
    """Return the edges of boxes that are written as ``format`` says: [total, 4]."""
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
