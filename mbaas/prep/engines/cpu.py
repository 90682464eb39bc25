"""The cpu engine for images: libjpeg-turbo, OpenCV and torch's resampling, in threads over samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mbaas.errors import BadSampleError, ConfigError
from mbaas.prep import pixels
from mbaas.prep.decode import decode, decode_whole
from mbaas.prep.decoded import Decoded, DecodedRow, DecodedRows, sealed
from mbaas.prep.engines import DEFAULT_MAX_PIXELS, BadRow, Encoded, Prepared
from mbaas.prep.fields_on_image import fields_between
from mbaas.prep.geometry import Stage, boxes_before, plan, sizes_after_all, stages_of
from mbaas.prep.header import UndecodableError
from mbaas.prep.image_part import ImageMemory, PartInput, described, image_memory, read_headers
from mbaas.prep.pixels import Image, Scratch
from mbaas.prep.process import SampleThreads
from mbaas.prep.user_code import SampleFields, call_map
from mbaas.samples.fields import IMAGE, Arrays, Field
from mbaas.samples.order import generator
from mbaas.transforms import Map, Pipeline, RandomResizedCrop, Resize
from mbaas.transforms.base import Flips, Step, Windows
from mbaas.wire.samples import EngineName

Array = NDArray[Any]


@dataclass(frozen=True)
class _StepLists:
    # Each sample reads a few numbers from every step; indexing a list is several times as fast as indexing an array.
    boxes: list[list[int]] | None = None
    sizes: list[list[int]] | None = None
    flips: list[bool] | None = None
    changes: list[list[list[float]]] | None = None


def _step_lists(step: Step) -> _StepLists:
    if isinstance(step, Windows):
        return _StepLists(boxes=step.boxes.tolist(), sizes=step.sizes.tolist())
    if isinstance(step, Flips):
        return _StepLists(flips=step.which.tolist())
    return _StepLists(changes=step.changes.tolist())


class CpuEngine:
    """An engine that prepares images on the CPU, ``threads`` at a time. See `mbaas.prep.engines.Engine`."""

    name: EngineName = "cpu"

    def __init__(
        self, pipeline: Pipeline, *, seed: int, threads: int = 1, max_pixels: int = DEFAULT_MAX_PIXELS
    ) -> None:
        # For the whole process: OpenCV's own threads would compete with the threads that work on other samples.
        cv2.setNumThreads(1)
        self._pipeline = pipeline
        self._seed = seed
        self._max_pixels = max_pixels
        self._first, *self._after_maps = stages_of(pipeline.prep)
        self._threads = SampleThreads(threads)
        self._scratch = Scratch()
        # Import torch now, while the engine is made: on a busy machine the import may take longer than a block's
        # timeout.
        if any(isinstance(each, RandomResizedCrop | Resize) for each in pipeline.prep):
            pixels.resampler()

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        shape = self._pipeline.output_shape
        if shape is not None:
            return Field(IMAGE, shape, "uint8")
        most = self._pipeline.most_pixels
        if most is not None and not self._after_maps:
            return Field(IMAGE, (None, None, 3), "uint8", most)
        block = read_headers([encoded], np.zeros(1, np.int64), 0, known, self._max_pixels)
        if block.bad:
            raise BadSampleError(uri, block.bad[0].reason)
        try:
            steps, fields = self._begin(block)
            sample = self._sample(block, [_step_lists(step) for step in steps], 0, None, fields)
        except UndecodableError as error:
            raise BadSampleError(uri, str(error)) from error
        if self._pipeline.normalize and not _is_image(sample):
            raise ConfigError(f"Normalize needs {_IMAGE}, but samples are {described(sample)}")
        if most is None:
            return Field(IMAGE, sample.shape, sample.dtype.name)
        if sample.ndim < 2:
            raise ConfigError(
                f"samples may differ in height and width (DecodeImage's max_pixels), but are {described(sample)}"
            )
        return Field(IMAGE, (None, None, *sample.shape[2:]), sample.dtype.name, most)

    def prepare(
        self,
        encoded: Sequence[Encoded],
        sample_ids: NDArray[np.int64],
        epoch: int,
        known: Arrays,
        out: Array,
        keep: DecodedRows | None = None,
    ) -> Prepared:
        block = read_headers(encoded, sample_ids, epoch, known, self._max_pixels)
        steps, fields = self._begin(block)
        memory = image_memory(block, self._pipeline, steps, out)
        self.make(block, steps, range(len(block.rows)), memory, fields, keep)
        block, made = replace(block, known=fields.columns()), memory.made()
        if fields.on_image:  # already moved between Maps: only final filtering remains
            return block.finish(self._pipeline, [], made, fields.sizes)
        return block.finish(self._pipeline, steps, made)

    def make(
        self,
        block: PartInput,
        steps: Sequence[Step],
        indices: Sequence[int],
        memory: ImageMemory,
        fields: SampleFields,
        keep: DecodedRows | None,
    ) -> None:
        """Prepare the samples ``indices`` of a block; samples that cannot be prepared become bad.

        Args:
            block, memory, keep: the block, memory for the results, and for decoded samples (see `Engine.prepare`).
            steps, indices: steps before the first Map, and the samples to prepare.
            fields: the samples' fields, as input for the first Map.
        """
        listed = [_step_lists(step) for step in steps]

        def work(number: int) -> None:
            index = indices[number]
            row = block.rows[index]
            into = memory.at(row)
            if into is not None and not into.size:
                return  # too large, already recorded as bad
            kept = None
            if keep is not None and keep.wants(row):
                kept = DecodedRow(keep, row, self._pipeline.prefix, block.headers[index].size)
            try:
                memory.put(row, self._sample(block, listed, index, into, fields, kept), into)
            except UndecodableError as error:
                fields.reset(index)
                block.bad.append(BadRow(row, str(error)))
                if kept is not None:
                    kept.drop()

        self._threads.run(work, len(indices))

    def set_threads(self, threads: int) -> None:
        self.close()
        self._threads = SampleThreads(threads)

    def close(self) -> None:
        self._threads.close()

    def _begin(self, block: PartInput) -> tuple[list[Step], SampleFields]:
        boxes = block.boxes(self._pipeline)
        steps = plan(self._first, self._seed, block.epoch, block.sample_ids, block.sizes, boxes)
        known, sizes = block.known, block.sizes
        if self._after_maps and self._pipeline.has_fields_on_image:
            known, sizes = fields_between(self._pipeline, known, sizes, steps), sizes_after_all(sizes, steps)
        return steps, SampleFields(known, self._pipeline, sizes)

    def _sample(
        self,
        block: PartInput,
        steps: list[_StepLists],
        index: int,
        into: Array | None,
        fields: SampleFields,
        kept: DecodedRow | None = None,
    ) -> Array:
        """Return a prepared sample: in ``into`` if it fits, or read-only, or overwritten by the next sample."""
        decoded = block.decoded[index]
        if decoded is None:
            image, done = self._decode(block, steps, index, kept), 1
        else:
            image, done = self._checked(decoded, steps, index), decoded.applied
        # A Map returns a new array, so the steps before it need not write to the final memory.
        image = self._run(image, steps, index, into if not self._after_maps else None, done=done, kept=kept)
        for run in self._after_maps:
            image = self._map(run, image, block, index, fields, done, kept)
        return image

    def _decode(self, block: PartInput, steps: list[_StepLists], index: int, kept: DecodedRow | None) -> Image:
        data, header = block.encoded[index], block.headers[index]
        if kept is not None and kept.applied == 1:
            room: Image | None = kept.room((*header.size, 3), np.dtype(np.uint8))
            if room is not None:
                if decode_whole(data, header, self._scratch, room):
                    return sealed(room)
                kept.drop()
        first = steps[0] if steps else None
        # Rows below the first window are not needed, so the decoder may stop there.
        rows = first.boxes[index][0] + first.boxes[index][2] if first and first.boxes else None
        return decode(data, header, self._scratch, rows=rows)

    def _checked(self, decoded: Decoded, steps: list[_StepLists], index: int) -> Array:
        applied = decoded.applied
        decoded.check_applied(self._pipeline.prefix)
        if applied <= len(steps) + 1:  # without a Map, the result's size is known
            sizes = steps[applied - 2].sizes if applied > 1 else None
            decoded.check_image(decoded.original if sizes is None else (sizes[index][0], sizes[index][1]))
        return decoded.values

    def _map(
        self,
        run: Sequence[Stage],
        image: Array,
        block: PartInput,
        index: int,
        fields: SampleFields,
        done: int,
        kept: DecodedRow | None,
    ) -> Array:
        """Apply a Map and the transforms up to the next one, which depend on its result, from index ``done`` on."""
        sample_id, epoch = int(block.sample_ids[index]), block.epoch
        (substream, transform), *stages = run
        assert isinstance(transform, Map)
        result = image
        if substream >= done:
            rng = partial(generator, self._seed, epoch, sample_id, substream=substream)
            # Copy, because the function may keep or change its input, and the next sample reuses this memory.
            result = call_map(transform, IMAGE, image.copy(), fields, index, rng)
            if _is_image(result) and fields.on_image:
                fields.sizes[index] = result.shape[:2]
            if kept is not None and kept.applied == substream + 1:
                result = kept.put(result)
        stages = [stage for stage in stages if stage[0] >= done]
        if not stages:
            return result
        if not _is_image(result):
            following = type(stages[0][1]).__name__
            raise UndecodableError(f"{transform!r} made {described(result)}, but {following} needs {_IMAGE}")
        sizes, on_image = np.array([result.shape[:2]]), fields.of_sample(index)
        boxes = self._pipeline.boxes if any(each.needs_boxes for _, each in stages) else None
        now = None if boxes is None else boxes_before(boxes, on_image, sizes)
        steps = plan(stages, self._seed, epoch, np.array([sample_id]), sizes, now)
        if fields.on_image:
            fields.put(index, fields_between(self._pipeline, on_image, sizes, steps))
            fields.sizes[index] = sizes_after_all(sizes, steps)[0]
        # Copy, because the function may still hold its result, and steps change an image in place.
        result = result.copy() if result.flags.writeable else result
        return self._run(result, [_step_lists(step) for step in steps], 0, None, first=stages[0][0], kept=kept)

    def _run(
        self,
        image: Image,
        steps: Sequence[_StepLists],
        index: int,
        into: Array | None,
        *,
        first: int = 1,
        done: int = 0,
        kept: DecodedRow | None = None,
    ) -> Image:
        """Apply steps to an image uint8 [height, width, 3], whose memory may change unless it is read-only.

        The last window goes to ``into`` if it fits. ``first`` is the pipeline index of the first step; steps with an
        index below ``done`` are skipped. ``kept`` receives the result of the deterministic prefix.
        """
        # Only the last window may use `into`: a window reads the result of the one before, so they must not share
        # memory.
        last = max((k for k, step in enumerate(steps) if step.sizes), default=-1)
        for k, step in enumerate(steps):
            if first + k < done:
                continue
            place = into if k >= last else None
            if step.boxes is not None and step.sizes is not None:
                target = self._target(k, step.sizes[index], place)
                pixels.cut(image, step.boxes[index], target, self._scratch)
                image = target
                if kept is not None and kept.applied == first + k + 1:
                    image = kept.put(image)
            elif step.flips is not None:
                if step.flips[index]:
                    target = self._writable(k, image, place)
                    pixels.mirror(image, target)
                    image = target
            elif step.changes is not None:
                target = self._writable(k, image, place)
                if target is not image:
                    np.copyto(target, image)
                    image = target
                pixels.recolor(image, step.changes[index])
        return image

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


def _fits(into: Array, size: Sequence[int]) -> bool:
    return into.shape == (*size, 3) and into.dtype == np.uint8


def _is_image(array: Array) -> bool:
    return array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and array.size > 0
