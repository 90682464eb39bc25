"""The DALI engines give the same result for encoded and decoded samples, on the CPU and on a GPU."""

from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
import simplejpeg
import soundfile
import torch

from mbaas import transforms as T
from mbaas.prep.decoded import DecodedRows, read_decoded
from mbaas.prep.engines import Batch, make_engine
from mbaas.prep.engines.dali import DaliEngine
from mbaas.prep.engines.dali_runs import GraphRuns
from support.decoded import check_any_mix, containers

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
DEVICES = [pytest.param(None, id="cpu"), pytest.param(0, id="gpu", marks=[pytest.mark.gpu, NO_GPU])]
every_device = pytest.mark.parametrize("device_id", DEVICES)

CROP, FLIP = T.RandomResizedCrop((48, 40)), T.RandomHorizontalFlip()
IMAGES = {
    "crop": (1, [T.DecodeImage(), CROP, FLIP]),
    "resize, jitter": (2, [T.DecodeImage(), T.Resize(66), CROP, T.ColorJitter(0.4, 0.4, 0.4)]),
    "all of it": (3, [T.DecodeImage(), T.Resize(66), T.CenterCrop(50)]),
    "any size": (2, [T.DecodeImage(max_pixels=9_000), T.Resize(66), FLIP]),
    "some on CPUs": (1, [T.DecodeImage(), CROP, FLIP, T.ColorJitter(0.4, hue=0.1), T.RandomErasing(p=0.5)]),
    "a crop on CPUs": (2, [T.DecodeImage(), T.Resize((48, 40)), T.RandAugment(), T.RandomCrop((48, 40), padding=4)]),
    "all random ones on CPUs": (2, [T.DecodeImage(max_pixels=9_000), T.Resize(66), T.GaussianBlur(3), FLIP]),
    "too large by chance": (1, [T.DecodeImage(max_pixels=40_000), T.RandomZoomOut(p=0.9)]),
}


@pytest.fixture(scope="module")
def files(photos, odd_files):
    """Photographs with every chroma subsampling, one damaged photograph, and the odd files."""
    small = [np.ascontiguousarray(photo[::3, ::3]) for photo in photos]
    ways = ("420", "422", "444")
    jpegs = [simplejpeg.encode_jpeg(photo, quality=85, colorsubsampling=way) for photo in small for way in ways]
    return [*jpegs, jpegs[0][:2000] + bytes(20) + jpegs[0][2020:], *(raw for raw, _ in odd_files.values())]


def made_by(kept):
    return Counter(read_decoded(memoryview(container)).made_by for container in kept.values())


@every_device
@pytest.mark.parametrize("name", IMAGES)
def test_images(files, name, device_id):
    """CMYK and WebP are prepared by the cpu engine, from its own decoded pixels, in every epoch."""
    prefix, steps = IMAGES[name]
    pipeline = T.Pipeline(steps)
    assert pipeline.prefix == prefix
    kept = check_any_mix(
        lambda threads: make_engine("dali", pipeline, seed=4, threads=threads, device_id=device_id),
        files,
        epochs=(0, 1),
    )
    found = made_by(kept)
    assert found["dali"] >= (11 if "chance" in name else 31)
    assert found["cpu"] >= (4 if "chance" in name else 14)
    assert {read_decoded(memoryview(container)).applied for container in kept.values()} == {prefix}


@every_device
def test_what_dali_refuses_is_not_kept(files, broken_png, bad_files, device_id):
    tables = files[1].index(b"\xff\xdb")
    stray, broken = files[1][:tables] + bytes(2) + files[1][tables:], broken_png
    raw = [files[0], stray, files[2], broken, *(bad_files[name][0] for name in ("gif", "half a jpeg", "png bomb"))]
    pipeline = T.Pipeline(IMAGES["crop"][1])
    kept = check_any_mix(
        lambda threads: make_engine("dali", pipeline, seed=4, threads=threads, device_id=device_id), raw, epochs=(0, 1)
    )
    found = {row: read_decoded(memoryview(container)).made_by for row, container in kept.items()}
    assert found == {0: "dali", 2: "dali"}, "the cpu engine decodes odd files each time and keeps none"


@pytest.mark.parametrize("limit", [1, 10**9])
def test_batches_are_bounded_and_halved_for_decoded_samples_too(files, monkeypatch, limit):
    """At most two samples fit into memory here."""
    run, sizes = GraphRuns._feed, []

    def cramped(runs, feeds, indices):
        sizes.append(len(indices))
        if len(indices) > 2:
            raise MemoryError("std::bad_alloc")
        return run(runs, feeds, indices)

    monkeypatch.setattr(GraphRuns, "_feed", cramped)
    pipeline = T.Pipeline(IMAGES["crop"][1])
    kept = check_any_mix(
        lambda threads: DaliEngine(pipeline, seed=4, threads=threads, batch_pixels=limit), files[:9], epochs=(0, 1)
    )
    assert made_by(kept) == {"dali": 9}
    assert max(sizes) == (1 if limit == 1 else 9)


def test_a_sample_is_not_kept_that_decodes_to_something_else_when_only_its_crop_is_decoded(jpegs, monkeypatch):
    """This can occur on a GPU: at the edge of a crop, subsampled chroma is interpolated from fewer values."""
    from mbaas.prep.engines import dali

    images = dali.image_graph

    def off_by_one(stages, *, gpu, decoded=False):
        made = images(stages, gpu=gpu, decoded=decoded)
        return made if stages else made ^ np.uint8(1)

    monkeypatch.setattr(dali, "image_graph", off_by_one)
    engine, out = DaliEngine(T.Pipeline(IMAGES["crop"][1]), seed=4), np.empty((5, 48, 40, 3), np.uint8)
    keep = DecodedRows(range(5), 1 << 24)
    assert engine.prepare(Batch(jpegs, np.arange(5), 0, {}), out, keep).bad == []
    engine.close()
    assert not containers(keep)


@pytest.mark.parametrize("graph", ["_first", "_rest"])
def test_a_sample_is_not_kept_that_cannot_be_made_again(jpegs, monkeypatch, graph):
    engine, keep = DaliEngine(T.Pipeline(IMAGES["crop"][1]), seed=4), DecodedRows(range(5), 1 << 24)
    wanted, out = (np.empty((5, 48, 40, 3), np.uint8) for _ in range(2))
    assert engine.prepare(Batch(jpegs, np.arange(5), 0, {}), wanted).bad == []
    runs = getattr(engine, graph)

    def refused(indices, *_):
        return indices.tolist()

    monkeypatch.setattr(runs, "run", refused)
    assert engine.prepare(Batch(jpegs, np.arange(5), 0, {}), out, keep).bad == []
    engine.close()
    assert out.tobytes() == wanted.tobytes()
    assert not containers(keep)


def test_what_the_cpu_engine_decoded_is_no_work_for_dali(odd_files, monkeypatch):
    engine, keep = DaliEngine(T.Pipeline(IMAGES["crop"][1]), seed=4), DecodedRows([0, 1], 1 << 24)
    files, wanted = [odd_files["webp"][0], odd_files["jpeg cmyk"][0]], np.empty((2, 48, 40, 3), np.uint8)
    assert engine.prepare(Batch(files, np.arange(2), 0, {}), wanted, keep).bad == []
    monkeypatch.setattr(GraphRuns, "_feed", None)
    out = np.empty_like(wanted)
    assert engine.prepare(Batch([*containers(keep).values()], np.arange(2), 0, {}), out).bad == []
    engine.close()
    assert out.tobytes() == wanted.tobytes()


def test_what_another_pipeline_kept_is_refused(jpegs):
    def decoded(steps):
        engine, keep = DaliEngine(T.Pipeline(steps), seed=4), DecodedRows([0], 1 << 24)
        out = engine.field(jpegs[0], "x", {}).empty(1)
        assert engine.prepare(Batch(jpegs[:1], np.arange(1), 0, {}), out, keep).bad == []
        engine.close()
        (container,) = containers(keep).values()
        return container

    plain, resized = decoded([T.DecodeImage()]), decoded([T.DecodeImage(), T.Resize((50, 60))])
    for steps, container, says in [
        ([T.DecodeImage(), CROP], resized, "it is a decoded sample after 2 transforms, of which this pipeline begins"),
        ([T.DecodeImage(), T.Resize((9, 9)), CROP], plain, "after 1 transforms, and DALI goes on after 2"),
        ([T.DecodeImage(), T.Resize((9, 9)), CROP], resized, "uint8 [50, 60, 3], but must be uint8 [9, 9, 3] after 2"),
    ]:
        engine, out = DaliEngine(T.Pipeline(steps), seed=4), np.empty((2, 48, 40, 3), np.uint8)
        (bad,) = engine.prepare(Batch([container, jpegs[0]], np.arange(2), 0, {}), out).bad
        engine.close()
        assert bad.row == 0
        assert says in bad.reason
        assert not out[0].any()
        assert out[1].any()


def sound(number, rate=16_000, channels=1):
    noise = np.random.default_rng(number).standard_normal((6000 + 911 * number, channels)) * 0.1
    stream = io.BytesIO()
    soundfile.write(stream, noise, rate, format="WAV" if number % 2 else "FLAC", subtype="PCM_16")
    return stream.getvalue()


def infinite():
    """Sound prepared by the cpu engine, because the square of 1e30 overflows float32."""
    stream = io.BytesIO()
    soundfile.write(stream, np.full(9000, 1e30), 16_000, format="WAV", subtype="FLOAT")
    return stream.getvalue()


def brief():
    stream = io.BytesIO()
    soundfile.write(stream, np.full(99, 0.1), 16_000, format="WAV", subtype="PCM_16")
    return stream.getvalue()


MELS, MASKS = T.MelSpectrogram(n_fft=256, n_mels=20), T.SpecAugment(1, 9, 1, 5)


@every_device
@pytest.mark.parametrize(
    ("applied", "steps"),
    [
        (1, [T.DecodeAudio(), T.RandomCrop(5000), MELS, T.AmplitudeToDB(top_db=60), MASKS]),
        (1, [T.DecodeAudio(max_s=1), MELS, T.AmplitudeToDB(top_db=60), MASKS]),
        (2, [T.DecodeAudio(channels=2), T.CropOrPad(5000), MELS, T.RandomCrop(9)]),
    ],
    ids=str,
)
def test_sound(applied, steps, device_id):
    files = [*map(sound, range(8)), infinite(), b"no sound", sound(0)[:-900], sound(3, rate=22_050), brief()]
    kept = check_any_mix(
        lambda threads: make_engine("dali", T.Pipeline(steps), seed=4, threads=threads, device_id=device_id), files
    )
    # Sound too short for a spectrogram is bad unless it is padded first.
    assert sorted(kept) == [*range(9), 11, *([12] if len(steps) == 5 or applied == 2 else [])]
    assert {read_decoded(memoryview(container)).applied for container in kept.values()} == {applied}
