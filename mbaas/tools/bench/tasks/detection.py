"""Task "detection": photographs with boxes, augmented as for SSD (Liu et al., 2016).

Loading does not look at the content of boxes, so those of generated photographs are random. Numbers and sizes are
similar to COCO (Lin et al., 2014): about seven per image, a third each smaller than 32x32 pixels, up to 96x96, and
larger.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import DatasetError
from mbaas.prep.engines import DEFAULT_MAX_PIXELS
from mbaas.prep.header import peek
from mbaas.samples.fields import IMAGE, LABELS, Field, Packed
from mbaas.tools.bench.tasks.base import Data, Report, Samples, Task, checked_folder, files_below, made_once
from mbaas.transforms import Boxes, ColorJitter, DecodeImage, Pipeline, RandomHorizontalFlip, RandomIoUCrop, Resize

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

SIDE = 300
BRIGHTNESS, CONTRAST, SATURATION = 0.125, 0.5, 0.5
"""Amounts of torchvision's RandomPhotometricDistort."""

CATEGORIES = 80
MEAN_OBJECTS = 7.3
MOST_OBJECTS = 60
WITHOUT = 0.01
"""Fraction of images without objects."""

SIDES = (8.0, 320.0)
"""Smallest and largest side of an object's square before its aspect ratio is drawn, in pixels; log-uniform."""


class Detection(Task):
    """Photographs with COCO annotations of the objects in them."""

    name = "detection"
    things = "images with boxes"
    work = f"random-IoU-crop to {SIDE}, flip and colour"
    made = Field(IMAGE, (SIDE, SIDE, 3), "uint8")
    beside = ("boxes", LABELS)

    def make(self, cache_dir: Path, count: int, *, seed: int, report: Report) -> Data:
        from mbaas.tools.bench.tasks.images import make_photos

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

    def pipeline(self, variant: int = 0) -> Pipeline:  # noqa: ARG002
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
    """The annotation file's image id of each sample: int64[n]."""
    return np.array([image["id"] for image in json.loads(annotations.read_bytes())["images"]], np.int64)


def _packed(values: list[NDArray[Any]]) -> Packed:
    bounds = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(each) for each in values], out=bounds[1:])
    return Packed(np.concatenate(values), bounds)


def make_annotations(folder: Path, *, seed: int = 0, report: Report = print) -> Path:
    """Generate or find a JSON file next to ``folder``, a class-per-folder tree of JPEGs; return its path.

    ``report`` is called with one line if the file is generated.
    """
    path = folder.parent / f"{folder.name}-objects-v1-s{seed}.json"
    return made_once(path, partial(_write_annotations, folder, seed), "annotations", report)


def _write_annotations(folder: Path, seed: int, path: Path) -> None:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, file in enumerate(files_below(folder, (".jpg",))):
        header = peek(memoryview(file.read_bytes()), DEFAULT_MAX_PIXELS)
        name = file.relative_to(folder).as_posix()
        images.append({"id": number, "file_name": name, "height": header.height, "width": header.width})
        rng = np.random.default_rng([seed, number])
        for box in _boxes(rng, header.height, header.width):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": int(rng.integers(1, CATEGORIES + 1)),
                    "bbox": box,
                    "area": round(box[2] * box[3], 2),
                    "iscrowd": 0,
                }
            )
    categories = [{"id": number, "name": f"category {number}"} for number in range(1, CATEGORIES + 1)]
    path.write_text(json.dumps({"images": images, "categories": categories, "annotations": annotations}))


def _boxes(rng: np.random.Generator, height: int, width: int) -> list[list[float]]:
    """Draw random boxes within an image: left, top, width, height."""
    if rng.random() < WITHOUT:
        return []
    count = min(int(rng.geometric(1 / MEAN_OBJECTS)), MOST_OBJECTS)
    side = np.exp(rng.uniform(math.log(SIDES[0]), math.log(SIDES[1]), count))
    form = np.exp(rng.uniform(-0.7, 0.7, count) / 2)  # square root of width / height
    sizes = np.minimum(np.stack([side * form, side / form], axis=1), (width, height))
    corners = rng.random((count, 2)) * (np.array([width, height]) - sizes)
    boxes: list[list[float]] = np.concatenate([corners, sizes], axis=1).round(2).tolist()
    return boxes
