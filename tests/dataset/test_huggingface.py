"""Hugging Face datasets are read as the package `datasets` reads them, field by field, wherever they are stored."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pytest
from contents import content
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem

from mbaas.base.progress import watched
from mbaas.dataset import read_huggingface
from mbaas.errors import BadSampleError, ConfigError, DatasetError
from mbaas.samples.fields import Field, Packed

ROWS = 203
IMAGES = [np.random.default_rng(row).bytes(1 + row * 37 % 1000) for row in range(ROWS)]
FEATURES = datasets.Features(
    {
        "image": datasets.Image(decode=False),
        "label": datasets.ClassLabel(names=["owl", "ant", "bee"]),
        "caption": datasets.Value("string"),
        "age": datasets.Value("float32"),
        "tokens": datasets.Sequence(datasets.Value("int64")),
        "pose": datasets.Array2D((2, 3), "float32"),
        "objects": {"bbox": datasets.Sequence(datasets.Sequence(datasets.Value("float32"), length=4))},
    }
)
UNPACKED = ("chosen, some twice", "another column")
Read = Callable[[datasets.Dataset], datasets.Dataset]

datasets.disable_progress_bars()


def in_memory(rows: int = ROWS, features: datasets.Features = FEATURES) -> datasets.Dataset:
    known = {
        "image": [{"bytes": image, "path": f"{row}.jpg"} for row, image in enumerate(IMAGES[:rows])],
        "label": [row % 3 for row in range(rows)],
        "caption": [f"number {row}" for row in range(rows)],
        "age": [row / 2 for row in range(rows)],
        "tokens": [[*range(row % 4)] for row in range(rows)],
        "pose": [[[row, 1, 2], [3, 4, 5]] for row in range(rows)],
        "objects": [{"bbox": [[row, 0, 1, 1]] * (row % 3)} for row in range(rows)],
    }
    return datasets.Dataset.from_dict(known, features=features)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset saved in two files, with record batches of 30 rows."""
    top = tmp_path_factory.mktemp("saved") / "all"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "DEFAULT_MAX_BATCH_SIZE", 30)
        in_memory().save_to_disk(top, num_shards=2)
    return top


@pytest.fixture(scope="module")
def saved(folder: Path) -> datasets.Dataset:
    return datasets.load_from_disk(folder)


def check(data: Any, wanted: datasets.Dataset, fields: tuple[str, ...] = ()) -> None:
    """Compare a dataset with the package's, row by row and field by field."""
    flat = wanted.flatten()
    assert content(data) == list(flat["image.bytes"])
    values = data.values(np.arange(len(data)))
    assert tuple(values) == (fields or ("label", "age", "tokens", "pose", "objects.bbox"))
    for name, column in values.items():
        for row, theirs in enumerate(flat[name]):
            ours = column[[row]].own()[0] if isinstance(column, Packed) else column[row]
            np.testing.assert_array_equal(ours, np.asarray(theirs, ours.dtype).reshape(ours.shape))
            assert len(theirs) == len(ours) if isinstance(theirs, list) else True
    assert data.class_names == tuple(wanted.features["label"].names)


def test_fields_have_the_types_of_the_features(folder: Path) -> None:
    data = read_huggingface(folder)
    assert data.fields == (
        Field("label", (), "int64"),
        Field("age", (), "float32"),
        Field("tokens", (None,), "int64", 3),
        Field("pose", (2, 3), "float32"),
        Field("objects.bbox", (None, 4), "float32", 2),
    )
    assert data.uri(150) == f"{folder}/data-00001-of-00002.arrow#150"


@pytest.mark.parametrize("how", ["object", "path", "file system", "split of a dict"])
def test_what_was_saved_is_read_where_it_is(folder: Path, saved: datasets.Dataset, tmp_path: Path, how: str) -> None:
    options: dict[str, Any] = {"path": saved if how == "object" else folder}
    if how == "file system":
        inside = pyarrow.fs.SubTreeFileSystem(str(folder.parent), pyarrow.fs.LocalFileSystem())
        options = {"path": "all", "filesystem": inside}
    if how == "split of a dict":
        options = {"path": datasets.DatasetDict({"test": saved.select([1]), "train": saved}), "split": "train"}
    data = read_huggingface(**options)
    check(data, saved)
    again = pickle.loads(pickle.dumps(data, protocol=5))
    check(again, saved)
    assert [file.name for file in tmp_path.iterdir()] == []


def test_how_far_it_is_is_told_to_who_watches(folder: Path, tmp_path: Path) -> None:
    for unpacked in (None, tmp_path / "out"):
        seen: list[tuple[str, int, int]] = []
        with watched(lambda *step, seen=seen: seen.append(step)):
            read_huggingface(folder, unpacked=unpacked)
        assert [each for each in seen if each[0] == "Arrow files"] == [("Arrow files", done, 2) for done in range(3)]


@pytest.mark.parametrize(
    ("name", "made"),
    {
        "shuffled": lambda data: data.shuffle(seed=3),
        "chosen, some twice": lambda data: data.select([150, 3, 3, 202, 0]),
        "a run of rows": lambda data: data.select(range(40, 133)),
        "filtered": lambda data: data.filter(lambda row: row["age"] > 50),
        "two in one": lambda data: datasets.concatenate_datasets([data.select(range(150, 203)), data.select(range(9))]),
        "a shard": lambda data: data.shard(4, 1),
        "another column": lambda data: data.add_column("more", [*range(ROWS)]),
        "decoded": lambda data: data.cast_column("image", datasets.Image()),
        "in a format": lambda data: data.with_format("numpy", columns=["label"]),
    }.items(),
)
def test_what_was_made_of_it_is_read_as_the_package_has_it(
    saved: datasets.Dataset, tmp_path: Path, name: str, made: Read
) -> None:
    theirs = made(saved)
    plain = theirs.with_format(None).cast_column("image", datasets.Image(decode=False))
    more = ("label", "age", "tokens", "pose", "objects.bbox", "more")
    for unpacked in (None, tmp_path / "new/out") if name in UNPACKED else (None,):
        data = read_huggingface(theirs, unpacked=unpacked)
        check(data, plain, more if name == "another column" else ())
        assert Path(data.root) == (unpacked or Path(saved.cache_files[0]["filename"]).parent)


def test_a_dataset_that_was_read_from_parquet_is_read_in_its_cache(tmp_path: Path) -> None:
    in_memory().to_parquet(tmp_path / "a.parquet")
    theirs = datasets.Dataset.from_parquet(str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache"))
    check(read_huggingface(theirs), theirs)
    mapped = theirs.map(lambda row: {"age": row["age"] + 1}, load_from_cache_file=False)
    check(read_huggingface(mapped), mapped)


def test_a_dataset_behind_a_link_is_read_in_its_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder.parent)
    theirs = datasets.load_from_disk(tmp_path / "link" / "all")
    data = read_huggingface(theirs)
    check(data, theirs)
    assert data.root == str(folder)
    assert read_huggingface(tmp_path / "link" / "all").fingerprint == data.fingerprint


def test_images_in_files_of_their_own_are_read_there(tmp_path: Path) -> None:
    for row in range(9):
        (tmp_path / f"{row} # {row % 2}.jpg").write_bytes(IMAGES[row])
    paths = [str(tmp_path / f"{row} # {row % 2}.jpg") for row in range(9)]
    for kind in (datasets.Image(decode=False), datasets.Value("string")):
        features = datasets.Features({"image": kind, "label": datasets.Value("int64")})
        theirs = datasets.Dataset.from_dict({"image": paths, "label": [*range(9)]}, features=features)
        for listing in (None, tmp_path / f"kept-{features['image'].dtype}.parquet"):
            for _ in range(2):
                data = read_huggingface(theirs.select([4, 2, 8]), listing=listing)
                assert content(data) == [IMAGES[4], IMAGES[2], IMAGES[8]]
                assert data.labels(np.arange(3)).tolist() == [4, 2, 8]
                assert (data.root, data.uri(1)) == (str(tmp_path), paths[2])
    with pytest.raises(DatasetError, match=r"1 of 2 files that .* names cannot be read; the first, of row 1 .*/gone"):
        read_huggingface(datasets.Dataset.from_dict({"image": [paths[0], str(tmp_path / "gone")]}))


def test_some_bytes_and_some_paths_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"in a file")
    rows = [{"bytes": b"inside", "path": None}, {"bytes": None, "path": str(tmp_path / "a.jpg")}]
    theirs = datasets.Dataset.from_dict({"image": rows}, features=datasets.Features({"image": datasets.Image()}))
    with pytest.raises(DatasetError, match=r"has images in its own files, and others in theirs: name a folder with"):
        read_huggingface(theirs)
    assert content(read_huggingface(theirs, unpacked=tmp_path / "out")) == [b"inside", b"in a file"]
    (tmp_path / "a.jpg").unlink()
    with pytest.raises(DatasetError, match=r"cannot read .*/a\.jpg: .*No such file"):
        read_huggingface(theirs, unpacked=tmp_path / "again")


def test_a_row_without_an_image_is_named_unless_it_is_left_out(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict(
        {"image": [*({"bytes": content, "path": None} for content in IMAGES[:3]), None], "label": [0, 1, 2, 3]},
        features=datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("int64")}),
    )
    saved.save_to_disk(tmp_path / "saved")
    theirs = datasets.load_from_disk(tmp_path / "saved")
    for rows, named in ([0, 1, 2, 3], "row 3"), ([1, 3, 2], "row 1"):
        with pytest.raises(DatasetError, match=rf"^{named} \(counted from 0\) of .* has no image in column 'image'"):
            read_huggingface(theirs.select(rows))
    with pytest.raises(DatasetError, match=r"^row 3 .* has no image in column 'image'"):
        read_huggingface(theirs, unpacked=tmp_path / "unpacked")
    data = read_huggingface(theirs.filter(lambda row: row["image"] is not None))
    assert content(data) == IMAGES[:3]
    assert data.labels(np.arange(3)).tolist() == [0, 1, 2]


def test_what_is_in_memory_or_compressed_must_be_unpacked(tmp_path: Path, folder: Path) -> None:
    theirs = in_memory()
    with pytest.raises(
        DatasetError, match=r"images of a datasets.Dataset in memory are in this program's memory: save"
    ):
        read_huggingface(theirs)
    check(read_huggingface(theirs, unpacked=tmp_path / "memory"), theirs)
    squeezed = tmp_path / "squeezed"
    squeezed.mkdir()
    for name in ("state.json", "dataset_info.json"):
        (squeezed / name).write_text((folder / name).read_text())
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    for file in folder.glob("*.arrow"):
        table = pa.ipc.open_stream(file.read_bytes()).read_all()
        with pa.ipc.new_stream(squeezed / file.name, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=30)
    with pytest.raises(
        DatasetError, match=r"of .*/data-00000-of-00002\.arrow cannot be read: it is compressed; name a"
    ):
        read_huggingface(squeezed)
    with pytest.raises(DatasetError, match=r"images of .*/squeezed are in this program's memory: save it"):
        read_huggingface(datasets.load_from_disk(squeezed))
    check(read_huggingface(squeezed, unpacked=tmp_path / "unsqueezed"), theirs)


def test_it_is_unpacked_once_and_again_when_something_changed(tmp_path: Path) -> None:
    in_memory().save_to_disk(tmp_path / "in")
    out = tmp_path / "out"
    first = read_huggingface(tmp_path / "in", unpacked=out)
    (images,) = out.glob("*.images")
    before = images.stat().st_ino
    again = read_huggingface(tmp_path / "in", unpacked=out)
    assert (again.fingerprint, content(again), images.stat().st_ino) == (first.fingerprint, IMAGES, before)
    images.write_bytes(b"short")
    with pytest.raises(BadSampleError, match=r"arrow\.images#0: the file has 5 bytes now, .* when the dataset was"):
        content(first)
    assert content(read_huggingface(tmp_path / "in", unpacked=out)) == IMAGES
    in_memory(17).save_to_disk(tmp_path / "in")
    assert content(read_huggingface(tmp_path / "in", unpacked=out)) == IMAGES[:17]
    theirs = in_memory().select([7, 3])
    for _ in range(2):
        assert content(read_huggingface(theirs, unpacked=tmp_path / "memory")) == [IMAGES[7], IMAGES[3]]
    one = read_huggingface(theirs.select([1]), unpacked=tmp_path / "memory")
    assert content(one) == [IMAGES[3]]
    assert one.fields[-1] == Field("objects.bbox", (None, 4), "float32", 0), "also without any box"
    with pytest.raises(
        DatasetError, match=r"memory/listing\.parquet was made with label_column None, not 'caption'; remove"
    ):
        read_huggingface(theirs, label_column="caption", unpacked=tmp_path / "memory")


class Counted(LocalFileSystem):  # type: ignore[misc]
    """Local file system that counts the bytes read."""

    taken = 0

    def _open(self, path: str, *args: Any, **options: Any) -> Any:
        opened = super()._open(path, *args, **options)
        read, counted = opened.f.read, self

        class File:
            def __getattr__(self, name: str) -> Any:
                return getattr(opened, name)

            def read(self, *given: Any) -> bytes:
                found: bytes = read(*given)
                counted.taken += len(found)
                return found

        return File()


def test_of_large_images_only_their_places_are_read(tmp_path: Path) -> None:
    """Only three buffers of 16 KiB of the 2 MB are read: one at each of two record batches, and one after the last."""
    large = [np.random.default_rng(row).bytes(100_000) for row in range(20)]
    theirs = datasets.Dataset.from_dict({"image": large, "label": [*range(20)]})
    theirs.save_to_disk(tmp_path / "in")
    counted = Counted(skip_instance_cache=True)
    data = read_huggingface(str(tmp_path / "in"), filesystem=PyFileSystem(FSSpecHandler(counted)))
    assert 0 < counted.taken < 200_000
    assert content(data) == large
    assert counted.taken > 2_000_000


def test_what_was_kept_is_read_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory().save_to_disk(tmp_path / "in")
    kept = tmp_path / "kept.parquet"
    first = read_huggingface(tmp_path / "in", listing=kept)
    with monkeypatch.context() as patch:
        patch.setattr("mbaas.dataset.readers.encoded_column._located", None)  # image offsets are not searched again
        again = read_huggingface(tmp_path / "in", listing=kept)
    check(again, in_memory())
    assert (again.fingerprint, again.uri(3)) == (first.fingerprint, first.uri(3))
    in_memory(17).save_to_disk(tmp_path / "in")
    with pytest.raises(BadSampleError, match=r"the file has [0-9]+ bytes now, [0-9]+ when the dataset was listed"):
        content(first)
    assert content(read_huggingface(tmp_path / "in", listing=kept)) == IMAGES[:17]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"image_column": "picture"},
            r"has no column 'picture'; it has image, label, caption, age, tokens, pose, objects$",
        ),
        (
            {"image_column": "age"},
            r"column 'age' of .* must have encoded images or their paths: a feature .*, got float",
        ),
        ({"label_column": "Label"}, r"has no column 'Label'; it has label, caption, age, tokens, pose, objects\.bbox$"),
        ({"fields": ["size"]}, r"has no column 'size'; it has label,"),
        ({"fields": "age"}, r"fields must be a list of columns, such as \['age'\], got 'age'"),
        (
            {"label_column": "age", "fields": ["label"]},
            r"a field must not be called 'label', which minibatches have already",
        ),
        ({"split": "train"}, r"split chooses from a DatasetDict, and .*/all has none; got 'train'"),
        ({"listing": "x", "unpacked": "y"}, r"listing must not be named beside unpacked, where a listing is kept"),
    ],
)
def test_options_that_cannot_be_are_named(folder: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_huggingface(folder, **options)


def test_labels_and_fields_are_chosen(folder: Path, saved: datasets.Dataset) -> None:
    data = read_huggingface(folder, label_column="caption", fields=["objects.bbox"])
    assert data.class_names == tuple(sorted(saved["caption"]))
    assert [data.class_names[label] for label in data.labels(np.arange(ROWS))] == list(saved["caption"])
    assert [field.name for field in data.fields] == ["label", "objects.bbox"]
    for theirs in (saved.select_columns("image"), datasets.Dataset.from_file(saved.cache_files[0]["filename"])):
        bare = read_huggingface(theirs.select_columns("image"))
        assert (bare.fields, content(bare)) == ((), list(theirs.flatten()["image.bytes"]))


def test_lists_of_lists_of_different_lengths_are_left_out_by_default(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"image": [b"1", b"2"], "words": [[[1], [1, 2]], [[3]]]}).save_to_disk(tmp_path)
    assert read_huggingface(tmp_path).fields == ()
    with pytest.raises(
        ConfigError, match=r"column 'words' of .* must have numbers, .* or of equally long lists of num"
    ):
        read_huggingface(tmp_path, fields=["words"])


def test_a_split_must_be_named_and_be_there(tmp_path: Path, saved: datasets.Dataset) -> None:
    both = datasets.DatasetDict({"train": saved, "test": saved.select([5])})
    both.save_to_disk(tmp_path / "both")
    assert content(read_huggingface(tmp_path / "both", split="test")) == [IMAGES[5]]
    for given in (both, tmp_path / "both"):
        for split, got in ((None, "none"), ("val", "'val'")):
            with pytest.raises(ConfigError, match=rf"split must name one of train, test, which .* has; got {got}$"):
                read_huggingface(given, split=split)
    with pytest.raises(ConfigError, match=r"split chooses from a DatasetDict, got 'train' for one dataset"):
        read_huggingface(saved, split="train")


@pytest.mark.parametrize("given", [3, None, "streamed"])
def test_what_is_no_dataset_is_named(saved: datasets.Dataset, given: Any) -> None:
    what = saved.to_iterable_dataset() if given == "streamed" else given
    with pytest.raises(ConfigError, match=r"^path must be a datasets\.Dataset, or a folder that .*, got ") as caught:
        read_huggingface(what)
    assert ("streamed" in str(caught.value)) == (given == "streamed")


def test_a_file_whose_name_would_be_taken_apart_is_named(tmp_path: Path, saved: datasets.Dataset) -> None:
    (tmp_path / "a#1.arrow").write_bytes(Path(saved.cache_files[0]["filename"]).read_bytes())
    with pytest.raises(DatasetError, match=r"the name of an Arrow file must not have '#' in it, got .*/a#1\.arrow"):
        read_huggingface(datasets.Dataset.from_file(str(tmp_path / "a#1.arrow")))


def test_a_value_that_is_missing_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"image": [b"1", b"2"], "age": [1, None]}).save_to_disk(tmp_path / "in")
    with pytest.raises(DatasetError, match=r"column 'age' of .*/in has no value in row 1 \(counted from 0\)"):
        read_huggingface(tmp_path / "in")


def test_folders_that_nobody_saved_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DatasetError, match=r"cifar10 has no state\.json, so save_to_disk did not write it; lo"):
        read_huggingface("cifar10")
    state = json.loads((folder / "state.json").read_text())
    for said, told in (
        ("{", r"cannot read .*/state\.json: "),
        ("[]", r"/state\.json must be a JSON object, got \[\]"),
        ("{}", r" has no rows"),
        (json.dumps(state | {"_data_files": [{"filename": "../x"}]}), r"must name a file next to it, got '\.\./x'"),
        (json.dumps(state | {"_data_files": [3]}), r"must name a file next to it, got None"),
        (json.dumps(state), r"the shard .*/data-00000-of-00002\.arrow is not there"),
    ):
        (tmp_path / "state.json").write_text(said)
        with pytest.raises(DatasetError, match=told):
            read_huggingface(tmp_path)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    """`benchmarks/fuzz` covers other damage."""
    in_memory(5).save_to_disk(tmp_path)
    (file,) = tmp_path.glob("*.arrow")
    whole = file.read_bytes()
    for end in range(0, len(whole) - 8, 37):
        file.write_bytes(whole[:end])
        with pytest.raises(DatasetError, match=r"is not an Arrow IPC stream, or cannot be read: |has no rows$"):
            read_huggingface(tmp_path)


def test_a_message_that_leads_back_to_itself_is_refused(tmp_path: Path) -> None:
    """The body length is somewhere in the metadata of the first batch, so every offset is tried."""
    in_memory(5).save_to_disk(tmp_path)
    (file,) = tmp_path.glob("*.arrow")
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[4:8], "little")
    nbytes = int.from_bytes(whole[start + 4 : start + 8], "little")
    told = []
    for place in range(start + 8, start + 8 + nbytes, 8):
        file.write_bytes(whole[:place] + (-8 - nbytes).to_bytes(8, "little", signed=True) + whole[place + 8 :])
        try:
            read_huggingface(tmp_path)
        except DatasetError as error:
            told.append(str(error))
    assert any("negative bodyLength" in each for each in told)
