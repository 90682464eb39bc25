"""Input and result of both image engines: a block's samples with valid headers, and the prepared block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.fields import ANNOTATED_SIZE, Arrays, Column, Packed
from mbaas.prep.boxes import placed
from mbaas.prep.decoded import Decoded, image_header, is_decoded, read_decoded
from mbaas.prep.engine import BadRow, Encoded, Prepared
from mbaas.prep.header import Header, UndecodableError, peek
from mbaas.prep.on_image import moved_fields
from mbaas.transforms import Pipeline
from mbaas.transforms.base import BoxesNow, Step


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

    def placed(self, pipeline: Pipeline) -> BoxesNow | None:
        """Return the boxes on the images, if a transform depends on boxes; see `mbaas.prep.boxes.placed`."""
        if pipeline.boxes is None or not any(transform.needs_boxes for transform in pipeline.transforms):
            return None
        return placed(pipeline.boxes, self.known, self.sizes)

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
