"""Folders of files with a record of openings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyarrow.fs import PyFileSystem
from watched_files import Folder, WatchedFiles

from mbaas.dataset import read_images

CLASSES = ("ant", "bee", "cat")


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Folder]:
    """Make a folder of `samples` files of `smallest` to `largest` bytes."""

    def make(samples: int, *, smallest: int = 100, largest: int = 4000) -> Folder:
        root, watch = tmp_path / "data", tmp_path / "watch"
        random = np.random.default_rng(samples)
        for name in CLASSES:
            (root / name).mkdir(parents=True)
        watch.mkdir()
        for i in range(samples):
            size = int(random.integers(smallest, largest + 1))
            (root / CLASSES[i % 3] / f"{i:05}.jpg").write_bytes(random.bytes(size))
        dataset = read_images(str(root), filesystem=PyFileSystem(WatchedFiles(str(watch))))
        return Folder(root, watch, dataset)

    return make
