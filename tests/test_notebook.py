"""What notebooks show: small tables, in which nothing that a user named is taken for HTML."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.notebook import some


def rows_of(html: str) -> tuple[str, dict[str, str]]:
    """The heading of a table, and its rows; it must be well-formed."""
    table = ElementTree.fromstring(html)
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


def test_a_feed_while_it_runs_and_after_it_was_stopped(ray_clean: None, feed_name: str) -> None:
    feed = mbaas.serve(feed_name, synthetic(50), T.Pipeline([T.DecodeImage()]), batch_size=10, prep_workers=1)
    try:
        with mbaas.join(feed_name, consumer="<ann>", format="numpy") as loader:
            for _ in loader:
                pass
            title, rows = rows_of(feed._repr_html_())
        assert (title, rows["state"], rows["trials"]) == (f"Feed {feed_name}", "serving", "<ann>")
        assert rows["samples"] == "50, in minibatches of 10"
    finally:
        feed.stop()
    _, rows = rows_of(feed._repr_html_())
    assert [*rows] == ["state"]
    assert "stopped" in rows["state"]
