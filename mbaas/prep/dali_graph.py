"""Builds a DALI graph from an image pipeline, and the data that is fed to it.

The graph is static. Random parameters are inputs, from the same plan that the cpu engine executes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, math

from mbaas.prep.dali_runs import types
from mbaas.prep.plan import Stage
from mbaas.transforms import (
    CenterCrop,
    ColorJitter,
    RandomHorizontalFlip,
    RandomIoUCrop,
    RandomResizedCrop,
    RandomZoomOut,
    Transform,
)
from mbaas.transforms.base import Flips, Step, Windows, WindowTransform

ENCODED, DECODED = "encoded", "decoded"
"""Name of a graph's first input: encoded files, or decoded images."""

_HEIGHT_WIDTH = (0, 1)
_WINDOWS = (RandomResizedCrop, RandomIoUCrop, CenterCrop, RandomZoomOut)
"""Transforms whose window is an input of the graph. Resize is not among them: its window is the whole image."""


def feeds(stages: Sequence[Stage], steps: Sequence[Step]) -> dict[str, NDArray[Any]]:
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


def images(stages: Sequence[Stage], *, gpu: bool, decoded: bool = False) -> Any:
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
