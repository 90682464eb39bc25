"""A Map that takes fields, in a real feed: minibatches have what it made of them, also where lists became shorter."""

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


def test_minibatches_have_what_a_function_made_of_image_and_fields(tmp_path: Path, feed_name: str) -> None:
    def halve(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Keep every other token, mark the image with what is left, and change the label."""
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
        mbaas.serve(feed_name, data, pipeline, batch_size=8, prep_workers=2),
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
