"""Boxes, keypoints and masks of COCO annotations match the image content that trials receive."""

from __future__ import annotations

import json

import cv2
import numpy as np
import pytest

import mbaas
from mbaas import transforms as T

SAMPLES = 48


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> mbaas.Dataset:
    """Images with one white rectangle, except every sixth. Image 7 has a second object of zero width."""
    folder, rng = tmp_path_factory.mktemp("objects"), np.random.default_rng(0)
    images, annotations = [], []
    for number in range(SAMPLES):
        image = np.zeros((80, 90, 3), np.uint8)
        if number % 6:
            left, top = rng.integers(15, 40, 2).tolist()
            image[top : top + 30, left : left + 25] = 255
            corners = [left, top, left + 25, top, left + 25, top + 30, left, top + 30]
            annotations += [
                {
                    "image_id": number,
                    "category_id": 10 + number % 2,
                    "bbox": [left, top, width, 30],
                    "segmentation": [corners],
                    "keypoints": [left + 12, top + 15, 2, 0, 0, 0],
                }
                for width in ((25, 0) if number == 7 else (25,))
            ]
        images.append({"id": number, "file_name": f"{number}.png"})
        cv2.imwrite(str(folder / f"{number}.png"), image)
    categories = [{"id": 11, "name": "odd"}, {"id": 10, "name": "even"}]
    said = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "a.json").write_text(json.dumps(said))
    fields = ["boxes", "labels", "keypoints", "segmentation"]
    return mbaas.read_coco(folder / "a.json", folder, fields=fields)


def test_a_trial_gets_boxes_points_and_masks_where_the_objects_are(ray_session: None, data: mbaas.Dataset) -> None:
    transforms = [T.DecodeImage(), T.RandomIoUCrop(0.5, sampler_options=(0.3,)), T.Resize((60, 64))]
    pipeline = T.Pipeline(
        [*transforms, T.RandomHorizontalFlip()],
        boxes=T.Boxes(beside=("labels", "keypoints")),
        keypoints=T.Keypoints(),
        masks=T.Masks(),
    )
    seen = 0
    with mbaas.serve("objects", data, pipeline, batch_size=8, prep_workers=1) as feed:
        with mbaas.join(feed.name) as loader, mbaas.join(feed.name, collate="packed", consumer="other") as other:
            assert loader.class_names == ("even", "odd")
            for batch, packed in zip(loader, other, strict=True):
                assert "segmentation" not in batch
                for row, sample in enumerate(batch["sample_id"].tolist()):
                    boxes, labels, masks, points = (
                        batch[name][row] for name in ("boxes", "labels", "masks", "keypoints")
                    )
                    start, stop = packed["masks_bounds"][row : row + 2].tolist()
                    assert (packed["masks"][start:stop] == masks).all()
                    assert len(boxes) == len(masks) == (sample % 6 > 0)
                    assert labels.tolist() == [sample % 2] * len(boxes)
                    assert tuple(masks.shape[1:]) == (60, 64)
                    white = batch["image"][row, 0] > 127
                    ys, xs = white.nonzero(as_tuple=True)
                    for box, mask, point in zip(boxes.tolist(), masks > 0, points.tolist(), strict=True):
                        edges = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
                        assert box == pytest.approx([float(edge) for edge in edges], abs=1.5)
                        assert (white & mask).sum() > 0.85 * (white | mask).sum()
                        assert point[1] == [0, 0, 0]
                        if min(edges[:2]) > 0 and edges[2] < 64 and edges[3] < 60:
                            assert point[0] == pytest.approx(
                                [float(xs.float().mean()), float(ys.float().mean()), 2], abs=1.5
                            )
                            seen += 1
                del batch, packed
            assert loader.ledger is not None
            assert loader.ledger.exact
    assert seen > SAMPLES / 4


def test_fields_that_the_dataset_has_not_are_refused_before_anything_starts(data: mbaas.Dataset) -> None:
    pipeline = T.Pipeline([T.DecodeImage(), T.Resize((8, 8))], boxes=T.Boxes(), masks=T.Masks("rle"))
    with pytest.raises(mbaas.ConfigError, match=r"^Masks names the field 'rle', but samples have boxes, labels,"):
        mbaas.serve("none", data, pipeline, batch_size=8)
