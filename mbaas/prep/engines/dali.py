"""The dali engine: NVIDIA DALI on a GPU or the CPU.

A sample's result must not depend on its batch. So on a GPU the hardware decoder gets every JPEG that it supports. By
default DALI divides a batch between it and CUDA, whose pixels differ by up to three levels. Files that DALI decodes
differently or rejects go to the cpu engine; rejected ones are found by halving their batch (`dali_runs`). So do images
that are too large for the device's memory.

The cpu engine may also prepare a fixed share of all samples, so that CPUs and a GPU work on the same block at the same
time. Then only the cpu engine's samples are kept decoded. They save more CPU time per byte, and sending a file to a GPU
is faster than sending an image.

DALI runs the transforms up to the first one that it lacks. The cpu engine's code applies that one, and all that follow,
to DALI's results.

Damage inside a JPEG's entropy-coded data is found only by decoding. DALI then fills the rest with grey, while the cpu
engine rejects the file. Both find truncated files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, math

from mbaas.prep.decoded import Decoded, DecodedRow, DecodedRows, sealed
from mbaas.prep.engines import DEFAULT_MAX_PIXELS, Batch, EngineOf, Prepared
from mbaas.prep.engines.cpu import CpuEngine, ImagePart
from mbaas.prep.engines.dali_runs import Deliver, GraphInput, GraphRuns, PlaceOf, types
from mbaas.prep.geometry import Stage, sizes_after_all
from mbaas.prep.header import Header, UndecodableError
from mbaas.prep.pixels import Image
from mbaas.transforms import (
    CenterCrop,
    ColorJitter,
    Pad,
    Pipeline,
    RandomCrop,
    RandomHorizontalFlip,
    RandomIoUCrop,
    RandomResizedCrop,
    RandomVerticalFlip,
    RandomZoomOut,
    Transform,
)
from mbaas.transforms.base import BLACK, Flips, Recolorings, Size, Step, Windows, WindowTransform
from mbaas.transforms.geometry import PaddingTransform
from mbaas.wire.samples import EngineName

BATCH_PIXELS = 32_000_000
"""Maximum pixels of a batch before cropping: 64 images of 700x700, or two of 12 megapixels.

Decoded, a batch takes 100 MB, and about as much again at each stage of the graph. DALI holds up to three batches: two
in flight, and one whose results are delivered.
"""


SAMPLES = "samples"
"""Name of a graph's first input: encoded files, or decoded images."""

_HEIGHT_WIDTH = (0, 1)
_UNSCALED = (RandomIoUCrop, CenterCrop, RandomZoomOut, Pad, RandomCrop)
"""Transforms that cut or extend images."""

_WINDOWS = (RandomResizedCrop, *_UNSCALED)
"""Transforms whose window is an input of the graph. Those that resize the whole image are not among them."""


class DaliEngine(CpuEngine):
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
        super().__init__(pipeline, seed=seed, threads=threads, max_pixels=max_pixels)
        self._for_dali = for_dali
        self._beside = ThreadPoolExecutor(1, "prep-beside")
        (stages,) = self._runs
        # Numbers of stages (which begin after the decoder) that DALI runs, and in the deterministic prefix. DALI runs
        # the whole prefix, because all transforms that it lacks are random.
        self._on_dali = next((k for k, (_, each) in enumerate(stages) if not each.runs_on_dali), len(stages))
        self._in_prefix = min(max(0, pipeline.prefix - 1), self._on_dali)
        later = [transform for _, transform in stages[self._on_dali :]]
        self._is_whole = not later
        # A window must not write to the memory that it reads, so DALI's results must not be there.
        self._in_place = not any(isinstance(each, WindowTransform) for each in later)
        options: dict[str, Any] = {"threads": threads, "device_id": device_id, "limit": batch_pixels, "unit": "pixels"}
        self._whole = _ImageGraph(stages, slice(self._on_dali), **options)
        self._first = _ImageGraph(stages, slice(self._in_prefix), **options)
        self._rest = _ImageGraph(stages, slice(self._in_prefix, self._on_dali), decoded=True, **options)
        self._graphs = self._whole, self._first, self._rest
        self._kept_after = (self._in_prefix + 1,) if pipeline.prefix else ()

    def prepare(self, batch: Batch, out: NDArray[Any], keep: DecodedRows | None = None) -> Prepared:
        part = self._part(batch, out, keep)
        results, opened = part.results, self._opened(part)
        place, delivered = results.at if self._in_place else None, set[int]()

        def take(images: Mapping[int, Image]) -> None:
            delivered.update(images)
            if self._is_whole:
                for row, image in images.items():
                    results.attempt(row, results.put, row, image)
            else:
                self._complete(part, {row: sealed(image) for row, image in images.items()})

        good, takes = results.good, self._takes(part)
        files = {row: _bytes_of(part, row) for row in np.flatnonzero(good & takes).tolist() if row not in opened}
        working = self._beside.submit(self._make, part, np.flatnonzero(good & ~takes))
        try:
            refused = self._whole.run_on(part, files, take, place)
            going_on = {row: image for row, image in opened.items() if good[row] and takes[row]}
            refused += self._run_rest(part, going_on, take, place)
        finally:
            wait([working])  # because it writes to the block
        working.result()
        if not self._is_whole:
            placed = {*files, *going_on} - delivered - {*refused}
            self._complete(part, {row: image for row in sorted(placed) if (image := results.at(row)) is not None})
        if self._for_dali is None:
            self._keep(part, [row for row in files if row not in refused and row not in results.bad])
        if refused:
            self._make(part, np.array(sorted(refused)))
        return part.finish()

    def close(self) -> None:
        self._beside.shutdown()
        super().close()

    def _complete(self, part: ImagePart, images: Mapping[int, Image]) -> None:
        """Apply the transforms that DALI lacks, and all that follow, to its results."""
        self._make(part, np.array([*images], np.intp), partial(self._completed, images))

    def _completed(self, images: Mapping[int, Image], part: ImagePart, row: int, into: NDArray[Any] | None) -> Image:
        nothing_kept = DecodedRow(DecodedRows((), 0), row, 0)
        return self._run(images[row], part.steps, row, into, nothing_kept, done=1 + self._on_dali)

    def _size_after_prefix(self, part: ImagePart, row: int) -> Size:
        height, width = sizes_after_all(part.sizes, part.steps[: self._in_prefix])[row].tolist()
        return height, width

    def _opened(self, part: ImagePart) -> dict[int, Image]:
        opened = {}

        def open_row(row: int, decoded: Decoded) -> None:
            decoded.check_applied(self._in_prefix + 1)
            if decoded.applied <= self._in_prefix:
                raise UndecodableError(
                    f"it is a decoded sample after {decoded.applied} transforms, and DALI goes on after "
                    f"{self._in_prefix + 1}"
                )
            decoded.check_image(self._size_after_prefix(part, row))
            opened[row] = decoded.values

        for row in np.flatnonzero(part.results.good).tolist():
            decoded = part.decoded[row]
            if decoded is not None and decoded.made_by == self.name:
                part.results.attempt(row, open_row, row, decoded)
        return opened

    def _run_rest(
        self, part: ImagePart, decoded: Mapping[int, Image], take: Deliver, place: PlaceOf | None = None
    ) -> list[int]:
        """Apply DALI's part of the random suffix to decoded samples; return the samples rejected by DALI."""
        if self._in_prefix < self._on_dali:
            return self._rest.run_on(part, decoded, take, place)
        take(decoded)
        return []

    def _keep(self, part: ImagePart, rows: Sequence[int]) -> None:
        # A second graph decodes again, and ends with the deterministic prefix. A sample is kept only if the rest of the
        # pipeline gives the same result from it. The results may differ if a crop comes first: the CPU decoder then
        # decodes only a window, and its pixels may differ from the whole image.
        rooms: dict[int, Image] = {}
        keep = part.results.keep
        if keep.applied not in (None, self._in_prefix + 1):
            return
        for row in rows:
            kept = DecodedRow(keep, row, self._in_prefix + 1, part.headers[row].size, self.name)
            room = kept.room((*self._size_after_prefix(part, row), 3))
            if room is not None:
                rooms[row] = room

        def fill(images: Mapping[int, Image]) -> None:
            for row, image in images.items():
                np.copyto(rooms[row], image)

        def compare(images: Mapping[int, Image]) -> None:
            for row, image in images.items():
                made = part.results.at(row)
                found = image if self._is_whole else self._completed({row: sealed(image)}, part, row, None)
                if made is None or not np.array_equal(found, made):
                    keep.drop(row)

        files = {row: _bytes_of(part, row) for row in rooms}
        refused = self._first.run_on(part, files, fill, rooms.get)
        filled = {row: room for row, room in rooms.items() if row not in refused}
        refused += self._run_rest(part, filled, compare)
        for row in refused:
            keep.drop(row)

    def _takes(self, part: ImagePart) -> NDArray[np.bool_]:
        """Return bool[n], the samples for DALI. Too large ones go to the cpu engine, for its error message."""
        takes = np.array([not _is_left_to_cpu(header) for header in part.headers], bool)
        takes &= np.array([each is None or each.made_by == self.name for each in part.decoded], bool)
        if self._for_dali is not None:
            takes &= self._for_dali(part.batch.ids, part.batch.epoch)
        for step in part.steps:
            if isinstance(step, Windows):
                takes &= step.sizes.prod(axis=1) <= self._max_pixels
        return takes


class _ImageGraph(GraphRuns):
    """A graph of some ``stages``, from files or from ``decoded`` images. Other arguments as for `GraphRuns`."""

    def __init__(self, stages: Sequence[Stage], some: slice, *, decoded: bool = False, **options: Any) -> None:
        self._stages, self._some = stages[some], some
        gpu = options["device_id"] is not None
        super().__init__(lambda: image_graph(self._stages, gpu=gpu, decoded=decoded), **options)

    def run_on(
        self, part: ImagePart, samples: Mapping[int, NDArray[Any]], deliver: Deliver, place: PlaceOf | None
    ) -> list[int]:
        """Prepare these samples of a block, by row; otherwise like `run`. DALI reads ``samples`` in place."""
        feeds: dict[str, GraphInput] = {SAMPLES: samples, **graph_inputs(self._stages, part.steps[self._some])}
        return self.run(np.array([*samples], np.intp), part.sizes.prod(axis=1), feeds, deliver, place)


def _bytes_of(part: ImagePart, row: int) -> NDArray[np.uint8]:
    return np.frombuffer(part.encoded[row], np.uint8)


def _is_left_to_cpu(header: Header) -> bool:
    # DALI decodes these files differently, or not on all devices.
    is_odd = header.format in ("webp", "bmp") or (header.format == "jpeg" and header.channels == 4)
    is_turned_png = header.format == "png" and header.orientation != 1
    return is_odd or is_turned_png or header.as_stored or header.is_animated


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
        elif isinstance(step, Recolorings):
            inputs[f"blends {index}"] = step.changes[:, :, :3].astype(np.float32)
    return inputs


def image_graph(stages: Sequence[Stage], *, gpu: bool, decoded: bool = False) -> Any:
    """Build the nodes of a graph from files or ``decoded`` images to uint8 [height, width, 3] per sample."""
    if decoded:
        made = fn.external_source(name=SAMPLES, no_copy=True, dtype=types.UINT8, ndim=3, layout="HWC")
        made, rest = made.gpu() if gpu else made, stages
    else:
        made, rest = _decoded(stages, gpu)
    for index, transform in rest:
        if isinstance(transform, WindowTransform):
            made = _cut(made, index, transform)
        elif isinstance(transform, RandomHorizontalFlip | RandomVerticalFlip):
            which = _input(f"flip {index}", types.INT32, 0)
            made = (
                fn.flip(made, horizontal=0, vertical=which) if transform.vertical else fn.flip(made, horizontal=which)
            )
        elif isinstance(transform, ColorJitter):
            made = _jittered(made, _input(f"blends {index}", types.FLOAT, 2))
    return made


def _decoded(stages: Sequence[Stage], gpu: bool) -> tuple[Any, Sequence[Stage]]:
    """Decode, and return the remaining stages; on a CPU, a first crop is part of decoding."""
    encoded = fn.external_source(name=SAMPLES, no_copy=True, dtype=types.UINT8, ndim=1)
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
    if isinstance(transform, _UNSCALED):
        fill = transform.padding_of.fill if isinstance(transform, PaddingTransform) else BLACK.fill
        colour = [float(round(level)) for level in fill]
        return fn.slice(images, **_box(index), axes=_HEIGHT_WIDTH, out_of_bounds_policy="pad", fill_values=colour)
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
