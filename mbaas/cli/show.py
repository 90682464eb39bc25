"""``mbaas show`` draws the first samples of an epoch as trials will get them; no Ray is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mbaas.cli import feed_file, picture_grid, reading
from mbaas.cli.console import err, line, out, plain, say_note
from mbaas.dataset import Dataset
from mbaas.errors import ConfigError
from mbaas.fields import LABEL, Column, Packed
from mbaas.messages import BadSample
from mbaas.prep.boxes import edges_of
from mbaas.prep.preview import Preview, first_samples
from mbaas.transforms import Pipeline
from mbaas.units import counted, exact

COUNT = 32
"""Samples that are drawn, unless somebody asks for another number."""

NAMED = 5
"""Bad samples that are named; all are counted."""


def show(file: Path, *, to: Path, epoch: int, count: int | None) -> None:
    """Draw the first samples of an epoch of the feed that ``file`` describes.

    Args:
        file: as for `mbaas serve`.
        to: the PNG.
        epoch: the feed's number of the epoch, from 0.
        count: how many samples; None: as many as a minibatch has, `COUNT` at most.

    Raises:
        ConfigError: the file cannot work, or samples are no images.
        DatasetError: the data is not there.
        BadSampleError: none of the samples can be prepared.
    """
    wanted = feed_file.load(file)
    if not wanted.pipeline.has_images:
        raise ConfigError(f"only images can be drawn, but {wanted.pipeline.decoder!r} makes none")
    picture_grid.check_path(to)
    options = wanted.options
    dataset = reading.read(wanted.data)
    most = count if count is not None else min(COUNT, options.batch_size)
    with err.status(plain(f"preparing {counted(most, 'sample')} ...")):
        found = first_samples(
            dataset, wanted.pipeline, count=most, seed=options.seed, shuffle=options.shuffle, epoch=epoch
        )
        drawn = counted(len(found.samples), "sample")
        title = [
            f"{wanted.name}: the first {drawn} of epoch {epoch}, seed {options.seed}",
            *map(repr, wanted.pipeline.transforms),
        ]
        picture_grid.draw(cells_of(dataset, wanted.pipeline, found), to, title=title)
    _tell_bad(found.bad, on_bad_sample=options.on_bad_sample)
    line(out, f"{to}: the first {drawn} of epoch {epoch} of feed {wanted.name!r}, as every trial gets them")


def cells_of(dataset: Dataset, pipeline: Pipeline, found: Preview) -> list[picture_grid.Cell]:
    """Return what is drawn of each sample: its image, what its label and its id are, and its boxes."""
    images, none = _checked_images(found.samples), np.zeros((0, 4))
    cells = []
    for row, (sample_id, image) in enumerate(zip(found.sample_ids.tolist(), images, strict=True)):
        edges = none
        if pipeline.boxes is not None:
            (values, _) = found.known[pipeline.boxes.field][row : row + 1].own()
            edges = edges_of(values, pipeline.boxes.format)
        label = _label(dataset, found, row)
        lines = (label, f"sample {sample_id}") if label else (f"sample {sample_id}",)
        cells.append(picture_grid.Cell(image, lines, edges))
    return cells


def _label(dataset: Dataset, found: Preview, row: int) -> str:
    """Say in a word what a sample's label is; nothing if it has none, or an array."""
    labels = found.known.get(LABEL.name)
    if not isinstance(labels, np.ndarray) or labels.ndim != 1:
        return ""
    return dataset.class_names[int(labels[row])] if dataset.class_names else exact(labels[row].item())


def _checked_images(samples: Column) -> list[NDArray[np.uint8]]:
    """Return images of one size: smaller ones among larger ones lie at the upper left of a white sheet."""
    images = [samples.value(row) if isinstance(samples, Packed) else samples[row] for row in range(len(samples))]
    for image in images:
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ConfigError(
                "only images, uint8 [height, width, 3], can be drawn, but the pipeline makes "
                f"{image.dtype.name} {list(image.shape)} of a sample"
            )
    size = tuple(max(image.shape[axis] for image in images) for axis in (0, 1))
    return [image if image.shape[:2] == size else _on_sheet(image, size) for image in images]


def _on_sheet(image: NDArray[np.uint8], size: tuple[int, ...]) -> NDArray[np.uint8]:
    sheet = np.full((*size, 3), 255, np.uint8)
    sheet[: image.shape[0], : image.shape[1]] = image
    return sheet


def _tell_bad(bad: tuple[BadSample, ...], *, on_bad_sample: str) -> None:
    for sample in bad[:NAMED]:
        say_note(f"{sample.uri} cannot be prepared: {sample.reason}")
    if bad:
        then = "is left out" if on_bad_sample == "skip" else "is an error in each trial, unless on_bad_sample is skip"
        say_note(f"{counted(len(bad), 'bad sample')} among the first of this epoch; each {then}")
