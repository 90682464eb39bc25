"""Audio and arrays reach trials as the libraries read them, in any format and batch size."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import mbaas
from mbaas import serving
from mbaas import transforms as T
from mbaas.ray_cluster import resources
from mbaas.samples.order import uniforms
from mbaas.transforms.arrays import Form

CLIPS, RATE, CLASSES = 67, 8000, ("high", "low", "noise")
MELS = T.MelSpectrogram(n_fft=128, hop_length=64, n_mels=16)


def clip(number: int) -> Any:
    """Float samples of a clip, [time]. The first clip has 0.1 s, and each is longer than the one before."""
    return (np.random.default_rng(number).standard_normal(800 + 13 * number) / 8).astype(np.float32)


def decoded(number: int) -> Any:
    """The clip as soundfile reads it back."""
    stream = io.BytesIO()
    soundfile.write(stream, clip(number), RATE, format="FLAC" if number % 2 else "WAV")
    stream.seek(0)
    return soundfile.read(stream, dtype="float32")[0]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> mbaas.Dataset:
    """Class folders with FLAC and WAV files. A clip's number is its id."""
    folder = tmp_path_factory.mktemp("recordings")
    for number in range(CLIPS):
        kind = CLASSES[number * 3 // CLIPS]
        (folder / kind).mkdir(exist_ok=True)
        soundfile.write(folder / kind / f"{number:03d}.{'flac' if number % 2 else 'wav'}", clip(number), RATE)
    return mbaas.read_audio(folder)


@pytest.fixture(scope="module")
def whole(ray_session: None, recordings: mbaas.Dataset) -> Iterator[mbaas.Feed]:
    """Clips in full length."""
    pipeline = T.Pipeline([T.DecodeAudio(RATE, max_s=0.3)])
    with mbaas.serve("whole recordings", recordings, pipeline, batch_size=8, prep_workers=1) as feed:
        yield feed


def seen(loader: mbaas.Loader, values_of: Any) -> dict[int, Any]:
    """Read an exact epoch: id -> value."""
    found = {}
    for batch in loader:
        ids = batch["sample_id"].tolist()
        found.update(zip(ids, values_of(batch), strict=True))
        assert batch["label"].tolist() == [number * 3 // CLIPS for number in ids]
    assert sorted(found) == list(range(CLIPS))
    assert loader.ledger is not None
    assert loader.ledger.exact
    return found


def listed(batch: Any) -> list[Any]:
    return [np.asarray(value).copy() for value in batch["audio"]]


def padded(batch: Any) -> list[Any]:
    assert batch["audio"].shape[1] == batch["audio_length"].max()
    return [
        np.asarray(row[:length]).copy()
        for row, length in zip(batch["audio"], batch["audio_length"].tolist(), strict=True)
    ]


def packed(batch: Any) -> list[Any]:
    bounds = batch["audio_bounds"].tolist()
    return [np.asarray(batch["audio"][start:end]).copy() for start, end in pairwise(bounds)]


@pytest.mark.parametrize("format", ["torch", "numpy"])
@pytest.mark.parametrize(("collate", "values_of"), [("list", listed), ("pad", padded), ("packed", packed)])
def test_recordings_of_different_lengths_are_what_soundfile_reads(
    whole: mbaas.Feed, format: str, collate: str, values_of: Any
) -> None:
    """A minibatch of 5 can span two blocks."""
    with mbaas.join(whole.name, format=format, collate=collate, batch_size=5) as loader:
        assert loader.class_names == CLASSES
        found = seen(loader, values_of)
    for number, values in found.items():
        np.testing.assert_array_equal(values, decoded(number))
        assert values.dtype == np.float32


def test_ranks_share_recordings_of_different_lengths(whole: mbaas.Feed) -> None:
    def of_rank(rank: int) -> dict[int, Any]:
        with mbaas.join(whole.name, "ranked", rank=rank, world_size=2, format="numpy", batch_size=8) as loader:
            return {
                number: np.asarray(value).copy()
                for batch in loader
                for number, value in zip(batch["sample_id"].tolist(), batch["audio"], strict=True)
            }

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(of_rank, range(2))
    assert not first.keys() & second.keys()
    found = first | second
    assert sorted(found) == list(range(CLIPS))
    for number, values in found.items():
        np.testing.assert_array_equal(values, decoded(number))


def test_spectrograms_are_the_same_however_they_are_shared(ray_session: None, recordings: mbaas.Dataset) -> None:
    """[frames, mels] is not an image: torch tensors keep these axes, even with three mels."""
    crop, thin = T.RandomCrop(900), T.MelSpectrogram(n_fft=128, n_mels=3)
    pipeline = T.Pipeline([T.DecodeAudio(RATE, field="mels"), crop, thin])
    form = Form("sound", rate=RATE)
    with mbaas.serve("spectrograms", recordings, pipeline, batch_size=8, seed=5, prep_workers=1) as feed:
        with mbaas.join(feed.name) as loader:
            for epoch in range(2):
                found = seen(loader, lambda batch: list(batch["mels"].numpy()))
                u = uniforms(5, epoch, np.arange(CLIPS), substream=1, draws=1)
                for number, made in found.items():
                    wanted = thin.apply(crop.apply(decoded(number), u[number], form), np.empty(0), form)
                    np.testing.assert_array_equal(made, wanted)


def test_dali_serves_what_the_cpu_engine_makes_but_for_rounding(ray_session: None, recordings: mbaas.Dataset) -> None:
    """The spectrograms have different lengths, and masks."""
    decibels, masks, form = T.AmplitudeToDB(), T.SpecAugment(1, 9, 1, 3), Form("sound", rate=RATE)
    pipeline = T.Pipeline([T.DecodeAudio(RATE, max_s=0.3), MELS, decibels, masks])
    with mbaas.serve("by dali", recordings, pipeline, batch_size=8, seed=5, engine="dali", prep_workers=1) as feed:
        assert feed.status().engine == "dali"
        with mbaas.join(feed.name) as loader:
            found = seen(loader, listed)
    u = uniforms(5, 0, np.arange(CLIPS), substream=3, draws=masks.draws)
    for number, made in found.items():
        loud = decibels.apply(MELS.apply(decoded(number), np.empty(0), form), np.empty(0), form)
        np.testing.assert_allclose(made, masks.apply(loud, u[number], form), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("reserved", "images", "sound"), [(None, 2, 4), (0.25, 1, 1)])
def test_a_gpu_has_several_workers_that_decode_sound(
    ray_session: None,
    recordings: mbaas.Dataset,
    monkeypatch: pytest.MonkeyPatch,
    reserved: float | None,
    images: int,
    sound: int,
) -> None:
    """The machine has 64 CPUs and a GPU."""
    monkeypatch.setattr(resources, "cpus", lambda: 64)
    monkeypatch.setattr(resources, "gpus", lambda: 1)
    monkeypatch.setattr(resources, "markable_gpus", lambda: 1)
    monkeypatch.setattr(resources, "cpus_per_gpu", lambda: 64.0)
    monkeypatch.setattr(serving, "_start", lambda fill_in, *_given, **_options: fill_in())
    of_images = T.Pipeline([T.DecodeImage(), T.Resize((8, 8))])
    of_sound = T.Pipeline([T.DecodeAudio(RATE, max_s=1), MELS])
    for workers, pipeline in ((images, of_images), (sound, of_sound)):
        options: Any = {"batch_size": 8, "gpus_per_worker": reserved, "engine": "dali"}
        settings: Any = mbaas.serve("filled in", recordings, pipeline, **options)
        assert settings.prep_workers == workers


def test_a_recording_that_is_too_long_is_left_out_and_named(
    ray_session: None, recordings: mbaas.Dataset, tmp_path: Path
) -> None:
    soundfile.write(tmp_path / "long.wav", np.zeros(9000), RATE)
    soundfile.write(tmp_path / "short.wav", clip(0), RATE)
    (tmp_path / "text.wav").write_text("no sound at all")
    data = mbaas.read_audio(tmp_path, classes=False)
    pipeline = T.Pipeline([T.DecodeAudio(RATE, max_s=1), MELS, T.AmplitudeToDB()])
    with mbaas.serve("some too long", data, pipeline, batch_size=3, on_bad_sample="skip", prep_workers=1) as feed:
        with mbaas.join(feed.name) as loader:
            (batch,) = loader
        assert batch["sample_id"].tolist() == [1]
        assert "label" not in batch
        assert [tuple(values.shape) for values in batch["audio"]] == [(13, 16)]
        reasons = {Path(bad.uri).name: bad.reason for bad in feed.status().skipped}
    assert reasons["long.wav"] == "it is 1.125 s long, over the limit of 1 s (max_s)"
    assert reasons["text.wav"].startswith("libsndfile cannot decode it: ")
    assert len(reasons) == 2


def test_arrays_keep_their_axes(ray_session: None, tmp_path: Path) -> None:
    """The volumes are [depth, height, 3], uint8. Images with the same shape would be transposed for torch."""
    rng = np.random.default_rng(1)
    volumes = [rng.integers(0, 255, (4, 5, 3), np.uint8) for _ in range(10)]
    for number, volume in enumerate(volumes):
        np.savez(tmp_path / f"{number}.npz", volume=volume, mass=np.float32(number))
    data = mbaas.read_arrays(tmp_path, classes=False)
    pipeline = T.Pipeline([T.DecodeArray("npz", "volume", field="image")])
    with mbaas.serve("volumes", data, pipeline, batch_size=4, prep_workers=1) as feed:
        for kind in ("torch", "numpy"):
            with mbaas.join(feed.name, format=kind) as loader:
                for batch in loader:
                    assert batch["image"].dtype in (torch.uint8, np.uint8)
                    for number, values in zip(batch["sample_id"].tolist(), batch["image"], strict=True):
                        np.testing.assert_array_equal(np.asarray(values), volumes[number])
