"""Every reader of data keeps the promises of a feed. The tests are generated from the table of readers.

By default one feed serves all readers, joined into one dataset, each with a file that is not an image.
The long tests repeat this for each reader alone, on the local file system and on another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from fsspec.implementations.local import LocalFileSystem

import mbaas
from mbaas import transforms as T
from mbaas.tools.chaos.participants import kill
from support.feeds import warm
from support.ranks import union_flaws
from support.readers import BAD, CLASSES, READERS, SAMPLES, FileSystem, images, picture
from support.trials import EpochRecord, Recorder, record_epoch
from support.waiting import wait_until

BATCH_SIZE = 8
IMAGES = images()
FILE_SYSTEMS: dict[str, FileSystem] = {
    "local": None,
    "another": pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(LocalFileSystem())),
}

Batches = list[dict[str, Any]]


def read(name: str, top: Path, filesystem: FileSystem = None) -> mbaas.Dataset:
    top.mkdir()
    return READERS[name](top, IMAGES, filesystem)


def serve(name: str, data: mbaas.Dataset, on_bad_sample: Any) -> mbaas.Feed:
    """Serve with staging for a part of the data and a smaller cache."""
    sizes = {"staging_bytes": max(6_200, 90 * len(data)), "cache_bytes": 2_000}
    options = {"batch_size": BATCH_SIZE, "prep_workers": 1, "engine": "cpu", "on_bad_sample": on_bad_sample, **sizes}
    return mbaas.serve(name, data, T.Pipeline([T.DecodeImage()]), **options)


def epoch_of(loader: mbaas.Loader) -> Batches:
    return [{name: array.copy() for name, array in batch.items()} for batch in loader]


def record_of(batches: Batches, loader: mbaas.Loader) -> EpochRecord:
    recorder = Recorder()
    for batch in batches:
        recorder.add(batch)
    return recorder.record(loader.ledger)


def good(readers: int) -> list[int]:
    """Ids of the good samples in a dataset that joins this many readers."""
    return [number for number in range(readers * SAMPLES) if number % SAMPLES != BAD]


def check_rest_after_resuming(feed: mbaas.Feed, readers: int) -> None:
    with mbaas.join(feed.name, "first", format="numpy") as loader:
        batches = iter(loader)
        seen = [next(batches)["sample_id"].copy() for _ in range(3)]
        state = loader.state_dict()
    with mbaas.join(feed.name, "second", format="numpy", state=state) as loader:
        seen += [batch["sample_id"].copy() for batch in loader]
        assert loader.ledger is not None
        assert loader.ledger.exact
    assert sorted(np.concatenate(seen).tolist()) == good(readers)


def check_ranks(feed: mbaas.Feed, readers: int) -> None:
    def of_rank(rank: int) -> EpochRecord:
        with mbaas.join(feed.name, "parallel", format="numpy", rank=rank, world_size=2) as loader:
            return record_epoch(loader)

    with ThreadPoolExecutor(2) as pool:
        records = [*pool.map(of_rank, range(2))]
    assert union_flaws(records, good(readers), batch_size=BATCH_SIZE) == []


def check_after_a_worker_was_killed(feed: mbaas.Feed, readers: int) -> None:
    """Little of the epoch fits into staging, so a replacement worker prepares the end."""
    with mbaas.join(feed.name, "bereaved", format="numpy") as loader:
        recorder = Recorder()
        for number, batch in enumerate(loader):
            recorder.add(batch)
            if number == 0:
                (worker,) = feed.status().workers
                kill(worker.pid)
        del batch
        assert recorder.record(loader.ledger).flaws(good(readers)) == []
        wait_until(lambda: [each.pid for each in feed.status().workers] not in ([worker.pid], []), "it was replaced")


def check_pictures(batches: Batches, first: int) -> None:
    """Check the images of the reader whose first sample is ``first``."""
    found = 0
    for batch in batches:
        for sample, label, image in zip(batch["sample_id"], batch["label"], batch["image"], strict=True):
            if first <= sample < first + SAMPLES:
                np.testing.assert_array_equal(image, picture(int(sample) - first))
                assert label == IMAGES.labels[sample - first]
                found += 1
    assert found == SAMPLES - 1


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> mbaas.Dataset:
    """The datasets of all readers, one after the other."""
    top = tmp_path_factory.mktemp("readers")
    return mbaas.concat([read(name, top / name) for name in READERS])


@pytest.fixture(scope="module")
def feed(ray_session: None, joined: mbaas.Dataset) -> Iterator[mbaas.Feed]:
    with serve("every-reader", joined, "skip") as feed:
        yield warm(feed)


@pytest.fixture(scope="module")
def epoch(feed: mbaas.Feed) -> Batches:
    with mbaas.join(feed.name, "whole", format="numpy") as loader:
        batches = epoch_of(loader)
        assert record_of(batches, loader).flaws(good(len(READERS))) == []
    return batches


@pytest.mark.parametrize(("first", "name"), [*enumerate(READERS)])
def test_an_epoch_has_the_images_and_classes_that_were_written(
    epoch: Batches, joined: mbaas.Dataset, first: int, name: str
) -> None:
    check_pictures(epoch, first * SAMPLES)
    assert joined.class_names == CLASSES


def test_a_bad_sample_is_left_out_and_listed_with_its_reason(
    epoch: Batches, feed: mbaas.Feed, joined: mbaas.Dataset
) -> None:
    skipped = {each.sample_id: each for each in feed.status().skipped}
    assert sorted(skipped) == [first * SAMPLES + BAD for first in range(len(READERS))]
    for number, each in skipped.items():
        assert (each.uri, each.reason) == (
            joined.uri(number),
            "it is not JPEG, PNG, WebP or BMP: it starts with b'no image'",
        )


def test_a_loader_goes_on_where_another_was(feed: mbaas.Feed) -> None:
    check_rest_after_resuming(feed, len(READERS))


def test_ranks_share_an_epoch(feed: mbaas.Feed) -> None:
    check_ranks(feed, len(READERS))


def test_nothing_is_lost_with_a_worker(feed: mbaas.Feed) -> None:
    check_after_a_worker_was_killed(feed, len(READERS))


def test_a_bad_sample_is_named_in_an_error(ray_clean: None, joined: mbaas.Dataset, feed_name: str) -> None:
    check_error(feed_name, joined, len(READERS))


def check_error(feed_name: str, data: mbaas.Dataset, readers: int) -> None:
    """Check that the error names the bad sample of one reader."""
    with serve(feed_name, data, "raise") as feed, mbaas.join(feed.name, format="numpy") as loader:
        with pytest.raises(mbaas.BadSampleError) as caught:
            record_epoch(loader)
    assert caught.value.uri in {data.uri(first * SAMPLES + BAD) for first in range(readers)}
    assert caught.value.reason == "it is not JPEG, PNG, WebP or BMP: it starts with b'no image'"


@pytest.mark.long
@pytest.mark.parametrize("filesystem", FILE_SYSTEMS)
@pytest.mark.parametrize("name", READERS)
def test_all_of_that_holds_for_each_reader_alone(
    ray_clean: None, tmp_path: Path, name: str, filesystem: str, feed_name: str
) -> None:
    data = read(name, tmp_path / "data", FILE_SYSTEMS[filesystem])
    with serve(feed_name, data, "skip") as feed:
        with mbaas.join(feed.name, "whole", format="numpy") as loader:
            batches = epoch_of(loader)
            assert record_of(batches, loader).flaws(good(1)) == []
        check_pictures(batches, 0)
        check_rest_after_resuming(feed, 1)
        check_ranks(feed, 1)
        check_after_a_worker_was_killed(feed, 1)
        assert [each.sample_id for each in feed.status().skipped] == [BAD]
    check_error(f"{feed_name}-raises", data, 1)
