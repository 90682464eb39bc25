"""Notebooks show small tables and pictures, and text from users is escaped."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

import mbaas
from mbaas import transforms as T
from mbaas.base.units import some
from mbaas.cli.top import draw_new
from mbaas.dataset import synthetic
from mbaas.pictures import samples
from mbaas.pictures.grid import Image, Layout
from mbaas.pictures.samples import first_samples, html_of


def rows_of(html: str) -> tuple[str, dict[str, str]]:
    """The caption and the rows of a table; raises if the HTML is not well-formed."""
    whole = ElementTree.fromstring(html)
    table = whole if whole.tag == "table" else whole.find("table")
    assert table is not None
    rows = {row.findtext("th", ""): row.findtext("td", "") for row in table.iter("tr")}
    return table.findtext("caption/b", ""), rows


def test_a_dataset_and_what_a_user_named_in_it(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / "<b>&" / ("<script>" if number % 2 else "cat") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), np.zeros((8, 8, 3), np.uint8))
    data = mbaas.read_images(tmp_path / "<b>&")
    title, rows = rows_of(data._repr_html_())
    assert title == f"Dataset {tmp_path}/<b>&"
    assert (rows["samples"], rows["classes"], rows["fields"]) == ("6", "2: <script>, cat", "label: int64")
    assert rows["fingerprint"] == data.fingerprint
    assert re.fullmatch(r"[\d.]+ k?B", rows["size"])


def test_many_classes_are_counted() -> None:
    _, rows = rows_of(synthetic(2000, num_classes=1200)._repr_html_())
    assert rows["classes"] == "1,200: 0, 1, 2, 3, 4, 5, 6, 7 and 1,192 more"
    assert some(["a", "b"], most=2) == "a, b"


def test_a_pipeline() -> None:
    pipeline = T.Pipeline([T.DecodeImage(), T.Resize((20, 30))], boxes=T.Boxes("<i>"))
    title, rows = rows_of(pipeline._repr_html_())
    assert title == "Pipeline"
    assert rows == {
        "0": "DecodeImage()", "1": repr(T.Resize((20, 30))), "boxes": repr(T.Boxes("<i>")), "makes": "uint8 [20, 30, 3]"
    }  # fmt: skip
    assert "data" in rows_of(T.Pipeline([T.DecodeImage()])._repr_html_())[1]["makes"]


def pictures_of(html: str) -> list[NDArray[np.uint8]]:
    """The images embedded in the HTML."""
    sources = [image.get("src", "") for image in ElementTree.fromstring(html).iter("img")]
    encoded = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources]
    return [np.asarray(cv2.imdecode(np.frombuffer(each, np.uint8), cv2.IMREAD_COLOR_RGB)) for each in encoded]


def test_a_feed_shows_its_first_samples_and_does_not_notice(ray_clean: None, feed_name: str, tmp_path: Path) -> None:
    for number in range(20):
        image = np.random.default_rng(number).integers(0, 255, (300, 400, 3), np.uint8)
        (tmp_path / "a").mkdir(exist_ok=True)
        cv2.imwrite(str(tmp_path / "a" / f"{number}.png"), image)
    data, pipeline = (
        mbaas.read_images(tmp_path),
        T.Pipeline([T.DecodeImage(), T.CenterCrop(256), T.RandomHorizontalFlip()]),
    )
    with mbaas.serve(feed_name, data, pipeline, batch_size=10, prep_workers=1, seed=4) as feed:
        before = feed.status()
        html = feed._repr_html_()
        after = feed.status()
        assert (after.consumers, after.delivered_samples) == (before.consumers, 0)
        assert pictures_of(html)
        other = mbaas.connect(feed_name)._repr_html_()
        assert all(map(np.array_equal, pictures_of(other), pictures_of(html)))
        assert rows_of(other)[1]["state"] == "serving"
        on_page: dict[str, str] = {}
        draw_new({feed_name: feed.status()}, on_page)
        assert all(map(np.array_equal, pictures_of(f"<div>{on_page[feed_name]}</div>"), pictures_of(html)))
    (drawn,) = pictures_of(html)
    assert len(html) < 1_000_000
    found = first_samples(data, pipeline, count=8, seed=4)
    layout = Layout.of(8, (256, 256), title_lines=0, lines=2, most_side=128)
    for number, image in enumerate(found.samples):
        top, left = layout.corner(number)
        shown = drawn[top : top + 128, left : left + 128]
        assert (shown == cv2.resize(image, (128, 128), interpolation=cv2.INTER_AREA)).all()


def test_where_there_is_no_picture_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    cv2.imwrite(str(tmp_path / "a" / "0.png"), np.zeros((8, 8, 3), np.uint8))
    data = mbaas.read_images(tmp_path)
    flat = T.Pipeline([T.DecodeImage(), T.Map(lambda image, rng: image.mean(axis=2))])
    assert html_of(data, flat, seed=0, shuffle=True) == ""
    assert html_of(data, T.Pipeline([T.DecodeAudio(max_s=1)]), seed=0, shuffle=True) == ""
    (tmp_path / "a" / "0.png").write_text("<no image>")
    bad = ElementTree.fromstring(html_of(data, T.Pipeline([T.DecodeImage()]), seed=0, shuffle=True))
    assert (bad.tag, "0.png" in (bad.text or "")) == ("p", True)


def test_a_notebook_does_not_wait_for_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    cv2.imwrite(str(tmp_path / "a" / "0.png"), np.zeros((8, 8, 3), np.uint8))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # a reader blocks until the pipe is written

    def hangs(image: Image, rng: np.random.Generator) -> Image:
        pipe.read_bytes()
        return image

    monkeypatch.setattr(samples, "NOTEBOOK_S", 0.1)
    pipeline = T.Pipeline([T.DecodeImage(), T.Map(hangs)])
    late = ElementTree.fromstring(html_of(mbaas.read_images(tmp_path), pipeline, seed=0, shuffle=True))
    assert (late.tag, "in time" in (late.text or "")) == ("p", True)
    pipe.write_bytes(b"")  # waits for the reader, and unblocks it


def test_a_feed_while_it_runs_and_after_it_was_stopped(
    ray_clean: None, feed_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = mbaas.serve(feed_name, synthetic(50), T.Pipeline([T.DecodeImage()]), batch_size=10, prep_workers=1)
    try:
        with mbaas.join(feed_name, consumer="<ann>", format="numpy") as loader:
            for _ in loader:
                pass
            title, rows = rows_of(feed._repr_html_())
            status = feed.status()
            with monkeypatch.context() as patched:
                patched.setattr(feed, "status", lambda **_: status)  # the next one may differ
                assert rows_of(feed._repr_html_()) == rows_of(status._repr_html_())
            named, *lines = str(status).splitlines()
            assert named == f"feed {feed_name}"
            parts = [line.strip().split("  ", 1) for line in lines]
            assert {what: text.strip() for what, text in parts} == rows_of(status._repr_html_())[1]
            of_loader, own = rows_of(loader._repr_html_())
            assert loader.ledger is not None
            of_ledger, epoch = rows_of(loader.ledger._repr_html_())
        assert (of_loader, own["feed"], own["received"]) == ("Consumer <ann>", feed_name, "50 samples")
        assert (own["epoch"], own["last epoch"]) == ("1, of 5 minibatches of 10", "0 exact")
        assert rows_of(loader._repr_html_())[1]["state"] == "closed"
        assert (of_ledger, epoch["samples"], epoch["each exactly once"]) == ("Ledger of epoch 0", "50 of 50", "yes")
        assert (title, rows["state"], rows["trials"]) == (f"Feed {feed_name}", "serving", "<ann>")
        assert rows["samples"] == "50, in minibatches of 10"
    finally:
        feed.stop()
    _, rows = rows_of(feed._repr_html_())
    assert [*rows] == ["state"]
    assert "stopped" in rows["state"]
