"""The custom reader of the examples reads all images of an archive and names unreadable files."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

import mbaas
from examples.read_zip import read_zip

IMAGES = {
    "dog/2.PNG": b"second dog",
    "cat/a/1.jpg": b"cat",
    "dog/1.webp": b"first dog" * 100,
    "dog/notes.txt": b"none",
    "top.jpg": b"none",
}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as file:
        for number, (name, content) in enumerate(IMAGES.items()):
            info = zipfile.ZipInfo(name, (2000 + number, 1, 1, 0, 0, 0))
            file.writestr(info, content, zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED)
    return tmp_path / "images.zip"


def test_it_has_the_images_of_the_archive(archive: Path) -> None:
    data = pickle.loads(pickle.dumps(read_zip(archive, years=True), protocol=5))
    ids = np.arange(3)
    assert (len(data), data.class_names) == (3, ("cat", "dog"))
    assert {name: column.tolist() for name, column in data.values(ids).items()} == {
        "label": [0, 1, 1],
        "year": [2001, 2002, 2000],
    }
    assert [field.dtype for field in data.fields] == ["int64", "int16"]
    assert [data.uri(sample) for sample in range(3)] == [f"{archive}/{name}" for name in sorted(IMAGES)[:3]]
    reader = data.reader()
    for sample, length in enumerate(data.lengths(ids).tolist()):
        for buffer in (np.zeros(length, np.uint8), memoryview(bytearray(length))):
            reader.read_into(sample, buffer)
            assert bytes(buffer) == IMAGES[data.uri(sample).removeprefix(f"{archive}/")]
    assert data.total_bytes == sum(map(len, [*IMAGES.values()][:3]))
    assert data.balance(samples=4).labels(np.arange(4)).tolist() == [0, 0, 1, 1]


def test_the_fingerprint_is_that_of_what_is_in_it(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.zip").write_bytes(archive.read_bytes())
    prints = {read_zip(archive).fingerprint, read_zip(tmp_path / "copy.zip").fingerprint}
    assert len(prints) == 1
    with zipfile.ZipFile(tmp_path / "copy.zip", "a") as file:
        file.writestr("cat/3.jpg", b"another")
    assert read_zip(tmp_path / "copy.zip").fingerprint not in prints
    assert read_zip(archive, years=True).fingerprint not in prints


def test_what_cannot_be_read_is_named(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(mbaas.DatasetError, match=r"cannot read .*/none\.zip: .*No such file"):
        read_zip(tmp_path / "none.zip")
    (tmp_path / "text.zip").write_text("no archive")
    with pytest.raises(mbaas.DatasetError, match=r"cannot read .*/text\.zip: File is not a zip file"):
        read_zip(tmp_path / "text.zip")
    with zipfile.ZipFile(tmp_path / "bare.zip", "w") as file:
        file.writestr("1.jpg", b"")
    with pytest.raises(mbaas.DatasetError, match=r"bare\.zip has no images in folders, such as cat/1\.jpg"):
        read_zip(tmp_path / "bare.zip")
    data = read_zip(archive)
    damaged = archive.read_bytes().replace(b"second dog", b"SECOND DOG")
    archive.write_bytes(damaged)
    with pytest.raises(mbaas.BadSampleError, match=r"images\.zip/dog/2\.PNG: Bad CRC-32"):
        data.reader().read_into(2, np.zeros(10, np.uint8))
    with pytest.raises(mbaas.BadSampleError, match=r"it has 3 bytes now, 4 when it was listed"):
        data.reader().read_into(0, np.zeros(4, np.uint8))
