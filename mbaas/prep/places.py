"""Assigns each image of a block to its memory.

The sizes of results are planned from headers, so images of varying size are written directly to their final place, end
to end. Only the results of a Map have unknown sizes.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mbaas.fields import Column, Packed
from mbaas.prep.boxes import sizes_after_all
from mbaas.prep.engine import BadRow
from mbaas.prep.header import UndecodableError
from mbaas.prep.part_input import PartInput
from mbaas.transforms import Map, Pipeline
from mbaas.transforms.base import Step

Array = NDArray[Any]


class Places(Protocol):
    """Memory for the images of a block."""

    def at(self, row: int) -> Array | None:
        """Return memory of the image's shape, to prepare it in place; None if the shape is not known yet."""

    def put(self, row: int, image: Array, into: Array | None) -> None:
        """Copy a prepared image to its memory, unless it is ``into``; raise UndecodableError if it does not fit."""

    def made(self) -> Column:
        """Return all images, after they are prepared."""


def places_of(block: PartInput, pipeline: Pipeline, steps: list[Step], out: Array) -> Places:
    """Return the places of a block's images in ``out``, and record images that are too large as bad.

    ``steps`` are the steps before the first Map; for ``out``, see `mbaas.prep.engine.Engine.prepare`.
    """
    most = pipeline.most_pixels
    if most is None:
        return _OneSize(out)
    if any(isinstance(each, Map) for each in pipeline.transforms):
        return _AsMade(out, most)
    sizes = sizes_after_all(block.sizes, steps)
    large = sizes.prod(axis=1) > most
    block.bad.extend(
        BadRow(block.rows[index], _too_large(sizes[index].tolist(), most)) for index in np.flatnonzero(large).tolist()
    )
    shapes = np.zeros((len(out), 2), np.int64)
    shapes[np.array(block.rows, np.intp)[~large]] = sizes[~large]
    return _Planned(Packed.within(out, shapes))


class _OneSize:
    def __init__(self, out: Array) -> None:
        self._out = out

    def at(self, row: int) -> Array:
        return self._out[row]

    def put(self, row: int, image: Array, into: Array | None) -> None:
        if image is not into:
            deliver(image, self._out[row])

    def made(self) -> Column:
        return self._out


class _Planned:
    # An image that is too large has no pixels.
    def __init__(self, column: Packed) -> None:
        self._column = column

    def at(self, row: int) -> Array:
        return self._column.value(row)

    def put(self, row: int, image: Array, into: Array | None) -> None:
        if image is not into:
            deliver(image, self._column.value(row))

    def made(self) -> Column:
        return self._column


class _AsMade:
    # Sizes become known while images are made, so each gets memory for the largest at first.
    def __init__(self, out: Array, most: int) -> None:
        self._out, self._most = out, most
        self._shapes = np.zeros((len(out), 2), np.int64)

    def at(self, row: int) -> None:  # noqa: ARG002 (the same for all rows)
        return None

    def put(self, row: int, image: Array, into: Array | None) -> None:  # noqa: ARG002 (it was made elsewhere)
        room = self._out[row]
        if image.ndim != room.ndim + 1 or image.shape[2:] != room.shape[1:] or image.dtype != room.dtype:
            lengths = ", ".join(["height", "width", *map(str, room.shape[1:])])
            raise UndecodableError(
                f"it is prepared to {described(image)}, but the samples of this feed are {room.dtype.name} [{lengths}]"
            )
        height, width = image.shape[:2]
        if height * width > self._most:
            raise UndecodableError(_too_large([height, width], self._most))
        np.copyto(room[: height * width].reshape(image.shape), image)
        self._shapes[row] = height, width

    def made(self) -> Column:
        return Packed.closed_up(self._out, self._shapes.prod(axis=1), self._shapes)


def deliver(sample: Array, into: Array) -> None:
    """Copy ``sample`` to ``into``; raise UndecodableError if shape or dtype differ."""
    if (sample.shape, sample.dtype) != (into.shape, into.dtype):
        raise UndecodableError(
            f"it is prepared to {described(sample)}, but the samples of this feed are {described(into)}; a Resize, a "
            "CenterCrop or a RandomResizedCrop in the pipeline gives all the same size, and DecodeImage's max_pixels "
            "lets them differ"
        )
    np.copyto(into, sample)


def described(array: Array) -> str:
    """Return an array's dtype and shape, such as "uint8 [480, 640, 3]"."""
    return f"{array.dtype.name} {list(array.shape)}"


def _too_large(size: list[int], most: int) -> str:
    height, width = size
    return (
        f"it is prepared to {width}x{height}, which is {height * width:,} pixels, over the limit of {most:,} "
        "(DecodeImage's max_pixels); a Resize in the pipeline makes images smaller"
    )
