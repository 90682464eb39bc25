"""The cpu engine for images: libjpeg-turbo, OpenCV and torch's resampling, in threads over samples.

The sizes of results are planned from headers, so images of varying size are written directly to their final place, end
to end. Only the results of a Map have unknown sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from mbaas.prep import pixels
from mbaas.prep.decode import decode, decode_whole
from mbaas.prep.decoded import Decoded, DecodedRow, DecodedRows, image_header, is_decoded, read_decoded, sealed
from mbaas.prep.engines import DEFAULT_MAX_PIXELS, Batch, Encoded, Engine, Prepared, is_image
from mbaas.prep.geometry import Stage, boxes_before, moved_fields, plan, sizes_after_all, stages_of
from mbaas.prep.header import Header, UndecodableError, peek
from mbaas.prep.part import Results, SampleFields, call_map, described
from mbaas.prep.pixels import Image, Scratch
from mbaas.samples.fields import ANNOTATED_SIZE, IMAGE, Arrays, Field
from mbaas.samples.order import generator
from mbaas.transforms import Map, Pipeline, RandomResizedCrop, Resize, ScaleJitter, Transform
from mbaas.transforms.base import Flips, Operations, Recolorings, Step, Windows

Array = NDArray[Any]


_NO_HEADER = Header("decoded", 1, 1, channels=3, bits=8)
"""Placeholder for a bad sample, whose steps are planned like those of the others."""


class ImagePart:
    """The images of a block while an engine prepares them.

    Args:
        runs: the result of `stages_of` for the pipeline.
        max_pixels: larger images are bad.

    Attributes:
        decoded: contents of the containers of decoded samples; None for encoded samples.
        sizes: int64[n, 2], (height, width) of the upright images in pixels.
        steps: steps before the first Map.
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


SampleOf: TypeAlias = Callable[[ImagePart, int, "Array | None"], Array]
"""Prepares the sample of a row, if possible in the given memory; see `CpuEngine._sample`."""


class CpuEngine(Engine):
    """An engine that prepares images on the CPU, ``threads`` at a time. See `mbaas.prep.engines.Engine`."""

    def __init__(
        self, pipeline: Pipeline, *, seed: int, threads: int = 1, max_pixels: int = DEFAULT_MAX_PIXELS
    ) -> None:
        super().__init__(pipeline, seed, threads)
        # For the whole process: OpenCV's own threads would compete with the threads that work on other samples.
        cv2.setNumThreads(1)
        self._max_pixels = max_pixels
        self._runs = stages_of(pipeline.prep)
        self._part = partial(ImagePart, pipeline=pipeline, seed=seed, runs=self._runs, max_pixels=max_pixels)
        self._scratch = Scratch()
        # Import torch now, while the engine is made: on a busy machine the import may take longer than a block's
        # timeout.
        if any(isinstance(each, _RESAMPLING) or _is_bilinear(each) for each in pipeline.prep):
            pixels.resampler()

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        shape, most = self._pipeline.output_shape, self._pipeline.most_pixels
        if shape is not None:
            return Field(IMAGE, shape, "uint8")
        if most is not None and len(self._runs) == 1:
            return Field(IMAGE, (None, None, 3), "uint8", most)
        return super().field(encoded, uri, known)

    def _first_sample(self, batch: Batch) -> Array:
        part = self._part(batch, np.empty((1, 0)), None)
        if part.results.bad:
            raise UndecodableError(part.results.bad[0])
        return self._sample(part, 0, None)

    def prepare(self, batch: Batch, out: Array, keep: DecodedRows | None = None) -> Prepared:
        part = self._part(batch, out, keep)
        self._make(part, np.flatnonzero(part.results.good))
        return part.finish()

    def _make(self, part: ImagePart, rows: NDArray[np.intp], sample: SampleOf | None = None) -> None:
        """Prepare good samples of a block by ``sample``, by default `_sample`; those that it rejects become bad."""
        sample = sample or self._sample

        def make(row: int) -> None:
            into = part.results.at(row)
            part.results.put(row, sample(part, row, into), into)

        def work(number: int) -> None:
            row = int(rows[number])
            if not part.results.attempt(row, make, row):
                part.fields.reset(row)

        self._threads.run(work, len(rows))

    def _sample(self, part: ImagePart, row: int, into: Array | None) -> Array:
        """Return a prepared sample: in ``into`` if it fits, or read-only, or overwritten by the next sample."""
        decoded, header, steps = part.decoded[row], part.headers[row], part.steps
        kept = DecodedRow(part.results.keep, row, self._pipeline.prefix, header.size)
        if decoded is None:
            image, done = self._decode(part, row, kept), 1
        else:
            image, done = decoded.values, decoded.applied
            decoded.check_applied(self._pipeline.prefix)
            if done <= len(steps) + 1:  # without a Map, the result's size is known
                decoded.check_image(sizes_after_all(part.sizes, steps[: done - 1])[row].tolist())
        # A Map returns a new array, so the steps before it need not write to the final memory.
        image = self._run(image, steps, row, into if len(self._runs) == 1 else None, kept, done=done)
        for run in self._runs[1:]:
            image = self._map(run, image, part, row, done, kept)
        return image

    def _decode(self, part: ImagePart, row: int, kept: DecodedRow) -> Image:
        data, header = part.encoded[row], part.headers[row]
        room: Image | None = kept.room((*header.size, 3)) if kept.applied == 1 else None
        if room is not None:
            if decode_whole(data, header, self._scratch, room):
                return sealed(room)
            kept.drop()
        rows = None
        if part.steps and isinstance(first := part.steps[0], Windows):
            # Rows below the first window are not needed, so the decoder may stop there.
            rows = int(first.boxes[row, 0] + first.boxes[row, 2])
        return decode(data, header, self._scratch, rows=rows)

    def _map(self, run: Sequence[Stage], image: Array, part: ImagePart, row: int, done: int, kept: DecodedRow) -> Array:
        """Apply a Map and the transforms up to the next one, which depend on its result, from index ``done`` on."""
        ids, epoch, fields = part.batch.ids[row : row + 1], part.batch.epoch, part.fields
        (substream, transform), *stages = run
        assert isinstance(transform, Map)
        result = image
        if substream >= done:
            rng = partial(generator, self._seed, epoch, int(ids[0]), substream=substream)
            # Copy, because the function may keep or change its input, and the next sample reuses this memory.
            result = call_map(transform, IMAGE, image.copy(), fields, row, rng)
            if is_image(result) and fields.on_image:
                fields.sizes[row] = result.shape[:2]
            result = kept.put(substream + 1, result)
        stages = [stage for stage in stages if stage[0] >= done]
        if not stages:
            return result
        if not is_image(result):
            following = type(stages[0][1]).__name__
            raise UndecodableError(f"{transform!r} made {described(result)}, but {following} needs {_IMAGE}")
        sizes, on_image = np.array([result.shape[:2]]), fields.of_sample(row)
        boxes = self._pipeline.boxes if any(each.needs_boxes for _, each in stages) else None
        now = None if boxes is None else boxes_before(boxes, on_image, sizes)
        steps = plan(stages, self._seed, epoch, ids, sizes, now)
        if fields.on_image:
            fields.put(row, moved_fields(self._pipeline, on_image, sizes, steps)[0])
            fields.sizes[row] = sizes_after_all(sizes, steps)[0]
        # Copy, because the function may still hold its result, and steps change an image in place.
        result = result.copy() if result.flags.writeable else result
        return self._run(result, steps, 0, None, kept, first=stages[0][0])

    def _run(
        self,
        image: Image,
        steps: Sequence[Step],
        row: int,
        into: Array | None,
        kept: DecodedRow,
        *,
        first: int = 1,
        done: int = 0,
    ) -> Image:
        """Apply steps to an image uint8 [height, width, 3], whose memory may change unless it is read-only.

        The last window goes to ``into`` if it fits. ``first`` is the pipeline index of the first step; steps with an
        index below ``done`` are skipped. ``kept`` receives the result of the deterministic prefix.
        """
        # Only the last window may use `into`: a window reads the result of the one before, so they must not share
        # memory.
        last = max((k for k, step in enumerate(steps) if isinstance(step, Windows)), default=-1)
        for k, step in enumerate(steps):
            if first + k < done:
                continue
            place = into if k >= last else None
            if isinstance(step, Windows):
                target = self._target(k, step.sizes[row].tolist(), place)
                pixels.cut(image, step.boxes[row].tolist(), target, self._scratch, step.padding)
                image = kept.put(first + k + 1, target)
            elif isinstance(step, Recolorings):
                image = self._own(k, image, place)
                pixels.recolor(image, step.changes[row].tolist())
            elif isinstance(step, Operations):
                if chain := step.chains[row]:
                    image = self._own(k, image, place)
                    pixels.operate(image, chain, nearest=step.nearest, fill=step.fill)
            elif not step.which[row]:
                continue
            elif isinstance(step, Flips):
                target = self._writable(k, image, place)
                cv2.flip(image, 0 if step.vertical else 1, dst=target)
                image = target
            else:
                size = step.sizes[row].tolist()
                image = pixels.warp(image, step.to_source[row], size, nearest=step.nearest, fill=step.fill)
        return image

    def _own(self, step: int, image: Image, into: Array | None) -> Image:
        """Return the image in memory that may change."""
        own = self._writable(step, image, into)
        if own is not image:
            np.copyto(own, image)
        return own

    def _writable(self, step: int, image: Image, into: Array | None) -> Image:
        if image.flags.writeable:
            return image
        if into is not None and _fits(into, image.shape[:2]):
            return into
        return self._scratch.array(f"step {step}", image.shape)

    def _target(self, step: int, size: list[int], into: Array | None) -> Image:
        height, width = size
        if into is not None and _fits(into, size):
            return into
        if height * width > self._max_pixels:
            limit = f"over the limit of {self._max_pixels:,} pixels (max_pixels)"
            raise UndecodableError(f"it would be resized to {width}x{height}, {limit}")
        # One slot per step, because a window must not write to the memory that it reads.
        return self._scratch.array(f"step {step}", (height, width, 3))


_IMAGE = "uint8 [height, width, 3]"

_RESAMPLING = (RandomResizedCrop, Resize, ScaleJitter)


def _is_bilinear(transform: Transform) -> bool:
    return getattr(transform, "interpolation", None) == "bilinear"


def _fits(into: Array, size: Sequence[int]) -> bool:
    return into.shape == (*size, 3) and into.dtype == np.uint8
