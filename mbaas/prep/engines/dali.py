"""The dali engine: NVIDIA DALI on a GPU or the CPU.

A sample's result must not depend on its batch. So on a GPU the hardware decoder gets every JPEG that it supports. By
default DALI divides a batch between it and CUDA, whose pixels differ by up to three levels. Files that DALI decodes
differently or rejects go to the cpu engine; rejected ones are found by halving their batch (`dali_runs`). So do images
that are too large for the device's memory.

The cpu engine may also prepare a fixed share of all samples, so that CPUs and a GPU work on the same block at the same
time. Then only the cpu engine's samples are kept decoded. They save more CPU time per byte, and sending a file to a GPU
is faster than sending an image.

Damage inside a JPEG's entropy-coded data is found only by decoding. DALI then fills the rest with grey, while the cpu
engine rejects the file. Both find truncated files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, math

from mbaas.prep.decoded import DecodedRows
from mbaas.prep.engines import DEFAULT_MAX_PIXELS, BadRow, Encoded, EngineOf, Prepared
from mbaas.prep.engines.cpu import CpuEngine
from mbaas.prep.engines.dali_runs import Deliver, Feed, GraphRuns, PlaceOf, types
from mbaas.prep.geometry import Stage, plan, stages_of
from mbaas.prep.header import Header, UndecodableError
from mbaas.prep.image_part import ImageMemory, PartInput, image_memory, read_headers
from mbaas.prep.pixels import Image
from mbaas.prep.user_code import SampleFields
from mbaas.samples.fields import Arrays, Field
from mbaas.transforms import (
    CenterCrop,
    ColorJitter,
    Pipeline,
    RandomHorizontalFlip,
    RandomIoUCrop,
    RandomResizedCrop,
    RandomZoomOut,
    Transform,
)
from mbaas.transforms.base import Flips, Size, Step, Windows, WindowTransform
from mbaas.wire.samples import EngineName

BATCH_PIXELS = 32_000_000
"""Maximum pixels of a batch before cropping: 64 images of 700x700, or two of 12 megapixels. DALI holds two batches.
Decoded, a batch takes 100 MB, and about as much again at each stage of the graph.
"""


ENCODED, DECODED = "encoded", "decoded"
"""Name of a graph's first input: encoded files, or decoded images."""

_HEIGHT_WIDTH = (0, 1)
_WINDOWS = (RandomResizedCrop, RandomIoUCrop, CenterCrop, RandomZoomOut)
"""Transforms whose window is an input of the graph. Resize is not among them: its window is the whole image."""


class DaliEngine:
    """An engine that prepares images with DALI. See `mbaas.prep.engines.Engine`."""

    name: EngineName = "dali"

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        seed: int,
        threads: int = 1,
        device_id: int | None = None,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        for_dali: EngineOf | None = None,
        batch_pixels: int = BATCH_PIXELS,
    ) -> None:
        # No graph is built yet: its batch size depends on the first block. A single image may have more pixels.
        self._pipeline, self._stages = pipeline, stages_of(pipeline.prep)[0]
        # Number of stages (which begin after the decoder) in the deterministic prefix.
        self._in_prefix = min(pipeline.prefix - 1, len(self._stages))
        self._seed = seed
        self._max_pixels = max_pixels
        self._for_dali = for_dali
        self._cpu = CpuEngine(pipeline, seed=seed, threads=threads, max_pixels=max_pixels)
        self._beside = ThreadPoolExecutor(1, "prep-beside")
        gpu, first, rest = device_id is not None, self._stages[: self._in_prefix], self._stages[self._in_prefix :]
        self._runs, self._first_runs, self._rest_runs = (
            GraphRuns(outputs, threads=threads, device_id=device_id, limit=batch_pixels, unit="pixels")
            for outputs in (
                lambda: image_graph(self._stages, gpu=gpu),
                lambda: image_graph(first, gpu=gpu),
                lambda: image_graph(rest, gpu=gpu, decoded=True),
            )
        )

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        return self._cpu.field(encoded, uri, known)

    def prepare(
        self,
        encoded: Sequence[Encoded],
        sample_ids: NDArray[np.int64],
        epoch: int,
        known: Arrays,
        out: NDArray[Any],
        keep: DecodedRows | None = None,
    ) -> Prepared:
        block = read_headers(encoded, sample_ids, epoch, known, self._max_pixels)
        boxes = block.boxes(self._pipeline)
        steps = plan(self._stages, self._seed, epoch, block.sample_ids, block.sizes, boxes)
        memory = image_memory(block, self._pipeline, steps, out)
        opened = self._opened(block, steps)

        def take(index: int, image: NDArray[Any]) -> None:
            row = block.rows[index]
            try:
                memory.put(row, image, None)
            except UndecodableError as error:
                block.bad.append(BadRow(row, str(error)))

        def place(index: int) -> NDArray[Any] | None:
            return memory.at(block.rows[index])

        fitting = ~np.isin(block.rows, [bad.row for bad in block.bad])
        takes, is_opened = self._takes(block, steps), np.isin(np.arange(len(block.rows)), [*opened])
        files = np.flatnonzero(fitting & takes & ~is_opened)
        # DALI reads these arrays in place: keep them alive until the run is over.
        encoded_of: Feed = [np.frombuffer(each, np.uint8) for each in block.encoded]
        feeds = {ENCODED: encoded_of, **graph_inputs(self._stages, steps)}
        going_on = {index: image for index, image in opened.items() if fitting[index] and takes[index]}

        def leave_to_cpu(indices: Sequence[int]) -> None:
            fields = SampleFields(block.known, self._pipeline, block.sizes)
            self._cpu.make(block, steps, indices, memory, fields, keep)

        with self._meanwhile(leave_to_cpu, np.flatnonzero(fitting & ~takes).tolist()):
            refused = self._runs.run(files, block.sizes.prod(axis=1), feeds, take, place)
            refused += self._run_rest(block, steps, going_on, take, place)
        if keep is not None and self._for_dali is None:
            lost = {*refused, *np.flatnonzero(np.isin(block.rows, [bad.row for bad in block.bad])).tolist()}
            self._keep(block, steps, [index for index in files.tolist() if index not in lost], memory, keep)
        if refused:
            leave_to_cpu(sorted(refused))
        return block.finish(self._pipeline, steps, memory.made())

    def set_threads(self, threads: int) -> None:
        self._cpu.set_threads(threads)
        for runs in (self._runs, self._first_runs, self._rest_runs):
            runs.set_threads(threads)

    def close(self) -> None:
        for runs in (self._runs, self._first_runs, self._rest_runs):
            runs.close()
        self._beside.shutdown()
        self._cpu.close()

    @contextmanager
    def _meanwhile(self, work: Callable[[Sequence[int]], None], indices: Sequence[int]) -> Iterator[None]:
        if not indices:
            yield
            return
        working = self._beside.submit(work, indices)
        try:
            yield
        finally:
            wait([working])  # because it writes to the block
        working.result()

    def _size_after_prefix(self, block: PartInput, steps: Sequence[Step], index: int) -> Size:
        if self._in_prefix == 0:
            return block.headers[index].size
        step = steps[self._in_prefix - 1]
        assert isinstance(step, Windows), "what has no chance changes sizes only"
        height, width = step.sizes[index].tolist()
        return height, width

    def _opened(self, block: PartInput, steps: Sequence[Step]) -> dict[int, Image]:
        opened = {}
        for index, decoded in enumerate(block.decoded):
            if decoded is None or decoded.made_by != self.name:
                continue
            try:
                decoded.check_applied(self._in_prefix + 1)
                if decoded.applied <= self._in_prefix:
                    raise UndecodableError(
                        f"it is a decoded sample after {decoded.applied} transforms, and DALI goes on after "
                        f"{self._in_prefix + 1}"
                    )
                decoded.check_image(self._size_after_prefix(block, steps, index))
            except UndecodableError as error:
                block.bad.append(BadRow(block.rows[index], str(error)))
            else:
                opened[index] = decoded.values
        return opened

    def _run_rest(
        self,
        block: PartInput,
        steps: Sequence[Step],
        decoded: Mapping[int, Image],
        take: Deliver,
        place: PlaceOf | None = None,
    ) -> list[int]:
        """Apply the random suffix to decoded samples; return the samples rejected by DALI."""
        rest = slice(self._in_prefix, None)
        if not decoded:
            return []
        if not self._stages[rest]:
            for index, image in decoded.items():
                take(index, image)
            return []
        images: Feed = [decoded.get(index, _NOTHING) for index in range(len(block.rows))]
        feeds = {DECODED: images, **graph_inputs(self._stages[rest], steps[rest])}
        return self._rest_runs.run(np.array([*decoded], np.intp), block.sizes.prod(axis=1), feeds, take, place)

    def _keep(
        self, block: PartInput, steps: Sequence[Step], indices: Sequence[int], memory: ImageMemory, keep: DecodedRows
    ) -> None:
        # A second graph decodes again, and ends with the deterministic prefix. A sample is kept only if the rest of the
        # pipeline gives the same result from it. The results may differ if a crop comes first: the CPU decoder then
        # decodes only a window, and its pixels may differ from the whole image.
        rooms: dict[int, Image] = {}
        for index in indices:
            size, original = self._size_after_prefix(block, steps, index), block.headers[index].size
            shape, dtype = (*size, 3), np.dtype(np.uint8)
            applied = self._in_prefix + 1
            room = keep.room(block.rows[index], shape, dtype, applied=applied, original=original, made_by=self.name)
            if room is not None:
                rooms[index] = room
        if not rooms:
            return

        def fill(index: int, image: Image) -> None:
            np.copyto(rooms[index], image)

        def compare(index: int, image: Image) -> None:
            made = memory.at(block.rows[index])
            if made is None or not np.array_equal(image, made):
                keep.drop(block.rows[index])

        first = slice(self._in_prefix)
        encoded: Feed = [np.frombuffer(each, np.uint8) for each in block.encoded]
        feeds = {ENCODED: encoded, **graph_inputs(self._stages[first], steps[first])}
        refused = self._first_runs.run(np.array([*rooms], np.intp), block.sizes.prod(axis=1), feeds, fill, rooms.get)
        filled = {index: room for index, room in rooms.items() if index not in refused}
        refused += self._run_rest(block, steps, filled, compare)
        for index in refused:
            keep.drop(block.rows[index])

    def _takes(self, block: PartInput, steps: Sequence[Step]) -> NDArray[np.bool_]:
        """Return bool[n], the samples for DALI. Too large ones go to the cpu engine, for its error message."""
        takes = np.array([not _is_left_to_cpu(header) for header in block.headers], bool)
        takes &= np.array([each is None or each.made_by == self.name for each in block.decoded], bool)
        if self._for_dali is not None:
            takes &= self._for_dali(block.sample_ids, block.epoch)
        for step in steps:
            if isinstance(step, Windows):
                takes &= step.sizes.prod(axis=1) <= self._max_pixels
        return takes


def _is_left_to_cpu(header: Header) -> bool:
    # DALI decodes these files differently, or not on all devices.
    is_odd = header.format in ("webp", "bmp") or (header.format == "jpeg" and header.channels == 4)
    is_turned_png = header.format == "png" and header.orientation != 1
    return is_odd or is_turned_png or header.as_stored or header.is_animated


_NOTHING = np.zeros((0, 0, 3), np.uint8)
"""Placeholder for a sample that is not decoded; no run uses it."""


def graph_inputs(stages: Sequence[Stage], steps: Sequence[Step]) -> dict[str, NDArray[Any]]:
    """Return exactly the inputs of the graph, except the samples: name -> array whose row i belongs to sample i."""
    inputs: dict[str, NDArray[Any]] = {}
    for (index, transform), step in zip(stages, steps, strict=True):
        if isinstance(transform, _WINDOWS) and isinstance(step, Windows):
            inputs[f"start {index}"] = step.boxes[:, :2].astype(np.int32)
            inputs[f"shape {index}"] = step.boxes[:, 2:].astype(np.int32)
        elif isinstance(step, Windows):
            if transform.fixed_size is None:
                inputs[f"size {index}"] = step.sizes.astype(np.float32)
        elif isinstance(step, Flips):
            inputs[f"flip {index}"] = step.which.astype(np.int32)
        else:
            inputs[f"blends {index}"] = step.changes[:, :, :3].astype(np.float32)
    return inputs


def image_graph(stages: Sequence[Stage], *, gpu: bool, decoded: bool = False) -> Any:
    """Build the nodes of a graph from files or ``decoded`` images to uint8 [height, width, 3] per sample."""
    if decoded:
        made = fn.external_source(name=DECODED, no_copy=True, dtype=types.UINT8, ndim=3, layout="HWC")
        made, rest = made.gpu() if gpu else made, stages
    else:
        made, rest = _decoded(stages, gpu)
    for index, transform in rest:
        if isinstance(transform, WindowTransform):
            made = _cut(made, index, transform)
        elif isinstance(transform, RandomHorizontalFlip):
            made = fn.flip(made, horizontal=_input(f"flip {index}", types.INT32, 0))
        elif isinstance(transform, ColorJitter):
            made = _jittered(made, _input(f"blends {index}", types.FLOAT, 2))
    return made


def _decoded(stages: Sequence[Stage], gpu: bool) -> tuple[Any, Sequence[Stage]]:
    """Decode, and return the remaining stages; on a CPU, a first crop is part of decoding."""
    encoded = fn.external_source(name=ENCODED, no_copy=True, dtype=types.UINT8, ndim=1)
    if gpu:
        # Give the hardware decoder every JPEG it supports. Otherwise the split between decoders, and so the pixels,
        # would depend on the batch. GPU decoders decode whole images only: DALI would leave partial decoding to the
        # CPU.
        options: dict[str, Any] = {"jpeg_fancy_upsampling": True, "hw_decoder_load": 1.0}  # chroma as in libjpeg
        return fn.decoders.image(encoded, device="mixed", output_type=types.RGB, **options), stages
    if not stages or not isinstance(stages[0][1], (RandomResizedCrop, RandomIoUCrop)):
        return fn.decoders.image(encoded, output_type=types.RGB), stages
    index, crop = stages[0]
    images = fn.decoders.image_slice(encoded, **_box(index), axes=_HEIGHT_WIDTH, output_type=types.RGB)
    return images if isinstance(crop, RandomIoUCrop) else _resized(images, index, crop), stages[1:]


def _cut(images: Any, index: int, transform: WindowTransform) -> Any:
    if isinstance(transform, (CenterCrop, RandomIoUCrop, RandomZoomOut)):
        return fn.slice(images, **_box(index), axes=_HEIGHT_WIDTH, out_of_bounds_policy="pad", fill_values=0)
    if isinstance(transform, RandomResizedCrop):
        images = fn.slice(images, **_box(index), axes=_HEIGHT_WIDTH)
    return _resized(images, index, transform)


def _resized(images: Any, index: int, transform: Transform) -> Any:
    size: Any = transform.fixed_size or _input(f"size {index}", types.FLOAT, 1)
    return fn.resize(images, size=size, interp_type=types.INTERP_LINEAR, antialias=True)


def _jittered(images: Any, blends: Any) -> Any:
    """Apply ``ColorJitter.changes`` without hue, as arithmetic on whole images."""
    for stage in range(3):
        own, grey, mean = (blends[stage, term] for term in range(3))
        greys = fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)
        blend = own * images + grey * greys + mean * fn.reductions.mean(greys)
        # Round after each change, like the cpu engine: the next change works on uint8.
        images = fn.cast(math.floor(math.clamp(blend + 0.5, 0.0, 255.0)), dtype=types.UINT8)
    return images


def _box(index: int) -> dict[str, Any]:
    return {name: _input(f"{name} {index}", types.INT32, 1) for name in ("start", "shape")}


def _input(name: str, dtype: Any, ndim: int) -> Any:
    return fn.external_source(name=name, dtype=dtype, ndim=ndim)
