"""What the guide shows of readers, run as it is: only its bucket and its shared disk are folders here."""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import cv2
import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import mbaas
from mbaas import transforms as T

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
PNG = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the guide's programs run: with folders ``bucket`` and ``shared`` for what they read and write."""
    monkeypatch.chdir(tmp_path)
    for name in ("bucket", "shared"):
        (tmp_path / name).mkdir()
    return tmp_path


def run(block_with: str, folder: Path) -> dict[str, Any]:
    """Run the one block of the guide that has a text; return its names."""
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if block_with in each)
    program = block.replace("s3://bucket", str(folder / "bucket")).replace('"/shared', f'"{folder}/shared')
    names: dict[str, Any] = {"mbaas": mbaas, "T": T}
    exec(compile(program, "guide.md", "exec"), names)
    return names


def write_shard(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as shard:
        for name, content in members.items():
            (path.parent / "member").write_bytes(content)
            shard.add(path.parent / "member", name)


def test_a_table_that_names_the_files(folder: Path) -> None:
    (folder / "bucket" / "a.png").write_bytes(PNG)
    table = {"path": ["a.png"] * 3, "species": ["cat", "dog", "cat"], "age": [1, 2, 3]}
    parquet.write_table(pa.table(table), folder / "bucket" / "train.parquet")
    data = run('read_manifest("s3', folder)["data"]
    assert (len(data), data.class_names) == (3, ("cat", "dog"))
    assert data.values(np.arange(3))["age"].tolist() == [1, 2, 3]


def test_boxes(folder: Path) -> None:
    pipeline = run("T.Boxes(", folder)["pipeline"]
    assert pipeline.boxes == T.Boxes("boxes", format="xywh", beside=("classes",))


def test_tar_shards(folder: Path) -> None:
    for number in range(128):
        write_shard(folder / "bucket" / f"train-{number:06d}.tar", {"x.png": PNG, "x.cls": b"%d" % number})
    known = json.dumps({"species": "cat", "age": 7}).encode()
    for name in ("a.tar", "b.tar"):
        write_shard(folder / name, {"x.png": PNG, "x.json": known})
    data = run("read_webdataset(", folder)["data"]
    assert (len(data), data.class_names) == (2, ("cat",))
    again = mbaas.read_webdataset(f"{folder}/bucket/train-{{000000..000127}}.tar", listing="shards.parquet")
    assert again.labels(np.arange(128)).tolist() == list(range(128))


def test_parquet_files(folder: Path) -> None:
    for number in range(8):
        table = pa.table({"image": pa.array([PNG]), "label": [number]})
        parquet.write_table(table, folder / "bucket" / f"train-{number:05d}-of-00008.parquet")
    data = run("read_parquet(", folder)["data"]
    assert data.labels(np.arange(8)).tolist() == list(range(8))
    assert (folder / "shared" / "train").is_dir()


def test_a_dataset_of_hugging_face(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is a folder here, too."""
    features = datasets.Features({"image": datasets.Image(), "labels": datasets.ClassLabel(names=["rust", "healthy"])})
    rows = datasets.Dataset.from_dict({"image": [{"bytes": PNG, "path": None}] * 3, "labels": [0, 1, 1]}, features)
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(folder / "bucket" / "beans")
    hub = datasets.load_from_disk(folder / "bucket" / "beans")
    monkeypatch.setattr(datasets, "load_dataset", {"AI-Lab-Makerere/beans": hub}.get)
    data = run("read_huggingface(", folder)["data"]
    assert data.labels(np.arange(3)).tolist() == [0, 1, 1]
    assert data.class_names == ("rust", "healthy")


def test_a_reader_of_your_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(folder / "photos.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo("cat/1.png", (2024, 1, 1, 0, 0, 0)), PNG)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    data = run("read_zip(", folder)["data"]
    assert data.values(np.arange(1))["year"].tolist() == [2024]
