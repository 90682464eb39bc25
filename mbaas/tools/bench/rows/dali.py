"""Row "dali": an NVIDIA DALI pipeline in every trial, on the CPU or on the GPU.

It uses the operators of DALI that are closest to the other rows. Files are mapped, only the window of an image is
decoded, and resizing is antialiased. The crop for boxes is SSD's, like RandomIoUCrop. DALI resamples audio with its own
filter, and masks are 0 dB, not the mean. Prep runs asynchronously, two minibatches ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.tools.bench.rows import Epoch, Minibatch, RowSpec
from mbaas.tools.bench.tasks import audio, detection, images
from mbaas.transforms import RandomIoUCrop

Nodes = tuple[Any, ...]
"""Outputs of a graph: the prepared sample, its id, and fields of varying length."""

_EPOCHS: dict[str, Any] = {
    "shuffle_after_epoch": True,
    "pad_last_batch": True,  # else the reader fills the last minibatch from the next epoch
    "name": "files",
}
"""Options of all readers."""


def _files(spec: RowSpec) -> tuple[Any, Any]:
    # Sample ids instead of classes, so that epochs can be checked.
    from nvidia.dali import fn

    files = [str(file) for file in spec.samples().files]
    encoded, ids = fn.readers.file(files=files, labels=list(range(len(files))), **_EPOCHS)
    return encoded, ids


def _images(spec: RowSpec) -> Nodes:
    from nvidia.dali import fn, types

    encoded, ids = _files(spec)
    crop = fn.decoders.image_random_crop(
        encoded,
        device="mixed" if spec.settings.gpu else "cpu",
        output_type=types.RGB,
        random_area=[0.08, 1.0],
        random_aspect_ratio=[3 / 4, 4 / 3],
    )
    image = fn.resize(crop, size=images.SIDE, interp_type=types.INTERP_LINEAR, antialias=True)
    return fn.flip(image, horizontal=fn.random.coin_flip()), ids


def _detection(spec: RowSpec) -> Nodes:
    from nvidia.dali import fn, types

    read: Any = fn.readers.coco(
        file_root=str(spec.data.folder),
        annotations_file=str(spec.data.annotations),
        ltrb=True,
        ratio=True,
        image_ids=True,
        skip_empty=False,
        **_EPOCHS,
    )
    encoded, boxes, labels, ids = read
    like = RandomIoUCrop()
    window: Any = fn.random_bbox_crop(
        boxes,
        labels,
        bbox_layout="xyXY",
        thresholds=[option for option in like.sampler_options if option < 1],
        all_boxes_above_threshold=False,  # one box is enough, as in torchvision
        allow_no_crop=True,  # the option of 1
        scaling=[like.min_scale, like.max_scale],
        aspect_ratio=[like.min_aspect_ratio, like.max_aspect_ratio],
        num_attempts=like.trials,
    )
    start, size, boxes, labels = window
    crop = fn.decoders.image_slice(encoded, start, size, device="cpu", output_type=types.RGB)
    side = detection.SIDE
    image = fn.resize(crop, size=(side, side), interp_type=types.INTERP_LINEAR, antialias=True)
    is_mirrored = fn.random.coin_flip()
    image = fn.flip(image, horizontal=is_mirrored)
    amounts = detection.BRIGHTNESS, detection.CONTRAST, detection.SATURATION
    brightness, contrast, saturation = (fn.random.uniform(range=(1 - amount, 1 + amount)) for amount in amounts)
    image = fn.color_twist(image, brightness=brightness, contrast=contrast, saturation=saturation)
    return image, ids, fn.bb_flip(boxes, ltrb=True, horizontal=is_mirrored) * float(side), labels


def _audio(spec: RowSpec) -> Nodes:
    from nvidia.dali import fn, types

    encoded, ids = _files(spec)
    rate = audio.RATE
    sound, _ = fn.decoders.audio(encoded, sample_rate=float(rate), downmix=True, dtype=types.FLOAT)
    # negative if the audio is shorter than a second, which is then padded at random offsets
    longer = fn.cast(sound.shape()[0], dtype=types.FLOAT) - float(rate)
    start = fn.cast(fn.random.uniform(range=(0.0, 1.0)) * longer, dtype=types.INT32)
    second = fn.slice(sound, start=start, shape=rate, axes=[0], out_of_bounds_policy="pad")
    power = fn.spectrogram(second, nfft=audio.WINDOW, window_length=audio.WINDOW, window_step=audio.HOP, power=2)
    mels = fn.mel_filter_bank(power, sample_rate=float(rate), nfilter=audio.MELS, mel_formula="htk", normalize=False)
    decibels = fn.to_decibels(mels, multiplier=10.0, reference=1.0, cutoff_db=-audio.TOP_DB)
    for axis, (count, most) in enumerate((audio.FREQ_MASKS, audio.TIME_MASKS)):
        length = audio.Audio.made.shape[1 - axis]
        width = fn.random.uniform(range=(0.0, float(most)), shape=[count])
        place = fn.random.uniform(range=(0.0, 1.0), shape=[count]) * (float(length or 0) - width)
        decibels = fn.erase(decibels, anchor=place, shape=width, axes=[axis])
    return fn.transpose(decibels, perm=[1, 0]), ids


_GRAPHS: dict[str, Callable[[RowSpec], Nodes]] = {"images": _images, "detection": _detection, "audio": _audio}


def build(spec: RowSpec, threads: int) -> Any:
    """Build the pipeline of a task, with `Nodes` as outputs."""
    from nvidia.dali import pipeline_def

    @pipeline_def
    def graph() -> Nodes:
        return _GRAPHS[spec.task.name](spec)

    pipe = graph(
        batch_size=spec.batch,
        num_threads=threads,
        device_id=0 if spec.settings.gpu else None,
        seed=spec.settings.seed + spec.trial + 1,
        prefetch_queue_depth=2,
    )
    pipe.build()
    return pipe


@contextmanager
def loader(spec: RowSpec) -> Iterator[Epoch]:
    """Run a DALI pipeline in a trial."""
    samples, sample_of = len(spec.samples().files), _sample_of(spec)
    pipe = build(spec, max(1, spec.settings.cores // spec.trials))

    def view(made: Any) -> Any:
        if not spec.settings.gpu:
            return np.asarray(made.as_tensor())
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(made.as_tensor())

    def epoch() -> Iterator[Minibatch]:
        left = samples
        while left > 0:
            made, labels, *beside = pipe.run()
            ids = sample_of(labels.as_array()[:left, 0].astype(np.int64))  # the last minibatch is padded
            pieces = [np.asarray(values[row]) for values in beside for row in range(len(ids))]
            yield [view(made)[: len(ids)], *pieces], ids
            left -= len(ids)

    yield epoch


def _sample_of(spec: RowSpec) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return a function from the ids in a graph's output to sample ids."""
    if spec.data.annotations is None:
        return lambda ids: ids
    known = detection.image_ids(spec.data.annotations)  # ids given by DALI's COCO reader
    order = np.argsort(known)
    return lambda ids: order[np.searchsorted(known, ids, sorter=order)]
