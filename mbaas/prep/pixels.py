"""Operations on decoded images on the CPU, and memory for the images.

Resampling uses torch's antialiased bilinear kernel for uint8: torchvision's result bit for bit, in the time that OpenCV
needs without antialiasing. CPUs without AVX2 use another kernel, which may differ by one level. Importing torch takes
1.5 s and 200 MB, so only resampling and bilinear means import it.

The operations of chains are those of torchvision's v2 functions for uint8 tensors, value by value. Changes of single
levels are lookup tables. What torchvision truncates, such as a change of brightness, is truncated here, too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mbaas.transforms.arrays import UnfitError
from mbaas.transforms.base import BLACK, Blur, Chain, Erasure, Mixture, Padding, PaddingMode
from mbaas.transforms.color import GREY
from mbaas.transforms.warps import moved

if TYPE_CHECKING:
    import torch

Image = NDArray[np.uint8]
"""uint8 [height, width, 3], RGB, contiguous."""

_KEPT_BYTES = 64 << 20  # larger buffers, for rare huge images, are not kept
_IDENTITY = [1.0, 0.0, 0.0, 0.0]
_LEVELS = np.arange(256, dtype=np.float64)


class Scratch(threading.local):
    """Reused uint8 buffers by name and thread: page faults of new ones cost a tenth of decoding a photograph."""

    def __init__(self) -> None:
        # Runs in each thread at its first access, as for any `threading.local` subclass.
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def array(self, slot: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return an uninitialized uint8 array; the previous array of ``slot`` becomes invalid."""
        size = prod(shape)
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.size < size:
            buffer = np.empty(size, np.uint8)
            if size <= _KEPT_BYTES:
                self._buffers[slot] = buffer
        return buffer[:size].reshape(shape)


def cut(image: Image, box: Sequence[int], into: Image, scratch: Scratch, padding: Padding = BLACK) -> None:
    """Resample the window ``box`` (top, left, height, width) of ``image`` into ``into``, of any size.

    A window that extends outside of the image, into ``padding``, must have the size of ``into``.
    """
    top, left, height, width = box
    if (height, width) == into.shape[:2]:
        _copy(image, top, left, into, padding)
        return
    window = image[top : top + height, left : left + width]
    if width != image.shape[1]:  # the kernel needs contiguous input
        packed = scratch.array("window", window.shape)
        np.copyto(packed, window)
        window = packed
    as_tensor, resample = resampler()
    if not window.flags.writeable:
        window = np.asarray(_Unsealed(window))
    resample(_channels_last(as_tensor(window)), into.shape[:2], False, None, None, out=_channels_last(as_tensor(into)))


class _Unsealed:
    """Presents read-only memory as writable, because torch warns about read-only arrays. Nothing writes to it."""

    def __init__(self, image: Image) -> None:
        self._image = image  # keeps the memory alive
        said = image.__array_interface__
        self.__array_interface__ = {**said, "data": (said["data"][0], False)}


@functools.cache
def resampler() -> tuple[Callable[[Image], torch.Tensor], Callable[..., Any]]:
    """Return ``from_numpy`` and the resampling kernel; the first call imports torch."""
    import torch

    # The operator itself, because torch's `interpolate` cannot write to given memory.
    return torch.from_numpy, torch.ops.aten._upsample_bilinear2d_aa.out


def _channels_last(image: torch.Tensor) -> torch.Tensor:
    """View [height, width, 3] as [1, 3, height, width] of the same memory."""
    return image.permute(2, 0, 1).unsqueeze(0)


def _copy(image: Image, top: int, left: int, into: Image, padding: Padding) -> None:
    height, width = into.shape[:2]
    inside = image[max(top, 0) : top + height, max(left, 0) : left + width]
    if inside.shape == into.shape:
        np.copyto(into, inside)
        return
    if padding.mode != "constant":
        ys, xs = (
            _mirrored(np.arange(first, first + length), size, padding.mode)
            for first, length, size in zip((top, left), into.shape, image.shape, strict=False)
        )
        np.copyto(into, image[np.ix_(ys, xs)])
        return
    into[:] = np.rint(padding.fill)
    y, x = max(-top, 0), max(-left, 0)
    into[y : y + inside.shape[0], x : x + inside.shape[1]] = inside


def _mirrored(places: NDArray[np.int64], size: int, mode: PaddingMode) -> NDArray[np.int64]:
    """Return the rows or columns, of ``size``, that are shown at ``places``; see `Padding`."""
    if mode == "edge":
        return np.clip(places, 0, size - 1)
    period = 2 * size if mode == "symmetric" else max(1, 2 * (size - 1))
    places = places % period
    return np.minimum(places, period - places - (mode == "symmetric"))


def recolor(image: Image, changes: Sequence[Sequence[float]]) -> None:
    """Apply the stages (a, b, c, turn) of ``ColorJitter.changes`` to ``image`` in place."""
    for stage in changes:
        *weights, turn = stage
        if turn:
            _turn_hue(image, turn)
        elif stage != _IDENTITY:
            _blend(image, *weights)


def _turn_hue(image: Image, turn: float) -> None:
    # Use 8 bits, like Pillow: this takes a quarter of the time of floats. OpenCV outputs hue in 256 steps but reads it
    # in 255, so a colour may be off by one step.
    steps = round(turn * 256) % 256
    if steps:
        cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL, dst=image)
        image[:, :, 0] += np.uint8(steps)  # uint8 wraps at 256, like the circle
        cv2.cvtColor(image, cv2.COLOR_HSV2RGB_FULL, dst=image)


def _blend(image: Image, own: float, grey: float, mean: float) -> None:
    """Compute ``clip(round(own * x + grey * grey(x) + mean * mean(grey(x))))``; ``grey`` or ``mean`` is 0."""
    if grey:  # one matrix product per pixel; OpenCV rounds and clips to uint8
        cv2.transform(image, own * np.eye(3) + grey * np.array(GREY), dst=image)
        return
    # A lookup table: 256 computations instead of one per pixel.
    offset = mean * float(np.dot(cv2.mean(image)[:3], GREY)) if mean else 0.0
    _look_up(image, np.clip(np.rint(own * _LEVELS + offset), 0, 255))


# ---- chains of operations, and warps ----

_LONGEST_SIDE = 32_767  # OpenCV's limit for `cv2.remap`
_LEVELS_32 = np.arange(256, dtype=np.float32)
_GREY_32 = np.array((0.2989, 0.587, 0.114), np.float32)  # torchvision's weights, whose sum is 0.9999
_SHARPENED = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32)


def operate(image: Image, chain: Chain, *, nearest: bool, fill: Sequence[float] | None) -> None:
    """Apply operations in order to ``image`` in place; ``nearest`` and ``fill`` as for `warp`, used by some of them."""
    for each in chain:
        if isinstance(each, Mixture):
            _mix(image, each, nearest=nearest, fill=fill)
        elif isinstance(each, Blur):
            _blur(image, each)
        elif isinstance(each, Erasure):
            top, left, height, width = each.box
            image[top : top + height, left : left + width] = np.rint(each.value)
        elif (change := _CHANGES.get(each.name)) is not None:
            change(image, each.value)
        else:
            to_source = moved(each, *image.shape[:2])
            np.copyto(image, warp(image, to_source, image.shape[:2], nearest=nearest, fill=fill))


def warp(
    image: Image, to_source: NDArray[np.float64], size: Sequence[int], *, nearest: bool, fill: Sequence[float] | None
) -> Image:
    """Return the image whose pixels are where ``to_source`` finds them, as torchvision's affine and perspective do.

    Args:
        image: uint8 [height, width, 3].
        to_source: float64[3, 3], from (x, y, 1) in the result to the image, up to a factor; in pixels, counted from the
            left and upper edge.
        size: (height, width) of the result in pixels.
        nearest: True for the nearest pixel, False for a bilinear mean of four.
        fill: level of each channel outside of the image. None is black, but torchvision also darkens the outermost
            pixels less with it when means are taken.
    """
    if max(*image.shape[:2], *size) >= _LONGEST_SIDE:  # also if bilinear, because masks are moved by OpenCV
        raise UnfitError(
            f"pixels are moved in images with sides below {_LONGEST_SIDE:,}, got {image.shape[1]}x{image.shape[0]}"
        )
    height, width = size
    x, y = (np.arange(length, dtype=np.float32) + np.float32(0.5) for length in (width, height))
    y = y[:, None]
    rows = to_source.astype(np.float32)
    xs, ys = (row[0] * x + row[1] * y + row[2] for row in rows[:2])
    if rows[2, 0] or rows[2, 1]:
        scale = rows[2, 0] * x + rows[2, 1] * y + rows[2, 2]
        xs, ys = xs / scale, ys / scale
    if nearest:
        xs -= np.float32(0.5)
        ys -= np.float32(0.5)
        border = tuple(fill) if fill is not None else (0.0, 0.0, 0.0)
        return _image(cv2.remap(image, xs, ys, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT, borderValue=border))
    return _mean_of_four(image, xs, ys, fill)


def _mean_of_four(
    image: Image, xs: NDArray[np.float32], ys: NDArray[np.float32], fill: Sequence[float] | None
) -> Image:
    # torch's kernel, because OpenCV rounds the weights to 1/32.
    import torch

    height, width = image.shape[:2]
    grid = torch.from_numpy(np.stack([xs * np.float32(2 / width) - 1, ys * np.float32(2 / height) - 1], axis=-1))
    planes = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1)
    if fill is not None:
        planes = torch.cat([planes, torch.ones(1, height, width)])
    found = torch.nn.functional.grid_sample(planes[None], grid[None], mode="bilinear", align_corners=False)[0]
    if fill is not None:
        background = torch.tensor(fill, dtype=torch.float32).view(3, 1, 1)
        found = (found[:3] - background) * found[3:] + background
    return _image(found.round_().to(torch.uint8).permute(1, 2, 0).contiguous().numpy())


def _blur(image: Image, blur: Blur) -> None:
    across, down = (_gaussian(length, blur.sigma) for length in blur.kernel_size)
    blurred = cv2.sepFilter2D(image, cv2.CV_32F, across, down, borderType=cv2.BORDER_REFLECT_101)
    np.copyto(image, np.rint(blurred), casting="unsafe")


def _gaussian(length: int, sigma: float) -> NDArray[np.float32]:
    at = np.linspace(-(length - 1) / 2, (length - 1) / 2, length, dtype=np.float32)
    weights = np.exp(-((at / np.float32(sigma)) ** 2) / 2)
    return np.asarray(weights / weights.sum(), np.float32)


def _look_up(image: Image, table: NDArray[Any]) -> None:
    cv2.LUT(image, table.astype(np.uint8), dst=image)


def _grey(image: Image) -> NDArray[np.float32]:
    return np.floor(image.astype(np.float32) @ _GREY_32)


def _brightness(image: Image, factor: float) -> None:
    _look_up(image, np.clip(_LEVELS_32 * np.float32(factor), 0, 255))


def _contrast(image: Image, factor: float) -> None:
    _look_up(image, _blended(_LEVELS_32, _grey(image).mean(dtype=np.float64), factor))


def _saturation(image: Image, factor: float) -> None:
    np.copyto(image, _blended(image, _grey(image)[:, :, None], factor), casting="unsafe")


def _sharpness(image: Image, factor: float) -> None:
    if min(image.shape[:2]) <= 2:
        return
    inner = image[1:-1, 1:-1]
    blurred = np.rint(cv2.filter2D(image, cv2.CV_32F, _SHARPENED)[1:-1, 1:-1] / np.float32(13))
    sharpened = inner + np.float64(np.float32(1 - factor)) * (blurred - inner)
    np.copyto(inner, np.clip(sharpened.astype(np.float32), 0, 255), casting="unsafe")


def _blended(image: NDArray[Any], reference: NDArray[Any] | np.floating[Any], factor: float) -> NDArray[np.float32]:
    """Return ``factor * image + (1 - factor) * reference``, clipped to [0, 255], in torch's arithmetic."""
    # Multiplied and added with one rounding. With two, a result such as 50 could become 49.99999, and be truncated.
    own = (image * np.float32(factor)).astype(np.float64)
    blended = own + np.float64(np.float32(1 - factor)) * reference
    return np.clip(blended.astype(np.float32), 0, 255)


def _posterize(image: Image, bits: float) -> None:
    np.bitwise_and(image, np.uint8(256 - (1 << (8 - int(bits)))), out=image)


def _solarize(image: Image, threshold: float) -> None:
    _look_up(image, np.where(threshold <= _LEVELS_32, 255 - _LEVELS_32, _LEVELS_32))


def _autocontrast(image: Image, _: float) -> None:
    low, high = (edge(edge(image, axis=0), axis=0).astype(np.float32) for edge in (np.min, np.max))
    is_flat = low == high
    low, scale = np.where(is_flat, 0, low), np.where(is_flat, 1, (high - low) * np.float32(1 / 255))
    _look_up(image, np.clip((_LEVELS_32[:, None] - low) / scale, 0, 255)[None])


def _equalize(image: Image, _: float) -> None:
    tables = np.tile(_LEVELS_32[:, None], 3)
    for channel in range(3):
        counts = np.bincount(image[:, :, channel].ravel(), minlength=256)
        step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
        if step:
            tables[1:, channel] = np.minimum((np.cumsum(counts)[:-1] + step // 2) // step, 255)
            tables[0, channel] = 0
    _look_up(image, tables[None])


def _invert(image: Image, _: float) -> None:
    np.bitwise_not(image, out=image)


def _grayscale(image: Image, _: float) -> None:
    image[:] = _grey(image)[:, :, None].astype(np.uint8)


_CHANGES: dict[str, Callable[[Image, float], None]] = {
    "Brightness": _brightness,
    "Contrast": _contrast,
    "Color": _saturation,
    "Sharpness": _sharpness,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "AutoContrast": _autocontrast,
    "Equalize": _equalize,
    "Invert": _invert,
    "Grayscale": _grayscale,
}
"""Name of an operation -> its function, which changes an image in place; all others are warps."""


def _mix(image: Image, mixture: Mixture, *, nearest: bool, fill: Sequence[float] | None) -> None:
    mixed = image * np.float32(mixture.own)
    for weight, chain in zip(mixture.weights, mixture.chains, strict=True):
        changed = image.copy()
        operate(changed, chain, nearest=nearest, fill=fill)
        mixed += changed * np.float32(weight)
    np.copyto(image, mixed, casting="unsafe")


def _image(pixels: Any) -> Image:
    result: Image = pixels
    return result
