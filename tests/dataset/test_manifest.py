"""Manifests (tables of files as CSV, JSON lines and Parquet) are read, and invalid ones are refused with a reason."""

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
from mbaas.samples.fields import Field

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
    """A file named in two rows is two samples. Lists become arrays, except in CSV, which has no lists."""
    data = read_manifest(written(folder, ending), label_column="kind")
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
    assert read_manifest(path, label_column="weight", fields=()).values(IDS)["label"].tolist() == [7.5, 4.25, 0.5]
    several = read_manifest(path, label_column="tags", fields=())
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
    data = read_manifest(folder / "t.parquet", label_column="kind")
    assert {field.name: (field.shape, field.dtype) for field in data.fields} == {
        "label": ((), "int64"), "half": ((), "float32"), "small": ((), "int8"), "known": ((), "uint8"),
        "box": ((2,), "float32"),
    }  # fmt: skip
    assert data.values(IDS)["known"].tolist() == [1, 0, 1]


def test_a_pickle_has_the_same_values_and_a_copy_elsewhere_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    data = read_manifest(written(folder, ".parquet"), label_column="kind")
    again = pickle.loads(pickle.dumps(data, protocol=5))
    assert (again.fields, again.class_names, again.fingerprint) == (data.fields, data.class_names, data.fingerprint)
    for name, array in data.values(IDS).items():
        np.testing.assert_array_equal(again.values(IDS)[name], array)
    same = read_manifest(written(folder, ".jsonl"), label_column="kind")
    assert same.fingerprint == data.fingerprint, "however it was written"
    others = [
        read_manifest(written(folder, ".parquet"), label_column="kind", fields=["age"]),
        read_manifest(written(folder, ".parquet")),
        read_manifest(written(folder, ".parquet", [{**row, "age": 9} for row in ROWS]), label_column="kind"),
    ]
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_lists_that_are_not_equally_long_are_packed(folder: Path, ending: str) -> None:
    """Boxes (none in the last image) and tokens, before and after pickling."""
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
    """A field's maximum length is the longest list in its own part. Filters may use list fields."""
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
    with pytest.raises(ConfigError, match=r"must have the same fields: .*tokens \(int64 \[k\]\), and .* has age"):
        concat([data, read_manifest(written(folder, ".parquet", rows), fields=["age"])])


def test_images_that_are_listed_or_named_are_the_same_dataset(folder: Path) -> None:
    listed = read_images(folder)
    rows = [{"path": "a/1.png", "label": "a"}, {"path": "b/2.png", "label": "b"}]
    assert read_manifest(written(folder, ".csv", rows), uri_column="path").fingerprint == listed.fingerprint


@pytest.mark.parametrize("absolute", [False, True])
def test_files_may_lie_elsewhere_and_lengths_be_known(folder: Path, tmp_path: Path, absolute: bool) -> None:
    """If lengths are given, files are not checked: gone.png does not exist."""
    (tmp_path / "elsewhere").mkdir()
    top = f"{folder}/" if absolute else ""
    rows = [{"uri": f"{top}a/1.png", "bytes": 14}, {"uri": f"{top}gone.png", "bytes": 5}]
    path = written(tmp_path / "elsewhere", ".csv", rows)
    data = read_manifest(path, length_column="bytes", root=None if absolute else folder)
    assert data.lengths(np.arange(2)).tolist() == [14, 5]
    assert data.fields == ()
    assert data.uri(1) == f"{folder}/gone.png"


@pytest.mark.parametrize(
    ("change", "options", "told"),
    [
        ({}, {"uri_column": "file"}, r"has no column 'file'; it has uri, kind, age, weight, tags, note"),
        ({}, {"label_column": "Kind"}, r"has no column 'Kind'; it has uri,"),
        ({}, {"uri_column": "age"}, r"column 'age' of .* must be text, got int64"),
        ({}, {"fields": "age"}, r"fields must be a list of columns, such as \['age'\], got 'age'$"),
        ({"tags": ["a"]}, {"fields": ["tags"]}, r"column 'tags' of .* must have numbers, .*, or strings, got list"),
        ({}, {"length_column": "weight"}, r"column 'weight' .* whole numbers of bytes, at least 0: they are double"),
        ({"age": -3}, {"length_column": "age"}, r"column 'age' .* whole numbers of bytes, at least 0: the least is -3"),
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
        ([{"uri": "a"}], r"1 of 1 files .* of row 0 .*, is not a file: .*/a$"),
        ([{"uri": "../a/1.png"}], r"the first, of row 0 .*, is not there: .*/a/1\.png$"),
        ([{"uri": "/a/1.png"}, {"uri": "s3://b/c"}], r"the file of row 1 .* must be below /, got 's3://b/c'$"),
    ],
)
def test_rows_that_cannot_be_are_named(folder: Path, rows: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(DatasetError, match=told):
        read_manifest(written(folder, ".jsonl", rows), fields=["age"] if "age" in str(rows) else None)


@pytest.mark.parametrize(
    ("values", "labels", "classes"),
    [
        (["001", "010", "001"], [0, 1, 0], ("001", "010")),
        (["12:30", "13:00", "12:30"], [0, 1, 0], ("12:30", "13:00")),
        (["2020-01-02", "2020-01-01", "2020-01-01"], [1, 0, 0], ("2020-01-01", "2020-01-02")),
        (["1", "2", "NA"], "has no value in row 2", ()),
        (["NA", "nan", "None"], [0, 2, 1], ("NA", "None", "nan")),
        (["cat", "", "dog"], "has no value in row 1", ()),
        (["1", "-7", "0"], [1, -7, 0], ()),
        (["1", "2.5", "1e-3"], [1.0, 2.5, 0.001], ()),
        (["1.0", "00.5", "2"], [1, 0, 2], ("00.5", "1.0", "2")),
        (["9" * 25, "1", "1"], [1e25, 1.0, 1.0], ()),
        (["True", "false", "true"], [1, 0, 1], ()),
        (["1", "2", "x"], [0, 1, 2], ("1", "2", "x")),
    ],
)
def test_a_column_of_a_csv_is_text_unless_all_values_are_numbers(
    folder: Path, values: list[str], labels: Any, classes: tuple[str, ...]
) -> None:
    path = folder / "table.csv"
    path.write_text("uri,label\n" + "".join(f"a/1.png,{value}\n" for value in values))
    if isinstance(labels, str):
        with pytest.raises(DatasetError, match=labels):
            read_manifest(path)
    else:
        data = read_manifest(path)
        assert (data.labels(IDS).tolist(), data.class_names) == (labels, classes)


def test_strings_of_json_that_look_like_times_stay_as_they_are(folder: Path) -> None:
    rows = [{"uri": "a/1.png", "label": day} for day in ("2020-01-01", "2020-01-01T00:00:00", "2020-01-01")]
    data = read_manifest(written(folder, ".jsonl", rows))
    assert (data.labels(IDS).tolist(), data.class_names) == ([0, 1, 0], ("2020-01-01", "2020-01-01T00:00:00"))


def test_files_whose_names_are_numbers_are_found(folder: Path) -> None:
    (folder / "0001").write_bytes(b"1")
    (folder / "table.csv").write_text("uri,label\n0001,cat\n")
    assert read_manifest(folder / "table.csv").uri(0) == f"{folder}/0001"


def test_a_large_file_is_read_as_a_small_one(folder: Path) -> None:
    """Covers empty lists for more than pyarrow's 1 MB block, and rows and quoted line ends that span blocks."""
    rows = [{"uri": "a/1.png", "label": "cat", "boxes": []} for _ in range(40_000)]
    rows += [{"uri": "a/1.png", "label": "dog", "boxes": [[1, 2, 3, 4.5]], "note": "x" * 3_000_000}]
    data = read_manifest(written(folder, ".jsonl", rows))
    assert data.values(np.array([40_000]))["boxes"].values.tolist() == [[1, 2, 3, 4.5]]
    lines = "".join(f'a/1.png,{"cat" if row % 3 else "dog"},"one\nand {row}"\n' for row in range(40_000))
    (folder / "table.csv").write_text("uri,label,note\n" + lines)
    assert read_manifest(folder / "table.csv").labels(np.arange(6)).tolist() == [1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("indent", [None, 1])
def test_json_may_be_one_array(folder: Path, indent: int | None) -> None:
    wanted = read_manifest(written(folder, ".json"), label_column="kind")
    (folder / "table.json").write_text(json.dumps(ROWS, indent=indent))
    assert read_manifest(folder / "table.json", label_column="kind").fingerprint == wanted.fingerprint


def test_a_list_of_an_array_may_have_nulls_where_nobody_asks_for_it(folder: Path) -> None:
    """In indented JSON, a null inside a row is at the start of a line, like a null row."""
    rows = [{"uri": "a/1.png", "age": 3, "note": ["x", None]}, {"uri": "b/2.png", "age": 4, "note": [None]}]
    (folder / "table.json").write_text(json.dumps(rows, indent=1))
    assert read_manifest(folder / "table.json").values(np.arange(2))["age"].tolist() == [3, 4]
    (folder / "table.json").write_text(json.dumps([rows[0], None]))
    with pytest.raises(DatasetError, match="a row is null"):
        read_manifest(folder / "table.json")


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
@pytest.mark.parametrize(
    ("encoding", "told"),
    [
        ("latin-1", r"line 2 is not UTF-8: it has the byte 0xfc; .* such as encoding='latin-1'"),
        ("utf-16", r"it is UTF-16, and not UTF-8: read it with encoding='utf-16'"),
        ("utf-8-sig", None),
    ],
)
def test_a_file_in_another_encoding_is_named_and_can_be_read(
    folder: Path, ending: str, encoding: str, told: str | None
) -> None:
    rows = [{"uri": "a/1.png", "label": "Wal"}, {"uri": "b/2.png", "label": "M\u00fcller"}]
    lines = ["uri,label", *(f"{row['uri']},{row['label']}" for row in rows)]
    if ending == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path = folder / f"table{ending}"
    path.write_bytes("\n".join(lines).encode(encoding))
    if told is not None:
        with pytest.raises(DatasetError, match=told.replace("line 2", "line [23]")):
            read_manifest(path)
    assert read_manifest(path, encoding=encoding).class_names == ("M\u00fcller", "Wal")
    with pytest.raises(DatasetError, match="encoding must be a codec of Python's, such as 'latin-1', got 'klingon'"):
        read_manifest(path, encoding="klingon")


def test_files_may_be_reached_by_other_ways(folder: Path) -> None:
    """By paths out of the table's folder, absolute paths with ``..``, and percent-encoded URIs."""
    (folder / "lists").mkdir()
    odd = folder / "c d#\u00e9%.png"
    odd.write_bytes(b"odd")
    lists = {
        "up": (["../a/1.png", "../b/2.png"], {}),
        "rooted": (["../../a/1.png", "../../b/2.png"], {"root": folder / "a" / "x"}),
        "absolute": ([f"{folder}/lists/../a/1.png", f"{folder}/b/2.png"], {}),
        "uris": ([(folder / "a/1.png").as_uri(), (folder / "b/2.png").as_uri()], {}),
        "uris below a path": ([(folder / "a/1.png").as_uri(), (folder / "b/2.png").as_uri()], {"root": folder}),
    }
    for name, (uris, options) in lists.items():
        path = folder / "lists" / f"{name}.csv"
        path.write_text("uri\n" + "".join(f"{uri}\n" for uri in uris))
        data = read_manifest(path, **options)
        assert [data.uri(row) for row in range(2)] == [f"{folder}/a/1.png", f"{folder}/b/2.png"], name
        assert content(data) == [b"a/1.png" * 2, b"b/2.png" * 3]
    for root in (folder.as_uri(), folder):
        assert content(read_manifest(folder / "lists" / "uris.csv", root=root)) == [b"a/1.png" * 2, b"b/2.png" * 3]
    (folder / "far.csv").write_text("uri\n" + "../" * 40 + "a/1.png\n")
    with pytest.raises(DatasetError, match=r"the file of row 0 .* must be below"):
        read_manifest(folder / "far.csv")
    (folder / "odd.csv").write_text(f"uri\n{odd.as_uri()}\n")
    assert content(read_manifest(folder / "odd.csv")) == [b"odd"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string_view(), pa.large_string(), pa.binary(7)])
def test_texts_may_be_of_any_arrow_type(folder: Path, kind: pa.DataType) -> None:
    """Spark, Impala and polars write these types. File names have the seven bytes of ``binary(7)``."""
    label_kind = pa.string() if pa.types.is_fixed_size_binary(kind) else kind
    columns = {
        "uri": pa.array(["b/2.png", "a/1.png"], pa.string()).cast(pa.binary()).cast(kind),
        "label": pa.array(["dog", "cat"], pa.string()).cast(label_kind),
    }
    pq.write_table(pa.table(columns), folder / "table.parquet")
    data = read_manifest(folder / "table.parquet")
    assert content(data) == [b"b/2.png" * 3, b"a/1.png" * 2]
    assert (data.labels(np.arange(2)).tolist(), data.class_names) == ([1, 0], ("cat", "dog"))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([[[1.0, 2, 3, 4]], None], "'boxes' of .* has no value in row 1"),
        ([[[1.0, 2, 3, 4]], [None]], "'boxes' of .* lacks a value in the list of row 1"),
        ([[[1.0, 2, 3, 4]], [[1.0, None, 3, 4]]], "'boxes' of .* lacks a value in the list of row 1"),
    ],
)
def test_a_list_that_lacks_a_value_is_named_and_not_left_out(folder: Path, values: list[Any], told: str) -> None:
    columns = {"uri": ["a/1.png"] * 2, "boxes": pa.array(values, pa.list_(pa.list_(pa.float32())))}
    pq.write_table(pa.table(columns), folder / "table.parquet")
    with pytest.raises(DatasetError, match=told):
        read_manifest(folder / "table.parquet")


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
    """Parquet writers mark any bytes as text without a check."""
    odd = pa.StringArray.from_buffers(1, pa.array([0, 5], pa.int32()).buffers()[1], pa.py_buffer(b"\xff.png"))
    table = pa.table({"uri": ["a/1.png"], "kind": ["cat"]}).drop_columns([column]).append_column(column, odd)
    pq.write_table(table, folder / "odd.parquet")
    with pytest.raises(DatasetError, match=rf"column '{column}' of .*odd\.parquet is damaged: .*UTF"):
        read_manifest(folder / "odd.parquet", label_column="kind")


@pytest.mark.parametrize(
    ("ending", "content", "told"),
    [
        (
            ".jsonl",
            b'null\n{"uri": "a/1.png"}\n',
            r": a row is null, and must be an object with a value for each column$",
        ),
        (".jsonl", b"\xef\xbb\xbfnull", r": a row is null"),
        (".csv", b"uri,\xaf\na/1.png,1\n", r"^cannot read the manifest .*: line 1 is not UTF-8: it has the byte 0xaf"),
    ],
)
def test_what_a_fuzzer_found_is_an_error(folder: Path, ending: str, content: bytes, told: str) -> None:
    """Null rows crashed pyarrow."""
    (folder / f"odd{ending}").write_bytes(content)
    with pytest.raises(DatasetError, match=told):
        read_manifest(folder / f"odd{ending}")
