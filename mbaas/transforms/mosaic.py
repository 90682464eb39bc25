"""Mosaics of the images of a minibatch, with their boxes. They run in the consumer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError, shown
from mbaas.samples.fields import BatchTransform
from mbaas.transforms import checks
from mbaas.transforms.base import Parameters
from mbaas.transforms.on_image import Boxes, Edges, boxes_of, edges_of

PARTNERS = 3
"""Other images in each mosaic."""


class _Tile(NamedTuple):
    """A tile: its rows and columns in the mosaic and in its own image, and the shift of that image."""

    rows: slice
    columns: slice
    own_rows: slice
    own_columns: slice
    down: int
    right: int


@dataclass(frozen=True, kw_only=True)
class Mosaic(Parameters, BatchTransform):
    """Combine four images of a minibatch into one, with their boxes (YOLOv4, Bochkovskiy et al., 2020).

    A random point divides the result into four tiles. Each tile shows an image with a corner at that point: the upper
    left one the original image, the others images drawn from the minibatch, so no extra samples are read. Boxes move
    with the pixels, and are clipped to their tile. All other fields remain those of the upper left image.

    Pass it as ``batch_fn`` to `mbaas.join` or `tune_integration.get_loader`. Images must have equal size. Random
    numbers are drawn as in `MixUp`.

    Args:
        boxes: the fields with boxes, as in the pipeline. ``min_size`` applies to clipped boxes, too.
        p: probability that an image becomes a mosaic.
        min_visible: boxes with less than this share of their area left are dropped, 0 to 1.
        image: key of the images, after ``columns``: [n, channels, height, width] in torch, and
            [n, height, width, channels] in NumPy.

    Raises:
        ConfigError: for a minibatch without these keys, images that differ in size, or fields that do not have one
            value for each box.

    Example:
        ``join(name, batch_fn=T.Mosaic(boxes=T.Boxes(beside=("labels",))))``
    """

    boxes: Boxes = field(default_factory=Boxes)
    p: Annotated[float, checks.fraction] = 1.0
    min_visible: Annotated[float, checks.fraction] = 0.1
    image: str = "image"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.boxes, Boxes):
            raise self._refused("boxes", "must be Boxes")

    def apply(self, batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        names = (self.boxes.field, *self.boxes.beside)
        if lacking := [name for name in (self.image, *names) if name not in batch]:
            has = ", ".join(map(repr, batch))
            raise ConfigError(f"Mosaic needs {' and '.join(map(repr, lacking))}, got a minibatch of {has}")
        images = batch[self.image]
        if isinstance(images, list) or images.ndim != 4:
            got = "a list of different sizes" if isinstance(images, list) else f"shape {shown(tuple(images.shape))}"
            raise ConfigError(f"Mosaic needs {self.image!r} of one size, with 4 axes, got {got}")
        values = {name: [_array(value) for value in batch[name]] for name in names}
        for name in self.boxes.beside:
            for row, (boxes, beside) in enumerate(zip(values[self.boxes.field], values[name], strict=True)):
                if len(boxes) != len(beside):
                    raise ConfigError(
                        f"Mosaic needs a value of {name!r} for each box, got {len(beside)} for {len(boxes)} boxes in "
                        f"row {row}"
                    )
        is_numpy, count = isinstance(images, np.ndarray), len(images)
        height, width = images.shape[1:3] if is_numpy else images.shape[2:]
        edges = [edges_of(boxes.reshape(-1, 4), self.boxes.format) for boxes in values[self.boxes.field]]
        # All at once, so that the draws for a row do not depend on earlier rows.
        chosen, points = rng.random(count) < self.p, rng.random((count, 2))
        partners = rng.integers(count, size=(count, PARTNERS))
        made = images.copy() if is_numpy else images.clone()
        new = {name: [*column] for name, column in values.items()}
        for row in np.flatnonzero(chosen).tolist():
            down, right = (round(float(u) * n) for u, n in zip(points[row], (height, width), strict=True))
            sources, tiles = [row, *partners[row].tolist()], _tiles(down, right, height, width)
            shown_edges, shown_rows = [], []
            for source, tile in zip(sources, tiles, strict=True):
                whole = () if is_numpy else (slice(None),)  # all channels, which come first in torch
                here, there = (*whole, tile.rows, tile.columns), (*whole, tile.own_rows, tile.own_columns)
                made[row][here] = images[source][there]
                clipped, kept = self._clipped(edges[source], tile)
                shown_edges.append(clipped)
                shown_rows.append(kept)
            new[self.boxes.field][row] = boxes_of(np.concatenate(shown_edges), self.boxes.format)
            for name in self.boxes.beside:
                parts = [values[name][source][kept] for source, kept in zip(sources, shown_rows, strict=True)]
                new[name][row] = np.concatenate(parts)
        return {**batch, self.image: made, **{name: _like(batch[name], column) for name, column in new.items()}}

    def _clipped(self, edges: Edges, tile: _Tile) -> tuple[Edges, NDArray[np.intp]]:
        """Return an image's boxes that remain in a tile, as edges [k, 4], and their rows, int[k]."""
        moved = edges + np.array([tile.right, tile.down] * 2)
        low = (tile.columns.start, tile.rows.start) * 2
        high = (tile.columns.stop, tile.rows.stop) * 2
        clipped = np.clip(moved, low, high)
        size, whole = clipped[:, 2:] - clipped[:, :2], moved[:, 2:] - moved[:, :2]
        is_visible = size.prod(axis=1) >= self.min_visible * whole.prod(axis=1)
        kept = np.flatnonzero(is_visible & (size >= max(self.boxes.min_size, 1e-9)).all(axis=1))
        return clipped[kept], kept


def _tiles(down: int, right: int, height: int, width: int) -> Sequence[_Tile]:
    upper, lower = slice(0, down), slice(down, height)
    left, rest = slice(0, right), slice(right, width)
    # The upper left tile shows its image's lower right corner, and so on.
    own_upper, own_lower = slice(height - down, height), slice(0, height - down)
    own_left, own_rest = slice(width - right, width), slice(0, width - right)
    return (
        _Tile(upper, left, own_upper, own_left, down - height, right - width),
        _Tile(upper, rest, own_upper, own_rest, down - height, right),
        _Tile(lower, left, own_lower, own_left, down, right - width),
        _Tile(lower, rest, own_lower, own_rest, down, right),
    )


def _array(value: Any) -> NDArray[Any]:
    return value if isinstance(value, np.ndarray) else np.asarray(value.detach().cpu())


def _like(before: Any, column: Sequence[NDArray[Any]]) -> list[Any]:
    """Return new values with the dtypes and devices of the old ones; floats for integers become float32."""
    made: list[Any] = []
    for old, new in zip(before, column, strict=True):
        if isinstance(old, np.ndarray):
            made.append(new.astype(np.float32 if old.dtype.kind in "iu" and new.dtype.kind == "f" else old.dtype))
        else:
            is_whole = not old.is_floating_point() and new.dtype.kind == "f"
            made.append((old.float() if is_whole else old).new_tensor(new))
    return made
