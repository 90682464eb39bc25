"""Random changes of whole minibatches, which run in the consumer: MixUp, CutMix and Mosaic."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError, shown
from mbaas.samples.fields import BatchTransform
from mbaas.transforms import checks
from mbaas.transforms.base import Parameters
from mbaas.transforms.on_image import Boxes, Edges, boxes_of, edges_of


@dataclass(frozen=True, kw_only=True)
class _Mixing(Parameters, BatchTransform):
    alpha: Annotated[float, checks.number] = 1.0
    num_classes: Annotated[int | None, partial(checks.whole, least=2)] = None
    image: str = "image"
    label: str = "label"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha <= 0.0:
            raise self._refused("alpha", "must be above 0")

    def apply(self, batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        images, labels = (self._column(batch, key) for key in (self.image, self.label))
        labels = self._soft(labels)
        mixed, own = self._mixed(images, rng)
        return {**batch, self.image: mixed, self.label: labels * own + _partners(labels) * (1.0 - own)}

    @abstractmethod
    def _mixed(self, images: Any, rng: np.random.Generator) -> tuple[Any, float]:
        """Return mixed images, and the weight of their own labels."""

    def _weight(self, rng: np.random.Generator) -> float:
        return float(rng.beta(self.alpha, self.alpha))

    def _column(self, batch: dict[str, Any], key: str) -> Any:
        if key not in batch:
            raise ConfigError(f"{type(self).__name__} needs {key!r}, got a minibatch of {', '.join(map(repr, batch))}")
        if isinstance(batch[key], list):
            raise ConfigError(f"{type(self).__name__} needs {key!r} of one size, got a list of different sizes")
        return batch[key]

    def _soft(self, labels: Any) -> Any:
        """Return labels as floats [n, classes]: class numbers as one-hot rows, other rows as they are."""
        name, count, is_numpy = type(self).__name__, self.num_classes, isinstance(labels, np.ndarray)
        if labels.ndim == 2 and "float" in str(labels.dtype):
            return labels
        if labels.ndim == 2:
            return labels.astype(np.float32) if is_numpy else labels.float()
        if labels.ndim != 1:
            raise ConfigError(f"{name} needs labels [n] or [n, classes], got shape {tuple(labels.shape)}")
        if "int" not in str(labels.dtype):
            raise ConfigError(f"{name} needs whole numbers as labels [n], got {labels.dtype}")
        if count is None:
            raise ConfigError(
                f"{name} needs num_classes for labels that are class numbers, such as {name}(num_classes=10)",
                option="num_classes",
            )
        # On a GPU, the check would wait for all work that was started there; one_hot fails there by itself.
        if is_numpy or not labels.is_cuda:
            least, most = int(labels.min()), int(labels.max())
            if least < 0 or most >= count:
                raise ConfigError(
                    f"{name}'s labels must be in [0, {count - 1}], got {least} to {most}", option="num_classes"
                )
        if is_numpy:
            return (labels[:, None] == np.arange(count)).astype(np.float32)
        import torch  # here: it takes 1.5 s, and consumers of NumPy arrays do not need it

        return torch.nn.functional.one_hot(labels.long(), count).float()


class MixUp(_Mixing):
    """Blend each image and label of a minibatch with another image and its label (Zhang et al., 2018).

    Like torchvision's ``MixUp``: the other image is the previous one in the minibatch, and one weight for all is drawn
    from Beta(alpha, alpha). Pass it as ``batch_fn`` to `mbaas.join` or `tune_integration.get_loader`: it
    runs in the consumer, so trials with different ``alpha`` share all prepared samples. What it draws depends only on
    the seed, the epoch, the minibatch's position in it and the rank.

    The pipeline must end with Normalize or ToFloat, because images must be floats.

    Args:
        alpha: parameter of the Beta distribution, above 0.
        num_classes: number of classes. Labels become float32[n, num_classes], each row with sum 1. None if labels
            are already rows of probabilities.
        image, label: keys of the minibatch, after ``columns``.

    Raises:
        ConfigError: for a minibatch without these keys, images that are not floats or differ in size, or a label
            that is no class.
    """

    def _mixed(self, images: Any, rng: np.random.Generator) -> tuple[Any, float]:
        if "float" not in str(images.dtype):
            raise ConfigError(
                f"MixUp needs float images, got {images.dtype}: end the pipeline with Normalize or ToFloat"
            )
        own = self._weight(rng)
        return images * own + _partners(images) * (1.0 - own), own


class CutMix(_Mixing):
    """Replace a random window of each image by that of another one, and mix labels by area (Yun et al., 2019).

    Like torchvision's ``CutMix``: the other image is the previous one in the minibatch, and one window for all is
    drawn. Its share of the image's area is from Beta(alpha, alpha), minus the part outside of the image. It runs where
    `MixUp` does, and draws as `MixUp` does. Images may have any dtype.

    Args:
        alpha: parameter of the Beta distribution, above 0.
        num_classes: number of classes. Labels become float32[n, num_classes], each row with sum 1. None if labels
            are already rows of probabilities.
        image, label: keys of the minibatch, after ``columns``. Images are [n, channels, height, width] in torch, and
            [n, height, width, channels] in NumPy.

    Raises:
        ConfigError: for a minibatch without these keys, images that differ in size, or a label that is no class.
    """

    def _mixed(self, images: Any, rng: np.random.Generator) -> tuple[Any, float]:
        if images.ndim != 4:
            raise ConfigError(f"CutMix needs images with 4 axes, got shape {shown(tuple(images.shape))}")
        height, width = _size_of(images)
        x, y = int(rng.integers(width)), int(rng.integers(height))
        half = 0.5 * (1.0 - self._weight(rng)) ** 0.5
        half_width, half_height = int(half * width), int(half * height)
        rows = slice(max(y - half_height, 0), min(y + half_height, height))
        columns = slice(max(x - half_width, 0), min(x + half_width, width))
        window = (slice(None), rows, columns) if isinstance(images, np.ndarray) else (..., rows, columns)
        mixed = _copy(images)
        mixed[window] = _partners(images[window])
        return mixed, 1.0 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)


def _size_of(images: Any) -> tuple[int, int]:
    """Return (height, width) of images, whose channels come last in NumPy and first in torch."""
    height, width = images.shape[1:3] if isinstance(images, np.ndarray) else images.shape[2:]
    return height, width


def _copy(images: Any) -> Any:
    return images.copy() if isinstance(images, np.ndarray) else images.clone()


def _partners(column: Any) -> Any:
    """Return a copy in which each row is the one before it, and the first is the last."""
    return np.roll(column, 1, axis=0) if isinstance(column, np.ndarray) else column.roll(1, 0)


# ---- mosaics ----

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
        count, (height, width) = len(images), _size_of(images)
        edges = [edges_of(boxes.reshape(-1, 4), self.boxes.format) for boxes in values[self.boxes.field]]
        # All at once, so that the draws for a row do not depend on earlier rows.
        chosen, points = rng.random(count) < self.p, rng.random((count, 2))
        partners = rng.integers(count, size=(count, PARTNERS))
        made = _copy(images)
        new = {name: [*column] for name, column in values.items()}
        for row in np.flatnonzero(chosen).tolist():
            down, right = (round(float(u) * n) for u, n in zip(points[row], (height, width), strict=True))
            sources, tiles = [row, *partners[row].tolist()], _tiles(down, right, height, width)
            shown_edges, shown_rows = [], []
            for source, tile in zip(sources, tiles, strict=True):
                whole = () if isinstance(images, np.ndarray) else (slice(None),)  # all channels, first in torch
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
