"""A feed file selects and filters data of every format, and errors name the line of each mistake."""

from __future__ import annotations

import inspect
import io
import json
import re
import signal
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from commandline import running
from tfrecord import TFRecordWriter

import mbaas
from mbaas import (
    read_images,
    read_manifest,
)
from mbaas.cli.feed_data import READERS
from mbaas.cli.feed_file import ON_IMAGES, load, schema
from mbaas.errors import ConfigError, DatasetError
from mbaas.transforms import Boxes, Keypoints, Masks

SAMPLES = 60
KINDS = ("ant", "bee", "cat")
REST = "name: train\nbatch_size: 8\npipeline: [DecodeImage]\n"
MANIFEST = "data:\n  read_manifest: {path: tables/all.parquet, root: images, label_column: kind, fields: [age]}\n"

Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def images(tmp_path: Path) -> Path:
    """Images in class folders next to the feed file, and their table in another folder."""
    rows = {"uri": [], "kind": [], "age": []}
    for number in range(SAMPLES):
        kind = KINDS[number % 3]
        path = tmp_path / "images" / kind / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), np.full((4, 4, 3), number, np.uint8))
        for name, value in zip(rows, (f"{kind}/{path.name}", kind, number), strict=True):
            rows[name].append(value)
    (tmp_path / "tables").mkdir()
    pq.write_table(pa.table(rows), tmp_path / "tables" / "all.parquet")
    return tmp_path / "images"


def test_a_manifest_is_read_with_its_options(write: Write, images: Path) -> None:
    config = load(write(MANIFEST + REST))
    assert config.data.where == str(images.parent / "tables" / "all.parquet")
    wanted = read_manifest(images.parent / "tables/all.parquet", root=images, label_column="kind", fields=["age"])
    assert config.data.read().fingerprint == wanted.fingerprint
    (images / "all.csv").write_text("uri\n" + "".join(f"{KINDS[n % 3]}/{n:02d}.png\n" for n in range(9)))
    short = load(write("data: {read_manifest: images/all.csv}\n" + REST)).data.read()
    assert (len(short), short.fields, short.class_names) == (9, (), ())


def test_a_folder_is_listed_once(write: Write, images: Path) -> None:
    config = load(write("data: images\nlisting: kept.parquet\n" + REST))
    assert config.data.read().fingerprint == read_images(images).fingerprint
    assert (images.parent / "kept.parquet").exists()


@pytest.mark.parametrize("call", [*READERS.values(), *ON_IMAGES.values()], ids=lambda call: call.__name__)
def test_the_schema_has_each_parameter_with_its_default_and_description(call: Any) -> None:
    """Except the file system, which a file cannot name."""
    parameters = {name: each for name, each in inspect.signature(call).parameters.items() if name != "filesystem"}
    section = schema()["$defs"][call.__name__]
    assert [*section["properties"]] == [*parameters]
    required = [name for name, each in parameters.items() if each.default is each.empty]
    assert section.get("required", []) == required
    defaults = {name: part["default"] for name, part in section["properties"].items() if name not in required}
    given = {name: each.default for name, each in parameters.items() if name not in required}
    assert defaults == json.loads(json.dumps(given))
    assert all(part["description"] for part in section["properties"].values())


def test_boxes_key_points_and_masks_of_a_file(write: Write) -> None:
    text = f"data: images\n{REST}".replace("[DecodeImage]", "[DecodeImage, RandomIoUCrop, Resize: [8, 8]]")
    config = load(
        write(f"{text}boxes: {{format: xywh, beside: [kinds]}}\nkeypoints: {{swaps: [[1, 2]]}}\nmasks: {{field: m}}\n")
    )
    assert config.pipeline.boxes == Boxes(format="xywh", beside=("kinds",))
    assert config.pipeline.keypoints == Keypoints(swaps=((1, 2),))
    assert config.pipeline.masks == Masks(field="m")
    plain = load(write(f"data: images\n{REST}")).pipeline
    assert (plain.boxes, plain.keypoints, plain.masks) == (None, None, None)
    with pytest.raises(ConfigError, match=r"feed.yaml:5: .*Keypoints's swaps must be pairs of points, each point once"):
        load(write(f"{text}keypoints: {{swaps: [[1, 1]]}}\n"))


def test_coco_is_read(write: Write, images: Path) -> None:
    said = {
        "images": [{"id": number, "file_name": f"{KINDS[number % 3]}/{number:02d}.png"} for number in range(5)],
        "annotations": [{"image_id": 3, "category_id": 7, "bbox": [0, 1, 2, 3]}],
        "categories": [{"id": 7, "name": "wing"}],
    }
    (images.parent / "a.json").write_text(json.dumps(said))
    options = "path: a.json, images: images, keep_empty: false, fields: [boxes], listing: kept.parquet"
    config = load(write(f"data:\n  read_coco: {{{options}}}\n{REST}"))
    assert config.data.where == str(images.parent / "a.json")
    data = config.data.read()
    assert data.uri(0) == str(images / "ant/03.png")
    assert data.values(np.arange(len(data)))["boxes"].own()[0].tolist() == [[0, 1, 2, 4]]
    assert (images.parent / "kept.parquet").exists()


def test_shards_and_parquet_files_are_read(write: Write, images: Path) -> None:
    """All paths, including paths with braces, are relative to the feed file."""
    folder, png = images.parent, cv2.imencode(".png", np.zeros((4, 4, 3), np.uint8))[1].tobytes()
    for number in range(2):
        with tarfile.open(folder / f"s-{number}.tar", "w") as tar:
            for ending, content in (("png", png), ("cls", b"5")):
                member = tarfile.TarInfo(f"{number}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    pq.write_table(pa.table({"image": [png] * 3, "label": [1, 2, 3]}), folder / "p-0.parquet")
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_dict({"image": [png] * 2, "label": [7, 8]})
    saved.save_to_disk(folder / "h")
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(folder / "hs")
    writer = TFRecordWriter(str(folder / "r-0.tfrecord"))
    for label in (4, 6):
        writer.write({"image": (png, "byte"), "image/class/label": (label, "int")})
    writer.close()
    for said, labels in (
        ("read_tfrecord: {path: 'r-{0..0}.tfrecord', image_column: image, listing: kept-r.parquet}", [4, 6]),
        ('read_webdataset: "s-{0..1}.tar"', [5, 5]),
        ('read_webdataset: {path: "s-{0..0}.tar", listing: kept.parquet}', [5]),
        ('read_parquet: {path: "p-{0..0}.parquet", unpacked: unpacked}', [1, 2, 3]),
        ("read_huggingface: h", [7, 8]),
        ("read_huggingface: {path: hs, split: test, listing: kept-hs.parquet}", [8]),
        ("read_huggingface: {path: h, unpacked: unpacked-h}", [7, 8]),
    ):
        data = load(write(f"data:\n  {said}\n{REST}")).data.read()
        assert data.labels(np.arange(len(data))).tolist() == labels
    assert (folder / "kept.parquet").exists()
    assert (folder / "kept-r.parquet").exists()
    flat = load(write(f"data: {{read_images: {{path: images, classes: false}}}}\n{REST}")).data.read()
    assert (flat.fields, len(flat)) == ((), len(read_images(images)))
    assert (folder / "kept-hs.parquet").exists()
    assert (folder / "unpacked").is_dir()
    assert (folder / "unpacked-h").is_dir()


def test_recordings_and_arrays_are_read_by_what_the_file_says_of_them(write: Write, images: Path) -> None:
    folder = images.parent / "numbers"
    for name in ("few/1.npy", "few/2.npy", "many/1.npy", "many/notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, np.zeros(3))
    (folder / "many/notes.txt.npy").rename(folder / "many/notes.txt")
    for said, wanted in (
        ("read_arrays: numbers", [0, 0, 1]),
        ("read_arrays: {path: numbers, extensions: [.txt, .npy], listing: arrays.parquet}", [0, 0, 1, 1]),
        ("read_audio: {path: numbers, extensions: [.npy]}", [0, 0, 1]),
    ):
        config = load(write(f"data: {{{said}}}\n{REST.replace('DecodeImage', 'DecodeArray')}"))
        assert config.data.where == str(folder)
        data = config.data.read()
        assert data.labels(np.arange(len(data))).tolist() == wanted
    assert (images.parent / "arrays.parquet").exists()
    config = load(write(f"data: {{read_arrays: {{path: numbers, classes: false}}}}\n{REST}"))
    assert config.data.read().fields == ()


@pytest.mark.parametrize("data", ["data: images\n", MANIFEST])
def test_a_filter_comes_before_a_split_and_that_before_what_is_taken(write: Write, data: str) -> None:
    whole = load(write(data + REST)).data.read()
    text = data + REST + 'filter: [[class, in, [ant, cat]], [label, "!=", 1]]\n'
    kept = load(write(text)).data.read()
    assert set(kept.labels(np.arange(len(kept))).tolist()) == {0, 2}
    assert kept.class_names == KINDS
    assert len(kept) == 40
    text += "split: {part: PART, fraction: 0.7, seed: 3, stratify: label}\n"
    train, validation = (load(write(text.replace("PART", part))).data.read() for part in ("train", "validation"))
    wanted = kept.split(0.7, 3, stratify="label")
    assert [train.fingerprint, validation.fingerprint] == [part.fingerprint for part in wanted]
    few = load(write(text.replace("PART", "train") + "limit: 5\n")).data.read()
    assert few.fingerprint == train.limit(5).fingerprint
    ids = np.concatenate([part.source_ids(np.arange(len(part))) for part in (train, validation)])
    assert sorted(ids.tolist()) == np.flatnonzero(whole.labels(np.arange(SAMPLES)) != 1).tolist()


def test_what_is_left_is_drawn_from_last(write: Write) -> None:
    taken = load(write(MANIFEST + REST + "limit: 40\n")).data.read()
    text = MANIFEST + REST + "limit: 40\nresample: "
    for said, wanted in (
        ("{balance: label}", taken.balance("label")),
        ("{balance: label, samples: 7, seed: 3}", taken.balance("label", 7, 3)),
        ("{weights: age, samples: 100}", taken.resample("age", 100)),
    ):
        assert load(write(text + said + "\n")).data.read().fingerprint == wanted.fingerprint


def test_conditions_compare_as_they_say(write: Write) -> None:
    for said, wanted in {
        '[[age, "<", 3]]': [0, 1, 2],
        '[[age, ">=", 57.5]]': [58, 59],
        "[[age, ==, 7]]": [7],
        '[[age, ">", 3], [age, "<=", 5]]': [4, 5],
        "[[age, not in, [0, 1, 2, 3]], [age, in, [3, 4]]]": [4],
    }.items():
        data = load(write(f"{MANIFEST}{REST}filter: {said}\n")).data.read()
        assert data.values(np.arange(len(data)))["age"].tolist() == wanted, said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data: 3\n", "1: data must be text, got 3 (a whole number)"),
        (
            "data: {tables: x}\n",
            "1: unknown key 'tables'; known are read_arrays, read_audio, read_coco, read_huggingface, read_",
        ),
        (
            "data: {}\n",
            "1: data: name one of read_arrays, read_audio, read_coco, read_huggingface, read_images, ",
        ),
        (
            "data:\n  read_manifest: x\n  read_webdataset: y\n",
            "1: data: name one of read_arrays, read_audio, read_coco, read_huggingface, read_images, read_manifest, "
            "read_parquet, read_tfrecord, read_webdataset, got read_manifest and read_webdataset",
        ),
        ("data: {read_parquet: x}\n", "1: data.read_parquet must be 'key: value' lines, got 'x' (text)"),
        ("data:\n  read_parquet: {path: x}\n", "2: data.read_parquet lacks 'unpacked'"),
        ("data: {read_manifest: 3}\n", "1: data.read_manifest must be text, got 3 (a whole number)"),
        ("data:\n  read_manifest:\n    feilds: x\n    path: y\n", "3: unknown key 'feilds'; did you mean 'fields'?"),
        ("data:\n  read_manifest:\n    label_column: x\n", "2: data.read_manifest lacks 'path'"),
        ("data:\n  read_manifest: {path: x, fields: age}\n", "2: data.read_manifest.fields must be a list, got 'age'"),
        (MANIFEST + "listing: kept.parquet\n", "3: listing is an option of a folder, but data "),
        ("data: images\nsplit: 0.8\n", "2: split must be 'key: value' lines, got 0.8 (a number)"),
        ("data: images\nsplit: {part: train}\n", "2: split lacks 'fraction'"),
        (
            "data: images\nsplit: {part: test, fraction: 0.8}\n",
            "2: split.part must be one of 'train', 'validation', got 'test' (text)",
        ),
        ("data: images\nsplit: {part: train, fraction: 1}\n", "2: split.fraction must be below 1, got 1"),
        ("data: images\nsplit:\n  parts: train\n", "3: unknown key 'parts'; did you mean 'part'?"),
        ("data: images\nlimit: 0\n", "2: limit must be at least 1, got 0 (a whole number)"),
        ("data: images\nresample: {seed: 1}\n", "2: resample: name one of balance, weights, got none"),
        (
            "data: images\nresample: {weights: age, balance: label}\n",
            "2: resample: name one of balance, weights, got both",
        ),
        ("data: images\nresample: {balance: label, samples: 0}\n", "2: resample.samples must be at least 1, got 0"),
        ("data: images\nfilter: []\n", "2: filter must hold at least 1 values, got [] (a list)"),
        ('data: images\nfilter: [label, "<", 5]\n', "2: filter[0] must be a list, got 'label' (text)"),
        ('data: images\nfilter: [[label, "<"]]\n', "2: filter[0] must hold at least 3 values, got [label, \"<\"]"),
        ("data: images\nfilter: [[label, ~=, 5]]\n", "2: filter[0][1] must be one of '==', '!=', '<', '<=', "),
        (
            "data: images\nfilter:\n  - [label, in, 5]\n",
            "3: filter[0]: the value after 'in' must be a list of numbers or of strings, got 5",
        ),
        ("data: images\nfilter: [[label, ==, [5]]]\n", "after '==' must be a number or a string, got [5]"),
        ("data: images\nfilter: [[label, ==, true]]\n", "got true; quote it if it is text: 'true'"),
        ("data: images\nfilter: [[class, in, [yes, no]]]\n", "got [yes, no]; quote it if it is text: 'yes'"),
        ("data: images\nfilter: [[class, ==, 010]]\n", "2: filter[0][2]: 010 is 8 in YAML: write 8, or"),
        ("data: images\nfilter: [[class, ==, null]]\n", "after '==' must be a number or a string, got null"),
        ("data: images\nfilter: [[label, in, [1, x]]]\n", "or of strings, got [1, x]; quote it if it is text: '1'"),
    ],
)  # fmt: skip
def test_mistakes_are_named_before_any_data_is_looked_for(write: Write, text: str, sentence: str) -> None:
    path = write(text + REST)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{sentence[:3]}" if sentence[0].isdigit() else f"{path}:2: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "data:\n  read_manifest:\n    path: tables/all.parquet\n    root: images\n    label_column: sort\n",
            ":5: data.read_manifest: ROOT/tables/all.parquet has no column 'sort'; it has uri, kind, age",
        ),
        (
            'data: images\nfilter:\n  - [size, "<", 5]\n',
            ":2: filter: cannot filter ROOT/images by (size < 5): there is no field size; its "
            "fields are label, class",
        ),
        ("data: images\nfilter: [[label, ==, ant]]\n", ":2: filter: cannot filter ROOT/images by (label == \"ant\"): "),
        (f"data: images\nfilter: [[label, ==, {2**70}]]\n", ":2: filter: "),
        (
            "data: images\nfilter: [[class, in, [1e3, 5]]]\n",
            ":2: filter[0]: class contains strings, but 1e3 without quotes is a number; quote it if it is text: '1e3'",
        ),
        (
            "data: images\nsplit:\n  part: train\n  stratify: kind\n  fraction: 0.5\n",
            ":4: split: stratify must name a field of whole numbers (ROOT/images has label), got 'kind'",
        ),
        (
            "data: images\nsplit:\n  part: train\n  fraction: 0.001\n",
            ":4: split: fraction 0.001 of the 60 samples of ROOT/images leaves none for the first part",
        ),
        (
            "data: images\nresample:\n  samples: 5\n  balance: kind\n",
            ":2: resample: field must name a field of whole numbers (ROOT/images has label), got 'kind'",
        ),
        (
            "data: images\nlimit: 61\n",
            ":2: limit: count must be a whole number in [1, 60], the number of samples of ROOT/images, got 61",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_data_has_its_line_too(write: Write, images: Path, text: str, sentence: str) -> None:
    path = write(text + REST)
    with pytest.raises(ConfigError) as caught:
        load(path).data.read()
    assert str(caught.value).startswith(f"{path}{sentence.replace('ROOT', str(images.parent))}")
    assert "\n" not in str(caught.value)


def test_a_filter_that_nothing_passes_is_one_sentence(write: Write) -> None:
    with pytest.raises(DatasetError, match=r"^none of the 60 samples of .*/images passes the filter \(label > 7\)$"):
        load(write('data: images\nfilter: [[label, ">", 7]]\n' + REST)).data.read()


def test_the_guide_shows_the_same_in_a_file_and_in_python(
    write: Write, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test's data has an age and a class "unknown", as the guide's has."""
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "subsets.md").read_text()
    (python,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "data.filter" in block)
    (yaml,) = (block for block in re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL) if "read_manifest" in block)
    rows = [("images/ant/00.png", ("cat", "dog", "unknown")[age % 3], age, 0.5) for age in range(2000)]
    names = ("path", "species", "age", "weight")
    table = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    pq.write_table(table, images.parent / "photos.parquet")
    pyarrow.csv.write_csv(table, images.parent / "more.csv")
    monkeypatch.chdir(images.parent)
    shown: dict[str, Any] = {"mbaas": mbaas}
    exec(python, shown)
    assert load(write(yaml + REST)).data.read().fingerprint == shown["small"].fingerprint
    assert [len(shown[name]) for name in ("adults", "small", "both")] == [1322, 1000, 1058 + 2000]


def test_the_guide_draws_the_same_in_a_file_and_in_python(
    write: Write, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "subsets.md").read_text()
    (python,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if ".balance(" in block)
    in_files = re.findall(r"`(resample: \{.*?\})`", guide)
    rows = {"uri": ["images/ant/00.png"] * 300, "label": [*range(30)] * 10, "weight": [*range(300)]}
    pyarrow.csv.write_csv(pa.table(rows), images.parent / "photos.csv")
    monkeypatch.chdir(images.parent)
    shown = {"train": read_manifest("photos.csv").filter(pyarrow.compute.field("weight") < 299)}
    exec(python, shown)
    drawn = [shown[name].fingerprint for name in ("even", "drawn")]
    text = "data: {read_manifest: photos.csv}\n" + REST + "filter: [[weight, '<', 299]]\n"
    assert [load(write(text + said + "\n")).data.read().fingerprint for said in in_files] == drawn


TRIAL = """
import mbaas
with mbaas.join("train", format="numpy") as loader:
    seen = [(pixel, age) for batch in loader for pixel, age in zip(batch["image"][:, 0, 0, 0], batch["age"])]
    assert all(pixel == age for pixel, age in seen)
    print("ages", *sorted(int(age) for _, age in seen), loader.class_names, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_part_of_a_manifest_is_served(write: Write, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(MANIFEST + REST + 'prep_workers: 1\nfilter: [[age, ">=", 30]]\nsplit: {part: train, fraction: 0.8}\n')
    data = load(path).data.read()
    with running([sys.executable, "-m", "mbaas", "serve", str(path), "--address", cluster]) as served:
        assert served.wait_for("serves").startswith("feed 'train' serves 24 samples in 3 classes of ")
        monkeypatch.setenv("RAY_ADDRESS", cluster)
        with running([sys.executable, "-c", TRIAL]) as trial:
            ages = " ".join(map(str, data.values(np.arange(24))["age"].tolist()))
            assert trial.wait_for("ages") == f"ages {ages} ('ant', 'bee', 'cat')\n"
            assert trial.end() == 0
        served.process.send_signal(signal.SIGINT)
        assert served.end() == 0
