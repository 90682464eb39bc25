"""A listing stored in a file replaces a new listing; a damaged one, or one of another dataset, is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from generated_tree import GeneratedTree
from pyarrow import parquet

from mbaas.dataset import Dataset, read_images
from mbaas.dataset.readers.listing import KEY
from mbaas.errors import BadSampleError, ConfigError, DatasetError

Change = Callable[[pa.Table, dict[str, Any]], pa.Table]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Three images of two classes; one name contains a line break and a non-ASCII letter."""
    for name in ("cat/1.jpg", "cat/å\n.jpg", "dog/3.png"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name * 10)
    return tmp_path / "tree"


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    return tmp_path / "train.parquet"


def everything(data: Dataset) -> tuple[Any, ...]:
    ids = np.arange(len(data))
    rows = data.labels(ids).tolist(), data.lengths(ids).tolist(), [data.uri(i) for i in ids.tolist()]
    return data.root, data.class_names, data.fingerprint, data.total_bytes, rows


@pytest.mark.parametrize("named", ["path", "uri"])
def test_what_was_kept_is_what_was_listed(tree: Path, listing: Path, named: str) -> None:
    where = listing if named == "path" else listing.as_uri()
    first, second = read_images(tree, listing=where), read_images(tree, listing=where)
    assert everything(first) == everything(second) == everything(read_images(tree))
    buffer = np.zeros(first.lengths(np.array([1]))[0], np.uint8)
    second.reader().read_into(1, buffer)
    assert buffer.tobytes().decode() == "cat/å\n.jpg" * 10
    assert {path.name for path in listing.parent.iterdir()} == {"tree", "train.parquet"}, "no other files are left"


def test_nothing_is_listed_again(tree: Path, listing: Path) -> None:
    """Not even the root is checked; a missing file is a bad sample when it is read."""
    read_images(tree, listing=listing)
    shutil.rmtree(tree / "dog")
    data = read_images(tree, listing=listing)
    assert len(data) == 3
    with pytest.raises(BadSampleError, match=r"dog/3\.png"):
        data.reader().read_into(2, np.zeros(data.lengths(np.array([2]))[0], np.uint8))
    listing.unlink()
    assert len(read_images(tree, listing=listing)) == 2


def test_a_listing_of_something_else_is_refused_with_both(tree: Path, listing: Path, tmp_path: Path) -> None:
    read_images(tree, listing=listing)
    shutil.copytree(tree, tmp_path / "copy")
    with pytest.raises(DatasetError, match=r"train\.parquet was made with root '.*/tree', not '.*/copy'; remove it"):
        read_images(tmp_path / "copy", listing=listing)
    with pytest.raises(DatasetError, match=r"was made with extensions \(.*'\.dib'\), not \('\.png',\)"):
        read_images(tree, extensions=".png", listing=listing)
    with pytest.raises(ConfigError, match="extensions"):
        read_images(tree, extensions="png", listing=listing)


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(name), [values])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda table, about: with_column(table, "length", [1, 2, 3]), "is damaged: its rows have the fingerprint"),
        (lambda table, about: with_column(table, "length", [-1, 2, 3]), "a length or a label that no sample can have"),
        (lambda table, about: with_column(table, "label", [0, 0, 2]), "a length or a label that no sample can have"),
        (lambda table, about: table.slice(0, 0), "is not a listing of read_images"),
        (lambda table, about: table.drop_columns(["label"]), "is not a listing of read_images"),
        (lambda table, about: about.clear() or table, "is not a listing of read_images"),
        (lambda table, about: about.update(class_names=[1, 2]) or table, "is not a listing of read_images"),
        (lambda table, about: about.update(class_names=["cat", "cow"]) or table, "is damaged"),
    ],
)
def test_what_was_changed_is_refused(tree: Path, listing: Path, change: Change, told: str) -> None:
    read_images(tree, listing=listing)
    table = parquet.read_table(listing)
    about = json.loads(table.schema.metadata[KEY])
    table = change(table, about)
    parquet.write_table(table.replace_schema_metadata({KEY: json.dumps(about)}), listing)
    with pytest.raises(DatasetError, match=told):
        read_images(tree, listing=listing)


def test_what_is_no_file_of_ours_is_refused_and_stays(tree: Path, listing: Path) -> None:
    listing.write_text("my notes")
    with pytest.raises(DatasetError, match=r"train\.parquet cannot be read"):
        read_images(tree, listing=listing)
    assert listing.read_text() == "my notes"
    with pytest.raises(DatasetError, match=r"cannot write the listing .*/nowhere/train\.parquet"):
        read_images(tree, listing=listing.parent / "nowhere/train.parquet")


def test_a_column_whose_name_is_no_text_is_none_of_ours(tree: Path, listing: Path) -> None:
    read_images(tree, listing=listing)
    listing.write_bytes(listing.read_bytes().replace(b"label", b"lab\x80l"))
    with pytest.raises(DatasetError, match="is not a listing of read_images"):
        read_images(tree, listing=listing)


def test_a_large_listing_is_one_chunk_of_each_column(listing: Path) -> None:
    """Finding a row takes constant time only in one chunk; Parquet returns one chunk per row group."""
    tree = pa.fs.PyFileSystem(GeneratedTree(2_000))
    listed = read_images("tree", filesystem=tree)
    assert everything(read_images("tree", filesystem=tree, listing=listing)) == everything(listed)
    table = parquet.read_table(listing)
    parquet.write_table(table, listing, row_group_size=100)
    assert everything(read_images("tree", filesystem=tree, listing=listing)) == everything(listed)


@pytest.mark.parametrize(
    ("error", "told"), [(OSError("no room"), DatasetError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_half_a_file_does_not_stay(
    tree: Path, listing: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: type[BaseException]
) -> None:
    write = parquet.write_table

    def cut_short(*given: Any, **options: Any) -> None:
        write(*given, **options)
        raise error

    monkeypatch.setattr(parquet, "write_table", cut_short)
    with pytest.raises(told):
        read_images(tree, listing=listing)
    assert [path.name for path in listing.parent.iterdir()] == ["tree"]
