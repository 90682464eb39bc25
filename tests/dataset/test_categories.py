"""String columns become integer-encoded fields, and their categories survive every operation on the dataset."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from webdataset import TarWriter

import mbaas
from mbaas import transforms as T
from mbaas.dataset import Dataset, read_manifest, read_webdataset
from mbaas.dataset.readers import columns
from mbaas.errors import ConfigError, DatasetError
from mbaas.samples.fields import Field

COATS = ["spotted", "black", "white", "black", "spotted", "grey"]
NAMES = ("black", "grey", "spotted", "white")
NUMBERS = [2, 0, 3, 0, 2, 1]


def table_of(folder: Path, coats: list[str] = COATS, name: str = "all.parquet") -> Path:
    for number in range(len(coats)):
        (folder / f"{number}.png").write_bytes(b"x")
    rows = {"uri": [f"{number}.png" for number in range(len(coats))], "coat": coats, "age": [*range(len(coats))]}
    pq.write_table(pa.table(rows), folder / name)
    return folder / name


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return read_manifest(table_of(tmp_path), fields=["coat", "age"])


def coats(data: Dataset) -> list[str]:
    (field, *_) = data.fields
    return [field.categories[number] for number in data.values(np.arange(len(data)))["coat"].tolist()]


def test_texts_become_numbers_that_stand_for_them(data: Dataset) -> None:
    assert data.fields == (Field("coat", (), "int64", categories=NAMES), Field("age", (), "int64"))
    assert (data.values(np.arange(6))["coat"].tolist(), coats(data)) == (NUMBERS, COATS)
    assert data.fields[0].text == "coat: one of 4"
    assert read_manifest(Path(data.root) / "all.parquet").fields == (Field("age", (), "int64"),), "none by default"


def test_parts_pickles_and_draws_keep_what_numbers_stand_for(data: Dataset) -> None:
    assert coats(pickle.loads(pickle.dumps(data))) == COATS
    assert coats(data.select(np.array([1, 2, 5]))) == ["black", "white", "grey"]
    assert coats(data.filter(pc.field("coat").isin(["black", "grey"]))) == ["black", "black", "grey"]
    assert coats(data.filter(pc.field("coat") == "white")) == ["white"]
    assert coats(mbaas.concat([data, data])) == 2 * COATS
    assert sorted(coats(data.balance("coat", samples=4))) == sorted(NAMES)


def test_numbers_that_stand_for_other_texts_are_another_dataset(data: Dataset, tmp_path: Path) -> None:
    """Both datasets have the numbers 2, 0, 3, 0, 2, 1."""
    other = read_manifest(table_of(tmp_path, ["x", "a", "y", "a", "x", "b"]), fields=["coat", "age"])
    assert other.values(np.arange(6))["coat"].tolist() == NUMBERS
    assert other.fingerprint != data.fingerprint
    with pytest.raises(ConfigError, match=r"coat \(one of black, grey, spotted, white\).* coat \(one of a, b, x, y\)"):
        mbaas.concat([data, other])


def test_what_is_kept_has_them_and_is_refused_where_they_are_damaged(tmp_path: Path) -> None:
    shard, kept = tmp_path / "a.tar", tmp_path / "kept.parquet"
    with TarWriter(str(shard)) as writer:
        for number in range(11):
            writer.write({"__key__": f"{number}", "jpg": b"x", "cls": 0, "json": {"kind": "ab"[number % 2]}})
    first = read_webdataset(shard, fields=["kind"], listing=kept)
    again = read_webdataset(shard, fields=["kind"], listing=kept)
    assert (again.fields, again.fingerprint) == (first.fields, first.fingerprint)
    assert again.fields[1].categories == ("a", "b")
    table = pq.read_table(kept)
    at = table.schema.get_field_index("kind")
    for told, message in (
        (b"3", "is not a listing of read_webdataset"),
        (b"[", "is not a listing of read_webdataset"),
        (json.dumps(["a"]).encode(), "a label that no sample can have"),
        (json.dumps(["a", "c"]).encode(), "is damaged: its rows have the fingerprint"),
    ):
        field = table.schema.field(at).with_metadata({b"mbaas.categories": told})
        pq.write_table(table.cast(table.schema.set(at, field)), kept)
        with pytest.raises(DatasetError, match=message):
            read_webdataset(shard, fields=["kind"], listing=kept)


def test_texts_that_are_too_many_to_be_categories_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MOST_CATEGORIES", 3)
    with pytest.raises(ConfigError, match=r"column 'coat' .* must have at most 3 distinct strings .*, got 4$"):
        read_manifest(table_of(tmp_path), fields=["coat"])


def test_trials_get_them(ray_clean: None, feed_name: str, tmp_path: Path) -> None:
    for number in range(6):
        cv2.imwrite(str(tmp_path / f"{number}.png"), np.full((8, 8, 3), number, np.uint8))
    rows = {"uri": [f"{number}.png" for number in range(6)], "coat": COATS}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    data = read_manifest(tmp_path / "t.parquet", fields=["coat"])
    pipeline = T.Pipeline([T.DecodeImage()])
    with (
        mbaas.serve(feed_name, data, pipeline, batch_size=4, prep_workers=1, engine="cpu"),
        mbaas.join(feed_name, format="numpy") as loader,
    ):
        assert loader.categories == {"coat": NAMES}
        for batch in loader:
            assert [NAMES[number] for number in batch["coat"]] == [COATS[number] for number in batch["sample_id"]]
