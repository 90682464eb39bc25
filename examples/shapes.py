"""Data of the detection examples: coloured shapes on photographs, with COCO annotations."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
from skimage import data

SIDE = 128  # side of the model's input in pixels; the files are about as large
KINDS = {"disc": 24, "square": 4, "triangle": 3}
"""Kinds of shapes, with the number of corners used to draw each."""


def write_shapes(folder: Path, images: int) -> Path:
    """Write JPEG files to ``folder/images``; return the path of the JSON file with their annotations."""
    photographs = [data.astronaut(), data.coffee(), data.chelsea(), data.rocket()]
    rng = np.random.default_rng(0)
    said = {
        "images": [],
        "categories": [{"id": n + 1, "name": name} for n, name in enumerate(KINDS)],
        "annotations": [],
    }
    (folder / "images").mkdir(parents=True)
    for number in range(images):
        photograph = photographs[rng.integers(len(photographs))]
        height, width = rng.integers(SIDE - 16, SIDE + 48, 2).tolist()
        top, left = (int(rng.integers(size - 256)) for size in photograph.shape[:2])
        picture = cv2.resize(photograph[top : top + 256, left : left + 256], (width, height))
        image = {"id": number, "file_name": f"{number}.jpg", "height": height, "width": width}
        said["images"].append(image)
        for corners, category in shapes(rng, height, width):
            hue = 60 * (category - 1) + rng.integers(40)  # lets a small model learn the kinds in a minute
            colour = cv2.cvtColor(np.array([[[hue, 255, 255]]], np.uint8), cv2.COLOR_HSV2RGB)
            cv2.fillPoly(picture, [np.rint(corners).astype(np.int32)], colour[0, 0].tolist())
            (x0, y0), (x1, y1) = corners.min(axis=0), corners.max(axis=0)
            said["annotations"].append(
                {
                    "id": len(said["annotations"]) + 1,
                    "image_id": image["id"],
                    "category_id": category,
                    "bbox": np.round([x0, y0, x1 - x0, y1 - y0], 2).tolist(),
                    "area": float(cv2.contourArea(corners.astype(np.float32))),
                    "iscrowd": 0,
                    "segmentation": [corners.ravel().round(2).tolist()],
                }
            )
        cv2.imwrite(str(folder / "images" / image["file_name"]), picture[:, :, ::-1])
    (folder / "shapes.json").write_text(json.dumps(said))
    return folder / "shapes.json"


def shapes(rng: np.random.Generator, height: int, width: int) -> list[tuple[np.ndarray, int]]:
    """Draw up to four shapes that do not overlap; return the corners [k, 2], x and y, and the category of each."""
    found: list[tuple[np.ndarray, int]] = []
    places: list[tuple[float, float, float]] = []
    for _ in range(rng.integers(5)):
        radius = rng.uniform(11, 24)
        x, y = rng.uniform(radius + 1, (width - radius - 1, height - radius - 1))
        if any(np.hypot(x - a, y - b) < radius + r + 4 for a, b, r in places):
            continue
        places.append((x, y, radius))
        category = int(rng.integers(len(KINDS)))
        count = [*KINDS.values()][category]
        angles = np.arange(count) * 2 * np.pi / count + rng.uniform(0, 2 * np.pi)
        corners = np.stack([x + radius * np.cos(angles), y + radius * np.sin(angles)], axis=1)
        found.append((corners, category + 1))
    return found
