"""What docs/detection.md shows, run as it is, on a few images with COCO's annotations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import mbaas
from mbaas import transforms as T
from mbaas.cli.feed_file import load

PAGE = (Path(__file__).parents[2] / "docs" / "detection.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's programs run: with images and their annotations under all names that it uses."""
    monkeypatch.chdir(tmp_path)
    images = [{"id": number, "file_name": f"{number}.png"} for number in range(10)]
    annotations = [
        {"image_id": number, "category_id": 1, "bbox": [1, 2, 3, 4], "segmentation": [[1, 2, 4, 2, 4, 6]]}
        for number in (0, 1, 1)
    ]
    said = json.dumps({"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]})
    for name in ("annotations/instances_train2017.json", "instances.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(said)
    for name in ("train2017", "images"):
        (tmp_path / name).mkdir()
        for image in images:
            cv2.imwrite(str(tmp_path / name / str(image["file_name"])), np.zeros((20, 30, 3), np.uint8))
    return tmp_path


def run(names: dict[str, Any], block_with: str) -> None:
    """Run the one block of the page that has a text."""
    (block,) = (each for each in PYTHON if block_with in each)
    exec(compile(block, "detection.md", "exec"), names)


def test_annotations_are_read_filtered_and_prepared(folder: Path) -> None:
    names: dict[str, Any] = {}
    run(names, "instances_train2017")
    run(names, "list_value_length")
    run(names, "RandomZoomOut")
    data, pipeline = names["data"], names["pipeline"]
    assert (len(data), len(names["few"]), data.class_names) == (10, 10, ("cat",))
    assert (folder / "train.parquet").exists()
    told = re.findall(r"^\| (`\w+`.*?) \|", PAGE, re.MULTILINE)
    listed = [name for cell in told for name in re.findall(r"`(\w+)`", cell)]
    there = [name for name in listed if name not in ("keypoints", "segmentation")]
    assert [field.name for field in data.fields] == there
    assert pipeline.known(data.fields)
    assert pipeline.output_shape == (512, 512, 3)


def test_masks(folder: Path) -> None:
    names: dict[str, Any] = {"mbaas": mbaas, "T": T}
    run(names, "T.Masks()")
    known = names["pipeline"].known(names["data"].fields)
    assert [(field.name, field.shape) for field in known][2] == ("masks", (None, 256, 256))


def test_a_file(folder: Path) -> None:
    (said,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (folder / "feed.yaml").write_text(f"name: train\nbatch_size: 8\n{said}")
    config = load(folder / "feed.yaml")
    assert len(config.data.read()) == 10
    assert config.pipeline.boxes == T.Boxes(beside=("labels", "area", "iscrowd"))


def test_the_pairs_of_points_of_people_are_left_and_right() -> None:
    """By COCO's names of key points."""
    sides = ["eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle"]
    points = ["nose", *(f"{side} {part}" for part in sides for side in ("left", "right"))]
    (swaps,) = re.findall(r"`swaps=(\[.*?\])`", PAGE)
    pairs = T.Keypoints(swaps=json.loads(swaps.replace("(", "[").replace(")", "]"))).swaps
    told = [(points[one], points[other]) for one, other in pairs]
    assert told == [(f"left {part}", f"right {part}") for part in sides]
