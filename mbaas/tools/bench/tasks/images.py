"""Task "images": classification, with the usual crops for training on ImageNet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mbaas.samples.fields import IMAGE, Field
from mbaas.tools.bench.tasks.base import Data, FolderTask, Report
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
        from mbaas.tools.bench.photos import make_photos

        return Data(make_photos(cache_dir, count, seed=seed, report=report))

    def dataset(self, data: Data) -> Dataset:
        from mbaas.dataset import read_images

        return read_images(data.folder)

    def pipeline(self) -> Pipeline:
        return Pipeline([DecodeImage(), RandomResizedCrop(SIDE), RandomHorizontalFlip()])
