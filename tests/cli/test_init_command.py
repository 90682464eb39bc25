"""`mbaas init` recognises each kind of data, and writes a file that `mbaas serve` takes, with a pipeline that fits."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import datasets
import numpy as np
import pyarrow as pa
import pytest
import soundfile
from commandline import call
from pyarrow import csv, parquet

from mbaas.cli import feed_file
from mbaas.pictures.samples import first_samples
from mbaas.tools.recognize import look
from support import readers

IMAGES = readers.images(bad=None)
Write = Callable[[Path], None]


def folders(top: Path) -> None:
    IMAGES.in_folders(top)


def no_classes(top: Path) -> None:
    for number, content in enumerate(IMAGES.encoded):
        (top / f"{number:02}.png").write_bytes(content)


def table(top: Path) -> None:
    """A CSV file that names images in another folder, with names of classes."""
    no_classes(top / "pictures") if (top / "pictures").mkdir() is None else None
    names = [f"{number:02}.png" for number in range(len(IMAGES.encoded))]
    csv.write_csv(pa.table({"file": names, "species": IMAGES.names, "age": [*range(len(names))]}), top / "t.csv")


def shards(top: Path) -> None:
    readers.tar_shards(top, IMAGES, None)


def records(top: Path) -> None:
    readers.records(top, IMAGES, None)


def parquet_files(top: Path) -> None:
    for number in range(2):
        rows = slice(number, None, 2)
        columns = {"image": IMAGES.encoded[rows], "label": IMAGES.names[rows]}
        parquet.write_table(pa.table(columns), top / f"part-{number:02}.parquet")


def saved(top: Path) -> None:
    readers.arrow_files(top, IMAGES, None)


def saved_parts(top: Path) -> None:
    rows = datasets.Dataset.from_dict(
        {"photo": [{"bytes": each, "path": None} for each in IMAGES.encoded], "rot": IMAGES.labels},
        features=datasets.Features({"photo": datasets.Image(), "rot": datasets.ClassLabel(names=[*readers.CLASSES])}),
    )
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": rows, "test": rows.select(range(5))}).save_to_disk(top)


def coco(top: Path) -> None:
    """Two parts, as on COCO's site."""
    (top / "annotations").mkdir()
    for part, samples in (("train2017", 12), ("val2017", 5)):
        (top / part).mkdir()
        known = [{"id": number, "file_name": f"{number}.png", "width": 10, "height": 8} for number in range(samples)]
        box = {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}
        said = {"images": known, "annotations": [box], "categories": [{"id": 1, "name": "cat"}]}
        (top / "annotations" / f"instances_{part}.json").write_text(json.dumps(said))
        for number in range(samples):
            (top / part / f"{number}.png").write_bytes(IMAGES.encoded[number])


def sound(top: Path) -> None:
    for number in range(8):
        noise = np.random.default_rng(number).normal(0, 0.1, 8000 + 400 * number)
        file = top / ("yes", "no")[number % 2] / f"{number}.wav"
        file.parent.mkdir(exist_ok=True)
        soundfile.write(file, noise, 8000)


def arrays(top: Path) -> None:
    for number in range(4):
        np.save(top / f"{number}.npy", np.zeros((4, 5, 6), np.float32))


def clouds(top: Path) -> None:
    for number in range(4):
        np.save(top / f"{number}.npy", np.zeros((10 + number, 3), np.float32))


def archives(top: Path) -> None:
    for number in range(4):
        np.savez(top / f"{number}.npz", x=np.zeros((4, 5), np.int16), y=np.zeros(1))


KINDS: list[tuple[Write, Any, int]] = [
    (folders, "top", 31),
    (no_classes, {"read_images": {"path": "top", "classes": False}}, 31),
    (
        table,
        {
            "read_manifest": {
                "path": "top/t.csv",
                "uri_column": "file",
                "label_column": "species",
                "root": "top/pictures",
            }
        },
        31,
    ),
    (shards, {"read_webdataset": {"path": "top/{0..1}.tar", "label_column": "kind"}}, 31),
    (
        records,
        {"read_tfrecord": {"path": "top/{0..1}.tfrecord", "image_column": "image", "label_column": "kind"}},
        31,
    ),
    (parquet_files, {"read_parquet": {"path": "top/part-{00..01}.parquet", "unpacked": "top/unpacked"}}, 31),
    (saved, {"read_huggingface": "top"}, 31),
    (
        saved_parts,
        {"read_huggingface": {"path": "top", "split": "train", "image_column": "photo", "label_column": "rot"}},
        31,
    ),
    (coco, {"read_coco": {"path": "top/annotations/instances_train2017.json", "images": "top/train2017"}}, 12),
    (sound, {"read_audio": "top"}, 8),
    (arrays, {"read_arrays": {"path": "top", "classes": False}}, 4),
    (clouds, {"read_arrays": {"path": "top", "classes": False}}, 4),
    (archives, {"read_arrays": {"path": "top", "classes": False}}, 4),
]


@pytest.mark.parametrize(("write", "data", "samples"), KINDS, ids=[kind[0].__name__ for kind in KINDS])
def test_each_kind_gets_a_file_that_works(
    write: Write, data: Any, samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    monkeypatch.chdir(tmp_path)
    top = tmp_path / "top"
    top.mkdir()
    write(top)
    said = call("init", "top")
    assert said.exit_code == 0, said.output
    file = tmp_path / "feed.yaml"
    assert yaml.safe_load(file.read_text())["data"] == data
    wanted = feed_file.load(file)
    dataset = wanted.data.read()
    assert len(dataset) == samples
    found = first_samples(dataset, wanted.pipeline, count=samples, seed=wanted.options.seed)
    assert (len(found.samples), found.bad) == (samples, ())
    assert "mbaas check feed.yaml" in said.stdout


def test_validation_data_get_a_file_of_their_own(tmp_path: Path) -> None:
    for part, images in (("train", IMAGES), ("val", readers.images(6, bad=None))):
        (tmp_path / "set" / part).mkdir(parents=True)
        images.in_folders(tmp_path / "set" / part)
    assert call("init", tmp_path / "set", "--out", tmp_path / "f.yaml").exit_code == 0
    train, validation = (feed_file.load(tmp_path / name) for name in ("f.yaml", "f-val.yaml"))
    assert [len(each.data.read()) for each in (train, validation)] == [31, 6]
    said = call("init", tmp_path / "set", "--out", tmp_path / "f.yaml")
    assert "f-val.yaml exist; --force overwrites them" in " ".join(said.stderr.split())
    assert (train.options.shuffle, validation.options.shuffle) == (True, False)
    assert [each.name for each in (train, validation)] == ["train", "val"]


def test_tables_and_folders_that_are_not_used_are_named(tmp_path: Path) -> None:
    names = ("train", "val", "extra", "a", "b", "c")
    for name in names:
        IMAGES.in_folders(tmp_path / "parts" / name)
        (tmp_path / "tables").mkdir(exist_ok=True)
        (tmp_path / "tables" / f"{name}.csv").write_text("uri\n0.png\n")
    (tmp_path / "tables" / "0.png").write_bytes(IMAGES.encoded[0])
    shown = " ".join(call("init", tmp_path / "tables", "--out", tmp_path / "t.yaml").stdout.split())
    assert "found the table train.csv of images" in shown
    assert "for validation: the table val.csv of images" in shown
    assert [each.split()[0] for each in shown.split("not used: the table ")[1:]] == ["a.csv", "b.csv", "c.csv"]
    assert "not used: 2 more" in shown, "the table extra.csv, and an image"
    shown = call("init", tmp_path / "parts", "--out", tmp_path / "p.yaml").stdout
    assert [line.split()[-1] for line in shown.splitlines() if "not used: the folder" in line] == ["a", "b", "c"]


def test_photographs_are_cropped_at_random_for_training_only(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for kind in ("a", "b"):
            (tmp_path / "d" / part / kind).mkdir(parents=True)
            cv2.imwrite(str(tmp_path / "d" / part / kind / "1.jpg"), np.zeros((300, 400, 3), np.uint8))
    assert call("init", tmp_path / "d", "--out", tmp_path / "f.yaml").exit_code == 0
    steps = [
        [type(each).__name__ for each in feed_file.load(tmp_path / name).pipeline.transforms]
        for name in ("f.yaml", "f-val.yaml")
    ]
    assert steps == [
        ["DecodeImage", "RandomResizedCrop", "RandomHorizontalFlip"],
        ["DecodeImage", "Resize", "CenterCrop"],
    ]


def test_no_file_is_overwritten_without_force(tmp_path: Path) -> None:
    IMAGES.in_folders(tmp_path / "top")
    out = tmp_path / "feed.yaml"
    out.write_text("mine")
    said = call("init", tmp_path / "top", "--out", out)
    assert (said.exit_code, out.read_text()) == (2, "mine")
    assert "feed.yaml exists; --force overwrites it" in said.stderr
    assert call("init", tmp_path / "top", "--out", out, "--force").exit_code == 0
    assert "name: train" in out.read_text()


def test_no_permission_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may read everything."""
    IMAGES.in_folders(tmp_path / "top")
    real = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "bee":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    said = call("init", tmp_path / "top", "--out", tmp_path / "f.yaml")
    assert "may not be listed: bee" in said.stdout
    monkeypatch.setattr(os, "scandir", lambda _: refuse(Path("bee")))
    said = call("init", tmp_path / "top", "--out", tmp_path / "g.yaml")
    assert (said.exit_code, "may not be listed: permission denied" in said.stderr) == (1, True)
    said = call("init", tmp_path / "top", "--out", tmp_path)
    assert (said.exit_code, "Traceback" in said.stderr) == (1, False)


def test_data_that_are_not_recognised_are_described(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("a")
    (tmp_path / "other" / "b.json").write_text(json.dumps({"a": 1}))
    IMAGES.in_folders(tmp_path / "two" / "one")
    IMAGES.in_folders(tmp_path / "two" / "other")
    for folder, sentence in (
        ("missing", "missing does not exist"),
        ("empty", "empty has no files; mbaas init knows images (.jpg"),
        ("other", "other has 2 files (1 .txt, 1 .json), of no kind that is known"),
        ("other/a.txt", "a.txt is a file; name its folder"),
        ("two", "two has several datasets: one, other; name one: mbaas init"),
    ):
        said = call("init", tmp_path / folder, "--out", tmp_path / "f.yaml")
        assert said.exit_code == 1
        assert sentence in " ".join(said.stderr.split())
    assert "looks at local folders" in call("init", "s3://bucket/train").stderr
    assert not (tmp_path / "f.yaml").exists()


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (shards, "part-{:05}.tar"),
        (records, "part-{:05}-of-00300"),
        (records, "part.tfrecord-{:05}-of-00300"),
        (parquet_files, "part-{:05}.parquet"),
    ],
)
def test_all_shards_are_named_however_many(tmp_path: Path, write: Write, names: str) -> None:
    """A pattern of the first 200 would train on a part of the data."""
    top = tmp_path / "top"
    (tmp_path / "one").mkdir()
    top.mkdir()
    write(tmp_path / "one")
    content = next(file for file in sorted((tmp_path / "one").iterdir()) if file.is_file()).read_bytes()
    for number in range(300):
        (top / names.format(number)).write_bytes(content)
    said = call("init", top, "--out", tmp_path / "f.yaml")
    assert said.exit_code == 0, said.stderr
    pattern = names.replace("{:05}", "{00000..00299}")
    assert pattern in (tmp_path / "f.yaml").read_text()
    assert "300 " in said.stdout


def test_shards_in_folders_that_were_not_listed_are_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "MOST_FOLDERS", 4)
    (tmp_path / "one").mkdir()
    shards(tmp_path / "one")
    content = next((tmp_path / "one").glob("*.tar")).read_bytes()
    for number in range(4):
        (tmp_path / "top" / "data" / str(number)).mkdir(parents=True)
        (tmp_path / "top" / "data" / str(number) / "a.tar").write_bytes(content)
    assert "at least 2 tar shards" in call("init", tmp_path / "top", "--out", tmp_path / "f.yaml").stdout


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"[1, 2"),
        ("a.jsonl", b"{]"),
        ("a.tar", b"no tar file" * 100),
        ("a.npz", b"no zip file"),
        ("a.npy", b""),
        ("a.csv", b'a,b\n"' + b"x" * 200_000),
        ("dataset_info.json", b"{"),
        ("a.parquet", b"PAR1"),
    ],
)
def test_a_damaged_file_does_not_end_it(tmp_path: Path, name: str, content: bytes) -> None:
    top = tmp_path / "top"
    IMAGES.in_folders(top)
    (top / name).write_bytes(content)
    said = call("init", top, "--out", tmp_path / "f.yaml")
    assert (said.exit_code, said.exception is None) == (0, True), said.exception


def test_a_list_beside_the_image_of_a_tar_file(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in (("0.json", b"[1, 2]"), ("0.png", IMAGES.encoded[0])):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert look.look_at(tmp_path).peeks["a.tar"].members == ("json", "png")


def test_a_json_object_in_several_lines_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"a": 1, "b": [1, 2]}, indent=2))
    assert look.look_at(tmp_path).peeks["a.json"].columns == {"a": (1,), "b": ([1, 2],)}


def test_large_files_are_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", image=np.zeros((1000, 1000, 3), np.uint8), label=np.int64(3))
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        for number in range(3000):
            archive.addfile(tarfile.TarInfo(str(number)))
    monkeypatch.setattr(np.lib.format, "read_array", pytest.fail)
    listed: list[str] = []
    from_header = tarfile.TarInfo.fromtarfile.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        tarfile.TarInfo, "fromtarfile", classmethod(lambda *given: listed.append("") or from_header(*given))
    )
    peeks = look.look_at(tmp_path).peeks
    assert peeks["a.npz"].arrays == {"image": ("uint8", (1000, 1000, 3)), "label": ("int64", ())}
    assert 1000 <= len(listed) < 1100
