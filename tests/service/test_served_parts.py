"""Splits, subsets and joined datasets are served exactly like whole datasets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pyarrow.compute as pc
import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.tools.chaos.participants import kill
from support.processes import coordinator_pid
from support.trials import record_epoch

SAMPLES = 203
PLAIN = T.Pipeline([T.DecodeImage()])
AUGMENTED = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images identified by their color, in three classes of different sizes."""
    root = tmp_path_factory.mktemp("divided")
    for number in range(SAMPLES):
        path = root / ("ant", "bee", "cat")[min(number % 7, 2)] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(path), np.full((8, 8, 3), number, np.uint8))
    return root


@pytest.fixture(scope="module")
def whole(folder: Path) -> mbaas.Dataset:
    return mbaas.read_images(folder)


@pytest.fixture(scope="module")
def parts(whole: mbaas.Dataset) -> tuple[mbaas.Dataset, mbaas.Dataset]:
    return whole.split(0.8, seed=1, stratify="label")


@pytest.fixture(scope="module")
def feeds(ray_session: None, parts: tuple[mbaas.Dataset, mbaas.Dataset]) -> Iterator[tuple[mbaas.Feed, mbaas.Feed]]:
    with (
        mbaas.serve("train part", parts[0], AUGMENTED, batch_size=16, prep_workers=1) as train,
        mbaas.serve("validation part", parts[1], PLAIN, batch_size=16, prep_workers=1, shuffle=False) as validation,
    ):
        yield train, validation


def colours_of(data: mbaas.Dataset) -> np.ndarray:
    """The color of each image, from its file name."""
    return np.array([int(Path(data.uri(sample)).stem) for sample in range(len(data))])


def epoch_of(feed: mbaas.Feed, data: mbaas.Dataset, consumer: str, epochs: int = 1) -> list[np.ndarray]:
    """Read exact epochs, and check each image and label by its id. Return the ids of each epoch in order."""
    found = []
    with mbaas.join(feed.name, consumer=consumer, format="numpy") as loader:
        assert loader.class_names == data.class_names
        for _ in range(epochs):
            ids = []
            for batch in loader:
                assert (batch["image"] == colours_of(data)[batch["sample_id"], None, None, None]).all()
                assert (batch["label"] == data.labels(batch["sample_id"])).all()
                ids.append(batch["sample_id"].copy())
            del batch
            assert loader.ledger is not None
            assert loader.ledger.exact
            found.append(np.concatenate(ids))
            assert sorted(found[-1].tolist()) == [*range(len(data))]
    return found


def test_a_trial_trains_on_one_part_and_validates_on_the_other(
    feeds: tuple[mbaas.Feed, mbaas.Feed], parts: tuple[mbaas.Dataset, mbaas.Dataset], whole: mbaas.Dataset
) -> None:
    """Every sample of the folder is in one of the two parts, and the source ids lead back to the folder."""
    (train, validation), seen = feeds, []
    first, second = epoch_of(train, parts[0], "a", epochs=2)
    assert not np.array_equal(first, second), "shuffled"
    for _ in range(2):  # two trials, one after the other
        (held_out,) = epoch_of(validation, parts[1], f"b{len(seen)}")
        assert np.array_equal(held_out, np.arange(len(parts[1]))), "the dataset's order"
        seen.append(held_out)
    assert validation.status().prepared_samples == len(parts[1]), "prepared once"
    sources = np.concatenate([parts[0].source_ids(second), parts[1].source_ids(held_out)])
    assert sorted(sources.tolist()) == [*range(SAMPLES)]
    assert sorted(colours_of(whole)[sources].tolist()) == [*range(SAMPLES)]
    assert train.status().inexact_epochs == validation.status().inexact_epochs == 0


def test_a_state_belongs_to_its_part(
    feeds: tuple[mbaas.Feed, mbaas.Feed], parts: tuple[mbaas.Dataset, mbaas.Dataset], folder: Path
) -> None:
    """A state fits the same part of a new split of the folder, but not the other part."""
    with mbaas.join(feeds[0].name, consumer="saved", format="numpy") as loader:
        batches = iter(loader)
        taken = [next(batches)["sample_id"].copy() for _ in range(3)]
        state = loader.state_dict()
        batches.close()
    with mbaas.join(feeds[1].name, consumer="wrong", format="numpy") as loader:
        with pytest.raises(mbaas.StateError, match="another dataset"):
            loader.load_state_dict(state)
    again = mbaas.read_images(folder).split(0.8, seed=1, stratify="label")[0]
    with mbaas.serve("anew", again, AUGMENTED, batch_size=16, prep_workers=1) as anew:
        with mbaas.join(anew.name, format="numpy", state=state) as loader:
            taken += [batch["sample_id"].copy() for batch in loader]
    assert sorted(np.concatenate(taken).tolist()) == [*range(len(parts[0]))]


@pytest.mark.chaos
def test_a_coordinator_that_dies_knows_its_part_again(
    feeds: tuple[mbaas.Feed, mbaas.Feed], parts: tuple[mbaas.Dataset, mbaas.Dataset]
) -> None:
    with mbaas.join(feeds[0].name, consumer="me", format="numpy") as loader:
        batches = iter(loader)
        ids = [next(batches)["sample_id"].copy() for _ in range(2)]
        kill(coordinator_pid(feeds[0].name))
        for batch in batches:
            assert (batch["image"] == colours_of(parts[0])[batch["sample_id"], None, None, None]).all()
            ids.append(batch["sample_id"].copy())
        del batch
    assert sorted(np.concatenate(ids).tolist()) == [*range(len(parts[0]))]
    epoch_of(feeds[0], parts[0], "later")


def test_joined_parts_of_two_file_systems_are_one_feed(ray_session: None, whole: mbaas.Dataset, folder: Path) -> None:
    elsewhere = mbaas.read_images(folder.name, filesystem=SubTreeFileSystem(str(folder.parent), LocalFileSystem()))
    data = mbaas.concat([whole.filter(pc.field("class") == "bee"), elsewhere.split(0.3)[1], whole.limit(9)])
    data = data.split(0.9)[0]
    with mbaas.serve("joined", data, PLAIN, batch_size=20, prep_workers=1) as feed:
        epoch_of(feed, data, "a", epochs=2)


def test_a_part_of_what_has_no_files_is_served(ray_session: None) -> None:
    data = synthetic(1_000).split(0.3, seed=4)[0]
    with mbaas.serve("computed part", data, PLAIN, batch_size=20, prep_workers=1) as feed:
        with mbaas.join(feed.name, format="numpy") as loader:
            assert record_epoch(loader).flaws(range(300)) == []
