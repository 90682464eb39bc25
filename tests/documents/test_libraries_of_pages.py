"""Programs of pages that use libraries which no other test needs. Torchvision must be installed for its test to run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import page_data
import pytest

import mbaas
from support.pages import ROOT, block_with

GUIDES = ROOT / "docs"


def test_a_torchvision_loader_and_a_feed_have_equal_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    page_data.write_classes(tmp_path / "train")
    names: dict[str, object] = {}
    block_with(GUIDES / "migration.md", "v2.Compose(").run(names)
    assert np.shape(names["image"]) == (12, 3, 64, 64)


def test_trials_of_an_optuna_study_share_a_feed(
    ray_clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page_data.with_feed(tmp_path)
    try:
        names: dict[str, object] = {"mbaas": mbaas}
        block_with(GUIDES / "how-to" / "other-searches.md", "import optuna").run(names)
        rows = mbaas.connect("train").ledger().to_pylist()
        assert sorted(row["consumer"] for row in rows) == [f"optuna-{number}" for number in range(4)]
        assert all(row["exact"] for row in rows)
    finally:
        mbaas.stop("train")
