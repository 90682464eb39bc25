"""Fields of a dataset reach trials unchanged, together with the images."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ray import cloudpickle

import mbaas
from mbaas import transforms as T
from mbaas.client.convert import check_names
from mbaas.samples.fields import Field
from mbaas.wire.samples import SampleSpec

SAMPLES = 203


def rows() -> dict[str, Any]:
    """Values of all samples in the manifest, by field."""
    number = np.arange(SAMPLES)
    return {
        "age": number * 3,
        "label": number / 7,
        "tags": np.stack([number % 2, number % 3, number % 5], axis=1).astype(np.uint8),
    }


def boxes_of(sample: int) -> np.ndarray:
    """Zero to three boxes."""
    return np.full((sample % 4, 4), sample, np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> mbaas.Dataset:
    """Images of one color each, two numbers, a list of labels, and boxes."""
    folder, known = tmp_path_factory.mktemp("manifest"), rows()
    for number in range(SAMPLES):
        cv2.imwrite(str(folder / f"{number}.png"), np.full((8, 8, 3), number, np.uint8))
    columns = {
        "uri": [f"{number}.png" for number in range(SAMPLES)],
        "age": known["age"],
        "label": known["label"],
        "tags": pa.FixedSizeListArray.from_arrays(known["tags"].ravel(), 3),
        "boxes": pa.array([boxes_of(number).tolist() for number in range(SAMPLES)], pa.list_(pa.list_(pa.float32()))),
    }
    pq.write_table(pa.table(columns), folder / "train.parquet")
    return mbaas.read_manifest(folder / "train.parquet")


@pytest.fixture(scope="module")
def feed(ray_session: None, data: mbaas.Dataset) -> Iterator[mbaas.Feed]:
    with mbaas.serve("fields", data, T.Pipeline([T.DecodeImage()]), batch_size=20, prep_workers=2) as served:
        yield served


def check(batch: dict[str, Any]) -> None:
    ids, known = np.asarray(batch["sample_id"]), rows()
    assert {*batch} == {"image", "label", "age", "tags", "boxes", "sample_id"}
    for name, values in known.items():
        np.testing.assert_array_equal(np.asarray(batch[name]), values[ids])
        assert np.asarray(batch[name]).dtype == values.dtype
    assert (np.asarray(batch["image"]) == ids[:, None, None, None]).all()
    assert len(batch["boxes"]) == len(ids)
    for boxes, sample in zip(batch["boxes"], ids.tolist(), strict=True):
        np.testing.assert_array_equal(np.asarray(boxes), boxes_of(sample))


@pytest.mark.parametrize("format", ["torch", "numpy"])
@pytest.mark.parametrize("batch_size", [20, 7])
def test_every_minibatch_has_them_beside_the_images(feed: mbaas.Feed, format: str, batch_size: int) -> None:
    """A minibatch of 7 can span two blocks."""
    with mbaas.join(feed.name, format=format, batch_size=batch_size) as loader:
        assert loader.class_names == ()
        seen = []
        for batch in loader:
            check(batch)
            seen += np.asarray(batch["sample_id"]).tolist()
        assert sorted(seen) == list(range(SAMPLES))
        assert loader.ledger is not None
        assert loader.ledger.exact


def test_a_loader_that_is_restored_gets_the_rest_with_the_same_fields(feed: mbaas.Feed) -> None:
    with mbaas.join(feed.name, consumer="first", format="numpy", batch_size=7) as loader:
        batches = iter(loader)
        seen = [next(batches)["sample_id"].tolist() for _ in range(5)]
        state = loader.state_dict()
    with mbaas.join(feed.name, consumer="second", format="numpy", batch_size=7, state=state) as loader:
        for batch in loader:
            check(batch)
            seen.append(batch["sample_id"].tolist())
    assert sorted(chain.from_iterable(seen)) == list(range(SAMPLES))


@pytest.mark.parametrize("format", ["torch", "numpy"])
@pytest.mark.parametrize("batch_size", [20, 7])
def test_values_that_differ_in_length_come_as_the_loader_is_asked_to(
    feed: mbaas.Feed, format: str, batch_size: int
) -> None:
    options = {"format": format, "batch_size": batch_size}
    with (
        mbaas.join(feed.name, "pads", collate="pad", **options) as padded,
        mbaas.join(feed.name, "packs", collate="packed", **options) as packed,
    ):
        for pads, packs in zip(padded, packed, strict=True):
            ids = np.asarray(pads["sample_id"])
            np.testing.assert_array_equal(np.asarray(packs["sample_id"]), ids)
            np.testing.assert_array_equal(np.asarray(pads["boxes_length"]), ids % 4)
            bounds = np.asarray(packs["boxes_bounds"])
            assert tuple(pads["boxes"].shape) == (len(ids), (ids % 4).max(), 4)
            assert bounds.tolist() == [0, *np.cumsum(ids % 4)]
            for row, sample in enumerate(ids.tolist()):
                wanted = boxes_of(sample)
                np.testing.assert_array_equal(np.asarray(packs["boxes"])[bounds[row] : bounds[row + 1]], wanted)
                np.testing.assert_array_equal(np.asarray(pads["boxes"])[row, : sample % 4], wanted)
                assert not np.asarray(pads["boxes"])[row, sample % 4 :].any()


def test_a_trial_may_name_fields_as_its_model_does_and_change_minibatches(feed: mbaas.Feed) -> None:
    """The ledger still counts each sample, although the trial leaves out its id."""
    columns = {"pixel_values": "image", "years": "age", "bounds": "boxes_bounds"}
    with mbaas.join(feed.name, columns=columns, collate="packed", format="numpy") as loader:
        assert {*loader.peek()} == {*columns}
        for batch in loader:
            assert {*batch} == {*columns}
            assert batch["pixel_values"].shape[1:] == (8, 8, 3)
            assert len(batch["bounds"]) == len(batch["years"]) + 1
        assert loader.ledger is not None
        assert loader.ledger.exact
    halved = partial(shrunk, keys=("image",))
    with mbaas.join(feed.name, batch_fn=halved) as loader:
        state = loader.state_dict()
        assert all(isinstance(batch, list) and batch[0].dtype == torch.float16 for batch in loader)
        assert loader.ledger is not None
        assert loader.ledger.exact
    with mbaas.join(feed.name, columns={"x": "image"}, batch_fn=lambda batch: batch["x"], state=state) as loader:
        again = pickle.loads(cloudpickle.dumps(loader))  # as accelerate and checkpoints do
        assert {tuple(images.shape[1:]) for images in again} == {(3, 8, 8)}
        again.close()


@pytest.mark.parametrize("format", ["torch", "numpy"])
def test_mixed_minibatches_depend_on_their_place_alone(feed: mbaas.Feed, format: str) -> None:
    """Two trials, one of which is restored in the middle, mix alike; each minibatch and epoch differs."""
    options = {"format": format, "columns": {"image": "image", "label": "tags"}, "batch_fn": T.CutMix()}

    def mixed(batch: dict[str, Any]) -> list[list[float]]:
        return np.asarray(batch["label"]).tolist()

    with (
        mbaas.join(feed.name, "one", **options) as one,
        mbaas.join(feed.name, "two", **options) as two,
        mbaas.join(feed.name, "plain", columns=options["columns"]) as plain,
        ThreadPoolExecutor(3) as pool,
    ):
        two_of_it = pool.submit(lambda: [mixed(batch) for _ in range(2) for batch in two])
        as_it_was = pool.submit(lambda: [mixed(batch) for _ in range(2) for batch in plain])
        first = mixed(one.peek())
        found, states = [], []
        for _ in range(2):
            for batch in one:
                found.append(mixed(batch))
                states.append(one.state_dict())
        assert found[0] == first
        assert two_of_it.result() == found
        shares = [np.abs(np.subtract(own, given)).max() for own, given in zip(found, as_it_was.result(), strict=True)]
        assert len(set(shares)) > 6, "tags differ by 1 to 4, so that one window for all would give at most 4"
    with mbaas.join(feed.name, "three", state=states[3], **options) as rest:
        assert [mixed(batch) for batch in rest] == found[4 : len(found) // 2]


def shrunk(batch: dict[str, Any], keys: tuple[str, ...]) -> list[Any]:
    return [batch[key].half() for key in keys]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"columns": {"x": "picture"}}, r"columns\['x'\] must be a field of minibatches, 'image', .*, got 'picture'"),
        ({"columns": {"x": "boxes_length"}}, r"columns\['x'\] must be a field of minibatches"),
        ({"columns": ["image"]}, r"columns must be a dict of keys and fields, such as .*, got \['image'\]"),
        ({"columns": {}}, r"columns must be a dict of keys and fields"),
        ({"batch_fn": "half"}, r"batch_fn must be a function of a minibatch, MixUp, CutMix or Mosaic, got 'half'"),
    ],
)
def test_columns_and_functions_that_cannot_be_are_refused(
    feed: mbaas.Feed, given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(mbaas.ConfigError, match=sentence):
        mbaas.join(feed.name, **given)


def test_a_way_that_there_is_not_and_a_name_that_is_taken_are_named(feed: mbaas.Feed, data: mbaas.Dataset) -> None:
    with pytest.raises(mbaas.ConfigError, match=r'^collate must be "list", "pad" or "packed", got \'stack\'$'):
        mbaas.join(feed.name, collate="stack")  # type: ignore[arg-type]
    known = (Field("boxes", (None, 4), "float32", 3), Field("boxes_length", (), "int64"))
    with pytest.raises(mbaas.ConfigError, match=r"^collate='pad' adds 'boxes_length' .* is a field of this feed"):
        check_names(SampleSpec(Field("image", (8, 8, 3), "uint8"), known), "pad")


def test_a_feed_without_labels_gives_images_and_ids_alone(ray_clean: None, data: mbaas.Dataset) -> None:
    folder = Path(data.uri(0)).parent
    (folder / "bare.csv").write_text("uri\n" + "".join(f"{number}.png\n" for number in range(SAMPLES)))
    bare = mbaas.read_manifest(folder / "bare.csv")
    assert bare.fields == ()
    with mbaas.serve("bare", bare, T.Pipeline([T.DecodeImage()]), batch_size=20, prep_workers=1) as feed:
        with mbaas.join(feed.name, format="numpy") as loader:
            seen = []
            for batch in loader:
                assert [*batch] == ["image", "sample_id"]
                seen += batch["sample_id"].tolist()
            del batch
        assert sorted(seen) == list(range(SAMPLES))


def test_the_ranks_of_a_trial_share_them(feed: mbaas.Feed) -> None:
    """Each rank gets its share of every minibatch, with all fields."""
    with ThreadPoolExecutor(2) as pool:
        seen = [*pool.map(partial(ids_of_rank, feed.name), range(2))]
    assert sorted(chain.from_iterable(seen)) == list(range(SAMPLES))
    assert abs(len(seen[0]) - len(seen[1])) <= 11, "in even shares, of each of eleven minibatches"


def ids_of_rank(feed: str, rank: int) -> list[int]:
    ids: list[int] = []
    with mbaas.join(feed, consumer="parallel", format="numpy", rank=rank, world_size=2) as loader:
        for batch in loader:
            check(batch)
            ids += batch["sample_id"].tolist()
    return ids
