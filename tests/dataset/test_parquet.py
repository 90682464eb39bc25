"""Images inside Parquet files are unpacked once, byte for byte, and invalid files are refused with a reason."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from contents import content, values

from mbaas.dataset import read_parquet
from mbaas.errors import BadSampleError, ConfigError, DatasetError
from mbaas.samples.fields import Field

ROWS = 203
IMAGES = [np.random.default_rng(row).bytes(row * 37 % 1000) for row in range(ROWS)]
KNOWN: dict[str, Any] = {
    "label": [row % 3 for row in range(ROWS)],
    "kind": ["dog" if row % 2 else "cat" for row in range(ROWS)],
    "age": [row / 2 for row in range(ROWS)],
    "box": [[row, 1] for row in range(ROWS)],
}


def written(path: Path, rows: slice = slice(None), *, image: pa.Array | None = None, **options: Any) -> Path:
    encoded = pa.array(IMAGES[rows], pa.binary()) if image is None else image
    pq.write_table(
        pa.table({"image": encoded, **{name: values[rows] for name, values in KNOWN.items()}}), path, **options
    )
    return path


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("kind", ["binary", "large_binary", "struct"])
def test_images_and_fields_are_those_of_the_file(tmp_path: Path, kind: str, compression: str) -> None:
    """203 rows in row groups of 30 (the last one has 23), read in batches of 64."""
    if kind == "struct":
        image = pa.array([{"bytes": encoded, "path": f"{row}.jpg"} for row, encoded in enumerate(IMAGES)])
    else:
        image = pa.array(IMAGES, kind)
    path = written(tmp_path / "a.parquet", image=image, row_group_size=30, compression=compression)
    data = read_parquet(path, unpacked=tmp_path / "new/folder")
    assert content(data) == IMAGES
    assert values(data) == {name: KNOWN[name] for name in ("label", "age", "box")}
    assert data.fields == (Field("label", (), "int64"), Field("age", (), "float64"), Field("box", (2,), "int64"))
    assert data.uri(7) == f"{tmp_path}/new/folder/a.parquet.images#7"
    assert (tmp_path / "new/folder/a.parquet.images").read_bytes() == b"".join(IMAGES)


def test_several_files_are_one_dataset_and_labels_may_be_text(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    written(tmp_path / "in/0.parquet", slice(150))
    written(tmp_path / "in/1.parquet", slice(150, 150))
    written(tmp_path / "in/2.parquet", slice(150, None))
    data = read_parquet(tmp_path / "in/{0..2}.parquet", unpacked=tmp_path / "out", label_column="kind", fields=["age"])
    assert (content(data), data.class_names) == (IMAGES, ("cat", "dog"))
    assert values(data) == {"label": [row % 2 for row in range(ROWS)], "age": KNOWN["age"]}
    again = pickle.loads(pickle.dumps(data, protocol=5))
    assert (content(again), values(again)) == (IMAGES, values(data))


def test_what_hugging_faces_datasets_write_has_its_classes(tmp_path: Path) -> None:
    features = datasets.Features(
        {"image": datasets.Image(), "fine": datasets.ClassLabel(names=["owl", "ant"]), "age": datasets.Value("float32")}
    )
    rows = {
        "image": [{"bytes": encoded, "path": None} for encoded in IMAGES],
        "fine": [row % 2 for row in range(ROWS)],
        "age": KNOWN["age"],
    }
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    read = datasets.Dataset.from_parquet(str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache"))
    plain = read.cast_column("image", datasets.Image(decode=False))
    data = read_parquet(tmp_path / "a.parquet", unpacked=tmp_path / "out", label_column="fine")
    assert content(data) == [row["image"]["bytes"] for row in plain]
    assert values(data) == {"label": list(plain["fine"]), "age": list(plain["age"])}
    assert data.class_names == tuple(read.features["fine"].names)
    assert data.labels(np.arange(ROWS)).dtype == np.int64
    again = read_parquet(tmp_path / "a.parquet", unpacked=tmp_path / "out", label_column="fine")
    assert (again.class_names, again.fingerprint) == (data.class_names, data.fingerprint)


def test_labels_that_are_not_known_have_no_classes(tmp_path: Path) -> None:
    features = datasets.Features({"image": datasets.Value("binary"), "label": datasets.ClassLabel(names=["owl"])})
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict({"image": [b"1", b"2"], "label": [0, -1]}, features=features)
    table.to_parquet(tmp_path / "a.parquet")
    data = read_parquet(tmp_path / "a.parquet", unpacked=tmp_path / "out")
    assert (data.class_names, values(data)) == ((), {"label": [0, -1]})


def test_it_is_unpacked_once_and_again_when_something_changed(tmp_path: Path) -> None:
    path, out = written(tmp_path / "a.parquet"), tmp_path / "out"
    first = read_parquet(path, unpacked=out)
    images = out / "a.parquet.images"
    before = images.stat().st_ino
    again = read_parquet(path, unpacked=out)
    assert (again.fingerprint, content(again), values(again)) == (first.fingerprint, IMAGES, values(first))
    assert images.stat().st_ino == before, "nothing was written"
    assert sorted(each.name for each in out.iterdir()) == ["a.parquet.images", "listing.parquet"]
    images.write_bytes(b"short")
    with pytest.raises(
        BadSampleError, match=r"a\.parquet\.images#0: the file has 5 bytes now, .* when the dataset was"
    ):
        content(first)
    assert content(read_parquet(path, unpacked=out)) == IMAGES
    images.unlink()
    assert content(read_parquet(path, unpacked=out)) == IMAGES
    written(path, slice(10, 20))
    assert content(read_parquet(path, unpacked=out)) == IMAGES[10:20]


def test_what_was_unpacked_with_other_options_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet")
    read_parquet(path, unpacked=tmp_path / "out")
    with pytest.raises(
        DatasetError, match=r"out/listing\.parquet was made with label_column None, not 'kind'; remove it"
    ):
        read_parquet(path, unpacked=tmp_path / "out", label_column="kind")
    (tmp_path / "in").mkdir()
    other = written(tmp_path / "in/a.parquet")
    with pytest.raises(DatasetError, match=r"was made with root '.*', not '.*/in'; remove it"):
        read_parquet(other, unpacked=tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"image_column": "picture"}, r"a\.parquet has no column 'picture'; it has image, label, kind, age, box$"),
        ({"label_column": "Kind"}, r"has no column 'Kind'; it has label,"),
        ({"fields": ["size"]}, r"has no column 'size'; it has label,"),
        (
            {"image_column": "kind"},
            r"column 'kind' of .* must have encoded images: .*, got string",
        ),
        ({"fields": "age"}, r"fields must be a list of columns, such as \['age'\], got 'age'"),
        (
            {"label_column": "kind", "fields": ["label"]},
            r"a field must not be called 'label', which minibatches have already",
        ),
    ],
)
def test_a_column_that_cannot_be_is_named(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_parquet(written(tmp_path / "a.parquet"), unpacked=tmp_path / "out", **options)


def test_a_file_that_cannot_be_unpacked_is_named_and_nothing_half_is_left(tmp_path: Path) -> None:
    lacking = pa.array([*IMAGES[:-1], None])
    path, out = written(tmp_path / "a.parquet", image=lacking), tmp_path / "out"
    with pytest.raises(
        DatasetError, match=rf"row {ROWS - 1} \(counted from 0\) of .*a\.parquet has no image in column 'image'"
    ):
        read_parquet(path, unpacked=out)
    named = pa.array(
        [{"bytes": None, "path": f"{row}.jpg"} for row in range(ROWS)],
        pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    )
    with pytest.raises(DatasetError, match=r"row 0 .* has no image .*: tables that name files are"):
        read_parquet(written(path, image=named), unpacked=out)
    whole = written(path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=r"cannot unpack .*a\.parquet into .*/out: "):
        read_parquet(path, unpacked=out)
    damaged = bytearray(whole)
    damaged[len(whole) // 4 : len(whole) // 4 + 2000] = b"\xff" * 2000
    path.write_bytes(damaged)
    with pytest.raises(DatasetError, match=r"cannot unpack .*a\.parquet into .*/out: |column .* is damaged"):
        read_parquet(path, unpacked=out)
    assert [*out.iterdir()] == []
    with pytest.raises(DatasetError, match=r"the shard .*/b\.parquet is not there"):
        read_parquet(tmp_path / "b.parquet", unpacked=out)
    with pytest.raises(DatasetError, match=r"cannot unpack .*a\.parquet into .*/a\.parquet/out: "):
        read_parquet(written(path), unpacked=path / "out")


def test_files_may_lie_in_another_file_system_than_what_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    written(tmp_path / "in/a.parquet")
    inside = pyarrow.fs.SubTreeFileSystem(str(tmp_path / "in"), pyarrow.fs.LocalFileSystem())
    data = read_parquet("a.parquet", unpacked=(tmp_path / "out").as_uri(), filesystem=inside)
    assert content(data) == IMAGES


def test_lists_that_are_not_equally_long_are_fields_also_when_they_were_unpacked_before(tmp_path: Path) -> None:
    boxes = [[[0.0, 1.0, 2.0, 3.0]], [[1.0, 1.0, 2.0, 2.0], [0.0, 0.0, 4.0, 4.0]], []]
    columns = {"image": IMAGES[:3], "boxes": pa.array(boxes, pa.list_(pa.list_(pa.float64())))}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for _ in range(2):
        data = read_parquet(tmp_path / "a.parquet", unpacked=tmp_path / "out")
        assert data.fields == (Field("boxes", (None, 4), "float64", 2),)
        found = data.values(np.array([1, 2, 0]))["boxes"]
        assert (found.lengths.tolist(), found.values.tolist()) == ([2, 0, 1], [*boxes[1], *boxes[0]])


def test_nested_columns_are_fields(tmp_path: Path) -> None:
    objects = [{"bbox": [[row, 0.0, 1.0, 1.0]] * row, "id": row} for row in range(3)]
    kind = pa.struct({"bbox": pa.list_(pa.list_(pa.float32(), 4)), "id": pa.int64()})
    pq.write_table(pa.table({"image": IMAGES[:3], "objects": pa.array(objects, kind)}), tmp_path / "a.parquet")
    data = read_parquet(tmp_path / "a.parquet", unpacked=tmp_path / "out")
    assert data.fields == (Field("objects.bbox", (None, 4), "float32", 2), Field("objects.id", (), "int64"))
    assert data.values(np.arange(3))["objects.bbox"].lengths.tolist() == [0, 1, 2]
