"""Draws a feed's samples: each image with its class, boxes, masks and keypoints."""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.base import notebook
from mbaas.base.units import counted, exact
from mbaas.dataset import Dataset
from mbaas.errors import ConfigError, MbaasError
from mbaas.pictures import grid
from mbaas.pictures.grid import Cell
from mbaas.pictures.preview import Preview, first_samples
from mbaas.prep.geometry import edges_of
from mbaas.samples.fields import LABEL, Column, Packed
from mbaas.transforms import Pipeline

IN_NOTEBOOK, NOTEBOOK_SIDE = 8, 128
"""Number of samples shown in a notebook, and pixels of their longer side: less than 600 kB for any content."""

NOTEBOOK_S = 10.0
"""Timeout for this picture."""

MASK_SHARE = 0.5
"""Opacity of masks."""

MASK_COLOURS = np.array(
    [[228, 26, 28], [55, 126, 184], [77, 175, 74], [152, 78, 163], [255, 127, 0], [0, 180, 200]], np.float64
)
"""RGB of an image's masks, in turn: ColorBrewer's Set1, with cyan instead of yellow, the colour of boxes."""


def cells_of(dataset: Dataset, pipeline: Pipeline, found: Preview) -> list[Cell]:
    """Return the image, the caption (label and id), the boxes and the keypoints of each sample.

    All images get the size of the largest, on a white sheet. Raises ConfigError if samples are not images.
    """
    cells, images = [], _checked_images(found.samples)
    size = max(image.shape[0] for image in images), max(image.shape[1] for image in images)
    for row, image in enumerate(images):
        edges, points = np.zeros((0, 4)), np.zeros((0, 2))
        if pipeline.boxes is not None:
            edges = edges_of(_value(found.known[pipeline.boxes.field], row), pipeline.boxes.format)
        if pipeline.keypoints is not None:
            points = _seen(_value(found.known[pipeline.keypoints.field], row))
        if pipeline.masks is not None:
            image = _under(_value(found.known[pipeline.masks.field], row), image)
        label, number = _label(dataset, found, row), f"sample {found.sample_ids[row]}"
        lines = (label, number) if label else (number,)
        cells.append(Cell(_on_sheet(image, size), lines, edges, points))
    return cells


def html_of(dataset: Dataset, pipeline: Pipeline, *, seed: int, shuffle: bool) -> str:
    """Return a picture of a feed's first samples for a notebook, or the reason for its absence.

    The result is HTML, well-formed as XML; empty if samples are not images. Samples are prepared in this process, so
    the feed is not affected. Arguments are as for `mbaas.serve`.
    """
    if not pipeline.has_images:
        return ""
    answer: list[str] = []
    # In a thread, so that hanging storage does not block the notebook's cell.
    drawing = threading.Thread(
        target=lambda: answer.append(_drawn(dataset, pipeline, seed=seed, shuffle=shuffle)),
        name="mbaas-picture",
        daemon=True,
    )
    drawing.start()
    drawing.join(NOTEBOOK_S)
    return answer[0] if answer else notebook.sentence("the first samples could not be prepared in time for a picture")


def _drawn(dataset: Dataset, pipeline: Pipeline, *, seed: int, shuffle: bool) -> str:
    try:
        found = first_samples(dataset, pipeline, count=IN_NOTEBOOK, seed=seed, shuffle=shuffle)
        png = io.BytesIO()
        grid.draw(cells_of(dataset, pipeline, found), png, title=[], most_side=NOTEBOOK_SIDE)
    except ConfigError:  # a Map may turn an image into another array
        return ""
    except MbaasError as error:
        return notebook.sentence(f"no picture of the first samples: {error}")
    return notebook.picture(png.getvalue(), f"the first {counted(len(found.samples), 'sample')} of epoch 0")


def _value(column: Column, row: int) -> NDArray[Any]:
    return column.value(row) if isinstance(column, Packed) else column[row]


def _seen(points: NDArray[Any]) -> NDArray[np.float64]:
    """Return [n, 2], x and y of the labelled points of [..., 2] or [..., 3]."""
    flat = points.reshape(-1, points.shape[-1]).astype(np.float64)
    return flat[flat[:, 2] > 0, :2] if flat.shape[1] == 3 else flat


def _under(masks: NDArray[Any], image: grid.Image) -> grid.Image:
    """Draw translucent masks uint8[k, height, width] over an image."""
    mixed = image.astype(np.float64)
    for number, mask in enumerate(masks):
        on = mask > 0
        mixed[on] += MASK_SHARE * (MASK_COLOURS[number % len(MASK_COLOURS)] - mixed[on])
    return np.rint(mixed).astype(np.uint8)


def _label(dataset: Dataset, found: Preview, row: int) -> str:
    labels = found.known.get(LABEL.name)
    if not isinstance(labels, np.ndarray) or labels.ndim != 1:
        return ""
    return dataset.class_names[int(labels[row])] if dataset.class_names else exact(labels[row].item())


def _checked_images(samples: Column) -> list[grid.Image]:
    images = [_value(samples, row) for row in range(len(samples))]
    for image in images:
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ConfigError(
                "only images, uint8 [height, width, 3], can be drawn, but the pipeline makes "
                f"{image.dtype.name} {list(image.shape)} of a sample"
            )
    return images


def _on_sheet(image: grid.Image, size: tuple[int, int]) -> grid.Image:
    if image.shape[:2] == size:
        return image
    sheet = np.full((*size, 3), 255, np.uint8)
    sheet[: image.shape[0], : image.shape[1]] = image
    return sheet
