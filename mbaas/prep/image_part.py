"""The images of a block while an engine prepares them: their headers, the plan of their steps, and their results.

The sizes of results are planned from headers, so images of varying size are written directly to their final place, end
to end. Only the results of a Map have unknown sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.prep.decoded import Decoded, DecodedRows, image_header, is_decoded, read_decoded
from mbaas.prep.engines import Batch, Prepared
from mbaas.prep.geometry import Stage, boxes_before, moved_fields, plan, sizes_after_all
from mbaas.prep.header import Header, UndecodableError, peek
from mbaas.prep.part import Results, SampleFields
from mbaas.samples.fields import ANNOTATED_SIZE
from mbaas.transforms import Pipeline

_NO_HEADER = Header("decoded", 1, 1, channels=3, bits=8)
"""Placeholder for a bad sample, whose steps are planned like those of the others."""


class ImagePart:
    """The images of a block.

    Args:
        batch, out, keep: see `mbaas.prep.engines.Engine.prepare`.
        pipeline, seed: its transforms, and the seed of the random ones.
        runs: the result of `stages_of` for the pipeline.
        max_pixels: larger images are bad.

    Attributes:
        encoded, headers: the samples' bytes and headers.
        decoded: contents of the containers of decoded samples; None for encoded samples.
        sizes: int64[n, 2], (height, width) of the upright images in pixels.
        steps: steps before the first Map.
        fields: the samples' fields, as input for the first Map.
        results: memory for the images, and the bad samples.
    """

    def __init__(
        self,
        batch: Batch,
        out: NDArray[Any],
        keep: DecodedRows | None,
        *,
        pipeline: Pipeline,
        seed: int,
        runs: Sequence[Sequence[Stage]],
        max_pixels: int,
    ) -> None:
        most = pipeline.most_pixels
        self.batch, self._pipeline = batch, pipeline
        self.results = Results(out, pipeline, keep)
        self.encoded = [memoryview(cast("Any", each)) for each in batch.encoded]
        self.headers, self.decoded = [_NO_HEADER] * len(batch), [cast("Decoded | None", None)] * len(batch)
        for row in range(len(batch)):
            self.results.attempt(row, self._read_header, row, max_pixels)
        self.sizes = np.array([header.size for header in self.headers], np.int64).reshape(-1, 2)  # even without rows
        boxes, known, sizes = pipeline.boxes, batch.known, self.sizes
        by_boxes = boxes is not None and any(transform.needs_boxes for transform in pipeline.transforms)
        now = boxes_before(boxes, known, sizes) if boxes is not None and by_boxes else None
        self.steps = plan(runs[0], seed, batch.epoch, batch.ids, sizes, now)
        after = sizes_after_all(sizes, self.steps)
        if len(runs) > 1:
            if pipeline.has_fields_on_image:
                known, sizes = moved_fields(pipeline, known, sizes, self.steps)[0], after
        elif most is not None:
            for row, size in enumerate(after.tolist()):
                if row not in self.results.bad:
                    self.results.attempt(row, self.results.check_size, size)
            self.results.lay_out(after * self.results.good[:, None])
        self.fields = SampleFields(known, pipeline, sizes)

    def _read_header(self, row: int, max_pixels: int) -> None:
        data, annotated = self.encoded[row], self.batch.known.get(ANNOTATED_SIZE)
        if is_decoded(data):
            self.decoded[row] = decoded = read_decoded(data)
            header = image_header(decoded, max_pixels)
        else:
            header = peek(data, max_pixels)
        self.headers[row] = header if annotated is None else _as_annotated(header, *annotated[row].tolist())

    def finish(self) -> Prepared:
        """Return the results, after the images are prepared."""
        known, steps, sizes = self.fields.columns(), self.steps, self.sizes
        if self.fields.on_image:  # already moved between Maps: only final filtering remains
            steps, sizes = [], self.fields.sizes
        if self._pipeline.has_fields_on_image:
            known, unfit = moved_fields(self._pipeline, known, sizes, steps, ~self.results.good)
            self.results.bad.update(unfit)
        return self.results.finish(known)


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
