"""`read_audio` and `read_arrays` list a tree with and without classes; test_listing covers listing itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from mbaas.dataset import AUDIO_EXTENSIONS, read_arrays, read_audio
from mbaas.errors import DatasetError


def grow(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def names_of(data: Any) -> list[str]:
    return [str(name) for name in data.table["uri"].to_pylist()]


def test_folders_are_classes(tmp_path: Path) -> None:
    grow(tmp_path, "yes/b.wav", "yes/a.FLAC", "no/deep/c.mp3", "no/notes.txt")
    data = read_audio(tmp_path)
    assert data.class_names == ("no", "yes")
    assert names_of(data) == ["no/deep/c.mp3", "yes/a.FLAC", "yes/b.wav"]
    assert data.labels(np.arange(3)).tolist() == [0, 1, 1]
    grow(tmp_path / "arrays", "yes/1.npy", "no/2.npz")
    assert names_of(read_arrays(tmp_path / "arrays")) == ["no/2.npz", "yes/1.npy"]


def test_recordings_of_all_formats_that_are_decoded_are_found_in_any_case(tmp_path: Path) -> None:
    names = [f"{number:02d}{ending}" for number, ending in enumerate(AUDIO_EXTENSIONS)]
    names = [name.upper() if number % 2 else name for number, name in enumerate(names)]
    grow(tmp_path, *names)
    assert names_of(read_audio(tmp_path, classes=False)) == names
    formats = {f".{name.lower()}" for name in soundfile.available_formats()}
    # MATLAB and HTK files mostly contain other data; raw and SD2 files do not record their own format.
    assert formats - {*AUDIO_EXTENSIONS} == {".mat4", ".mat5", ".mpc2k", ".htk", ".raw", ".sd2", ".wavex"}
    grow(tmp_path / "arrays", "1.NPY", "2.Npz")
    assert names_of(read_arrays(tmp_path / "arrays", classes=False)) == ["1.NPY", "2.Npz"]


def test_without_classes_files_lie_at_any_depth_by_folder_and_name(tmp_path: Path) -> None:
    """The layout of LibriSpeech chapters, with transcripts next to the audio."""
    flac = [f"84/121123/84-121123-{number:04d}.flac" for number in (2, 0)] + ["84_x/1/9.flac", "top.flac"]
    grow(tmp_path, *flac, "84/121123/84-121123.trans.txt", ".hidden/1.flac", "84/.2.flac")
    data = read_audio(tmp_path, classes=False)
    wanted = ["top.flac", "84/121123/84-121123-0000.flac", "84/121123/84-121123-0002.flac", "84_x/1/9.flac"]
    assert names_of(data) == wanted
    assert data.fields == ()
    assert data.class_names == ()
    assert data.uri(1) == f"{tmp_path}/{wanted[1]}"
    reader, buffer = data.reader(), np.zeros(len(wanted[1]), np.uint8)
    reader.read_into(1, buffer)
    assert buffer.tobytes().decode() == wanted[1]
    assert data.fingerprint != read_audio(tmp_path / "84", classes=False).fingerprint


def test_the_top_of_a_file_system_is_a_tree_like_any_other(tmp_path: Path) -> None:
    grow(tmp_path, "a/1.wav", "2.wav")
    top = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    assert names_of(read_audio("", classes=False, filesystem=top)) == ["2.wav", "a/1.wav"]


def test_a_kept_listing_is_of_one_reader_and_one_kind_of_samples(tmp_path: Path) -> None:
    root, kept = grow(tmp_path / "tree", "a/1.wav", "b/2.wav"), tmp_path / "kept.parquet"
    first = read_audio(root, listing=kept)
    grow(root, "a/later.wav")
    assert read_audio(root, listing=kept).fingerprint == first.fingerprint
    with pytest.raises(DatasetError, match=r"was made with classes True, not False"):
        read_audio(root, classes=False, listing=kept)
    with pytest.raises(DatasetError, match=r"is not a listing of read_arrays|is of extensions"):
        read_arrays(root, listing=kept)
    flat = read_audio(root, classes=False, listing=tmp_path / "flat.parquet")
    again = read_audio(root, classes=False, listing=tmp_path / "flat.parquet")
    assert (len(again), again.fingerprint, again.fields) == (3, flat.fingerprint, ())


@pytest.mark.parametrize(
    ("read", "options", "says"),
    [
        (
            read_audio,
            {},
            r"holds audio files, for instance 1.wav, but no folders; expected a folder with a folder of au",
        ),
        (
            read_arrays,
            {"classes": False},
            r": it holds no file that ends in .npy or .npz; name other endings with extensi",
        ),
        (
            read_arrays,
            {},
            r"holds no folders; expected a folder with a folder of arrays for each class, as in ill/1.npy",
        ),
    ],
)
def test_a_tree_without_samples_says_what_was_expected(read: Any, options: Any, says: str, tmp_path: Path) -> None:
    grow(tmp_path, "1.wav")
    with pytest.raises(DatasetError, match=says):
        read(tmp_path, **options)


@pytest.mark.parametrize("classes", [True, False])
def test_what_is_no_folder_is_refused(classes: bool, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"away does not exist; expected a folder"):
        read_audio(tmp_path / "away", classes=classes)
    with pytest.raises(DatasetError, match=r"1.wav is a file; expected a folder"):
        read_audio(grow(tmp_path, "1.wav") / "1.wav", classes=classes)


def test_files_that_others_take_for_recordings_are_counted(tmp_path: Path) -> None:
    grow(tmp_path, "a/1.wav", "a/2.m4a", "a/3.M4A")
    with pytest.warns(
        UserWarning, match=r"left out 2 files whose names do not end as audio files do, for instance 'a/2.m4a'"
    ) as seen:
        read_audio(tmp_path)
    assert seen[0].filename == __file__
    read_audio(tmp_path, classes=False, extensions=[".wav"])  # no warning if extensions are given
