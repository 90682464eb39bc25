"""Images of any size arrive from parts on several nodes, whole, and row by row for ranks on another node."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import mbaas
from mbaas import transforms as T
from mbaas.client import part_fetch, rank_stream
from mbaas.client.part_fetch import FetchPlan

SAMPLES = 203


def size(number: int) -> tuple[int, int]:
    return 10 + number % 13, 20 + number % 17


@pytest.mark.long
@pytest.mark.slow
def test_images_of_any_size_come_from_three_nodes(
    three_nodes: Any, tmp_path: Path, feed_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def plan_fetch(*given: Any, **named: Any) -> FetchPlan:
        plan = part_fetch.plan_fetch(*given, **named)
        asked.extend(plan.asked)
        return plan

    monkeypatch.setattr(rank_stream, "plan_fetch", plan_fetch)
    for number in range(SAMPLES):
        cv2.imwrite(str(tmp_path / f"{number:03}.png"), np.full((*size(number), 3), number, np.uint8))
    (tmp_path / "rows.csv").write_text("uri\n" + "".join(f"{number:03}.png\n" for number in range(SAMPLES)))
    data = mbaas.read_manifest(tmp_path / "rows.csv")
    pipeline = T.Pipeline([T.DecodeImage(max_pixels=1000), T.RandomHorizontalFlip()])

    def epoch(batch_size: int, **rank: Any) -> list[int]:
        """Run an epoch, check each sample, and return the sample ids."""
        seen = []
        with mbaas.join(feed.name, format="numpy", batch_size=batch_size, **rank) as loader:
            for batch in loader:
                for sample, image in zip(batch["sample_id"].tolist(), batch["image"], strict=True):
                    assert image.shape == (*size(sample), 3)
                    assert (image == sample).all()
                    seen.append(sample)
            assert loader.ledger is not None
            assert loader.ledger.exact
        return seen

    options: dict[str, Any] = {"batch_size": 16, "prep_workers": 3, "staging_bytes": 1 << 20, "engine": "cpu"}
    with mbaas.serve(feed_name, data, pipeline, **options) as feed:
        assert len(feed.status().nodes) == 3
        assert sorted(epoch(10)) == list(range(SAMPLES))
        with ThreadPoolExecutor(2) as pool:
            ranks = [pool.submit(epoch, 16, consumer="ranks", rank=rank, world_size=2) for rank in range(2)]
            assert sorted(sample for rank in ranks for sample in rank.result()) == list(range(SAMPLES))
    assert len(set(asked)) == 3, "cache nodes of all three handed out rows"
