"""Images in tar shards and Parquet files give the same minibatches as in folders, byte by byte."""

from __future__ import annotations

import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from service_feeds import augmented

import mbaas

SAMPLES = 151
SHARDS = 4
KINDS = (".jpg", ".png", ".webp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three formats and five classes, whose names are in label order."""
    top = tmp_path_factory.mktemp("images")
    for number in range(SAMPLES):
        path = top / f"class-{number * 5 // SAMPLES}" / f"{number:04}{KINDS[number % 3]}"
        path.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(path), np.random.default_rng(number).integers(0, 255, (24, 30, 3), np.uint8))
    return top


@pytest.fixture(scope="module")
def shards(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> mbaas.Dataset:
    """The same images in the same order, in shards of different sizes."""
    top = tmp_path_factory.mktemp("shards")
    images = sorted(folder.rglob("*.*"))
    for shard in range(SHARDS):
        with tarfile.open(top / f"{shard:02}.tar", "w") as tar:
            for image in images[SAMPLES * shard**2 // SHARDS**2 : SAMPLES * (shard + 1) ** 2 // SHARDS**2]:
                label = top / f"{image.stem}.cls"
                label.write_text(image.parent.name.removeprefix("class-"))
                tar.add(image, image.name)
                tar.add(label, label.name)
    return mbaas.read_webdataset(top / f"{{00..{SHARDS - 1:02}}}.tar")


@pytest.fixture(scope="module")
def parquet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> mbaas.Dataset:
    """The same images in the same order, in row groups of two Parquet files."""
    top = tmp_path_factory.mktemp("parquet")
    images = sorted(folder.rglob("*.*"))
    for number, part in enumerate((images[:60], images[60:])):
        encoded = [{"bytes": image.read_bytes(), "path": image.name} for image in part]
        labels = [int(image.parent.name.removeprefix("class-")) for image in part]
        pq.write_table(pa.table({"image": encoded, "label": labels}), top / f"{number}.parquet", row_group_size=17)
    return mbaas.read_parquet(top / "{0..1}.parquet", unpacked=top / "unpacked")


def epoch(loader: mbaas.Loader) -> dict[int, tuple[int, NDArray[Any]]]:
    """Read an exact epoch: id -> (label, image)."""
    found: dict[int, tuple[int, NDArray[Any]]] = {}
    for batch in loader:
        for sample, label, image in zip(
            batch["sample_id"].tolist(), batch["label"].tolist(), batch["image"], strict=True
        ):
            assert sample not in found
            found[sample] = label, image.copy()
    assert loader.ledger is not None
    assert loader.ledger.exact
    return found


def two_epochs(data: mbaas.Dataset, name: str, batch_size: int) -> list[dict[int, tuple[int, NDArray[Any]]]]:
    with mbaas.serve(name, data, augmented(), batch_size=20, prep_workers=1, engine="cpu") as feed:
        with mbaas.join(feed.name, format="numpy", batch_size=batch_size) as loader:
            return [epoch(loader), epoch(loader)]


@pytest.fixture(scope="module")
def expected(ray_session: None, folder: Path) -> list[dict[int, tuple[int, NDArray[Any]]]]:
    return two_epochs(mbaas.read_images(folder), "folder", 20)


@pytest.mark.parametrize("kind", ["shards", "parquet"])
def test_epochs_have_the_same_bytes_as_of_a_folder(
    expected: list[dict[int, tuple[int, NDArray[Any]]]], kind: str, request: pytest.FixtureRequest, ray_clean: None
) -> None:
    """The trials' batch sizes differ, and each epoch has other colors and flips."""
    found = two_epochs(request.getfixturevalue(kind), kind, 7)
    for one, other in zip(found, expected, strict=True):
        assert sorted(one) == sorted(other) == list(range(SAMPLES))
        for sample, (label, image) in other.items():
            assert one[sample][0] == label
            np.testing.assert_array_equal(one[sample][1], image)


def test_a_loader_that_is_restored_gets_the_rest(ray_clean: None, shards: mbaas.Dataset) -> None:
    with mbaas.serve("shards", shards, augmented(), batch_size=20, prep_workers=1) as feed:
        with mbaas.join(feed.name, consumer="first", format="numpy", batch_size=7) as loader:
            batches = iter(loader)
            seen = [next(batches)["sample_id"].tolist() for _ in range(5)]
            state = loader.state_dict()
        with mbaas.join(feed.name, consumer="second", format="numpy", batch_size=7, state=state) as loader:
            seen += [batch["sample_id"].tolist() for batch in loader]
    assert sorted(chain.from_iterable(seen)) == list(range(SAMPLES))


def test_a_bad_image_is_named_by_its_shard_and_member(ray_clean: None, tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"GIF89a" + bytes(50))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "1.jpg", "cat/1.jpg")
    data = mbaas.read_webdataset(tmp_path / "a.tar", label_column=None)
    with pytest.raises(mbaas.BadSampleError, match=r"a\.tar#cat/1\.jpg: it is a GIF image, not JPEG, PNG, WebP or BMP"):
        mbaas.serve("bad", data, augmented(), batch_size=1, prep_workers=1)
