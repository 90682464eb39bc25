"""Input and result of both image engines: samples with valid headers, memory for the images, and the prepared part.

The sizes of results are planned from headers, so images of varying size are written directly to their final place, end
to end. Only the results of a Map have unknown sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.prep.decoded import Decoded, image_header, is_decoded, read_decoded
from mbaas.prep.engines import BadRow, Encoded, Prepared
from mbaas.prep.fields_on_image import moved_fields
from mbaas.prep.geometry import boxes_before, sizes_after_all
from mbaas.prep.header import Header, UndecodableError, peek
from mbaas.samples.fields import ANNOTATED_SIZE, Arrays, Column, Packed
from mbaas.transforms import Map, Pipeline
from mbaas.transforms.base import BoxState, Step

Array = NDArray[Any]


@dataclass(frozen=True)
class PartInput:
    """The samples of a block with a valid header, and the bad samples.

    Attributes:
        rows: indices in the block of the n samples with a valid header.
        encoded, headers: their bytes and headers.
        decoded: contents of the containers of decoded samples; None for encoded samples.
        sample_ids: int64[n], their ids.
        epoch: seeds the random transforms.
        known: the dataset's fields of the n samples.
        bad: all other samples; grows while the block is prepared.
    """

    rows: list[int]
    encoded: list[memoryview]
    headers: list[Header]
    decoded: list[Decoded | None]
    sample_ids: NDArray[np.int64]
    epoch: int
    known: Arrays
    bad: list[BadRow]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64[n, 2], (height, width) of the upright images in pixels."""
        # Two columns even without rows.
        return np.array([header.size for header in self.headers], np.int64).reshape(-1, 2)

    def boxes(self, pipeline: Pipeline) -> BoxState | None:
        """Return the boxes on the images, if a transform depends on boxes; see `mbaas.prep.geometry.boxes_before`."""
        if pipeline.boxes is None or not any(transform.needs_boxes for transform in pipeline.transforms):
            return None
        return boxes_before(pipeline.boxes, self.known, self.sizes)

    def finish(
        self, pipeline: Pipeline, steps: Sequence[Step], made: Column, sizes: NDArray[np.int64] | None = None
    ) -> Prepared:
        """Zero the bad rows of ``made``; return them in order, with the fields of the good samples.

        ``sizes``, int64[n, 2], are the (height, width) of the images before ``steps``; default: the original sizes.
        ``steps`` must be all steps if there are fields with image coordinates.
        """
        known = self.known
        if pipeline.has_fields_on_image:
            lost = np.isin(self.rows, [bad.row for bad in self.bad])
            known, unfit = moved_fields(pipeline, known, self.sizes if sizes is None else sizes, steps, lost)
            self.bad.extend(BadRow(self.rows[bad.row], bad.reason) for bad in unfit)
        if not self.bad:
            return Prepared([], known, made)
        # An engine may have partly written a row before it failed; the content of bad rows must not depend on the
        # engine.
        bad = sorted(self.bad, key=lambda bad: bad.row)
        if isinstance(made, Packed):
            for each in bad:
                made.value(each.row)[...] = 0
        else:
            made[[each.row for each in bad]] = 0
        good = np.flatnonzero(~np.isin(self.rows, [each.row for each in bad]))
        return Prepared(bad, {name: column[good] for name, column in known.items()}, made)


def read_headers(
    encoded: Sequence[Encoded], sample_ids: NDArray[np.int64], epoch: int, known: Arrays, max_pixels: int
) -> PartInput:
    """Read the headers of encoded or decoded samples; see `Engine.prepare` for the arguments."""
    rows: list[int] = []
    views: list[memoryview] = []
    headers: list[Header] = []
    opened: list[Decoded | None] = []
    bad: list[BadRow] = []
    annotated = cast("NDArray[np.int32] | None", known.get(ANNOTATED_SIZE))
    for row, item in enumerate(encoded):
        view = memoryview(cast("Any", item))
        try:
            decoded = read_decoded(view) if is_decoded(view) else None
            header = peek(view, max_pixels) if decoded is None else image_header(decoded, max_pixels)
            headers.append(header if annotated is None else _as_annotated(header, *annotated[row].tolist()))
        except UndecodableError as error:
            bad.append(BadRow(row, str(error)))
        else:
            rows.append(row)
            views.append(view)
            opened.append(decoded)
    if bad:
        known = {name: column[np.array(rows, np.intp)] for name, column in known.items()}
    return PartInput(rows, views, headers, opened, sample_ids[rows], epoch, known, bad)


def _as_annotated(header: Header, height: int, width: int) -> Header:
    """Return the header with the orientation that gives the annotated size (zeros: unknown)."""
    if header.size == (height, width) or not (height and width):
        return header
    if (header.height, header.width) == (height, width):
        return header._replace(orientation=1, as_stored=True)
    tall, wide = header.size
    raise UndecodableError(
        f"its boxes are of an image of {width} x {height} pixels (width x height), and it has {wide} x {tall}"
    )


class ImageMemory(Protocol):
    def at(self, row: int) -> Array | None:
        """Return memory of the image's shape, to prepare it in place; None if the shape is not known yet."""

    def put(self, row: int, image: Array, into: Array | None) -> None:
        """Copy a prepared image to its memory, unless it is ``into``; raise UndecodableError if it does not fit."""

    def made(self) -> Column:
        """Return all images, after they are prepared."""


def image_memory(block: PartInput, pipeline: Pipeline, steps: list[Step], out: Array) -> ImageMemory:
    """Return the memory of a block's images in ``out``, and record images that are too large as bad.

    ``steps`` are the steps before the first Map; for ``out``, see `mbaas.prep.engines.Engine.prepare`.
    """
    most = pipeline.most_pixels
    if most is None:
        return _PlannedImages(out)
    if any(isinstance(each, Map) for each in pipeline.transforms):
        return _UnplannedImages(out, most)
    sizes = sizes_after_all(block.sizes, steps)
    large = sizes.prod(axis=1) > most
    block.bad.extend(
        BadRow(block.rows[index], _too_large(sizes[index].tolist(), most)) for index in np.flatnonzero(large).tolist()
    )
    shapes = np.zeros((len(out), 2), np.int64)
    shapes[np.array(block.rows, np.intp)[~large]] = sizes[~large]
    return _PlannedImages(Packed.within(out, shapes))


class _PlannedImages:
    """Rows of ``column``; an image that is too large has no pixels there."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self.at: Callable[[int], Array] = column.value if isinstance(column, Packed) else column.__getitem__

    def put(self, row: int, image: Array, into: Array | None) -> None:
        if image is not into:
            deliver(image, self.at(row))

    def made(self) -> Column:
        return self._column


class _UnplannedImages:
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
