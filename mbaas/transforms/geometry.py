"""Geometric transforms of images: crops, resizing, padding, flips, and crops and zooms for object detection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mbaas.transforms import checks
from mbaas.transforms.base import (
    Colour,
    DrawInputs,
    Flips,
    ImageTransform,
    Padding,
    PaddingMode,
    Size,
    Windows,
    WindowTransform,
)

ATTEMPTS = 10
"""Windows tried before falling back to the largest central one, as in torchvision."""

Pixels = NDArray[np.int64]


@dataclass(frozen=True)
class RandomResizedCrop(WindowTransform):
    """Crop a window of random area and aspect ratio, and resize it to ``size``.

    This matches torchvision (Szegedy et al., 2015): ten attempts to find a window inside the image, then the largest
    central window with a valid aspect ratio.

    Args:
        size: (height, width) of the result in pixels; an integer means a square.
        scale: (low, high) fraction of the image's area, in (0, 1].
        ratio: (low, high) aspect ratio, width / height, drawn uniformly on a log scale.
    """

    size: Annotated[int | tuple[int, int], checks.height_width]
    scale: Annotated[tuple[float, float], partial(checks.interval, above=0.0, upto=1.0)] = (0.08, 1.0)
    ratio: Annotated[tuple[float, float], partial(checks.interval, above=0.0)] = (3.0 / 4.0, 4.0 / 3.0)

    draws: ClassVar[int] = 2 * ATTEMPTS + 2

    def step(self, drawn: DrawInputs) -> Windows:
        tries = random_windows(drawn.u, drawn.sizes, self.scale, self.ratio)
        boxes, found = first_fitting(tries, drawn.u[:, -2:], drawn.sizes, drawn.sizes)
        if not found.all():
            boxes[~found] = self._central(*drawn.sizes[~found].T)
        return Windows(boxes, _repeated(self.size, len(boxes)))

    def _central(self, heights: Pixels, widths: Pixels) -> Pixels:
        shape = widths / heights
        # At least 1: with an extreme ratio, a narrow strip would have no pixels.
        crop_h = np.where(shape < self.ratio[0], np.maximum(_rounded(widths / self.ratio[0]), 1), heights)
        crop_w = np.where(shape > self.ratio[1], np.maximum(_rounded(heights * self.ratio[1]), 1), widths)
        return np.stack([(heights - crop_h) // 2, (widths - crop_w) // 2, crop_h, crop_w], axis=1)


@dataclass(frozen=True)
class CenterCrop(WindowTransform):
    """Crop the central ``size``; a smaller image is first padded with black on both sides.

    Args:
        size: (height, width) of the result in pixels; an integer means a square.
    """

    size: Annotated[int | tuple[int, int], checks.height_width]

    def step(self, drawn: DrawInputs) -> Windows:
        sizes = _repeated(self.size, len(drawn.sizes))
        return Windows(np.column_stack([_centred(drawn.sizes, sizes), sizes]), sizes)


@dataclass(frozen=True)
class Resize(WindowTransform):
    """Resize the image, bilinearly with antialiasing.

    Args:
        size: an integer is the length of the shorter side in pixels; the aspect ratio is kept, and the longer side is
            rounded down, as in torchvision. (height, width) is the exact size.
    """

    size: Annotated[int | tuple[int, int], checks.side_or_size]

    def step(self, drawn: DrawInputs) -> Windows:
        heights, widths = drawn.sizes.T
        if isinstance(self.size, tuple):
            return Windows(drawn.whole, _repeated(self.size, len(heights)))
        longer = self.size * np.maximum(heights, widths) // np.minimum(heights, widths)
        tall = heights > widths
        sizes = np.stack([np.where(tall, longer, self.size), np.where(tall, self.size, longer)], axis=1)
        return Windows(drawn.whole, sizes)


@dataclass(frozen=True)
class ScaleJitter(WindowTransform):
    """Resize the image to a random multiple of the size at which it would fit into ``target_size``.

    This matches torchvision (Ghiasi et al., 2021, large scale jittering). The aspect ratio is kept, so images differ in
    size until a `RandomCrop` or `CenterCrop` follows.

    Args:
        target_size: (height, width) in pixels.
        scale_range: (low, high) of the multiple.
    """

    target_size: Annotated[tuple[int, int], checks.height_width]
    scale_range: Annotated[tuple[float, float], partial(checks.interval, above=0.0)] = (0.1, 2.0)

    draws: ClassVar[int] = 1

    def step(self, drawn: DrawInputs) -> Windows:
        low, high = self.scale_range
        factors = (low + (high - low) * drawn.u[:, 0]) * (np.array(self.target_size) / drawn.sizes).min(axis=1)
        # At least one pixel, where torchvision fails.
        return Windows(drawn.whole, np.maximum((drawn.sizes * factors[:, None]).astype(np.int64), 1))


class PaddingTransform(WindowTransform):
    """A transform that may add pixels around the image, by its ``fill`` and ``padding_mode``."""

    fill: float | Colour
    padding_mode: PaddingMode

    @property
    def padding_of(self) -> Padding:
        return Padding(self.padding_mode, self.fill)  # type: ignore[arg-type]  # canonical since the check

    @property
    def leaves_fields(self) -> str:
        return "" if self.padding_mode == "constant" else "mirrors or repeats pixels"

    @property
    def dali_limit(self) -> str:
        return "pads with a colour only" if self.leaves_fields else ""


@dataclass(frozen=True)
class Pad(PaddingTransform):
    """Add pixels on all sides of the image.

    Args:
        padding: pixels on each side; or (left and right, top and bottom), or (left, top, right, bottom).
        fill: level of the added pixels, 0 to 255, one or (red, green, blue).
        padding_mode: "constant" for ``fill``, "edge" to repeat the outermost pixel, "reflect" to mirror the image at
            that pixel, "symmetric" to mirror it at its outer edge.
    """

    padding: Annotated[int | tuple[int, ...], checks.paddings]
    fill: Annotated[float | Colour, checks.colour] = 0
    padding_mode: Annotated[PaddingMode, checks.padding_mode] = "constant"

    def step(self, drawn: DrawInputs) -> Windows:
        left, top, right, bottom = self.padding  # type: ignore[misc]  # canonical since the check
        sizes = drawn.sizes + np.array([top + bottom, left + right])
        corners = np.tile(np.array([-top, -left]), (len(sizes), 1))
        return Windows(np.column_stack([corners, sizes]), sizes, padding=self.padding_of)


class _RandomFlip(ImageTransform):
    p: float

    draws: ClassVar[int] = 1
    keeps_size: ClassVar[bool] = True
    vertical: ClassVar[bool]

    def step(self, drawn: DrawInputs) -> Flips:
        # u is in [0, 1), so p = 1 means always, and p = 0 never.
        return Flips(drawn.u[:, 0] < self.p, self.vertical)


@dataclass(frozen=True)
class RandomHorizontalFlip(_RandomFlip):
    """Mirror the image left to right with probability ``p``.

    Args:
        p: probability in [0, 1].
    """

    p: Annotated[float, checks.fraction] = 0.5

    vertical: ClassVar[bool] = False


@dataclass(frozen=True)
class RandomVerticalFlip(_RandomFlip):
    """Mirror the image upside down with probability ``p``.

    Args:
        p: probability in [0, 1].
    """

    p: Annotated[float, checks.fraction] = 0.5

    vertical: ClassVar[bool] = True


def random_windows(
    u: NDArray[np.float64], sizes: Pixels, scale: tuple[float, float], ratio: tuple[float, float]
) -> Pixels:
    """Return (height, width) of `ATTEMPTS` random windows for each of n images: int64[n, ATTEMPTS, 2].

    Args:
        u: float64[n, at least 2 * ATTEMPTS], uniform in [0, 1).
        sizes: int64[n, 2], (height, width) of the images in pixels.
        scale: (low, high) fraction of the image's area.
        ratio: (low, high) of width / height. It is drawn uniformly on a log scale: a window twice as wide as high is as
            likely as one twice as high as wide.
    """
    area = sizes.prod(axis=1)[:, None] * (scale[0] + (scale[1] - scale[0]) * u[:, :ATTEMPTS])
    low, high = np.log(ratio)
    aspect = np.exp(low + (high - low) * u[:, ATTEMPTS : 2 * ATTEMPTS])
    return _rounded(np.stack([np.sqrt(area / aspect), np.sqrt(area * aspect)], axis=2))


def first_fitting(
    tries: Pixels, u: NDArray[np.float64], sizes: Pixels, most: Pixels
) -> tuple[Pixels, NDArray[np.bool_]]:
    """Place the first window of each image that is at most ``most`` large; int64[n, 2], as ``sizes``.

    All attempts are drawn together and the first that fits is used. This has the same distribution as trying one after
    another, but needs no loop and a constant number of draws.

    Returns:
        int64[n, 4], (top, left, height, width), and bool[n], whether a window fits. ``u``, float64[n, 2], places it.
    """
    fits = np.logical_and.reduce((tries > 0) & (tries <= most[:, None]), axis=2)
    # argmax returns the first True of a row, or 0 if there is no True.
    rows, first = np.arange(len(tries)), fits.argmax(axis=1)
    windows = tries[rows, first]
    # The difference plus one, because a window as large as the image has one position.
    corners = (u * (sizes - windows + 1)).astype(np.int64)
    return np.concatenate([corners, windows], axis=1), fits[rows, first]


def _rounded(values: NDArray[np.floating[Any]]) -> Pixels:
    # Halves to even, like Python's ``round``, which torchvision uses.
    return np.rint(values).astype(np.int64)


def _repeated(size: int | Size, n: int) -> Pixels:
    # A pair since the check of parameters.
    return np.tile(np.array(size, dtype=np.int64), (n, 1))


def _centred(image: Pixels, crop: Pixels) -> Pixels:
    # Negative if the crop is larger than the image. As in torchvision, the smaller half of the padding comes first, and
    # half a pixel is rounded to even.
    return np.where(crop > image, -((crop - image) // 2), _rounded((image - crop) / 2.0))


_ROUNDS = 64
"""Options tried per sample. If none leads to a window, the sample stays unchanged."""


@dataclass(frozen=True)
class RandomIoUCrop(WindowTransform):
    """Crop a random window that overlaps at least one box by a random amount (Liu et al., SSD, 2016, section 2.2).

    This matches torchvision. First an option is drawn: the minimum intersection over union (IoU) of the window with
    some box. Then up to ``trials`` windows are tried. A window is accepted if its aspect ratio is in range, it contains
    the centre of a box, and its IoU with that box is high enough. If none is accepted, another option is drawn. Boxes
    whose centres are outside the window are dropped. The result has the window's size, so a `Resize` must follow.

    An option of 1 or more leaves the image unchanged. So do 64 unsuccessful options, for example for an image without
    boxes. torchvision would search forever.

    Args:
        min_scale: minimum height and width of a window, as a fraction of the image's, above 0.
        max_scale: maximum height and width, up to 1.
        min_aspect_ratio: minimum width / height of a window.
        max_aspect_ratio: maximum width / height.
        sampler_options: values of the minimum IoU, each equally likely.
        trials: windows tried before another option is drawn.
    """

    min_scale: float = 0.3
    max_scale: float = 1.0
    min_aspect_ratio: float = 0.5
    max_aspect_ratio: float = 2.0
    sampler_options: Annotated[tuple[float, ...], checks.numbers] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    trials: Annotated[int, partial(checks.whole, most=1000)] = 40

    draws: ClassVar[int] = 1  # the search continues with `DrawInputs.more`
    needs_boxes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, upto in (("scale", 1.0), ("aspect_ratio", math.inf)):
            names = f"min_{name}", f"max_{name}"
            given = tuple(getattr(self, each) for each in names)
            limits = checks.interval(f"RandomIoUCrop's {', '.join(names)}", given, above=0.0, upto=upto)
            for each, limit in zip(names, limits, strict=True):
                self._set(each, limit)

    def step(self, drawn: DrawInputs) -> Windows:
        assert drawn.boxes is not None, "a pipeline with this transform has boxes"
        assert drawn.more is not None
        (heights, widths), boxes = drawn.sizes.T, drawn.boxes
        windows, kept = drawn.whole, boxes.kept.copy()
        options, draws = np.array(self.sampler_options), 1 + 4 * self.trials
        open_rows = np.arange(len(heights))
        for number in range(_ROUNDS):
            if not len(open_rows):
                break
            u = drawn.more(open_rows, number * draws, draws)
            least = options[(u[:, 0] * len(options)).astype(np.intp)]
            goes_on = least < 1.0
            open_rows, u, least = open_rows[goes_on], u[goes_on], least[goes_on]
            index = np.flatnonzero(boxes.kept & np.isin(boxes.owner, open_rows))  # boxes of these images
            owner = np.searchsorted(open_rows, boxes.owner[index])  # positions of their images among these
            tries = self._tries(u[:, 1:], heights[open_rows], widths[open_rows])
            passes, inside = _judged(tries, boxes.edges[index], owner, least)
            first = passes.argmax(axis=1)
            found = passes[np.arange(len(passes)), first]
            windows[open_rows[found]] = tries[found, first[found]]
            of_found = found[owner]
            stays = inside[np.arange(len(inside)), first[owner]]
            kept[index[of_found]] &= stays[of_found]
            open_rows = open_rows[~found]
        return Windows(windows, windows[:, 2:], kept)

    def _tries(
        self, u: NDArray[np.float64], heights: NDArray[np.int64], widths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return windows, int64[n, trials, 4], with height and width 0 if the aspect ratio is invalid."""
        w_share, h_share, x_share, y_share = u.reshape(len(u), 4, self.trials).transpose(1, 0, 2)
        low, span = self.min_scale, self.max_scale - self.min_scale
        width = (widths[:, None] * (low + span * w_share)).astype(np.int64)
        height = (heights[:, None] * (low + span * h_share)).astype(np.int64)
        left = ((widths[:, None] - width) * x_share).astype(np.int64)
        top = ((heights[:, None] - height) * y_share).astype(np.int64)
        ratio = width / np.maximum(height, 1)
        good = (ratio >= self.min_aspect_ratio) & (ratio <= self.max_aspect_ratio) & (width > 0) & (height > 0)
        tries: NDArray[np.int64] = np.stack([top, left, height, width], axis=2)
        tries[~good] = 0
        return tries


def _judged(
    tries: NDArray[np.int64], edges: NDArray[np.float64], owner: NDArray[np.int64], least: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return sufficient IoU of windows, bool[n, trials], and boxes with their centre inside, bool[k, trials].

    Args:
        tries: int64[n, trials, 4], windows (top, left, height, width) of n images.
        edges, owner: float64[k, 4] and int64[k], boxes and their images.
        least: float64[n], the minimum IoU.
    """
    top, left, height, width = (each.astype(np.float64) for each in tries.transpose(2, 0, 1)[:, owner])
    bottom, right = top + height, left + width
    x0, y0, x1, y1 = (edge[:, None] for edge in edges.T)
    x, y = (x0 + x1) / 2, (y0 + y1) / 2
    inside = (left < x) & (x < right) & (top < y) & (y < bottom)
    across = np.clip(np.minimum(x1, right) - np.maximum(x0, left), 0.0, None)
    shared = across * np.clip(np.minimum(y1, bottom) - np.maximum(y0, top), 0.0, None)
    union = (x1 - x0) * (y1 - y0) + width * height - shared
    # An empty box in an empty window has no union, and is not inside either.
    overlap = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    passes = np.zeros(tries.shape[:2], np.bool_)
    np.logical_or.at(passes, owner, inside & (overlap >= least[owner, None]))
    return passes, inside


@dataclass(frozen=True)
class RandomZoomOut(WindowTransform):
    """Place the image at a random position on a larger black one, with probability ``p``, so objects become smaller.

    This matches torchvision (Liu et al., SSD, 2016, section 3.6). The result has the larger size, so a `Resize` must
    follow, or a `RandomIoUCrop` and then a `Resize`.

    Args:
        side_range: (low, high) height and width of the result as a multiple of the image's, at least 1.
        p: probability in [0, 1].
    """

    side_range: Annotated[tuple[float, float], partial(checks.interval, least=1.0)] = (1.0, 4.0)
    p: Annotated[float, checks.fraction] = 0.5

    draws: ClassVar[int] = 4

    def step(self, drawn: DrawInputs) -> Windows:
        zooms, r, x_share, y_share = drawn.u.T
        low, high = self.side_range
        side = np.where(zooms < self.p, low + (high - low) * r, 1.0)
        sizes = (drawn.sizes * side[:, None]).astype(np.int64)
        corners = ((sizes - drawn.sizes) * np.column_stack([y_share, x_share])).astype(np.int64)
        return Windows(np.column_stack([-corners, sizes]), sizes)
