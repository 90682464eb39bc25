"""Time to the first minibatch of many small files, listed and served in a running cluster.

Every round serves the feed again, so only the file system's page cache stays warm.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import cv2
import numpy as np
from rich.table import Table

import mbaas
from mbaas import transforms as T
from mbaas.base.units import count, seconds
from mbaas.ray_cluster import connection
from mbaas.tools.bench.render import figure_table

SIDE, BATCH, CLASSES = 8, 256, 100
PIPELINE = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])


@dataclass(frozen=True)
class First:
    """Times until the first minibatch; all but the listing are medians over rounds.

    Attributes:
        images: number of images.
        listing_s: listing the images, once.
        again_s: reading the saved listing.
        serving_s: serving the feed.
        joining_s: from then to the first minibatch.
        longest_s: from serving to the first minibatch, the longest round.
        block_samples: samples of a block; the first minibatch needs a whole block.
    """

    images: int
    listing_s: float
    again_s: float
    serving_s: float
    joining_s: float
    longest_s: float
    block_samples: int


def measure(*, images: int, rounds: int) -> First:
    """Make ``images`` images of 8x8 pixels, list them, and serve them ``rounds`` times."""
    folder = Path(tempfile.mkdtemp(prefix="mbaas-first-"))
    try:
        _make(folder / "images", images)
        listing_s, data = _listed(folder)
        again_s, data = _listed(folder)
        with connection.separate_ray():
            _first_batch(data)  # the first feed of a cluster also waits for Ray's first processes
            found = [_first_batch(data) for _ in range(rounds)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    served, joined, blocks = zip(*found, strict=True)
    longest_s = max(map(sum, zip(served, joined, strict=True)))
    return First(images, listing_s, again_s, median(served), median(joined), longest_s, int(median(blocks)))


def _make(folder: Path, images: int) -> None:
    """Write the images, all with the same content: only their number matters."""
    pixels = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
    content = cv2.imencode(".png", pixels)[1].tobytes()
    for label in range(CLASSES):
        (folder / f"{label:03}").mkdir(parents=True)
    for number in range(images):
        (folder / f"{number % CLASSES:03}" / f"{number:08}.png").write_bytes(content)


def _listed(folder: Path) -> tuple[float, mbaas.Dataset]:
    began = time.perf_counter()
    data = mbaas.read_images(folder / "images", listing=folder / "listing.parquet")
    return time.perf_counter() - began, data


def _first_batch(data: mbaas.Dataset) -> tuple[float, float, int]:
    began = time.perf_counter()
    with mbaas.serve("first", data, PIPELINE, batch_size=BATCH) as feed:
        served = time.perf_counter()
        with mbaas.join("first", "trial", format="numpy") as loader:
            next(iter(loader))
            return served - began, time.perf_counter() - served, feed.status().block_samples


def table(result: First) -> Table:
    """Return a table of the times."""
    shown = figure_table(f"{count(result.images)} images of {SIDE}x{SIDE} pixels", ("what", "time"), words=("what",))
    for what, took_s in (
        ("listed", result.listing_s),
        ("the kept listing read", result.again_s),
        ("served", result.serving_s),
        (f"first minibatch, of a block of {count(result.block_samples)}", result.joining_s),
        ("from serving to the first minibatch, at most", result.longest_s),
    ):
        shown.add_row(what, seconds(took_s))
    return shown
