"""Decoded samples are kept in the form that pipelines have in common: it changes while consumers read, and back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import ray

import mbaas
from mbaas import transforms as T
from mbaas.core import kept_form
from mbaas.dataset import synthetic
from mbaas.ray_cluster import actor_names
from support.feeds import in_coordinator
from support.trials import record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_clean")

SAMPLES, HEIGHT, WIDTH = 211, 96, 128
DATA = synthetic(SAMPLES, height=HEIGHT, width=WIDTH)
WHOLE_BYTES = SAMPLES * (HEIGHT * WIDTH * 3 + 128)
OPTIONS: dict[str, Any] = {"batch_size": 32, "prep_workers": 2, "seed": 3, "cache_bytes": 4 * WHOLE_BYTES}
PAUSE_S, SLOW_S = 0.2, 0.002
EPOCHS = 4
"""Epochs that each consumer reads at least."""


def resized(size: int) -> T.Pipeline:
    """Pipelines that differ after two transforms, which take long, so that it pays to keep their result."""

    def slow(image: Any) -> Any:
        end = time.thread_time() + SLOW_S
        while time.thread_time() < end:
            pass
        return image

    transforms = [T.DecodeImage(), T.Map(slow, deterministic=True), T.Resize(size), T.RandomCrop(40)]
    return T.Pipeline([*transforms, T.RandomHorizontalFlip()])


@contextmanager
def reading(feed: str, name: str, **options: Any) -> Iterator[dict[int, str]]:
    """Read epochs in another thread, one after the other; yields the digest of each by its number."""
    seen: dict[int, str] = {}
    over = threading.Event()

    def read() -> None:
        with mbaas.join(feed, name, format="numpy", **options) as loader:
            while not over.is_set():
                record = record_epoch(loader)
                assert record.ledger is not None
                assert record.ledger.exact
                assert seen.setdefault(record.ledger.feed_epoch, record.row_digest) == record.row_digest
                time.sleep(PAUSE_S)

    with ThreadPoolExecutor(1) as pool:
        done: Future[None] = pool.submit(read)
        try:
            yield seen
        finally:
            over.set()
        done.result()


def digests_alone(pipeline: T.Pipeline, epochs: int) -> dict[int, str]:
    with mbaas.serve("alone", DATA, pipeline, **OPTIONS) as feed, mbaas.join(feed.name, "me", format="numpy") as loader:
        records = [record_epoch(loader) for _ in range(epochs)]
        return {each.ledger.feed_epoch: each.row_digest for each in records if each.ledger is not None}


def kill_cache(feed: str) -> None:
    """Kill the cache node, which Ray restarts."""
    ray.kill(next(iter(actor_names.children(feed, "cache").values())), no_restart=False)


def test_the_form_changes_with_the_pipelines_and_no_byte_does(feed_name: str) -> None:
    """Whole images once a pipeline resizes otherwise, also after the cache died; and back.

    A form is used after it was best for a second. `tests/core/test_kept_form.py` has the ten seconds of a real feed.
    """
    with mbaas.serve(feed_name, DATA, resized(60), **OPTIONS) as feed:
        in_coordinator(feed.name, lambda _: setattr(kept_form, "STAY_S", 1.0))

        def decoded_bytes() -> int:
            return feed.status(timeout_s=30).decoded.nbytes

        with reading(feed.name, "first") as first:
            small = SAMPLES * (60 * 80 * 3 + 128)
            wait_until(lambda: decoded_bytes() == small, "all samples are kept resized")
            with reading(feed.name, "other", pipeline=resized(48)) as other:
                wait_until(lambda: decoded_bytes() == WHOLE_BYTES, "all samples are kept whole", deadline_s=40)
                assert any("kept after 2 transforms" in note for note in feed.status().notes), feed.status().notes
                kill_cache(feed.name)
                wait_until(lambda: decoded_bytes() < WHOLE_BYTES, "the cache is empty")
                wait_until(lambda: decoded_bytes() == WHOLE_BYTES, "they are kept whole again")
                wait_until(lambda: len(other) >= EPOCHS, "the other pipeline has read enough epochs")
            wait_until(lambda: decoded_bytes() == small, "they are kept resized again", deadline_s=40)
            wait_until(lambda: len(first) >= EPOCHS, "the feed's own pipeline has read enough epochs")
    for seen, pipeline in ((first, resized(60)), (other, resized(48))):
        assert seen.items() <= digests_alone(pipeline, max(seen) + 1).items()
