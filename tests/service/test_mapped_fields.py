"""The fields that a Map returns reach minibatches of a real feed, also if lists became shorter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import mbaas
from mbaas import transforms as T

pytestmark = pytest.mark.usefixtures("ray_clean")

SAMPLES = 37


def test_a_detector_gets_the_objects_that_a_function_added(tmp_path: Path, feed_name: str) -> None:
    """The function enlarges the image and adds more objects than any sample of the dataset has."""

    def pasted(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        image = np.pad(sample["image"], ((0, 0), (30, 0), (0, 0)))
        boxes, kinds = sample["boxes"] + np.array([30, 0, 0, 0], np.float32), sample["kinds"]
        for _ in range(int(rng.integers(3))):
            left, top = rng.integers(0, 20, 2).tolist()
            image[top : top + 8, left : left + 9] = 255
            boxes, kinds = [*boxes, [left, top, 9, 8]], [*kinds, -1]
        return {"image": image, "boxes": np.array(boxes).reshape(-1, 4), "kinds": kinds}

    rows = []
    for number in range(SAMPLES):
        image, boxes = np.zeros((40, 50, 3), np.uint8), []
        if number % 4:
            image[5:20, 10:24] = 255
            boxes = [[10.0, 5.0, 14.0, 15.0]]
        cv2.imwrite(str(tmp_path / f"{number}.png"), image)
        rows.append({"uri": f"{number}.png", "boxes": boxes, "kinds": [number] * len(boxes)})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = mbaas.read_manifest(tmp_path / "rows.jsonl")
    function = T.Map(pasted, fields=["boxes", "kinds"], longest=3)
    pipeline = T.Pipeline(
        [T.DecodeImage(), T.RandomHorizontalFlip(), function, T.RandomHorizontalFlip(), T.CenterCrop((40, 80))],
        boxes=T.Boxes(format="xywh", beside=("kinds",)),
    )
    added = 0
    with mbaas.serve(feed_name, data, pipeline, batch_size=8, prep_workers=1) as feed:
        with mbaas.join(feed.name, format="numpy", collate="pad") as loader:
            for batch in loader:
                for row, sample in enumerate(batch["sample_id"].tolist()):
                    count = int(batch["boxes_length"][row])
                    kinds = batch["kinds"][row, :count].tolist()
                    assert [kind for kind in kinds if kind >= 0] == ([sample] if sample % 4 else [])
                    covered = np.zeros((40, 80), bool)
                    for left, top, width, height in batch["boxes"][row, :count].astype(int).tolist():
                        covered[top : top + height, left : left + width] = True
                    np.testing.assert_array_equal(covered, batch["image"][row, :, :, 0] > 127)
                    added += kinds.count(-1)
            assert loader.ledger is not None
            assert loader.ledger.exact
    assert added > SAMPLES // 2


def test_minibatches_have_what_a_function_made_of_image_and_fields(tmp_path: Path, feed_name: str) -> None:
    def halve(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Keep every other token, add their count to the image, and change the label."""
        tokens = sample["tokens"][::2]
        return {
            "image": sample["image"] + np.uint8(len(tokens)),
            "tokens": tokens + rng.integers(2, size=len(tokens)) * 1000,
            "label": -sample["label"],
        }

    rows = []
    for number in range(SAMPLES):
        cv2.imwrite(str(tmp_path / f"{number}.png"), np.full((4, 5, 3), number, np.uint8))
        rows.append({"uri": f"{number}.png", "label": number, "tokens": [*range(number % 6)]})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = mbaas.read_manifest(tmp_path / "rows.jsonl")
    pipeline = T.Pipeline([T.DecodeImage(), T.Map(halve, fields=["tokens", "label"])])
    seen: dict[int, Any] = {}
    with (
        mbaas.serve(feed_name, data, pipeline, batch_size=8, prep_workers=1),
        mbaas.join(feed_name, consumer="me", format="numpy", collate="list") as loader,
    ):
        for _ in range(2):
            for batch in loader:
                ids, images, tokens = batch["sample_id"].tolist(), batch["image"], batch["tokens"]
                for row, sample in enumerate(ids):
                    kept = [*range(sample % 6)][::2]
                    assert (tokens[row] % 1000).tolist() == kept
                    assert batch["label"][row] == -sample
                    assert (images[row] == sample + len(kept)).all()
                    seen.setdefault(sample, []).append(tokens[row].tolist())
            assert loader.ledger is not None
            assert loader.ledger.exact
    assert sorted(seen) == [*range(SAMPLES)]
    assert any(first != second for first, second in seen.values()), "its randomness is another one in each epoch"
