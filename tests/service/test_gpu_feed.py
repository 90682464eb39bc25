"""DALI workers prepare on the GPU, and trials take their minibatches there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
import torch

import mbaas
from mbaas import transforms as T
from mbaas.tools.chaos.participants import kill
from support.processes import prep_worker_pids
from support.trials import EpochRecord, Recorder, record_epoch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
    pytest.mark.usefixtures("ray_clean"),
]

SAMPLES = 301
PREP: list[Any] = [T.DecodeImage(), T.RandomResizedCrop(96), T.RandomHorizontalFlip()]
PIPELINE = T.Pipeline(PREP)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crops of photographs in forty sizes."""
    from skimage import data

    folder, chance = tmp_path_factory.mktemp("photos"), np.random.default_rng(1)
    photographs: Any = data
    sources = [cv2.resize(getattr(photographs, name)(), (450, 360)) for name in ("astronaut", "coffee", "chelsea")]
    for number in range(SAMPLES):
        top, left = chance.integers(0, 100, 2)
        cut = np.ascontiguousarray(sources[number % 3][top : top + 200 + number % 40, left : left + 320])
        to = folder / f"class {number % 2}" / f"{number}.jpg"
        to.parent.mkdir(exist_ok=True)
        to.write_bytes(simplejpeg.encode_jpeg(cut, quality=90, colorsubsampling="420"))
    return folder


def serve(name: str, photos: Path, **options: Any) -> mbaas.Feed:
    return mbaas.serve(name, mbaas.read_images(photos), **{"pipeline": PIPELINE, "batch_size": 16, **options})


def on_device(loader: mbaas.Loader) -> Iterator[dict[str, Any]]:
    """Yield an epoch's minibatches as NumPy arrays in the axes of prep, each after the next has begun."""
    before: dict[str, Any] | None = None
    for batch in loader:
        assert all(tensor.device.type == "cuda" for tensor in batch.values())
        if before is not None:
            yield as_numpy(before)
        before = batch
    assert before is not None
    yield as_numpy(before)


def as_numpy(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    image = batch["image"]
    assert image.is_contiguous(memory_format=torch.channels_last)
    return {**{name: tensor.cpu().numpy() for name, tensor in batch.items()}, "image": image.permute(0, 2, 3, 1).cpu()}


def record_on_device(loader: mbaas.Loader) -> EpochRecord:
    recorder = Recorder()
    for batch in on_device(loader):
        recorder.add({**batch, "image": np.ascontiguousarray(batch["image"])})
    return recorder.record(loader.ledger)


def test_trials_on_the_device_and_on_the_host_get_the_same_bytes(photos: Path, feed_name: str) -> None:
    """By default DALI prepares on the GPU. Each trial receives every sample once per epoch."""
    with serve(feed_name, photos) as feed:
        assert feed.status().engine == "dali"
        mbaas.announce(feed.name, ["host", "device"])
        with mbaas.join(feed.name, "host", format="numpy") as host:
            with mbaas.join(feed.name, "device", device="cuda") as device:
                for _ in range(3):
                    found = record_on_device(device)
                    assert found.flaws(range(SAMPLES)) == []
                    assert found.row_digest == record_epoch(host).row_digest


def test_they_do_so_also_when_every_worker_dies_in_each_epoch(photos: Path, feed_name: str) -> None:
    options: dict[str, Any] = {"prep_workers": 2, "staging_bytes": 4 << 20}
    with serve(feed_name, photos, **options) as feed, mbaas.join(feed.name, format="numpy") as host:
        known = [record_epoch(host).row_digest for _ in range(3)]
    with serve(feed_name, photos, **options) as feed, mbaas.join(feed.name, device="cuda") as device:
        for epoch in range(3):
            recorder = Recorder()
            for number, batch in enumerate(on_device(device)):
                recorder.add({**batch, "image": np.ascontiguousarray(batch["image"])})
                if number == 3:
                    for pid in prep_worker_pids(feed.name):
                        kill(pid)
            found = recorder.record(device.ledger)
            assert found.flaws(range(SAMPLES)) == []
            assert found.row_digest == known[epoch]


@pytest.mark.parametrize("engine", ["cpu", "dali"])
def test_images_are_normalized_on_the_device(engine: str, photos: Path, feed_name: str) -> None:
    normalize = T.Normalize(mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    pipeline = T.Pipeline([*PREP, normalize])
    with serve(feed_name, photos, engine=engine, pipeline=pipeline) as feed:
        mbaas.announce(feed.name, ["host", "device"])
        with mbaas.join(feed.name, "host", format="numpy") as host:
            with mbaas.join(feed.name, "device", device="cuda") as device:
                for on_host, on_gpu in zip(host, device, strict=True):
                    assert on_gpu["image"].dtype == torch.float32
                    assert on_gpu["sample_id"].tolist() == on_host["sample_id"].tolist()
                    found = on_gpu["image"].permute(0, 2, 3, 1).cpu()
                    np.testing.assert_allclose(found, on_host["image"], rtol=1e-5, atol=1e-5)


def test_images_of_any_size_reach_the_device(photos: Path, feed_name: str) -> None:
    pipeline = T.Pipeline([T.DecodeImage(max_pixels=100_000), T.RandomHorizontalFlip()])
    with serve(feed_name, photos, pipeline=pipeline) as feed:
        mbaas.announce(feed.name, ["host", "device"])
        with mbaas.join(feed.name, "host", format="numpy", collate="list") as host:
            with mbaas.join(feed.name, "device", device="cuda", collate="list") as device:
                seen = 0
                for on_host, on_gpu in zip(host, device, strict=True):
                    for plain, tensor in zip(on_host["image"], on_gpu["image"], strict=True):
                        assert tensor.device.type == "cuda"
                        np.testing.assert_array_equal(tensor.permute(1, 2, 0).cpu(), plain)
                        seen += 1
    assert seen == SAMPLES
