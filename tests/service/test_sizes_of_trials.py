"""Images of any size reach trials unchanged, as lists, padded and packed, with matching boxes."""

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

SAMPLES, LARGE = 61, 17
"""Image `LARGE` has more pixels than the feed allows."""

PIPELINE = T.Pipeline(
    [T.DecodeImage(max_pixels=4000), T.RandomHorizontalFlip()], boxes=T.Boxes(format="xywh", beside=("kinds",))
)


def size(number: int) -> tuple[int, int]:
    return (90, 80) if number == LARGE else (30 + number % 7, 40 + number % 11)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> mbaas.Dataset:
    """Images with one white rectangle; every sixth image has no rectangle."""
    folder, rng, rows = tmp_path_factory.mktemp("sizes"), np.random.default_rng(0), []
    for number in range(SAMPLES):
        image, boxes = np.zeros((*size(number), 3), np.uint8), []
        if number % 6:
            top, left = rng.integers(1, 10, 2).tolist()
            image[top : top + 15, left : left + 12] = 255
            boxes = [[left, top, 12.0, 15.0]]
        cv2.imwrite(str(folder / f"{number}.png"), image)
        rows.append({"uri": f"{number}.png", "boxes": boxes, "kinds": [number] * len(boxes)})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return mbaas.read_manifest(path)


@pytest.fixture(scope="module")
def feed(ray_session: None, data: mbaas.Dataset) -> Iterator[mbaas.Feed]:
    with mbaas.serve(
        "sizes", data, PIPELINE, batch_size=8, prep_workers=2, seed=5, on_bad_sample="skip", staging_bytes=1 << 20
    ) as served:
        yield served


def epoch(feed: mbaas.Feed, collate: Any, format: str) -> tuple[list[dict[str, Any]], int]:
    """The minibatches of an epoch, in another size than the feed's, and the feed epoch's number."""
    with mbaas.join(feed.name, format=format, collate=collate, batch_size=7, consumer=f"{collate} {format}") as loader:
        batches = [
            {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in batch.items()}
            for batch in loader
        ]
        assert loader.ledger is not None
        assert loader.ledger.exact
        return batches, loader.ledger.feed_epoch


def test_each_trial_gets_the_images_of_a_preview(feed: mbaas.Feed, data: mbaas.Dataset) -> None:
    listed, number = epoch(feed, "list", "torch")
    padded, again = epoch(feed, "pad", "numpy")
    found = first_samples(data, PIPELINE, count=SAMPLES, seed=5, epoch=number)
    later = first_samples(data, PIPELINE, count=SAMPLES, seed=5, epoch=again)
    assert [bad.sample_id for bad in found.bad] == [LARGE]
    samples = np.concatenate([batch["sample_id"] for batch in listed]).tolist()
    assert samples == found.sample_ids.tolist()
    assert sorted(samples) == [sample for sample in range(SAMPLES) if sample != LARGE]
    images = [image for batch in listed for image in batch["image"]]
    boxes = [each for batch in listed for each in batch["boxes"]]
    for row, (sample, image) in enumerate(zip(samples, images, strict=True)):
        assert image.shape == (3, *size(sample))
        np.testing.assert_array_equal(image.permute(1, 2, 0), found.samples.value(row))  # type: ignore[union-attr]
        ys, xs = (image[0] > 127).nonzero(as_tuple=True)
        edges = [[int(xs.min()), int(ys.min()), 12, 15]] if len(xs) else []
        assert boxes[row].tolist() == edges
    row = 0
    for batch in padded:
        assert batch["image"].shape[1:3] == tuple(batch["image_size"].max(axis=0))
        for image, (height, width) in zip(batch["image"], batch["image_size"].tolist(), strict=True):
            np.testing.assert_array_equal(image[:height, :width], later.samples.value(row))  # type: ignore[union-attr]
            row += 1
    assert row == SAMPLES - 1


def test_ranks_share_images_of_any_size_out(feed: mbaas.Feed) -> None:
    """Two ranks in threads receive each image once, packed."""
    from concurrent.futures import ThreadPoolExecutor

    def train(rank: int) -> dict[int, tuple[int, ...]]:
        found = {}
        name = {"consumer": "ranks", "rank": rank, "world_size": 2}
        with mbaas.join(feed.name, format="numpy", collate="packed", batch_size=8, **name) as loader:
            for batch in loader:
                assert batch["image"].shape == (batch["image_bounds"][-1], 3)
                for sample, shape in zip(batch["sample_id"].tolist(), batch["image_size"].tolist(), strict=True):
                    found[sample] = tuple(shape)
        return found

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(train, range(2))
    assert not one.keys() & other.keys()
    assert one | other == {sample: size(sample) for sample in range(SAMPLES) if sample != LARGE}
    assert min(len(one), len(other)) > SAMPLES // 3


def test_an_image_that_is_too_large_is_told(feed: mbaas.Feed) -> None:
    (bad,) = feed.status().skipped
    assert Path(bad.uri).name == f"{LARGE}.png"
    assert "is 7,200 pixels, over the limit of 4,000 (DecodeImage's max_pixels)" in bad.reason
