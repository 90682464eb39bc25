"""Passing storage errors are waited out without delaying others, and a sample that stays bad keeps its reason."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing_storage import failing
from PIL import Image

import mbaas
from mbaas import transforms as T
from mbaas.prep.probe import PROBE_SAMPLES
from mbaas.tools.chaos.storage import Trouble, images, troubled
from support.trials import record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_clean")

SAMPLES, BATCH_SIZE = 61, 8
SAMPLE_BYTES = 8 * 8 * 3 + 16  # an image, its label and its id
Switch = Callable[..., Path]
Serve = Callable[..., mbaas.Feed]


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    """Make a file fail until the returned path is removed."""
    (tmp_path / "switches").mkdir()

    def fail(number: int, error: str = "EIO") -> Path:
        path = tmp_path / "switches" / f"{number:02}.png"
        path.write_text(error)
        return path

    return fail


@pytest.fixture
def serve(feed_name: str, tmp_path: Path, switch: Switch) -> Iterator[Serve]:
    """Serve 61 images in blocks of one minibatch each, without a memory cache."""
    (tmp_path / "data" / "one").mkdir(parents=True)
    for number in range(SAMPLES):
        stream = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(stream, "PNG")
        (tmp_path / "data" / "one" / f"{number:02}.png").write_bytes(stream.getvalue())
    data = mbaas.read_images(str(tmp_path / "data"), filesystem=failing(tmp_path / "switches"))
    feeds = []

    def start(*, storage_s: float, **options: Any) -> mbaas.Feed:
        memory = {"cache_bytes": 0, "staging_bytes": 8 * BATCH_SIZE * SAMPLE_BYTES}
        given: dict[str, Any] = {"batch_size": BATCH_SIZE, "prep_workers": 1} | memory | options
        pipeline = T.Pipeline([T.DecodeImage()])
        feeds.append(mbaas.serve(feed_name, data, pipeline, timeouts=mbaas.Timeouts(storage_s=storage_s), **given))
        return feeds[-1]

    yield start
    for feed in feeds:
        feed.stop()


def told(feed: mbaas.Feed, sentence: str) -> bool:
    return any(sentence in note for note in feed.status().notes)


@pytest.mark.parametrize("how", ["errs", "file away"])
def test_storage_that_comes_back_costs_time_and_no_sample(
    serve: Serve, switch: Switch, tmp_path: Path, how: str
) -> None:
    """Two files fail for longer than a fetch waits. The only worker stays, and the log names the failure."""
    feed = serve(storage_s=120.0)
    numbers = (20, 41)
    files = [tmp_path / "data" / "one" / f"{number:02}.png" for number in numbers]
    if how == "errs":
        broken = [switch(number) for number in numbers]
    else:
        moved = [file.rename(tmp_path / file.name) for file in files]

    def mend() -> None:
        wait_until(lambda: told(feed, "storage does not give"), "the log says so")
        if how == "errs":
            for path in broken:
                path.unlink()
        else:
            for path, file in zip(moved, files, strict=True):
                path.rename(file)

    with ThreadPoolExecutor(1) as mending, mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        mended = mending.submit(mend)
        record = record_epoch(loader)
        mended.result()
        assert record.flaws(range(SAMPLES)) == []
    wait_until(lambda: told(feed, "storage works again"), "the log says so")
    status = feed.status()
    assert (status.skipped_total, status.inexact_epochs, status.failed) == (0, 0, None)
    assert not told(feed, "will be made again"), "no worker was taken for dead"


def test_a_sample_that_stays_bad_is_raised_with_its_reason_and_tried_anew(serve: Serve, switch: Switch) -> None:
    feed = serve(storage_s=1.0)
    broken = switch(20)
    with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        ids: list[int] = []
        with pytest.raises(mbaas.BadSampleError) as caught:
            ids += [int(i) for batch in loader for i in batch["sample_id"]]
        assert re.search(r"Input/output error.*\(\d+ attempts in [\d.]+ m?s\)", caught.value.reason)
        assert caught.value.uri.endswith("20.png")
        broken.unlink()
        assert loader.state_dict()["feed_epoch"] == 0, "also if the bad one is in the first block"
        loader.load_state_dict(loader.state_dict())
        rest = record_epoch(loader)
        assert rest.ledger is not None
        assert rest.ledger.exact


def test_a_sample_that_is_left_out_keeps_its_reason_and_is_back_in_a_later_epoch(serve: Serve, switch: Switch) -> None:
    """All epochs of the feed are the same."""
    feed = serve(storage_s=1.0, on_bad_sample="skip", shuffle=False)
    broken = switch(20)
    with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        first = record_epoch(loader)
        (skipped,) = feed.status().skipped
        broken.unlink()
        # the second epoch may have tried its block already, as soon as the consumer came near
        _, third = record_epoch(loader), record_epoch(loader)
    assert skipped.sample_id == 20
    assert "Input/output error" in skipped.reason
    assert first.flaws(set(range(SAMPLES)) - {20}) == []
    assert third.flaws(range(SAMPLES)) == []


def test_storage_that_errs_while_a_feed_begins_is_asked_again_for_as_long_as_the_option_says(
    feed_name: str, tmp_path: Path
) -> None:
    """With ``storage_s=0`` each of the first samples is tried once. Otherwise it is retried until storage answers."""
    data = mbaas.read_images(str(images(tmp_path / "images", SAMPLES)), filesystem=troubled(tmp_path))
    trouble, pipeline = Trouble(tmp_path), T.Pipeline([T.DecodeImage()])

    def start(storage_s: float) -> mbaas.Feed:
        timeouts = mbaas.Timeouts(storage_s=storage_s)
        return mbaas.serve(feed_name, data, pipeline, timeouts=timeouts, batch_size=BATCH_SIZE, prep_workers=1)

    trouble.begin("err")
    with pytest.raises(mbaas.BadSampleError, match=r"reading failed: .* \(1 attempt in [\d.]+ (µs|ms)\)") as caught:
        start(storage_s=0.0)
    assert caught.value.uri == data.uri(0)
    assert trouble.met == PROBE_SAMPLES
    with ThreadPoolExecutor(1) as starting:
        started = starting.submit(start, storage_s=60.0)
        wait_until(lambda: trouble.met >= 4 * PROBE_SAMPLES or started.done(), "it was asked for again")
        assert not started.done()
        trouble.end()
        with started.result(), mbaas.join(feed_name, consumer="me", format="numpy") as loader:
            assert record_epoch(loader).flaws(range(SAMPLES)) == []
