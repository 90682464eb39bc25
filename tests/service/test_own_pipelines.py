"""Consumers with pipelines of their own: bytes as in a feed of that pipeline alone, shared work, state, errors."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import ray
import soundfile

import mbaas
from mbaas import transforms as T
from mbaas.core.staging import state as staging_state
from mbaas.dataset import synthetic
from mbaas.ray_cluster import actor_names, store
from mbaas.wire.blocks import own_pipeline_key
from support.feeds import in_coordinator
from support.leaks import store_use
from support.trials import EpochRecord, Recorder, record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_clean")

SAMPLES = 331
DATA = synthetic(SAMPLES, height=96, width=128)
DECODED_BYTES = SAMPLES * (96 * 128 * 3 + 128)
OPTIONS: dict[str, Any] = {"batch_size": 32, "prep_workers": 2, "seed": 3}


def crop(size: int = 64, flip: float = 0.5) -> T.Pipeline:
    return T.Pipeline([T.DecodeImage(), T.RandomCrop(size), T.RandomHorizontalFlip(flip)])


OTHERS = {
    "size": crop(48),
    "chance": crop(64, flip=0.1),
    "another first transform": T.Pipeline([T.DecodeImage(), T.CenterCrop(80), T.RandomVerticalFlip()]),
    "floats": T.Pipeline([T.DecodeImage(), T.RandomCrop(32), T.Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))]),
    "a function": T.Pipeline([T.DecodeImage(), T.RandomCrop(40), T.Map(lambda image, rng: image[::-1].copy())]),
}


def exact(record: EpochRecord) -> tuple[int, str]:
    """The feed's epoch, and the digest of its samples."""
    assert record.ledger is not None
    assert record.ledger.exact
    return record.ledger.feed_epoch, record.row_digest


def digests(feed: str, epochs: int = 2, **options: Any) -> dict[int, str]:
    with mbaas.join(feed, consumer=f"me-{threading.get_ident()}", format="numpy", **options) as loader:
        return dict(exact(record_epoch(loader)) for _ in range(epochs))


@pytest.fixture(scope="module")
def alone(ray_session: None) -> dict[str, dict[int, str]]:
    """The first epochs of a feed for each pipeline."""
    found = {}
    for name, pipeline in OTHERS.items():
        with mbaas.serve("alone", DATA, pipeline, **OPTIONS) as feed:
            found[name] = digests(feed.name, 8)
    return found


@pytest.fixture(params=[0.0, 0.5, 1.2], ids=["nothing kept decoded", "half", "all"])
def shared(request: pytest.FixtureRequest, feed_name: str) -> Iterator[mbaas.Feed]:
    kept = {"cache_decoded": False} if not request.param else {"cache_bytes": int(request.param * DECODED_BYTES)}
    with mbaas.serve(feed_name, DATA, crop(), **OPTIONS, **kept) as feed:
        yield feed


def test_bytes_are_those_of_a_feed_with_that_pipeline_alone(
    shared: mbaas.Feed, alone: dict[str, dict[int, str]]
) -> None:
    """All run at once, next to the feed's own, and again when more samples are kept decoded."""
    for _ in range(2):
        with ThreadPoolExecutor(len(OTHERS) + 1) as pool:
            own = {name: pool.submit(digests, shared.name, pipeline=each) for name, each in OTHERS.items()}
            plain = pool.submit(digests, shared.name)
            for name, found in own.items():
                assert found.result().items() <= alone[name].items(), name
            plain.result()


@pytest.mark.parametrize("cache_decoded", [False, True])
def test_a_pipeline_that_decodes_otherwise_shares_the_bytes_of_files(
    feed_name: str, tmp_path: Path, cache_decoded: bool
) -> None:
    """Sound of another rate; both pipelines read at the same time."""
    (tmp_path / "class").mkdir()
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (41, 1600)).astype(np.float32)
    for number, sound in enumerate(noise):
        soundfile.write(tmp_path / "class" / f"{number:02d}.wav", sound, 16_000)
    data = mbaas.read_audio(tmp_path)
    pipelines = [T.Pipeline([T.DecodeAudio(rate), T.RandomCrop(rate // 20)]) for rate in (16_000, 8_000)]
    options: dict[str, Any] = {"batch_size": 8, "prep_workers": 1, "cache_decoded": cache_decoded}

    def epochs(feed: str, count: int, pipeline: T.Pipeline | None = None) -> dict[int, bytes]:
        found = {}
        with mbaas.join(feed, f"me-{threading.get_ident()}", pipeline=pipeline, format="numpy") as loader:
            for _ in range(count):
                sound = np.concatenate([batch["audio"] for batch in loader])
                assert loader.ledger is not None
                assert loader.ledger.exact
                found[loader.ledger.feed_epoch] = sound.tobytes()
        return found

    with mbaas.serve(f"{feed_name}-alone", data, pipelines[1], **options) as feed:
        alone = epochs(feed.name, 12)
    with mbaas.serve(feed_name, data, pipelines[0], **options) as feed, ThreadPoolExecutor(2) as pool:
        plain, own = [pool.submit(epochs, feed.name, 3, each) for each in (None, pipelines[1])]
        assert own.result().items() <= alone.items()
        assert {len(sound) for sound in plain.result().values()} == {41 * 800 * 4}
        if not cache_decoded:
            assert feed.status().fetched.storage.nbytes == data.total_bytes


def test_consumers_with_equal_pipelines_share_minibatches_whoever_came_first(feed_name: str) -> None:
    with mbaas.serve(feed_name, DATA, crop(), **OPTIONS) as feed:
        names = [f"trial-{number}" for number in range(4)]
        loaders = [mbaas.join(feed.name, name, pipeline=crop(48), format="numpy") for name in names]
        same = mbaas.join(feed.name, "same", pipeline=crop(), format="numpy")
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(record_epoch, loaders)]
        assert len({record.row_digest for record in found}) == 1
        one = record_epoch(same)
        status = feed.status()
        assert {c.name: bool(c.pipeline) for c in status.consumers} == {**dict.fromkeys(names, True), "same": False}
        for loader in (*loaders, same):
            loader.close()
        # Up to two more epochs are prepared ahead.
        assert feed.status().remade_blocks == 0
        assert one.row_digest != found[0].row_digest
        prepared = sum(loader.report().prepared for loader in loaders)
        assert prepared == SAMPLES


def test_the_pipeline_can_change_from_the_next_epoch_on(feed_name: str, alone: dict[str, dict[int, str]]) -> None:
    """As in progressive resizing."""
    with mbaas.serve(feed_name, DATA, crop(), **OPTIONS) as feed:
        with mbaas.join(feed.name, "me", format="numpy") as loader:
            found = {}
            for size in (64, 32, 48, 64):
                loader.set_pipeline(crop(size))
                epoch, digest = exact(record_epoch(loader))
                found[epoch] = digest
                assert loader.peek()["image"].shape[1:] == (size, size, 3)
            assert [*found] == [0, 1, 2, 3]
            assert found[2] == alone["size"][2]


def test_a_change_in_mid_epoch_waits_for_its_end(feed_name: str) -> None:
    with (
        mbaas.serve(feed_name, DATA, crop(), **OPTIONS) as feed,
        mbaas.join(feed.name, "me", format="numpy") as loader,
    ):
        sizes = []
        for number, batch in enumerate(loader):
            if number == 2:
                loader.set_pipeline(crop(32))
            sizes.append(batch["image"].shape[1])
        assert sizes == [64] * len(loader)
        assert next(iter(loader))["image"].shape[1] == 32


def test_a_state_continues_with_its_pipeline_or_with_one_that_is_asked_for(feed_name: str) -> None:
    """As a clone in Population Based Training: its source's position, and its own augmentation."""
    with mbaas.serve(feed_name, DATA, crop(), **OPTIONS) as feed:
        with mbaas.join(feed.name, "source", pipeline=crop(48), format="numpy") as loader:
            before = []
            for batch in loader:
                before.append(batch["sample_id"].copy())
                if len(before) == 4:
                    break
            state = loader.state_dict()
        with pytest.raises(mbaas.StateError, match=r"another pipeline of the same dataset, seed and order.*pipeline="):
            mbaas.join(feed.name, "plain", state=state)
        with mbaas.join(feed.name, "clone", pipeline=crop(32), state=state, format="numpy") as clone:
            rest = [*clone]
            assert clone.ledger is not None
            assert clone.ledger.exact
        assert {batch["image"].shape[1] for batch in rest} == {32}
        ids = np.concatenate([*before, *(batch["sample_id"] for batch in rest)])
        assert sorted(ids.tolist()) == [*range(SAMPLES)]
        with mbaas.join(feed.name, "same", pipeline=crop(48), state=state, format="numpy") as same:
            np.testing.assert_array_equal(
                np.concatenate([batch["sample_id"] for batch in same]),
                np.concatenate([batch["sample_id"] for batch in rest]),
            )


def test_a_pickled_loader_keeps_its_pipeline(feed_name: str) -> None:
    with mbaas.serve(feed_name, DATA, crop(), **OPTIONS) as feed:
        loader = mbaas.join(feed.name, "me", pipeline=crop(48), format="numpy")
        loader.set_pipeline(crop(32))
        with pickle.loads(pickle.dumps(loader)) as again:
            assert again.peek()["image"].shape[1] == 32


class Unpicklable:
    def __call__(self, image: Any) -> Any:
        return image

    def __reduce__(self) -> Any:
        raise TypeError("it holds a lock")


REFUSED = {
    "must be an mbaas.transforms.Pipeline, got 'crop'": "crop",
    "begins with DecodeArray": T.Pipeline([T.DecodeArray(format="npy", shape=(3,))]),
    "names the field 'boxes', but samples have label": T.Pipeline(
        [T.DecodeImage(), T.RandomCrop(32)], boxes=T.Boxes("boxes")
    ),
    "ZeroDivisionError": T.Pipeline([T.DecodeImage(), T.RandomCrop(32), T.Map(lambda _: 1 // 0, deterministic=True)]),
    "at least 3 minibatches of 32 samples of each pipeline": T.Pipeline([T.DecodeImage(), T.Resize((1000, 1000))]),
}


def test_what_does_not_suit_the_feed_is_refused_and_nobody_else_notices(feed_name: str) -> None:
    with (
        mbaas.serve(feed_name, DATA, crop(), staging_bytes="64 MiB", **OPTIONS) as feed,
        mbaas.join(feed.name, "other", format="numpy") as other,
    ):
        for words, pipeline in REFUSED.items():
            with pytest.raises(mbaas.MbaasError, match=re.escape(words)):
                mbaas.join(feed.name, "me", pipeline=pipeline)
            with pytest.raises(mbaas.MbaasError, match=re.escape(words)):
                other.set_pipeline(pipeline)
        exact(record_epoch(other))
        status = feed.status()
        assert [consumer.name for consumer in status.consumers] == ["other"]
        assert status.internal_errors == 0


def test_a_pipeline_that_cannot_be_pickled_is_refused_before_the_feed_hears_of_it() -> None:
    with pytest.raises(mbaas.ConfigError, match="it holds a lock"):
        T.Pipeline([T.DecodeImage(), T.RandomCrop(32), T.Map(Unpicklable(), deterministic=True)]).pickled()


def test_workers_the_cache_and_the_coordinator_may_die(feed_name: str, alone: dict[str, dict[int, str]]) -> None:
    """The pipeline and its blocks are as before, so a loader in mid-epoch gets each sample once."""
    with mbaas.serve(feed_name, DATA, crop(), **OPTIONS) as feed:
        with mbaas.join(feed.name, "me", pipeline=OTHERS["size"], format="numpy") as loader:
            for epoch in range(2):
                recorder, kinds = Recorder(), iter(("prep", "cache", "feed"))
                for batch in loader:
                    recorder.add(batch)
                    _kill(feed.name, next(kinds, None))
                assert exact(recorder.record(loader.ledger)) == (epoch, alone["size"][epoch])
        assert feed.status().restarts == 1, "counted since the last coordinator began"


def _kill(feed: str, kind: str | None) -> None:
    if kind == "feed":
        ray.kill(ray.get_actor(actor_names.actor_name(feed), actor_names.NAMESPACE), no_restart=False)
    elif kind is not None:
        ray.kill(next(iter(actor_names.children(feed, kind).values())), no_restart=kind == "prep")


def refuses() -> T.Pipeline:
    """Images with levels below 8 are bad samples."""

    def bright(image: Any) -> Any:  # nested, so that workers need not import this file
        if image.max() < 8:
            raise ValueError("too dark")
        return image

    return T.Pipeline([T.DecodeImage(), T.Map(bright, deterministic=True), T.RandomCrop(6)])


CROPS = T.Pipeline([T.DecodeImage(), T.RandomCrop(8)])
SKIPPING: dict[str, Any] = {"batch_size": 8, "prep_workers": 1, "on_bad_sample": "skip"}


@pytest.fixture
def drawn(tmp_path: Path) -> mbaas.Dataset:
    """70 draws of 30 images: image n has level n, and file 11 is not an image."""
    (tmp_path / "class").mkdir()
    for level in range(30):
        cv2.imwrite(str(tmp_path / "class" / f"{level:02d}.png"), np.full((12, 12, 3), level, np.uint8))
    (tmp_path / "class" / "11.png").write_text("text")
    return mbaas.read_images(tmp_path).resample(np.arange(30) + 10, samples=70)


def read_epoch(loader: mbaas.Loader) -> tuple[int, list[int]]:
    """The feed's epoch, and its sample ids."""
    record = record_epoch(loader)
    return exact(record)[0], record.sample_ids.tolist()


def test_each_pipeline_leaves_out_its_own_bad_samples_from_the_same_draws(feed_name: str, drawn: mbaas.Dataset) -> None:
    """One pipeline refuses the levels below 8. Each consumer reads until all have read one epoch in common."""
    data, pipelines = drawn, {"feed": None, "crops": CROPS, "refuses": refuses()}
    found: dict[str, dict[int, list[int]]] = {name: {} for name in pipelines}

    def in_common() -> set[int]:
        return set.intersection(*(set(by_epoch) for by_epoch in found.values()))

    def read(name: str) -> None:
        with mbaas.join(feed.name, name, pipeline=pipelines[name], format="numpy") as loader:
            while not in_common():
                epoch, ids = read_epoch(loader)
                found[name] = found[name] | {epoch: ids}

    with mbaas.serve(feed_name, data, T.Pipeline([T.DecodeImage()]), **SKIPPING) as feed, ThreadPoolExecutor(3) as pool:
        list(pool.map(read, pipelines))
    for name, by_epoch in found.items():
        for epoch, ids in by_epoch.items():
            levels = data.stored_ids(np.arange(70), epoch)
            good = (levels != 11) & ((levels >= 8) | (name != "refuses"))
            assert sorted(ids) == np.flatnonzero(good).tolist(), (name, epoch)
    for epoch in in_common():
        levels = data.stored_ids(np.arange(70), epoch)
        assert found["crops"][epoch] == found["feed"][epoch]
        assert found["refuses"][epoch] == [draw for draw in found["feed"][epoch] if levels[draw] >= 8]


def test_a_pipeline_leaves_out_no_sample_that_was_bad_only_with_one_that_has_ended(
    feed_name: str, drawn: mbaas.Dataset
) -> None:
    """It gets the number of the pipeline that ended, and so the same block numbers."""
    options: dict[str, Any] = {**SKIPPING, "timeouts": mbaas.Timeouts(reservation_s=0.1)}
    with (
        mbaas.serve(feed_name, drawn, T.Pipeline([T.DecodeImage()]), **options) as feed,
        mbaas.join(feed.name, "feed", format="numpy") as loader,
    ):
        in_coordinator(feed.name, lambda _: setattr(staging_state, "UNUSED_S", 0.1))
        next(iter(loader))  # so that all others begin with the first epoch, too
        with mbaas.join(feed.name, "refuses", pipeline=refuses(), format="numpy") as other:
            epoch, refused = read_epoch(other)
        wait_until(lambda: len(feed.status().pipelines) == 1, "its stream has ended")
        with mbaas.join(feed.name, "crops", pipeline=CROPS, format="numpy") as other:
            cropped_epoch, cropped = read_epoch(other)
        levels = drawn.stored_ids(np.arange(70), epoch)
        assert sorted(refused) == np.flatnonzero((levels >= 8) & (levels != 11)).tolist()
        assert (cropped_epoch, sorted(cropped)) == (epoch, np.flatnonzero(levels != 11).tolist())
        assert feed.status().remade_blocks == 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_sixty_four_trials_with_a_pipeline_each_run_in_the_room_of_ten_minibatches(feed_name: str) -> None:
    """A minibatch of the feed takes 393 kB."""
    with mbaas.serve(feed_name, DATA, crop(), staging_bytes="4 MiB", **OPTIONS) as feed:
        before = store_use().spilled_bytes

        def epochs(number: int) -> list[list[str]]:
            pipeline = crop(64, flip=number / 100)
            with mbaas.join(feed.name, f"trial-{number}", pipeline=pipeline, format="numpy") as loader:
                return [record_epoch(loader).flaws(range(SAMPLES)) for _ in range(2)]

        with ThreadPoolExecutor(64) as pool:
            found = [*pool.map(epochs, range(64))]
        assert found == [[[], []]] * 64
        status = feed.status()
        # Of 1,408 blocks. A block that is staged ahead may have to make room for one that a consumer waits for.
        assert status.remade_blocks < 20
        assert status.internal_errors == 0
        assert store_use().spilled_bytes == before


def test_pipelines_are_forgotten_with_their_feed(feed_name: str) -> None:
    with mbaas.serve(feed_name, DATA, crop(), **OPTIONS) as feed:
        mbaas.join(feed.name, "me", pipeline=crop(48)).close()
        assert store.names(feed.name, own_pipeline_key(""))
    wait_until(lambda: not store.names(feed_name, own_pipeline_key("")), "the pipeline is forgotten")


def test_ranks_divide_the_minibatches_of_their_pipeline(feed_name: str) -> None:
    with mbaas.serve(feed_name, DATA, crop(), **OPTIONS) as feed:

        def rank(number: int) -> list[Any]:
            options: dict[str, Any] = {"rank": number, "world_size": 2, "format": "numpy"}
            with mbaas.join(feed.name, "trial", pipeline=OTHERS["size"], **options) as loader:
                first = [*loader]
                loader.set_pipeline(crop(32))
                return [first, [*loader]]

        with ThreadPoolExecutor(2) as pool:
            ranks = [*pool.map(rank, range(2))]
        for epoch, size in ((0, 48), (1, 32)):
            batches = [batch for each in ranks for batch in each[epoch]]
            assert {batch["image"].shape[1] for batch in batches} == {size}
            assert sorted(np.concatenate([b["sample_id"] for b in batches]).tolist()) == [*range(SAMPLES)]


def test_ranks_of_a_trial_need_equal_pipelines(feed_name: str) -> None:
    """The feed's own may be named or not."""
    with mbaas.serve(feed_name, DATA, crop(), **OPTIONS) as feed:

        def rank(number: int, pipeline: T.Pipeline | None, trial: str, **options: Any) -> mbaas.Loader:
            ranks: dict[str, Any] = {"rank": number, "world_size": 2}
            return mbaas.join(feed.name, trial, pipeline=pipeline, format="numpy", **ranks, **options)

        with rank(0, None, "equal") as one, rank(1, crop(), "equal") as other, ThreadPoolExecutor(2) as pool:
            assert [len(each["sample_id"]) for each in pool.map(lambda loader: next(iter(loader)), (one, other))] == [
                16
            ] * 2
        with rank(0, None, "odd", wait_timeout_s=1.0) as one, rank(1, crop(32), "odd"):
            with pytest.raises(mbaas.ConfigError, match="same batch_size and pipeline"):
                next(iter(one))


@pytest.mark.parametrize("name", ["size", "another first transform"])
def test_dali_prepares_pipelines_of_consumers_as_their_own_feeds_would(feed_name: str, name: str) -> None:
    """The first one can use the feed's decoded samples, the second one cannot."""
    options = {**OPTIONS, "engine": "dali", "prep_workers": 1, "cache_bytes": 2 * DECODED_BYTES}
    with mbaas.serve(f"{feed_name}-alone", DATA, OTHERS[name], **options) as feed:
        wanted = digests(feed.name, 8)
    with mbaas.serve(feed_name, DATA, crop(), **options) as feed:
        plain = digests(feed.name, 2)
        found = digests(feed.name, 2, pipeline=OTHERS[name])
        assert feed.status().engine == "dali"
    assert len(plain) == len(found) == 2
    again = found.keys() & wanted.keys()
    assert again
    assert {epoch: found[epoch] for epoch in again} == {epoch: wanted[epoch] for epoch in again}
