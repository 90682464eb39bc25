"""Each storage fault has its effect on reads, transient ones pass, and all are counted."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pyarrow.fs import FileInfo, PyFileSystem

import mbaas
from mbaas.dataset import Dataset
from mbaas.dataset.storage.retry import PatientReader
from mbaas.errors import StorageError
from mbaas.tools.chaos.storage import Trouble, TroubledFiles, images, troubled
from support.waiting import wait_until

SAMPLES = 7


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return mbaas.read_images(str(images(tmp_path / "images", SAMPLES)), filesystem=troubled(tmp_path))


def read(data: Dataset, sample: int) -> bytes:
    """Read once, without retries."""
    buffer = np.empty(int(data.lengths(np.array([sample]))[0]), np.uint8)
    data.reader().read_into(sample, buffer)
    return buffer.tobytes()


def test_without_trouble_it_gives_the_files(tmp_path: Path, data: Dataset) -> None:
    files = sorted(path.read_bytes() for path in (tmp_path / "images").rglob("*.png"))
    assert sorted(read(data, sample) for sample in range(SAMPLES)) == files
    assert len(set(files)) == SAMPLES
    assert Trouble(tmp_path).met == 0


def test_the_images_are_the_same_in_every_run(tmp_path: Path) -> None:
    first, second = (images(tmp_path / name, SAMPLES) for name in ("a", "b"))
    assert mbaas.read_images(str(first)).fingerprint == mbaas.read_images(str(second)).fingerprint
    assert (first / "1" / "000004.png").read_bytes() == (second / "1" / "000004.png").read_bytes()


class ComesBack(TroubledFiles):
    """Files that reappear as soon as their metadata is requested."""

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        self._trouble.end()
        return super().get_file_info(paths)


def test_a_file_that_is_there_again_when_it_is_looked_after_is_not_missing(tmp_path: Path) -> None:
    folder = str(images(tmp_path / "images", SAMPLES))
    data = mbaas.read_images(folder, filesystem=PyFileSystem(ComesBack(str(tmp_path))))
    Trouble(tmp_path).begin("lose")
    with pytest.raises(StorageError, match="the file was away, and is there again") as caught:
        read(data, 3)
    assert not caught.value.is_missing
    assert read(data, 3)


@pytest.mark.parametrize("action", ["err", "truncate", "lose"])
def test_a_read_that_fails_may_pass_and_does_when_the_trouble_is_over(
    tmp_path: Path, data: Dataset, action: str
) -> None:
    trouble, whole = Trouble(tmp_path), read(data, 3)
    data = pickle.loads(pickle.dumps(data))  # as workers receive it
    trouble.begin(action)
    with pytest.raises(StorageError) as caught:
        read(data, 3)
    assert not caught.value.is_missing
    assert trouble.met == 1
    with ThreadPoolExecutor(1) as pool:
        buffer = np.empty(len(whole), np.uint8)
        reading = pool.submit(PatientReader(data.reader()).read_into, 3, buffer)
        wait_until(lambda: trouble.met > 1, "it was asked again")
        trouble.end()
        reading.result(30)
    assert buffer.tobytes() == whole


@pytest.mark.parametrize("action", ["hang", "slow"])
def test_a_read_that_waits_gets_the_whole_file(tmp_path: Path, data: Dataset, action: str) -> None:
    trouble, whole = Trouble(tmp_path), read(data, 3)
    trouble.begin(action)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, data, 3)
        wait_until(lambda: trouble.met, "the read met it")
        if action == "hang":
            assert not reading.done()
            trouble.end()
        assert reading.result(30) == whole
    assert trouble.met == 1


def test_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Read-only"):
        troubled(tmp_path).create_dir("x")
