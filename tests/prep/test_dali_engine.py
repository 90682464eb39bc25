"""The DALI engine agrees with the cpu engine, on the CPU everywhere and on a GPU if there is one."""

from __future__ import annotations

import itertools
from importlib.metadata import requires, version
from pathlib import Path

import numpy as np
import pytest
import torch

from mbaas import transforms as T
from mbaas.prep.engines import BadRow, Batch, make_engine
from mbaas.prep.engines.dali import BATCH_PIXELS, DaliEngine
from mbaas.prep.engines.dali_runs import GraphRuns

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
DEVICES = [pytest.param(None, id="cpu"), pytest.param(0, id="gpu", marks=[pytest.mark.gpu, NO_GPU])]
every_device = pytest.mark.parametrize("device_id", DEVICES)

CROP = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(224), T.RandomHorizontalFlip()])
PIPELINES = {
    "crop": CROP,
    "decode": T.Pipeline([T.DecodeImage()]),
    "center": T.Pipeline([T.DecodeImage(), T.Resize(256), T.CenterCrop(224)]),
    "pad": T.Pipeline([T.DecodeImage(), T.CenterCrop((450, 301))]),
    "squeeze": T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip(), T.Resize((333, 111))]),
    "jitter": T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(96), T.ColorJitter(0.8, 0.8, 0.8)]),
    "cifar": T.Pipeline([T.DecodeImage(), T.RandomCrop((300, 350), padding=(20, 9), fill=(250, 3, 77)), T.Pad(4)]),
    "upside down": T.Pipeline(
        [T.DecodeImage(), T.RandomVerticalFlip(), T.Pad((1, 2, 3, 4), fill=99), T.CenterCrop((390, 500))]
    ),
    "large scale jitter": T.Pipeline([T.DecodeImage(), T.ScaleJitter((200, 200), (0.5, 1.5)), T.RandomCrop(180)]),
    "late crop": T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip(), T.RandomResizedCrop((100, 200))]),
}


def test_dali_has_to_be_2_or_newer() -> None:
    """DALI 1.x rotates photographs differently by their EXIF orientation."""
    (wanted,) = (each for each in requires("mbaas") or () if each.startswith("nvidia-dali-cuda120"))
    assert wanted == "nvidia-dali-cuda120>=2"
    assert int(version("nvidia-dali-cuda120").partition(".")[0]) >= 2


def prepare(kind, pipeline, raw, ids=None, *, device_id=None, epoch=0, seed=0, threads=1):
    engine = make_engine(kind, pipeline, seed=seed, threads=threads, device_id=device_id)
    ids = np.arange(len(raw)) if ids is None else np.asarray(ids)
    shape = pipeline.output_shape or engine.field(raw[0], "x", {}).shape
    out = np.full((len(raw), *shape), 77, np.uint8)
    bad = engine.prepare(Batch(raw, ids, epoch, {}), out).bad
    engine.close()
    return out, bad


@every_device
@pytest.mark.parametrize("name", PIPELINES)
def test_both_engines_agree_on_photographs(jpegs, name, device_id):
    """40 samples. Error measured on the CPU: mean 0.0-0.2 levels, 99th percentile 1 (2 with strong jitter)."""
    pipeline, raw = PIPELINES[name], jpegs * 8
    cpu, _ = prepare("cpu", pipeline, raw)
    dali, bad = prepare("dali", pipeline, raw, device_id=device_id)
    assert bad == []
    error = np.abs(cpu.astype(int) - dali)
    mean, high = (0.5, 2) if device_id is None else (2.0, 12)
    assert error.mean(axis=(1, 2, 3)).max() < mean
    assert np.percentile(error, 99) <= high


LACKING = {
    "hue": [T.ColorJitter(0.4, hue=0.2)],
    "levels": [T.RandomGrayscale(0.5), T.RandomInvert(), T.RandomSolarize(99), T.RandomPosterize(3)],
    "whole images": [T.RandomEqualize(), T.RandomAutocontrast(), T.RandomAdjustSharpness(3, p=0.9), T.GaussianBlur(5)],
    "erasing": [T.RandomErasing(p=0.9, value=(1, 2, 3))],
    "rotation": [T.RandomRotation(45)],
    "larger": [T.RandomRotation(45, expand=True), T.CenterCrop((200, 180))],
    "affine": [T.RandomAffine(20, translate=(0.1, 0.1), scale=(0.5, 2.0), shear=9, interpolation="bilinear")],
    "perspective": [T.RandomPerspective(p=0.9)],
    "policies": [T.RandAugment(), T.TrivialAugmentWide(), T.AugMix(), T.AutoAugment()],
    "a window of equal size": [T.RandomInvert(), T.RandomCrop((200, 180), padding=30), T.RandomVerticalFlip()],
}


@every_device
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", LACKING)
def test_what_dali_lacks_has_the_values_of_the_cpu_engine(photos, encode, name, threads, device_id):
    """PNG images, cropped and flipped, are equal in both engines, so all that differs comes from later transforms."""
    raw = [encode(photo[:220, :230], "PNG") for photo in photos] * 5
    begin = [T.DecodeImage(), T.RandomCrop((200, 180), padding=8), T.RandomHorizontalFlip()]
    pipeline = T.Pipeline([*begin, *LACKING[name]])
    cpu, _ = prepare("cpu", pipeline, raw)
    dali, bad = prepare("dali", pipeline, raw, threads=threads, device_id=device_id)
    assert bad == []
    assert dali.tobytes() == cpu.tobytes()
    before, _ = prepare("dali", T.Pipeline(begin), raw, device_id=device_id)
    assert (dali != before).any(axis=(1, 2, 3)).mean() > 0.3


def test_the_images_that_cpus_complete_are_in_memory_a_batch_at_a_time(jpegs, monkeypatch):
    """Whole photographs of a block could take gigabytes."""
    pipeline, raw = T.Pipeline([T.DecodeImage(), T.RandomInvert(), T.RandomResizedCrop(64)]), jpegs * 8
    engine, together = DaliEngine(pipeline, seed=0, batch_pixels=1), []
    complete = engine._complete

    def counted(part, images):
        together.append(len(images))
        complete(part, images)

    monkeypatch.setattr(engine, "_complete", counted)
    out = np.empty((len(raw), 64, 64, 3), np.uint8)
    assert engine.prepare(Batch(raw, np.arange(len(raw)), 0, {}), out).bad == []
    engine.close()
    assert max(together) == 1
    assert sum(together) == len(raw)


@every_device
def test_both_engines_agree_on_odd_files(odd_files, device_id):
    raw = [raw for raw, _ in odd_files.values()]
    cpu, _ = prepare("cpu", CROP, raw)
    dali, bad = prepare("dali", CROP, raw, device_id=device_id)
    assert bad == []
    errors = np.abs(cpu.astype(int) - dali).mean(axis=(1, 2, 3))
    assert dict(zip(odd_files, errors < 2, strict=True)) == dict.fromkeys(odd_files, True)
    assert errors[list(odd_files).index("jpeg cmyk")] == 0


@every_device
def test_a_sample_does_not_depend_on_its_minibatch_or_threads(jpegs, odd_files, device_id):
    raw = [*jpegs, *(raw for raw, _ in odd_files.values())]
    pipeline = T.Pipeline([*CROP.transforms, T.ColorJitter(0.4, 0.4, 0.4)])
    alone = np.concatenate(
        [prepare("dali", pipeline, [raw[k]], [k], epoch=2, device_id=device_id)[0] for k in range(len(raw))]
    )
    order = np.random.default_rng(0).permutation(len(raw))
    shuffled = [raw[k] for k in order]
    for threads in (1, 3):
        mixed, _ = prepare("dali", pipeline, shuffled, order, epoch=2, threads=threads, device_id=device_id)
        np.testing.assert_array_equal(mixed, alone[order])


@every_device
def test_blocks_of_all_sizes_go_through_one_engine(jpegs, device_id):
    engine = make_engine("dali", CROP, seed=0, device_id=device_id)
    expected, _ = prepare("dali", CROP, jpegs, device_id=device_id)
    for n in (2, 5, 1, 0, 4):
        out = np.empty((n, 224, 224, 3), np.uint8)
        assert engine.prepare(Batch(jpegs[:n], np.arange(n), 0, {}), out).bad == []
        np.testing.assert_array_equal(out, expected[:n])
    engine.close()


@every_device
def test_bad_rows_are_reported_zeroed_and_leave_the_others_alone(jpegs, bad_files, device_id):
    """Every kind of damage but one: only the cpu engine detects a JPEG that is cut and then given an end marker."""
    names = sorted(set(bad_files) - {"half a jpeg with an end marker"})
    raw = [item for name in names for item in (jpegs[0], bad_files[name][0])]
    out, bad = prepare("dali", CROP, raw, device_id=device_id)
    assert [row.row for row in bad] == list(range(1, len(raw), 2))
    for row, name in zip(bad, names, strict=True):
        assert bad_files[name][1] in row.reason
    assert not out[1::2].any()
    good, _ = prepare("dali", CROP, raw[::2], np.arange(0, len(raw), 2), device_id=device_id)
    np.testing.assert_array_equal(out[::2], good)


@every_device
def test_files_that_fail_inside_dali_are_found_and_the_others_go_on(jpegs, broken_png, device_id):
    """The cpu engine retries files that DALI refuses; its verdict and its reason count."""
    tables = jpegs[1].index(b"\xff\xdb")
    stray = jpegs[1][:tables] + bytes(2) + jpegs[1][tables:]
    raw = [jpegs[0], broken_png, jpegs[1], jpegs[2], stray, jpegs[3], broken_png]
    out, bad = prepare("dali", CROP, raw, device_id=device_id)
    reason = "corrupt PNG: its pixels cannot be decompressed"
    assert bad == [BadRow(1, reason), BadRow(6, reason)]
    good = [0, 2, 3, 5]
    expected, _ = prepare("dali", CROP, [raw[k] for k in good], good, device_id=device_id)
    np.testing.assert_array_equal(out[good], expected)
    np.testing.assert_array_equal(out[4:5], prepare("cpu", CROP, [stray], [4])[0])


def test_a_failure_that_is_no_samples_fault_is_raised(jpegs, monkeypatch):
    engine = make_engine("dali", CROP, seed=0)

    def fail(*_args):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(GraphRuns, "_feed", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.prepare(Batch(jpegs, np.arange(5), 0, {}), np.empty((5, 224, 224, 3), np.uint8))


@pytest.fixture
def batches(monkeypatch):
    """Pixels per image of each batch fed to DALI."""
    seen, run = [], GraphRuns._feed

    def counted(runs, feeds, indices):
        seen.append([400 * 500] * len(indices))  # all photographs have the same size
        return run(runs, feeds, indices)

    monkeypatch.setattr(GraphRuns, "_feed", counted)
    return seen


@every_device
@pytest.mark.parametrize("limit", [1, 500_000, 10**9])
def test_batches_are_bounded_in_pixels_and_change_nothing(jpegs, batches, device_id, limit):
    raw = jpegs * 2
    expected, _ = prepare("dali", CROP, raw, device_id=device_id)
    batches.clear()
    engine = DaliEngine(CROP, seed=0, device_id=device_id, batch_pixels=limit)
    out = np.empty_like(expected)
    assert engine.prepare(Batch(raw, np.arange(len(raw)), 0, {}), out).bad == []
    engine.close()
    np.testing.assert_array_equal(out, expected)
    assert all(len(batch) == 1 or sum(batch) <= limit for batch in batches)
    full = [sum(before) + after[0] > limit for before, after in itertools.pairwise(batches)]
    assert all(full), "no batch is smaller than it has to be"
    assert sum(map(len, batches)) == len(raw)


OUT_OF_MEMORY = [
    RuntimeError("Critical error in pipeline: [...] Can't allocate 33554432 bytes on device 0."),
    RuntimeError("CUDA runtime API error cudaErrorMemoryAllocation (2): out of memory"),
    MemoryError("std::bad_alloc"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["DALI", "CUDA", "C++"])
@pytest.mark.parametrize("room", [2, 1, 0], ids=["two images", "one image", "none"])
def test_out_of_memory_halves_batches_until_they_fit(jpegs, monkeypatch, caplog, room, error):
    """An image that does not fit even alone is prepared by the cpu engine. No worker is lost."""
    raw = jpegs * 2
    expected, _ = prepare("dali" if room else "cpu", CROP, raw)
    run, sizes = GraphRuns._feed, []

    def cramped(runs, feeds, indices):
        if len(indices) > room:
            raise error
        sizes.append(len(indices))
        return run(runs, feeds, indices)

    monkeypatch.setattr(GraphRuns, "_feed", cramped)
    engine = DaliEngine(CROP, seed=0)
    out = np.empty_like(expected)
    assert engine.prepare(Batch(raw, np.arange(len(raw)), 0, {}), out).bad == []
    np.testing.assert_array_equal(out, expected)
    assert f"the CPU is out of memory: batches of {BATCH_PIXELS // 2} pixels from now on" in caplog.text
    sizes.clear()
    assert engine.prepare(Batch(raw, np.arange(len(raw)), 0, {}), out).bad == []
    assert all(size <= room for size in sizes)
    engine.close()


def test_samples_of_another_size_than_the_feeds_are_bad_rows(jpegs, odd_files):
    out, bad = prepare("dali", PIPELINES["decode"], [jpegs[0], odd_files["png"][0], jpegs[0]])
    reason = "it is prepared to uint8 [120, 90, 3], but the samples of this feed are uint8 [400, 500, 3]"
    assert [row.row for row in bad] == [1]
    assert bad[0].reason.startswith(reason)
    np.testing.assert_array_equal(out[0], out[2])


def test_a_closed_engine_leaves_no_thread(jpegs):
    def threads():
        return len(list(Path("/proc/self/task").iterdir()))

    prepare("dali", CROP, jpegs, threads=3)
    before = threads()
    prepare("dali", CROP, jpegs, threads=3)
    assert threads() <= before


def test_a_sliver_whose_result_would_be_huge_is_a_bad_row(encode):
    """1x9000 pixels with the shorter side resized to 400: 400x3,600,000 pixels, 4.3 GB."""
    sliver = encode(np.zeros((1, 9000, 3), np.uint8), "PNG")
    pipeline = T.Pipeline([T.DecodeImage(), T.Resize(400), T.CenterCrop(300)])
    _, bad = prepare("dali", pipeline, [sliver])
    reason = "it would be resized to 3600000x400, over the limit of 100,000,000 pixels (max_pixels)"
    assert bad == [BadRow(0, reason)]
