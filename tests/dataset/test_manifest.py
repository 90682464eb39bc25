"""Manifests: tables of files, as CSV, JSON lines and Parquet, and what is wrong with those that cannot be."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from contents import content

from mbaas.dataset import concat, read_images, read_manifest
from mbaas.errors import ConfigError, DatasetError
from mbaas.fields import Field

ROWS: list[dict[str, Any]] = [
    {"uri": "b/2.png", "kind": "dog", "age": 3, "weight": 7.5, "tags": [0, 1, 1], "note": "old"},
    {"uri": "a/1.png", "kind": "cat", "age": 1, "weight": 4.25, "tags": [1, 0, 1], "note": ""},
    {"uri": "b/2.png", "kind": "ant", "age": 2, "weight": 0.5, "tags": [0, 0, 0], "note": "again"},
]
IDS = np.arange(3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a/1.png", "b/2.png"):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_bytes(name.encode() * (2 if name.startswith("a") else 3))
    return tmp_path


def written(folder: Path, ending: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    path = folder / f"table{ending}"
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif ending == ".csv":
        flat = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
        pyarrow.csv.write_csv(pa.Table.from_pylist(flat), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".ndjson", ".json", ".parquet"])
def test_columns_of_numbers_are_fields_and_a_label_of_text_has_classes(folder: Path, ending: str) -> None:
    """A file that two rows name is two samples. Lists, which CSV has not, become arrays."""
    data = read_manifest(written(folder, ending), label="kind")
    assert (len(data), data.class_names) == (3, ("ant", "cat", "dog"))
    numbers = [Field("label", (), "int64"), Field("age", (), "int64"), Field("weight", (), "float64")]
    lists = [] if ending == ".csv" else [Field("tags", (3,), "int64")]
    assert data.fields == (*numbers, *lists)
    values = data.values(np.array([2, 0]))
    assert {name: array.tolist() for name, array in values.items() if name != "tags"} == {
        "label": [0, 2], "age": [2, 3], "weight": [0.5, 7.5]
    }  # fmt: skip
    assert lists == [] or values["tags"].tolist() == [[0, 0, 0], [0, 1, 1]]
    assert data.labels(IDS).tolist() == [2, 1, 0]
    assert content(data) == [b"b/2.png" * 3, b"a/1.png" * 2, b"b/2.png" * 3]
    assert data.uri(1) == f"{folder}/a/1.png"


def test_what_is_delivered_can_be_chosen_and_a_label_may_be_missing_a_number_or_a_list(folder: Path) -> None:
    path = written(folder, ".parquet")
    none = read_manifest(path, fields=["age"])
    assert [field.name for field in none.fields] == ["age"]
    with pytest.raises(DatasetError, match=r"have no field 'label', but age$"):
        none.labels(IDS)
    assert read_manifest(path, label="weight", fields=()).values(IDS)["label"].tolist() == [7.5, 4.25, 0.5]
    several = read_manifest(path, label="tags", fields=())
    assert (several.class_names, several.values(IDS)["label"].shape) == ((), (3, 3))


def test_numbers_stay_as_wide_as_they_are_and_booleans_are_zero_and_one(folder: Path) -> None:
    table = pa.table(
        {
            "uri": [row["uri"] for row in ROWS],
            "half": pa.array([1, 2, 3], pa.float32()),
            "small": pa.array([1, 2, 3], pa.int8()),
            "known": pa.array([True, False, True]),
            "box": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
        }
    )
    pq.write_table(table, folder / "t.parquet")
    data = read_manifest(folder / "t.parquet", label="kind")
    assert {field.name: (field.shape, field.dtype) for field in data.fields} == {
        "label": ((), "int64"), "half": ((), "float32"), "small": ((), "int8"), "known": ((), "uint8"),
        "box": ((2,), "float32"),
    }  # fmt: skip
    assert data.values(IDS)["known"].tolist() == [1, 0, 1]


def test_a_pickle_has_the_same_values_and_a_copy_elsewhere_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    data = read_manifest(written(folder, ".parquet"), label="kind")
    again = pickle.loads(pickle.dumps(data, protocol=5))
    assert (again.fields, again.class_names, again.fingerprint) == (data.fields, data.class_names, data.fingerprint)
    for name, array in data.values(IDS).items():
        np.testing.assert_array_equal(again.values(IDS)[name], array)
    same = read_manifest(written(folder, ".jsonl"), label="kind")
    assert same.fingerprint == data.fingerprint, "however it was written"
    others = [
        read_manifest(written(folder, ".parquet"), label="kind", fields=["age"]),
        read_manifest(written(folder, ".parquet")),
        read_manifest(written(folder, ".parquet", [{**row, "age": 9} for row in ROWS]), label="kind"),
    ]
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_lists_that_are_not_equally_long_are_packed(folder: Path, ending: str) -> None:
    """Boxes, none in the last image, and tokens; a copy that was pickled has them, too, also of a part of a table."""
    boxes = [[[0.5, 1.0, 2.0, 3.0]], [[1.0, 1.0, 2.0, 2.0], [0.0, 0.0, 4.0, 4.0]], []]
    tokens = [[7], [], [8, 9]]
    rows = [{"uri": "a/1.png", "boxes": box, "tokens": token} for box, token in zip(boxes, tokens, strict=True)]
    data = read_manifest(written(folder, ending, rows))
    assert data.fields == (Field("boxes", (None, 4), "float64", 2), Field("tokens", (None,), "int64", 2))
    for each in (data, pickle.loads(pickle.dumps(data, protocol=5))):
        values = each.values(np.array([1, 2, 0]))
        assert values["boxes"].lengths.tolist() == [2, 0, 1]
        assert values["boxes"].values.tolist() == [*boxes[1], *boxes[0]]
        assert values["tokens"].values.tolist() == [8, 9, 7]
    others = [rows, [{**rows[0], "tokens": []}, {**rows[1], "tokens": [7]}, rows[2]]]
    assert len({read_manifest(written(folder, ending, each)).fingerprint for each in others}) == 2


def test_parts_and_joined_datasets_have_lists_that_are_not_equally_long(folder: Path) -> None:
    """Each is as long as its own longest list; a filter may name them."""
    tokens = [[7], [], [8, 9]]
    rows = [{"uri": "a/1.png", "age": age, "tokens": each} for age, each in enumerate(tokens)]
    data = read_manifest(written(folder, ".jsonl", rows))
    part = data.filter(pc.list_value_length(pc.field("tokens")) < 2)
    assert part.fields[1] == Field("tokens", (None,), "int64", 1)
    both = concat([part, data])
    assert both.fields == data.fields
    values = both.values(np.array([4, 0, 3, 2, 1]))
    assert values["tokens"].lengths.tolist() == [2, 1, 0, 1, 0]
    assert (values["tokens"].values.tolist(), values["age"].tolist()) == ([8, 9, 7, 7], [2, 0, 1, 0, 1])
    assert len(both.values(np.array([], np.int64))["tokens"]) == 0
    with pytest.raises(ConfigError, match=r"must have the same fields: .*tokens \(int64\['k'\]\), and .* has age"):
        concat([data, read_manifest(written(folder, ".parquet", rows), fields=["age"])])


def test_images_that_are_listed_or_named_are_the_same_dataset(folder: Path) -> None:
    listed = read_images(folder)
    rows = [{"path": "a/1.png", "label": "a"}, {"path": "b/2.png", "label": "b"}]
    assert read_manifest(written(folder, ".csv", rows), uri="path").fingerprint == listed.fingerprint


@pytest.mark.parametrize("absolute", [False, True])
def test_files_may_lie_elsewhere_and_lengths_be_known(folder: Path, tmp_path: Path, absolute: bool) -> None:
    """With the lengths at hand, no file is looked for."""
    (tmp_path / "elsewhere").mkdir()
    top = f"{folder}/" if absolute else ""
    rows = [{"uri": f"{top}a/1.png", "bytes": 14}, {"uri": f"{top}gone.png", "bytes": 5}]
    path = written(tmp_path / "elsewhere", ".csv", rows)
    data = read_manifest(path, length="bytes", root=None if absolute else folder)
    assert data.lengths(np.arange(2)).tolist() == [14, 5]
    assert data.fields == ()
    assert data.uri(1) == f"{folder}/gone.png"


@pytest.mark.parametrize(
    ("change", "options", "told"),
    [
        ({}, {"uri": "file"}, r"has no column 'file'; it has uri, kind, age, weight, tags, note"),
        ({}, {"label": "Kind"}, r"has no column 'Kind'; it has uri,"),
        ({}, {"uri": "age"}, r"column 'age' of .* must be text, got int64"),
        ({}, {"fields": "age"}, r"fields must be a list of columns, such as \['age'\], got 'age'$"),
        ({"tags": ["a"]}, {"fields": ["tags"]}, r"column 'tags' of .* must have numbers, .*, or texts, got list"),
        ({}, {"length": "weight"}, r"column 'weight' .* whole numbers of bytes, at least 0: they are double"),
        ({"age": -3}, {"length": "age"}, r"column 'age' .* whole numbers of bytes, at least 0: the least is -3"),
        ({"image": 1}, {"fields": ["image"]}, r"a field must not be called 'image', which minibatches have already"),
        ({"tags": [[1], [1, 2]]}, {"fields": ["tags"]}, r"column 'tags' .* or of equally long lists .*, got list"),
    ],
)  # fmt: skip
def test_a_column_that_cannot_be_is_named(folder: Path, change: dict[str, Any], options: Any, told: str) -> None:
    path = written(
        folder,
        ".parquet",
        [{**ROWS[0], **change}, *[{**row, **({} if "age" in change else change)} for row in ROWS[1:]]],
    )
    with pytest.raises(ConfigError, match=told):
        read_manifest(path, **options)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "has no rows|cannot read the manifest"),
        ([{"uri": "a/1.png", "age": 1}, {"uri": "a/1.png", "age": None}], r"column 'age' .* has no value in row 1"),
        ([{"uri": "a/1.png"}, {"uri": "a/9.png"}], r"1 of 2 files .* of row 1 .*, is not there: .*/a/9\.png$"),
        ([{"uri": "a"}], r"1 of 1 files .* of row 0 .*, is no file: .*/a$"),
        ([{"uri": "../a/1.png"}], r"the file of row 0 .* must be below .*, got '\.\./a/1\.png'$"),
        ([{"uri": "/a/1.png"}, {"uri": "s3://b/c"}], r"the file of row 1 .* must be below /, got 's3://b/c'$"),
    ],
)
def test_rows_that_cannot_be_are_named(folder: Path, rows: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(DatasetError, match=told):
        read_manifest(written(folder, ".jsonl", rows), fields=["age"] if "age" in str(rows) else None)


def test_a_table_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "odd.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DatasetError, match=r"cannot read the manifest .*odd\.parquet: "):
        read_manifest(folder / "odd.parquet")
    with pytest.raises(DatasetError, match=r"cannot read the manifest .*nowhere\.csv: "):
        read_manifest(folder / "nowhere.csv")
    with pytest.raises(ConfigError, match=r"a manifest must end in \.csv, .*, got .*table\.xls$"):
        read_manifest(folder / "table.xls")


@pytest.mark.parametrize("column", ["uri", "kind"])
def test_text_that_is_not_utf_8_is_named(folder: Path, column: str) -> None:
    """Parquet writes what it is given, and says that it is text."""
    odd = pa.StringArray.from_buffers(1, pa.array([0, 5], pa.int32()).buffers()[1], pa.py_buffer(b"\xff.png"))
    table = pa.table({"uri": ["a/1.png"], "kind": ["cat"]}).drop_columns([column]).append_column(column, odd)
    pq.write_table(table, folder / "odd.parquet")
    with pytest.raises(DatasetError, match=rf"column '{column}' of .*odd\.parquet is damaged: .*UTF"):
        read_manifest(folder / "odd.parquet", label="kind")


@pytest.mark.parametrize(
    ("ending", "content", "told"),
    [
        (
            ".jsonl",
            b'null\n{"uri": "a/1.png"}\n',
            r": a row is null, and must be an object with a value for each column$",
        ),
        (".jsonl", b"\xef\xbb\xbfnull", r": a row is null"),
        (".csv", b"uri,\xaf\na/1.png,1\n", r"^the manifest .* has a column whose name is not UTF-8: b'\\xaf'$"),
    ],
)
def test_what_a_fuzzer_found_is_an_error(folder: Path, ending: str, content: bytes, told: str) -> None:
    """The rows that are null crashed pyarrow."""
    (folder / f"odd{ending}").write_bytes(content)
    with pytest.raises(DatasetError, match=told):
        read_manifest(folder / f"odd{ending}")
