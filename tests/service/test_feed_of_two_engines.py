"""A feed prepares one share of the images with DALI and the others with the cpu engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import ray
import simplejpeg
from numpy.typing import NDArray

import mbaas
from mbaas import serving
from mbaas import transforms as T
from mbaas.dataset import Dataset
from mbaas.prep.engines import Batch, Engine, make_engine
from mbaas.ray_cluster import actor_names, resources
from mbaas.samples.order import Ids, in_share
from support.trials import Recorder, record_epoch
from support.waiting import wait_until

SAMPLES, SHARE = 150, 0.4
PIPELINE = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.ColorJitter(0.2, hue=0.1)])
OPTIONS: dict[str, Any] = {
    "batch_size": 16,
    "prep_workers": 1,
    "engine": "dali",
    "gpus_per_worker": 0,
    "dali_share": SHARE,
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crops of photographs. The engines' results differ by a few grey levels."""
    from skimage import data

    folder, chance = tmp_path_factory.mktemp("photos"), np.random.default_rng(1)
    sources = [cv2.resize(each, (300, 240)) for each in (data.astronaut(), data.coffee(), data.chelsea())]
    for number in range(SAMPLES):
        top, left = chance.integers(0, 100, 2)
        cut = np.ascontiguousarray(sources[number % 3][top : top + 140, left : left + 190])
        to = folder / f"class {number % 2}" / f"{number}.jpg"
        to.parent.mkdir(exist_ok=True)
        to.write_bytes(simplejpeg.encode_jpeg(cut, quality=90, colorsubsampling="420"))
    return folder


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """Both engines; each prepares all samples."""
    made = {"dali": make_engine("dali", PIPELINE, seed=0), "cpu": make_engine("cpu", PIPELINE, seed=0)}
    yield made
    for engine in made.values():
        engine.close()


def made_by(engine: Engine, data: Dataset, ids: Ids, epoch: int) -> NDArray[Any]:
    """Prepare samples with one engine alone."""
    stored, reader, raw = data.stored_ids(ids, epoch), data.stored.reader(), []
    for sample, length in zip(stored.tolist(), data.stored.lengths(stored).tolist(), strict=True):
        raw.append(np.empty(length, np.uint8))
        reader.read_into(sample, raw[-1])
    out = np.empty((len(ids), 64, 64, 3), np.uint8)
    assert engine.prepare(Batch(raw, ids, epoch, {}), out).bad == []
    return out


@pytest.mark.parametrize("is_drawn", [False, True], ids=["as stored", "drawn"])
def test_a_sample_is_made_by_its_engine_in_every_epoch_also_once_it_is_kept_decoded(
    is_drawn: bool, photos: Path, engines: dict[str, Engine], ray_clean: None, feed_name: str
) -> None:
    """If each epoch draws its samples, all draws of one sample are prepared by the same engine."""
    data: Dataset = mbaas.read_images(photos)
    if is_drawn:
        data = data.resample(np.arange(SAMPLES) % 3 + 1.0, samples=SAMPLES, each_epoch=True)
    ids, differing = np.arange(SAMPLES), 0
    with mbaas.serve(feed_name, data, PIPELINE, cache_bytes="200 MiB", **OPTIONS) as feed:
        with mbaas.join(feed_name, format="numpy") as loader:
            for epoch in range(4):
                seen, recorder = np.empty((SAMPLES, 64, 64, 3), np.uint8), Recorder()
                for batch in loader:
                    recorder.add(batch)
                    seen[batch["sample_id"]] = batch["image"]
                assert recorder.record(loader.ledger).flaws(ids) == []
                dalis = in_share(data.stored_ids(ids, epoch), SHARE)
                by_dali, by_cpu = (made_by(engines[kind], data, ids, epoch) for kind in ("dali", "cpu"))
                np.testing.assert_array_equal(seen[dalis], by_dali[dalis])
                np.testing.assert_array_equal(seen[~dalis], by_cpu[~dalis])
                differing += int(np.any(by_dali != by_cpu, axis=(1, 2, 3)).sum())
        assert differing > SAMPLES
        status = feed.status()
        assert (status.engine, status.dali_share) == ("dali", SHARE)
        assert status.fetched.decoded.samples > 0
        if not is_drawn:
            others = int((~in_share(ids, SHARE)).sum())
            wait_until(lambda: record_of(feed_name) and feed.status().decoded.samples == others, "all others are kept")
            assert feed.status().cached_samples == SAMPLES


def record_of(feed_name: str) -> str:
    with mbaas.join(feed_name, format="numpy") as loader:
        return record_epoch(loader).row_digest


@pytest.mark.parametrize(
    ("gpus", "threads", "expected"),
    [(2, 1, (4, 8.0, 8, 0.4)), (2, 20, (4, 8.0, 20, 0.4)), (0, 1, (32, 1.0, 1, 1.0))],
)
def test_the_workers_on_gpus_have_the_cpus_too_if_nobody_says_how_many_there_are(
    photos: Path,
    ray_clean: None,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    threads: int,
    expected: tuple[int, float, int, float],
) -> None:
    """The machine has 64 CPUs. Without a GPU, "auto" is the cpu engine, which prepares all samples."""
    monkeypatch.setattr(resources, "cpus", lambda: 64)
    monkeypatch.setattr(resources, "gpus", lambda: gpus)
    monkeypatch.setattr(resources, "markable_gpus", lambda: gpus)
    monkeypatch.setattr(resources, "cpus_per_gpu", lambda: 32.0)
    monkeypatch.setattr(serving, "_start", lambda fill_in, *_given, **_options: fill_in())
    data, many = mbaas.read_images(photos), mbaas.Threads(prep=threads)
    found: Any = mbaas.serve("filled in", data, PIPELINE, batch_size=8, dali_share=SHARE, threads=many)
    assert (found.prep_workers, found.cpus_per_worker, found.threads.prep, found.dali_share) == expected


def test_what_cannot_be_shared_out_is_refused_before_ray_starts(photos: Path) -> None:
    data = mbaas.read_images(photos)
    with pytest.raises(mbaas.ConfigError, match=r"dali_share must be above 0, got 0"):
        mbaas.serve("refused", data, PIPELINE, batch_size=8, dali_share=0)
    with pytest.raises(mbaas.ConfigError, match=r"dali_share must be 1 with engine='cpu'"):
        mbaas.serve("refused", data, PIPELINE, batch_size=8, dali_share=0.5, engine="cpu")


def test_bytes_are_the_same_whatever_dies_and_with_nothing_kept_decoded(
    photos: Path, ray_clean: None, feed_name: str
) -> None:
    """With the decoded tier, a worker and the cache die before each epoch."""
    data, digests = mbaas.read_images(photos), {}
    for decoded in (False, True):
        with mbaas.serve(f"{feed_name} {decoded}", data, PIPELINE, cache_decoded=decoded, **OPTIONS) as feed:
            with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
                digests[decoded] = []
                for _ in range(3):
                    if decoded:
                        for actor in actor_names.children(feed.name, "cache").values():
                            ray.kill(actor, no_restart=False)
                        ray.kill(next(iter(actor_names.children(feed.name, "prep").values())))
                    digests[decoded].append(record_epoch(loader).row_digest)
    assert digests[True] == digests[False]
    assert len({*digests[False]}) == 3
