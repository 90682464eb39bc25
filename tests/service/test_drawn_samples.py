"""A feed of samples that were drawn by weights: each draw comes once in an epoch, prepared by chances of its own."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from support.trials import Recorder


def test_each_draw_comes_once_and_has_colours_of_its_own(ray_clean: None, feed_name: str) -> None:
    """Eleven samples, of which the last ten come 13 times and a half, and the first never."""
    data = synthetic(11).resampled(np.arange(11) > 0, samples=135)
    sources = data.source_ids(np.arange(135))
    pipeline = T.Pipeline([T.DecodeImage(), T.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4)])
    epochs: list[dict[int, NDArray[Any]]] = []
    with mbaas.serve(feed_name, data, pipeline, batch_size=16, prep_workers=1, engine="cpu") as feed:
        with mbaas.join(feed.name, format="numpy") as loader:
            for _ in range(2):
                seen, recorder = {}, Recorder()
                for batch in loader:
                    recorder.add(batch)
                    assert batch["label"].tolist() == (sources[batch["sample_id"]] % 10).tolist()
                    seen.update(zip(batch["sample_id"].tolist(), batch["image"].copy(), strict=True))
                assert recorder.record(loader.ledger).flaws(range(135)) == []
                assert loader.ledger is not None
                assert loader.ledger.samples == 135
                epochs.append(seen)
    for seen in epochs:
        made = defaultdict(set)
        for draw, image in seen.items():
            made[int(sources[draw])].add(image.tobytes())
        assert sorted(made) == list(range(1, 11))
        assert all(len(found) == np.sum(sources == source) for source, found in made.items())
    assert all(not np.array_equal(epochs[0][draw], epochs[1][draw]) for draw in range(135))
