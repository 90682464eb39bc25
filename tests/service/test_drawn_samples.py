"""A feed of samples drawn by weight delivers each draw once, with its own randomness."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.pictures.samples import first_samples
from support.trials import Recorder

DRAWS = np.arange(135)


@pytest.mark.parametrize("each_epoch", [True, False])
def test_each_draw_comes_once_and_has_colours_of_its_own(each_epoch: bool, ray_clean: None, feed_name: str) -> None:
    """The first of eleven samples is never drawn, and the others 13.5 times each on average."""
    data = synthetic(11).resample(np.arange(11) > 0, samples=135, each_epoch=each_epoch)
    pipeline = T.Pipeline([T.DecodeImage(), T.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4)])
    epochs: list[dict[int, NDArray[Any]]] = []
    with mbaas.serve(feed_name, data, pipeline, batch_size=16, prep_workers=1, engine="cpu") as feed:
        with mbaas.join(feed.name, format="numpy") as loader:
            for epoch in range(3):
                seen, recorder, sources = {}, Recorder(), data.source_ids(DRAWS)
                if each_epoch:
                    sources = data.stored.source_ids(data.stored_ids(DRAWS, epoch))
                for batch in loader:
                    recorder.add(batch)
                    drawn = sources[batch["sample_id"]]
                    assert batch["label"].tolist() == (drawn % 10).tolist()
                    if each_epoch:
                        assert batch["source_id"].tolist() == drawn.tolist()
                    seen.update(zip(batch["sample_id"].tolist(), batch["image"].copy(), strict=True))
                assert recorder.record(loader.ledger).flaws(DRAWS) == []
                assert loader.ledger is not None
                assert loader.ledger.samples == 135
                made = defaultdict(set)
                for draw, image in seen.items():
                    made[int(sources[draw])].add(image.tobytes())
                assert sorted(made) == list(range(1, 11))
                assert all(len(found) == np.sum(sources == source) for source, found in made.items())
                epochs.append(seen)
        assert feed.status().cached_samples == len(data.stored)
        assert (data.total_bytes < synthetic(11).total_bytes) == each_epoch, "caches keep each sample once"
    assert all(not np.array_equal(epochs[0][draw], epochs[1][draw]) for draw in range(135))
    shown = first_samples(data, pipeline, count=20, epoch=2)
    for draw, image in zip(shown.sample_ids.tolist(), np.asarray(shown.samples), strict=True):
        np.testing.assert_array_equal(image, epochs[2][draw])


def test_a_bad_sample_is_bad_as_often_as_it_is_drawn(ray_clean: None, feed_name: str, tmp_path: Path) -> None:
    """Five of six samples are drawn, so the draws of the bad sample differ between epochs."""
    for number in range(6):
        image = tmp_path / "class" / f"{number}.png"
        image.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(image), np.full((8, 8, 3), number, np.uint8))
    bad = tmp_path / "class" / "4.png"
    bad.write_text("no image")
    data = mbaas.read_images(tmp_path).resample(np.ones(6), samples=5)
    pipeline, options = T.Pipeline([T.DecodeImage()]), {"prep_workers": 1, "engine": "cpu", "on_bad_sample": "skip"}
    named = set()
    with mbaas.serve(feed_name, data, pipeline, batch_size=1, **options) as feed:
        with mbaas.join(feed.name, format="numpy") as loader:
            for epoch in range(10):
                loader._first_bad = None
                drawn = data.stored_ids(np.arange(5), epoch)
                seen = np.concatenate([batch["sample_id"] for batch in loader])
                assert sorted(seen.tolist()) == np.flatnonzero(drawn != 4).tolist()
                if loader._first_bad is not None:
                    named.add((loader._first_bad.sample_id, loader._first_bad.uri))
    assert named == {(3, str(bad)), (4, str(bad))}
