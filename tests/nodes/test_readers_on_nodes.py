"""An epoch of every reader has the same bytes on one node and on three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from node_feeds import augmented

import mbaas
from support.readers import READERS, images
from support.trials import EpochRecord, record_epoch

SAMPLES = 203
OPTIONS: dict[str, Any] = {"batch_size": 16, "staging_bytes": 100_000, "engine": "cpu"}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_one_node_and_three_make_the_same_bytes(three_nodes: Any, tmp_path: Path, name: str, feed_name: str) -> None:
    data = READERS[name](tmp_path, images(SAMPLES, bad=None), None)
    found: list[list[EpochRecord]] = []
    for workers in (1, 3):
        with mbaas.serve(f"{feed_name}-{workers}", data, augmented(), prep_workers=workers, **OPTIONS) as feed:
            assert len(feed.status().nodes) == workers
            with mbaas.join(feed.name, format="numpy") as loader:
                found.append([record_epoch(loader), record_epoch(loader)])
    for one, three in zip(*found, strict=True):
        assert one.flaws(range(SAMPLES)) == three.flaws(range(SAMPLES)) == []
        assert one.row_digest == three.row_digest
