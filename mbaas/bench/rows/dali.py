"""Row "dali": an NVIDIA DALI pipeline on the CPU in every trial.

DALI's own operators throughout: its reader maps the files, its decoder decodes only the window that is kept, its resize
filters with antialiasing as the other rows do. Prep runs in DALI's threads, asynchronously, two minibatches ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mbaas.bench.rows import IMAGE_SIZE, Minibatch, TrialSpec


def build(spec: TrialSpec, files: Sequence[Path], threads: int) -> Any:
    """Build a pipeline that gives (uint8[224, 224, 3], int32[1] sample id) for each sample."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def
    def random_resized_crop() -> Any:
        encoded, ids = fn.readers.file(
            files=[str(file) for file in files],
            labels=list(range(len(files))),  # ids instead of classes, so that epochs can be checked
            shuffle_after_epoch=True,
            pad_last_batch=True,  # else the reader would fill the last minibatch from the next epoch
            name="files",
        )
        crop = fn.decoders.image_random_crop(
            encoded,
            device="cpu",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
        )
        image = fn.resize(crop, size=IMAGE_SIZE, interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(image, horizontal=fn.random.coin_flip()), ids

    pipe = random_resized_crop(
        batch_size=spec.batch,
        num_threads=threads,
        device_id=None,  # no GPU
        seed=spec.seed + spec.trial + 1,
        prefetch_queue_depth=2,
    )
    pipe.build()
    return pipe


class PerTrialPipeline:
    """A DALI pipeline. See `mbaas.bench.rows.EpochLoader`."""

    def __init__(self, spec: TrialSpec) -> None:
        files = spec.files
        self.samples = len(files)
        self._pipe = build(spec, files, max(1, spec.cores // spec.trials))

    def epoch(self) -> Iterator[Minibatch]:
        left = self.samples
        while left > 0:
            images, labels = self._pipe.run()
            ids = labels.as_array()[:left, 0].astype(np.int64)  # the last minibatch is padded: cut that off
            yield np.asarray(images.as_tensor())[: len(ids)], ids  # a view; as_array would copy
            left -= len(ids)

    def close(self) -> None:
        del self._pipe


def open_loader(spec: TrialSpec) -> PerTrialPipeline:
    """Open the loader of one trial."""
    return PerTrialPipeline(spec)
