"""Generated photographs have realistic sizes, are reproducible, and are made once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import cv2
import numpy as np
import pytest

from mbaas.errors import DatasetError
from mbaas.tools.bench.tasks.images import FILE_BYTES, SOURCES, make_photos


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.jpg")}


def test_files_look_like_imagenet(tmp_path: Path) -> None:
    folder = make_photos(tmp_path, 30, report=lambda _: None)
    files = contents(folder)
    assert len(files) == 30
    assert {name.split("/")[0] for name in files} == {Path(source).stem for source in SOURCES}
    assert all(FILE_BYTES[0] <= len(content) <= FILE_BYTES[1] for content in files.values())
    shapes = [cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR).shape for content in files.values()]
    assert 350 < np.mean([min(shape[:2]) for shape in shapes]) < 450
    assert 450 < np.mean([max(shape[:2]) for shape in shapes]) < 550
    assert len(set(shapes)) > 20, "sizes should differ"


def test_same_seed_same_files_another_seed_others(tmp_path: Path) -> None:
    first = contents(make_photos(tmp_path / "a", 9, seed=1, report=lambda _: None))
    again = contents(make_photos(tmp_path / "b", 9, seed=1, report=lambda _: None))
    other = contents(make_photos(tmp_path / "a", 9, seed=2, report=lambda _: None))
    assert first == again
    assert not set(first.values()) & set(other.values())


def test_made_once(tmp_path: Path) -> None:
    told: list[str] = []
    folder = make_photos(tmp_path, 3, report=told.append)
    marker = folder / "untouched"
    marker.touch()
    assert make_photos(tmp_path, 3, report=told.append) == folder
    assert marker.exists()
    assert len(told) == 1
    assert [path.name for path in tmp_path.iterdir()] == [folder.name], "the unfinished tree should be gone"


def test_without_scikit_image_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DatasetError, match="pip install scikit-image"):
        make_photos(tmp_path, 3, report=lambda _: None)
    assert list(tmp_path.iterdir()) == []
