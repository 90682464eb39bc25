"""Generates COCO annotations for photographs.

Loading does not look at the content of boxes, so their positions are random. Numbers and sizes are similar to COCO (Lin
et al., 2014): about seven per image, a third each smaller than 32x32 pixels, up to 96x96, and larger.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mbaas.prep.engines import DEFAULT_MAX_PIXELS
from mbaas.prep.header import peek
from mbaas.tools.bench.generated import made_once
from mbaas.tools.bench.tasks.base import files_below

CATEGORIES = 80
MEAN_OBJECTS = 7.3
MOST_OBJECTS = 60
WITHOUT = 0.01
"""Fraction of images without objects."""

SIDES = (8.0, 320.0)
"""Smallest and largest side of an object's square before its aspect ratio is drawn, in pixels; log-uniform."""

_VERSION = 1  # part of the file's name, as for photographs


def make_annotations(folder: Path, *, seed: int = 0, report: Callable[[str], None] = print) -> Path:
    """Generate or find a JSON file next to ``folder``, a class-per-folder tree of JPEGs; return its path.

    ``report`` is called with one line if the file is generated.
    """
    path = folder.parent / f"{folder.name}-objects-v{_VERSION}-s{seed}.json"
    return made_once(path, partial(_write, folder, seed), "annotations", report)


def _write(folder: Path, seed: int, path: Path) -> None:
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
