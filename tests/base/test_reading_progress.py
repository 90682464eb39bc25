"""Readers of datasets report their progress, and the command line shows it as a bar."""

from __future__ import annotations

import io
import json
import tarfile
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from rich.console import Console

import mbaas
from mbaas.base.progress import track, watched
from mbaas.cli import console as cli_console
from mbaas.cli import feed_data, feed_file
from mbaas.errors import DatasetError

Step = tuple[str, int, int]

PNG = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()


def tree(root: Path, classes: int = 3) -> Path:
    for number in range(classes):
        (root / f"class-{number}").mkdir(parents=True)
        (root / f"class-{number}" / "0.png").write_bytes(PNG)
    return root


def test_every_step_is_told_to_who_watches() -> None:
    seen: list[Step] = []
    with watched(lambda *step: seen.append(step)):
        assert [*track("abc", "letters", 3)] == ["a", "b", "c"]
        assert [*track([[1, 2], [3]], "numbers", 3, amount=len)] == [[1, 2], [3]]
    assert seen == [("letters", done, 3) for done in range(4)] + [("numbers", done, 3) for done in (0, 2, 3)]
    assert [*track("abc", "letters", 3)] == ["a", "b", "c"]
    assert len(seen) == 7


def test_who_watches_within_is_told_alone_and_then_the_other_again() -> None:
    outer: list[Step] = []
    inner: list[Step] = []
    with watched(lambda *step: outer.append(step)):
        with suppress(KeyError), watched(lambda *step: inner.append(step)):
            list(track("a", "letters", 1))
            raise KeyError
        list(track("b", "letters", 1))
    assert inner == outer == [("letters", 0, 1), ("letters", 1, 1)]


def test_each_reader_tells_what_it_reads(tmp_path: Path) -> None:
    tree(tmp_path / "folder")
    names = [f"{number}.png" for number in range(5)]
    for name in names:
        (tmp_path / name).write_bytes(PNG)
    (tmp_path / "table.jsonl").write_text("".join(json.dumps({"uri": name}) + "\n" for name in names))
    for number in range(2):
        parquet.write_table(pa.table({"image": pa.array([PNG])}), tmp_path / f"{number}.parquet")
    for number in range(4):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as shard:
            shard.add(tmp_path / "0.png", "0.png")
    seen: list[Step] = []
    with watched(lambda *step: seen.append(step)):
        mbaas.read_webdataset(str(tmp_path / "{0..3}.tar"), label_column=None)
        mbaas.read_images(tmp_path / "folder")
        mbaas.read_manifest(tmp_path / "table.jsonl")
        mbaas.read_parquet(str(tmp_path / "{0..1}.parquet"), unpacked=tmp_path / "unpacked")
    assert [things for things, done, _ in seen if done == 0] == [
        "files", "shards", "classes", "files", "files", "Parquet files"
    ]  # fmt: skip
    assert [(things, total) for things, done, total in seen if done == total] == [
        ("files", 4), ("shards", 4), ("classes", 3), ("files", 5), ("files", 2), ("Parquet files", 2)
    ]  # fmt: skip


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=200)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_how_far_the_listing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path / "[b]train")
    file = tmp_path / "feed.yaml"
    file.write_text('name: train\ndata: "[b]train"\nbatch_size: 2\npipeline: [DecodeImage]\n')
    for is_terminal in (True, False):
        err = console(is_terminal=is_terminal)
        monkeypatch.setattr(cli_console, "err", err)
        assert len(feed_data.listed(feed_file.load(file).data)) == 3
        said = written(err)
        assert ("3 of 3 classes" in said, "[b]train" in said) == (is_terminal, is_terminal)
    assert said == ""


def test_what_cannot_be_read_ends_the_bar_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "feed.yaml"
    file.write_text("name: train\ndata: nowhere\nbatch_size: 2\npipeline: [DecodeImage]\n")
    err = console(is_terminal=True)
    monkeypatch.setattr(cli_console, "err", err)
    with pytest.raises(DatasetError, match="nowhere does not exist"):
        feed_data.listed(feed_file.load(file).data)
    assert written(err).endswith("\x1b[2K")  # erased
