"""Boxes of a manifest match the image content that trials receive, whatever the transforms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import mbaas
from mbaas import transforms as T
from mbaas.pictures.samples import first_samples

SAMPLES = 60
PIPELINE = T.Pipeline(
    [T.DecodeImage(), T.RandomResizedCrop(64, scale=(0.5, 1.0)), T.RandomHorizontalFlip()],
    boxes=T.Boxes(format="xywh", beside=("kinds",), min_size=4),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> mbaas.Dataset:
    """Images with one white rectangle; every sixth image has no rectangle."""
    folder, rng, rows = tmp_path_factory.mktemp("boxes"), np.random.default_rng(0), []
    for number in range(SAMPLES):
        image, boxes = np.zeros((80, 90, 3), np.uint8), []
        if number % 6:
            left, top = rng.integers(20, 40, 2).tolist()
            image[top : top + 30, left : left + 25] = 255
            boxes = [[left, top, 25.0, 30.0]]
        cv2.imwrite(str(folder / f"{number}.png"), image)
        rows.append({"uri": f"{number}.png", "boxes": boxes, "kinds": [number] * len(boxes)})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return mbaas.read_manifest(path)


@pytest.fixture(scope="module")
def feed(ray_session: None, data: mbaas.Dataset) -> Iterator[mbaas.Feed]:
    with mbaas.serve("boxes", data, PIPELINE, batch_size=8, prep_workers=1, seed=5) as served:
        yield served


@pytest.mark.parametrize("collate", ["list", "packed"])
def test_a_detector_gets_boxes_where_the_objects_are(feed: mbaas.Feed, collate: Any) -> None:
    seen: dict[int, int] = {}
    with mbaas.join(feed.name, format="numpy", collate=collate) as loader:
        for batch in loader:
            for row, sample in enumerate(batch["sample_id"].tolist()):
                boxes, kinds = (of_row(batch, name, row, collate) for name in ("boxes", "kinds"))
                seen[sample] = len(boxes)
                assert kinds.tolist() == [sample] * len(boxes)
                ys, xs = np.nonzero(batch["image"][row, :, :, 0] > 127)
                if len(boxes):
                    pixels = [xs.min(), ys.min(), np.ptp(xs) + 1, np.ptp(ys) + 1]
                    assert boxes[0].tolist() == pytest.approx(pixels, abs=1.5)
            del batch
        assert loader.ledger is not None
        assert loader.ledger.exact
    assert sorted(seen) == list(range(SAMPLES))
    assert not any(seen[sample] for sample in range(0, SAMPLES, 6))
    assert sum(seen.values()) > 40


def test_a_preview_is_what_trials_get_to_the_byte(feed: mbaas.Feed, data: mbaas.Dataset) -> None:
    with mbaas.join(feed.name, format="torch", collate="packed") as loader:
        batches = list(loader)
        assert loader.ledger is not None
        epoch = loader.ledger.feed_epoch
    found = first_samples(data, PIPELINE, count=SAMPLES, seed=5, epoch=epoch)
    assert found.bad == ()
    for name, seen in (("sample_id", found.sample_ids), ("image", found.samples.transpose(0, 3, 1, 2))):
        np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), seen)
    for name in ("boxes", "kinds"):
        np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), found.known[name].values)


def test_boxes_stay_with_their_images_where_a_sample_between_them_is_bad(
    ray_session: None, data: mbaas.Dataset, tmp_path: Path
) -> None:
    """Sample 7 is truncated. With "skip" the other images keep their boxes."""
    folder = Path(data.uri(0)).parent
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 60 if file.name == "7.png" else None])
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()], boxes=T.Boxes(format="xywh", beside=("kinds",)))
    broken = mbaas.read_manifest(tmp_path / "train.jsonl")
    with mbaas.serve("broken", broken, pipeline, batch_size=8, prep_workers=1, on_bad_sample="skip") as feed:
        with mbaas.join(feed.name, format="torch") as loader:
            seen = []
            for batch in loader:
                for sample, kinds in zip(batch["sample_id"].tolist(), batch["kinds"], strict=True):
                    seen.append(sample)
                    assert kinds.tolist() == ([sample] if sample % 6 else [])
        assert sorted(seen) == [sample for sample in range(SAMPLES) if sample != 7]


def of_row(batch: dict[str, Any], name: str, row: int, collate: str) -> Any:
    if collate == "list":
        return batch[name][row]
    start, stop = batch[f"{name}_bounds"][row : row + 2]
    return batch[name][start:stop]


def test_boxes_that_the_dataset_has_not_are_refused_before_anything_starts(data: mbaas.Dataset) -> None:
    pipeline = T.Pipeline([T.DecodeImage()], boxes=T.Boxes("bboxes"))
    with pytest.raises(mbaas.ConfigError, match=r"^Boxes names the field 'bboxes', but samples have boxes, kinds$"):
        mbaas.serve("none", data, pipeline, batch_size=8)
