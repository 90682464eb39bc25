"""Operations on decoded images on the CPU, each with an explicit output, and memory for the images.

Resampling uses torch's antialiased bilinear kernel for uint8: torchvision's result bit for bit, in the time that OpenCV
needs without antialiasing. CPUs without AVX2 use another kernel, which may differ by one level. Importing torch takes
1.5 s and 200 MB, so only resampling imports it.
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

from mbaas.transforms.base import BLACK, Padding, PaddingMode
from mbaas.transforms.color import GREY

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


def mirror(image: Image, into: Image, *, vertical: bool = False) -> None:
    """Flip ``image`` left to right, or upside down, into ``into``, which may be itself."""
    cv2.flip(image, 0 if vertical else 1, dst=into)


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
    table: NDArray[np.uint8] = np.clip(np.rint(own * _LEVELS + offset), 0, 255).astype(np.uint8)
    cv2.LUT(image, table, dst=image)
