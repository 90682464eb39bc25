"""A step is measured on minibatches with the fields of a feed, even where the pipeline changes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import mbaas
from mbaas import transforms as T
from mbaas.samples.fields import Field
from mbaas.settings import FeedOptions
from mbaas.tools.analysis.measuring.effort import Effort
from mbaas.tools.analysis.measuring.service import Workload, measure_step

pytestmark = pytest.mark.usefixtures("ray_clean")


def test_a_step_gets_boxes_as_a_feed_gives_them(tmp_path: Path) -> None:
    """The dataset has one integer box for each image; after a crop it may be gone."""

    def step(batch: dict[str, Any]) -> None:
        assert [str(boxes.dtype) for boxes in batch["boxes"]] == ["torch.float32"] * 4
        assert [boxes.shape[1] for boxes in batch["boxes"]] == [4] * 4

    for number in range(2):
        cv2.imwrite(str(tmp_path / f"{number}.png"), np.zeros((8, 8, 3), np.uint8))
    rows = [json.dumps({"uri": f"{number}.png", "boxes": [[1, 1, 5, 5]]}) for number in range(2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    data = mbaas.read_manifest(tmp_path / "rows.jsonl")
    pipeline = T.Pipeline([T.DecodeImage(), T.CenterCrop(4)], boxes=T.Boxes())
    workload = Workload(dataset=data, pipeline=pipeline, step=step, options=FeedOptions(batch_size=4))
    (rate,) = measure_step(workload, Field("image", (4, 4, 3), "uint8"), [4], Effort(least=1, most=1, window_s=0.01))
    assert rate.batch_size == 4
