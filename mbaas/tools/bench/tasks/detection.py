"""Task "detection": photographs with boxes, augmented as for SSD (Liu et al., 2016)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import DatasetError
from mbaas.samples.fields import IMAGE, LABELS, Field, Packed
from mbaas.tools.bench.tasks.base import Data, Report, Samples, Task, checked_folder
from mbaas.transforms import (
    Boxes,
    ColorJitter,
    DecodeImage,
    Pipeline,
    RandomHorizontalFlip,
    RandomIoUCrop,
    Resize,
)

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

SIDE = 300
BRIGHTNESS, CONTRAST, SATURATION = 0.125, 0.5, 0.5
"""Amounts of torchvision's RandomPhotometricDistort."""


class Detection(Task):
    """Photographs with COCO annotations of the objects in them."""

    name = "detection"
    things = "images with boxes"
    work = f"random-IoU-crop to {SIDE}, flip and colour"
    made = Field(IMAGE, (SIDE, SIDE, 3), "uint8")
    beside = ("boxes", LABELS)

    def make(self, cache_dir: Path, count: int, *, seed: int, report: Report) -> Data:
        from mbaas.tools.bench.objects import make_annotations
        from mbaas.tools.bench.photos import make_photos

        folder = make_photos(cache_dir, count, seed=seed, report=report)
        return Data(folder, make_annotations(folder, seed=seed, report=report))

    def find(self, data: Path, image_folder: Path | None) -> Data:
        if not data.is_file():
            problem = "is a folder" if data.is_dir() else "does not exist"
            raise DatasetError(f"{data} {problem}; data must be a JSON file of COCO's instances")
        assert image_folder is not None, "BenchSettings asks for it"
        found = Data(checked_folder(image_folder, "image_folder must be the folder of the images"), data)
        self.dataset(found)  # raises errors for invalid files and missing images
        return found

    def samples(self, data: Data) -> Samples:
        assert data.annotations is not None
        said = json.loads(data.annotations.read_bytes())
        label_of = {category: label for label, category in enumerate(sorted(each["id"] for each in said["categories"]))}
        boxes: dict[int, list[list[float]]] = {image["id"]: [] for image in said["images"]}
        labels: dict[int, list[int]] = {image["id"]: [] for image in said["images"]}
        for each in said["annotations"]:
            left, top, width, height = each["bbox"]
            boxes[each["image_id"]].append([left, top, left + width, top + height])
            labels[each["image_id"]].append(label_of[each["category_id"]])
        files = [data.folder / image["file_name"] for image in said["images"]]
        known = {
            "boxes": _packed([np.array(some, np.float32).reshape(-1, 4) for some in boxes.values()]),
            LABELS: _packed([np.array(some, np.int64) for some in labels.values()]),
        }
        return Samples(files, known)

    def dataset(self, data: Data) -> Dataset:
        from mbaas.dataset import read_coco

        assert data.annotations is not None
        return read_coco(data.annotations, data.folder, fields=self.beside)

    def pipeline(self) -> Pipeline:
        return Pipeline(
            [
                DecodeImage(),
                RandomIoUCrop(),
                Resize((SIDE, SIDE)),
                RandomHorizontalFlip(),
                ColorJitter(BRIGHTNESS, CONTRAST, SATURATION),
            ],
            boxes=Boxes(beside=(LABELS,)),
        )


def image_ids(annotations: Path) -> NDArray[np.int64]:
    """Return the annotation file's image id of each sample: int64[n]."""
    return np.array([image["id"] for image in json.loads(annotations.read_bytes())["images"]], np.int64)


def _packed(values: list[NDArray[Any]]) -> Packed:
    bounds = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(each) for each in values], out=bounds[1:])
    return Packed(np.concatenate(values), bounds)
