"""A dataset's fingerprint depends only on its table's contents, and the table is pickled without copies."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from mbaas.dataset import Dataset, read_images
from mbaas.dataset.table import SPAN, TableDataset, fingerprint_of

SCHEMA = SPAN.append(pa.field("label", pa.int64(), nullable=False))

int64s = st.integers(-(2**63), 2**63 - 1)
rows = st.lists(st.tuples(st.text(max_size=5), int64s, int64s, int64s), max_size=12)


def table_of(rows: list[tuple[str, int, int, int]], schema: pa.Schema = SCHEMA) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/3.jpg"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name * 10)
    return tmp_path / "tree"


@given(rows=rows, cuts=st.lists(st.integers(0, 12), max_size=4))
@settings(max_examples=80, deadline=None)
def test_the_fingerprint_ignores_how_arrow_holds_the_table(
    rows: list[tuple[str, int, int, int]], cuts: list[int]
) -> None:
    """Chunks, slices of a larger array and 32-bit string offsets do not change the fingerprint of the same rows."""
    whole = table_of(rows)
    expected = fingerprint_of(whole, ("a", "b"))
    bounds = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    slices = [whole.slice(i, j - i) for i, j in pairwise(bounds)]
    copies = [table_of(rows[i:j]) for i, j in pairwise(bounds)]
    for parts in (slices, copies):
        if parts:
            assert fingerprint_of(pa.concat_tables(parts), ("a", "b")) == expected
    narrow = SCHEMA.set(0, pa.field("uri", pa.string(), nullable=False))
    assert fingerprint_of(table_of(rows, narrow), ("a", "b")) == expected


@given(rows=rows.filter(bool), data=st.data())
@settings(max_examples=80, deadline=None)
def test_the_fingerprint_changes_with_every_value(rows: list[tuple[str, int, int, int]], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(rows) - 1))
    field = data.draw(st.integers(0, 3))
    value = data.draw((st.text(max_size=5) if field == 0 else int64s).filter(lambda v: v != rows[i][field]))
    changed: list[Any] = [*rows]
    changed[i] = (*rows[i][:field], value, *rows[i][field + 1 :])
    assert fingerprint_of(table_of(changed), ()) != fingerprint_of(table_of(rows), ())


def test_the_fingerprint_knows_rows_order_columns_classes_and_where_names_end() -> None:
    base = [("ab", 0, 1, 2), ("c", 0, 3, 4)]
    variants = [
        (base, ("x", "y")),
        (base, ("x", "z")),
        (base, ("xy",)),
        (base, ("y", "x")),
        (base[::-1], ("x", "y")),
        (base[:1], ("x", "y")),
        ([("a", 0, 1, 2), ("bc", 0, 3, 4)], ("x", "y")),
        ([("ab", 1, 0, 2), ("c", 0, 3, 4)], ("x", "y")),
        ([("ab", 0, 2, 1), ("c", 0, 4, 3)], ("x", "y")),
    ]
    prints = [fingerprint_of(table_of(rows), names) for rows, names in variants]
    assert len(set(prints)) == len(variants)


def test_the_fingerprint_never_changes() -> None:
    """A saved state must match its dataset also after an upgrade."""
    table = table_of([("cat/1.jpg", 0, 100, 0), ("dog/å.jpg", 0, 200, 1)])
    assert fingerprint_of(table, ("cat", "dog")) == "4d07758a62f5942a99bc68b312b4e252"


def test_a_copy_elsewhere_has_the_same_fingerprint(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "copy")
    assert read_images(tmp_path / "copy").fingerprint == read_images(tree).fingerprint
    (tmp_path / "copy/cat/1.jpg").write_text("longer" * 100)
    assert read_images(tmp_path / "copy").fingerprint != read_images(tree).fingerprint


READ_IN_ANOTHER_PROCESS = """
import pickle, sys
import numpy as np
data = pickle.load(sys.stdin.buffer)
modules = set(sys.modules)
buffer = np.zeros(int(data.lengths(np.array([2]))[0]), np.uint8)
data.reader().read_into(2, buffer)
assert not (set(sys.modules) - modules).intersection(["pandas"])
print(repr(data), data.uri(2), data.labels(np.arange(3)), data.class_names, buffer.tobytes().decode())
"""


@pytest.mark.parametrize("named", ["path", "uri", "filesystem"])
def test_a_pickle_works_in_another_process(tree: Path, named: str) -> None:
    data = {
        "path": lambda: read_images(tree),
        "uri": lambda: read_images(tree.as_uri()),
        "filesystem": lambda: read_images("tree", filesystem=SubTreeFileSystem(str(tree.parent), LocalFileSystem())),
    }[named]()
    done = subprocess.run(
        [sys.executable, "-c", READ_IN_ANOTHER_PROCESS],
        input=pickle.dumps(data),
        capture_output=True,
        check=True,
    )
    expected = f"{data!r} {data.uri(2)} [0 0 1] ('cat', 'dog') {'dog/3.jpg' * 10}\n"
    assert done.stdout.decode() == expected


def test_a_pickle_shares_its_columns_out_of_band(tree: Path) -> None:
    """Columns are read-only views of the object store, not copies."""
    data = read_images(tree)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    data.labels(np.arange(3))
    # Reading labels must not add cached columns to the pickle.
    assert pickle.dumps(data, protocol=5, buffer_callback=lambda buffer: None) == stream
    shared = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    again: Dataset = pickle.loads(stream, buffers=shared)
    assert isinstance(again, TableDataset)
    column = again._values["label"]
    assert any(np.shares_memory(column, np.frombuffer(part, np.uint8)) for part in shared if len(part))
    assert not column.flags.writeable
    assert again.table.equals(read_images(tree).table)  # type: ignore[attr-defined]
    assert again.fingerprint == data.fingerprint


def test_a_dataset_cannot_be_changed(tree: Path) -> None:
    data = read_images(tree)
    with pytest.raises(AttributeError):
        data.root = "elsewhere"  # type: ignore[misc]
    labels = data.labels(np.arange(3))
    labels[:] = 9
    assert data.labels(np.arange(3)).tolist() == [0, 0, 1]
