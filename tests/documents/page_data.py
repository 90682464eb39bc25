"""Small generated data, under the names that the programs of the documentation read.

`for_shards` and the like each write the data of one page. The folders ``bucket`` and ``shared`` replace
``s3://bucket`` and ``/shared``: see `INSTEAD`.
"""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import datasets
import numpy as np
import pyarrow as pa
import soundfile
from pyarrow import csv, parquet
from tfrecord import TFRecordWriter

import mbaas
from mbaas import transforms as T

INSTEAD: Mapping[str, str] = {
    "s3://bucket": "bucket",
    '"/shared': '"shared',
    "shape=(128, 128, 128, 4)": "shape=(32, 32, 32, 4)",
}
"""Text of a page -> its replacement in tests: folders below the working directory, and volumes so small that twelve
fit in the memory of the shared Ray.
"""

PNG = cv2.imencode(".png", np.zeros((40, 48, 3), np.uint8))[1].tobytes()

SPECIES = ("cat", "dog")


def write_image(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(PNG)


def write_classes(folder: Path, samples: int = 12) -> None:
    """Write images into one folder per class."""
    for number in range(samples):
        write_image(folder / SPECIES[number % 2] / f"{number}.png")


def write_table(file: Path, **columns: list[Any]) -> None:
    """Write a table with these columns whose rows all name the same image, and write that image."""
    write_image(file.parent / "a.png")
    rows = len(next(iter(columns.values())))
    table = pa.table({"path": ["a.png"] * rows, **columns})
    if file.suffix == ".parquet":
        parquet.write_table(table, file)
    else:
        csv.write_csv(table, file)


def write_shard(file: Path, members: Mapping[str, bytes]) -> None:
    with tarfile.open(file, "w") as shard:
        for name, content in members.items():
            (file.parent / "member").write_bytes(content)
            shard.add(file.parent / "member", name)


def write_records(file: Path, **features: Any) -> None:
    """Write a TFRecord file with one record."""
    writer = TFRecordWriter(str(file))
    writer.write(features)
    writer.close()


def write_coco(file: Path, images: Path, samples: int = 12) -> None:
    """Write images, and COCO annotations: one object on image 0, two on image 1, none on the others."""
    size = {"width": 48, "height": 40}
    known = [{"id": number, "file_name": f"{number}.png", **size} for number in range(samples)]
    objects = [
        {"image_id": number, "category_id": 1, "bbox": [1, 2, 3, 4], "segmentation": [[1, 2, 4, 2, 4, 6]]}
        for number in (0, 1, 1)
    ]
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"images": known, "annotations": objects, "categories": [{"id": 1, "name": "cat"}]}))
    for image in known:
        write_image(images / str(image["file_name"]))


def for_classes(here: Path) -> None:
    write_classes(here / "train")


def for_images(here: Path) -> None:
    (here / "bucket").mkdir()
    write_table(here / "bucket" / "train.parquet", species=["cat", "dog", "cat"], age=[1, 2, 3])


def for_shards(here: Path) -> None:
    for name in ("bucket", "shared"):
        (here / name).mkdir()
    for number in range(128):
        write_shard(here / "bucket" / f"train-{number:06d}.tar", {"x.png": PNG, "x.cls": b"%d" % number})
    for name in ("a.tar", "b.tar"):
        write_shard(here / name, {"x.png": PNG, "x.json": json.dumps({"species": "cat", "age": 7}).encode()})
    write_records(here / "birds.tfrecord", image=(PNG, "byte"), species=(b"wren", "byte"), wing=(4.5, "float"))
    for number in range(8):
        name = f"train-{number:05d}-of-00008.tfrecord"
        record = {"image/encoded": (PNG, "byte"), "image/class/label": (number, "int")}
        write_records(here / "bucket" / name, **record)
        table = pa.table({"image": pa.array([PNG]), "label": [number]})
        parquet.write_table(table, here / "bucket" / f"train-{number:05d}-of-00008.parquet")
    features = datasets.Features({"image": datasets.Image(), "labels": datasets.ClassLabel(names=["rust", "healthy"])})
    rows = datasets.Dataset.from_dict({"image": [{"bytes": PNG, "path": None}] * 3, "labels": [0, 1, 1]}, features)
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(here / "bucket" / "beans")


def for_own_data(here: Path) -> None:
    with zipfile.ZipFile(here / "photos.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo("cat/1.png", (2024, 1, 1, 0, 0, 0)), PNG)


def for_subsets(here: Path) -> None:
    species, ages, weights = ["cat", "dog", "unknown"] * 1000, [17, 18, 19, 40] * 750, [0.5, 1.0, 2.0] * 1000
    write_table(here / "photos.parquet", species=species, age=ages, weight=weights)
    write_table(here / "more.csv", species=["dog", "cat", "unknown"], age=[1, 2, 3], weight=[1.0, 0.5, 2.0])


def with_feed(here: Path) -> None:
    """Serve 12 images as the feed "train", which the page's programs join."""
    write_classes(here / "train")
    pipeline = T.Pipeline([T.DecodeImage(), T.CenterCrop(32)])
    mbaas.serve("train", mbaas.read_images(here / "train"), pipeline, batch_size=4, prep_workers=1)


def for_detection(here: Path) -> None:
    write_coco(here / "annotations" / "instances_train2017.json", here / "train2017")
    write_coco(here / "instances.json", here / "images")


def for_sound(here: Path) -> None:
    """Write noise of 0.5 to 2 s."""
    for number in range(20):
        noise = np.random.default_rng(number).normal(0, 0.1, 8000 * (1 + number % 4))
        for file in (
            here / "commands" / SPECIES[number % 2] / f"{number}.wav",
            here / "LibriSpeech" / "train-clean-100" / "103" / "1240" / f"{number}.flac",
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(file, noise, 16_000)


def for_arrays(here: Path) -> None:
    for number in range(2):
        for name, array in (
            (f"scans/{SPECIES[number]}/{number}", np.zeros((70, 66, 64), np.float32)),
            (f"clouds/{SPECIES[number]}/{number}", np.zeros((5 + number, 3), np.float32)),
        ):
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            np.save(here / name, array)
    np.zeros((128, 128, 128), np.int16).tofile(here / "scans" / "1.raw")
    np.savez_compressed(here / "a.npz", volume=np.zeros((32, 32, 32, 4), np.int16))
    parquet.write_table(
        pa.table({"path": ["a.npz"] * 4, "parameters": [[0.1, 0.2, 0.3, 0.4]] * 4}), here / "universes.parquet"
    )


def for_tutorial(here: Path) -> None:
    """Write photographs, which a program of docs/tutorial.md makes for its feed file."""
    write_classes(here / "photos")


def for_disks(here: Path) -> None:
    write_classes(here / "images")
