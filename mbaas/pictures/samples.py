"""Prepares and draws the first samples of an epoch: each image with its class, boxes, masks and keypoints.

A minibatch is a pure function of (dataset, pipeline, seed, epoch, index), so no feed has to run, and the samples are
those that every trial would get.
"""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.base import notebook
from mbaas.base.units import counted, exact
from mbaas.dataset import Dataset, SampleReader
from mbaas.dataset.base import bounded, read_encoded
from mbaas.dataset.storage.retry import PatientReader
from mbaas.errors import BadSampleError, ConfigError, MbaasError
from mbaas.pictures import grid
from mbaas.pictures.grid import Cell
from mbaas.prep.engines import Batch, Engine, make_engine
from mbaas.prep.probe import PROBE_SAMPLES, first_good
from mbaas.samples.fields import LABEL, Arrays, Column, Field, value_of
from mbaas.samples.order import Ids, SampleOrder, Shuffle
from mbaas.transforms import Pipeline
from mbaas.transforms.on_image import edges_of
from mbaas.wire.samples import BadSample

_READERS = 8
"""Number of read threads; they mostly wait for storage."""

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


# ---- preparing ----


@dataclass(frozen=True)
class Preview:
    """Samples as prepared by a feed.

    Attributes:
        sample_ids: int64[n], in the order of the epoch.
        samples: [n, *shape], or packed, the output of the cpu engine; for images uint8 [n, height, width, 3].
        known: the samples' dataset fields, with boxes moved along with the pixels.
        bad: samples of the same range that cannot be prepared; not included above.
    """

    sample_ids: Ids
    samples: Column
    known: Arrays
    bad: tuple[BadSample, ...]


def first_samples(
    dataset: Dataset, pipeline: Pipeline, *, count: int, seed: int = 0, shuffle: bool = True, epoch: int = 0
) -> Preview:
    """Prepare the first samples of an epoch that is shuffled as a whole.

    Args:
        dataset, pipeline, seed, shuffle: as for `mbaas.serve`.
        count: number of samples, at least 1; limited to the dataset's size.

    Raises:
        ConfigError: the dataset lacks a field that the pipeline needs, or the seed is out of range.
        BadSampleError: none of the samples can be prepared; names the first.
    """
    pipeline.known(dataset.fields)  # raises ConfigError for missing fields
    dataset = bounded(dataset)
    order = SampleOrder(len(dataset), seed, block_samples=count, shuffled=shuffle)
    ids = order.samples_at(Shuffle(epoch), 0, min(count, len(dataset)))
    engine = make_engine("cpu", pipeline, seed=seed)
    try:
        return _prepared(dataset, engine, ids, epoch)
    finally:
        engine.close()


def _prepared(dataset: Dataset, engine: Engine, ids: Ids, epoch: int) -> Preview:
    stored, stored_ids = dataset.stored, dataset.stored_ids(ids, epoch).tolist()
    reader = PatientReader(stored.reader())
    with ThreadPoolExecutor(_READERS, thread_name_prefix="mbaas-preview") as pool:
        reads = [pool.submit(read_encoded, stored, reader, stored_id) for stored_id in stored_ids]
    encoded: dict[int, NDArray[np.uint8]] = {}
    reasons: dict[int, str] = {}
    for row, read in enumerate(reads):
        try:
            encoded[row] = read.result()
        except BadSampleError as error:
            reasons[row] = error.reason
    rows = np.array([*encoded], np.intp)
    if encoded:
        batch = Batch([*encoded.values()], ids[rows], epoch, dataset.values_in(epoch, ids[rows]))
        prepared = engine.prepare(batch, _made(dataset, PatientReader(dataset.reader()), engine).empty(len(rows)))
        reasons |= {int(rows[flaw.row]): flaw.reason for flaw in prepared.bad}
    bad = [BadSample(int(ids[row]), stored.uri(stored_ids[row]), reason) for row, reason in sorted(reasons.items())]
    if len(bad) == len(ids):
        raise BadSampleError(bad[0].uri, bad[0].reason)
    good = np.flatnonzero(~np.isin(rows, [*reasons]))
    return Preview(ids[rows[good]], prepared.made[good], prepared.known, tuple(bad))


def _made(dataset: Dataset, reader: SampleReader, engine: Engine) -> Field:
    """Return the prepared field, from the first of the dataset's samples that can be prepared, as a feed does."""

    def made(sample_id: int) -> Field:
        encoded = read_encoded(dataset, reader, sample_id)
        return engine.field(encoded, dataset.uri(sample_id), dataset.values(np.array([sample_id])))

    return first_good(made, min(PROBE_SAMPLES, len(dataset)))


# ---- drawing ----


def cells_of(dataset: Dataset, pipeline: Pipeline, found: Preview) -> list[Cell]:
    """Return the image, the caption (label and id), the boxes and the keypoints of each sample.

    All images get the size of the largest, on a white sheet. Raises ConfigError if samples are not images.
    """
    cells, images = [], _checked_images(found.samples)
    size = max(image.shape[0] for image in images), max(image.shape[1] for image in images)
    for row, image in enumerate(images):
        edges, points = np.zeros((0, 4)), np.zeros((0, 2))
        if pipeline.boxes is not None:
            edges = edges_of(value_of(found.known[pipeline.boxes.field], row), pipeline.boxes.format)
        if pipeline.keypoints is not None:
            points = _seen(value_of(found.known[pipeline.keypoints.field], row))
        if pipeline.masks is not None:
            image = _under(value_of(found.known[pipeline.masks.field], row), image)
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
    images = [value_of(samples, row) for row in range(len(samples))]
    for image in images:
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ConfigError(
                "only images, uint8 [height, width, 3], can be drawn, but the pipeline makes "
                f"{image.dtype.name} {list(image.shape)} of a sample"
            )
    return images


def _on_sheet(image: grid.Image, size: tuple[int, int]) -> grid.Image:
    below, right = size[0] - image.shape[0], size[1] - image.shape[1]
    return np.pad(image, ((0, below), (0, right), (0, 0)), constant_values=255)
