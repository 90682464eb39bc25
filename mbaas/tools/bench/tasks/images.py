"""Task "images": classification, with the usual crops for training on ImageNet.

Generated JPEGs are cut from the photographs that are part of scikit-image. Decoding cost depends on pixels, bytes and
content, so noise or flat colour would not do. Files have about 500x400 pixels and 90-110 KB, the means of ImageNet's
training set (Deng et al., 2009). Nothing is downloaded, and the same arguments give the same pixels.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mbaas.errors import DatasetError
from mbaas.samples.fields import IMAGE, Field
from mbaas.tools.bench.tasks.base import Data, FolderTask, Report, made_once, write_files
from mbaas.transforms import DecodeImage, Pipeline, RandomHorizontalFlip, RandomResizedCrop

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

EXTENSIONS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".jfi", ".jif", ".pjpeg", ".pjp", ".png", ".apng", ".webp", ".bmp", ".dib",
)  # fmt: skip
SIDE = 224


class Images(FolderTask):
    """Photographs in one folder per class."""

    name = "images"
    things = "images"
    work = f"random-resized-crop {SIDE} and flip"
    extensions = EXTENSIONS
    kinds = "JPEG, PNG, WebP or BMP files"
    made = Field(IMAGE, (SIDE, SIDE, 3), "uint8")

    def make(self, cache_dir: Path, count: int, *, seed: int, report: Report) -> Data:
        return Data(make_photos(cache_dir, count, seed=seed, report=report))

    def dataset(self, data: Data) -> Dataset:
        from mbaas.dataset import read_images

        return read_images(data.folder)

    def pipeline(self, variant: int = 0) -> Pipeline:
        smallest = 0.08 * (1 + variant % 8)
        return Pipeline([DecodeImage(), RandomResizedCrop(SIDE, scale=(smallest, 1.0)), RandomHorizontalFlip()])


SOURCES = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "motorcycle_right.png",
)
"""Colour photographs with detail everywhere, part of every scikit-image wheel; each becomes a class."""

FILE_BYTES = (90_000, 110_000)
"""Smallest and largest file in bytes; sizes are uniform in between."""

QUALITIES = range(60, 99)
"""JPEG qualities allowed for reaching a file's size."""

_VERSION = 1  # part of the folder's name, so that folders of older code are not used

Photo = NDArray[Any]
"""One decoded photograph: uint8[h, w, 3]."""


def make_photos(root: Path, count: int, *, seed: int = 0, report: Report = print) -> Path:
    """Generate or find a class-per-folder tree of ``count`` JPEGs under ``root``; return the tree's folder.

    ``report`` is called with one line if the tree is generated. Raises DatasetError if scikit-image or one of its
    photographs is missing.
    """
    folder = root / f"photos-v{_VERSION}-n{count}-s{seed}"
    return made_once(folder, lambda path: _write_tree(path, count, seed), f"{count} photographs", report)


def _write_tree(folder: Path, count: int, seed: int) -> None:
    photos = [_photo(name) for name in SOURCES]

    def write(file: Path, index: int, rng: np.random.Generator) -> None:
        file.with_suffix(".jpg").write_bytes(draw_jpeg(photos[index % len(photos)], rng))

    write_files(folder, count, seed, [Path(name).stem for name in SOURCES], write)


def _photo(name: str) -> Photo:
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        raise DatasetError(
            "the benchmark's photographs ship inside scikit-image: pip install scikit-image, or name a folder of your "
            "own with --data"
        )
    path = Path(spec.origin).parent / "data" / name
    pixels = cv2.imread(str(path)) if path.is_file() else None
    if pixels is None:
        raise DatasetError(
            f"scikit-image's photograph {path} is missing or cannot be read; name a folder of your own with --data"
        )
    return pixels


def draw_jpeg(photo: Photo, rng: np.random.Generator) -> bytes:
    """Cut a random window out of ``photo``, as a JPEG of `FILE_BYTES` if one of 50 windows can reach that size."""
    for _ in range(50):
        encoded = _compress(_window(photo, rng), int(rng.integers(*FILE_BYTES)))
        if FILE_BYTES[0] <= len(encoded) <= FILE_BYTES[1]:
            break
    return encoded


def _window(photo: Photo, rng: np.random.Generator) -> Photo:
    """Cut a window of 40-100 % of each side, resized to about 500x400 or 400x500."""
    height, width = int(rng.normal(400, 20)), int(rng.normal(500, 20))
    if rng.random() < 0.25:  # about the fraction of portrait photographs in ImageNet
        height, width = width, height
    rows, cols = (max(2, int(side * rng.uniform(0.4, 1.0))) for side in photo.shape[:2])
    top, left = rng.integers(photo.shape[0] - rows + 1), rng.integers(photo.shape[1] - cols + 1)
    window = photo[top : top + rows, left : left + cols]
    return cv2.resize(window, (width, height), interpolation=cv2.INTER_AREA if rows > height else cv2.INTER_CUBIC)


def _compress(pixels: Photo, target_bytes: int) -> bytes:
    """Encode in the highest quality that does not exceed ``target_bytes`` (or in the lowest)."""
    # bisection: files grow with quality
    low, high = QUALITIES.start, QUALITIES.stop - 1
    best = _encode(pixels, low)
    while low < high:
        quality = (low + high + 1) // 2
        encoded = _encode(pixels, quality)
        if len(encoded) <= target_bytes:
            low, best = quality, encoded
        else:
            high = quality - 1
    return best


def _encode(pixels: Photo, quality: int) -> bytes:
    """Encode with 4:2:0 chroma, like nearly all photographs on the web."""
    _, encoded = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])
    return bytes(encoded)
