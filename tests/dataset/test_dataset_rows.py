"""The rows of a dataset: ``data.schema``, ``data.head()`` and ``data[i]``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mbaas import BadSampleError, ConfigError
from mbaas.dataset import Dataset, read_images, read_manifest, synthetic
from support.readers import BAD, CLASSES, READERS, SAMPLES, images


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_every_reader_has_rows(tmp_path: Path, reader: Callable[[Path, Any, Any], Dataset]) -> None:
    stored = images()
    data = reader(tmp_path, stored, None)
    assert str(data.schema.field("class").type.value_type) == "string"
    rows = [{"label": label, "class": CLASSES[label]} for label in stored.labels]
    found = data.head(SAMPLES + 1)
    assert [row.pop("uri") for row in found] == [data.uri(sample) for sample in range(SAMPLES)]
    assert found == rows
    assert data[BAD] == {"uri": data.uri(BAD), "bytes": b"no image", **rows[BAD]}
    assert data[-1]["bytes"] == stored.encoded[-1]


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    rows = [
        {"uri": f"{number}.png", "kind": "ba"[number % 2], "age": number, "box": [[0.5, number]] * number}
        for number in range(7)
    ]
    for row in rows:
        (tmp_path / row["uri"]).write_bytes(b"x" * row["age"])
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read_manifest(tmp_path / "rows.jsonl", fields=["kind", "age", "box"])


def test_a_row_has_all_fields(data: Dataset) -> None:
    assert len(data.head()) == 5
    assert data.head(0) == []
    *_, row = data.head(3)
    assert row.pop("box").tolist() == [[0.5, 2]] * 2
    assert row == {"uri": data.uri(2), "kind": "b", "age": 2}
    assert {name: str(kind) for name, kind in zip(data.schema.names, data.schema.types, strict=True)} == {
        "kind": "dictionary<values=string, indices=int64, ordered=0>",
        "age": "int64",
        "box": "large_list<item: fixed_size_list<item: double>[2]>",
    }


def test_a_dataset_is_a_sequence_of_samples(data: Dataset) -> None:
    assert [len(sample["bytes"]) for sample in data] == [*range(7)]
    assert [data[number]["age"] for number in (-7, -1, np.int64(3))] == [0, 6, 3]
    for number in (7, -8):
        with pytest.raises(IndexError, match=f"sample {number} is not in the dataset of 7 samples"):
            data[number]
    with pytest.raises(TypeError):
        data["age"]  # type: ignore[index]


def test_parts_and_draws_have_rows(data: Dataset) -> None:
    assert [row["age"] for row in data.select(np.array([2, 5])).head()] == [2, 5]
    drawn = data.resample(np.arange(7) == 4, samples=3)
    assert [(row["age"], row["source_id"]) for row in drawn.head()] == [(4, 4)] * 3
    assert len(drawn[1]["bytes"]) == 4
    assert synthetic(3).head(1) == [{"uri": synthetic(3).uri(0), "label": 0, "class": "0"}]


def test_a_dataset_without_fields_has_rows(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"some")
    data = read_images(tmp_path, classes=False)
    assert data.schema == pa.schema([])
    assert data[0] == {"uri": data.uri(0), "bytes": b"some"}
    assert data.head() == [{"uri": data.uri(0)}]


@pytest.mark.parametrize("n", [-1, 2.0, True, "3"])
def test_a_wrong_number_of_rows_is_refused(data: Dataset, n: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^n must be a whole number of at least 0, got .*{n}"):
        data.head(n)


def test_a_sample_that_cannot_be_read_is_an_error(data: Dataset) -> None:
    Path(data.uri(3)).unlink()
    with pytest.raises(BadSampleError, match="the file is gone since the dataset was listed"):
        data[3]
