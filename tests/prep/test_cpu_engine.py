"""The cpu engine gives reproducible results and reports samples that it cannot prepare."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from mbaas import transforms as T
from mbaas.errors import BadSampleError, ConfigError
from mbaas.prep.engines import BadRow, Batch, make_engine
from mbaas.samples.fields import Field
from mbaas.samples.order import generator, uniforms
from mbaas.transforms.base import DrawInputs

CROP = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(224), T.RandomHorizontalFlip()])
ALL = T.Pipeline(
    [
        T.DecodeImage(),
        T.RandomHorizontalFlip(),
        T.Resize(200),
        T.ColorJitter(0.4, 0.4, 0.4, 0.1),
        T.RandomResizedCrop((96, 80)),
        T.CenterCrop((100, 70)),
        T.RandomHorizontalFlip(),
    ]
)


def prepare(pipeline, raw, ids=None, *, epoch=0, seed=0, threads=1, shape=None, dtype=np.uint8):
    engine = make_engine("cpu", pipeline, seed=seed, threads=threads)
    ids = np.arange(len(raw)) if ids is None else np.asarray(ids)
    out = np.full((len(raw), *(shape or pipeline.output_shape)), 77, dtype)
    bad = engine.prepare(Batch(raw, ids, epoch, {}), out).bad
    engine.close()
    return out, bad


def pillow(raw):
    return np.array(Image.open(io.BytesIO(raw)).convert("RGB"))


def antialiased(image, size):
    """torchvision's ``resize(antialias=True)``."""
    tensor = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).unsqueeze(0)
    return interpolate(tensor, size=size, mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()


def test_a_random_crop_and_flip_is_bit_for_bit_torchvisions(jpegs):
    """Expected: decoded by Pillow, cropped to the drawn box, resampled by torchvision's kernel, flipped."""
    n = len(jpegs)
    out, bad = prepare(CROP, jpegs, epoch=3, seed=5)
    ids, sizes = np.arange(n), np.array([[400, 500]] * n)
    crop, flip = CROP.transforms[1], CROP.transforms[2]
    drawn = DrawInputs(uniforms(5, 3, ids, substream=1, draws=crop.draws), sizes)
    flips = uniforms(5, 3, ids, substream=2, draws=1)[:, 0] < flip.p
    assert bad == []
    assert 0 < flips.sum() < n
    for row, (top, left, height, width) in enumerate(crop.step(drawn).boxes):
        expected = antialiased(pillow(jpegs[row])[top : top + height, left : left + width], (224, 224))
        np.testing.assert_array_equal(out[row], expected[:, ::-1] if flips[row] else expected)


def test_resize_and_center_crop_are_torchvisions(jpegs):
    out, _ = prepare(T.Pipeline([T.DecodeImage(), T.Resize(256), T.CenterCrop(224)]), jpegs[:1])
    np.testing.assert_array_equal(out[0], antialiased(pillow(jpegs[0]), (256, 320))[16:240, 48:272])


def test_center_crop_of_a_small_image_pads_with_black(odd_files):
    raw, photo = odd_files["png"]
    out, _ = prepare(T.Pipeline([T.DecodeImage(), T.CenterCrop((125, 100))]), [raw])
    expected = np.pad(photo, ((2, 3), (5, 5), (0, 0)))
    np.testing.assert_array_equal(out[0], expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("brightness", lambda x: 0.5 * x),
        ("contrast", lambda x: 0.5 * x + 0.5 * (x @ [0.299, 0.587, 0.114]).mean()),
        ("saturation", lambda x: 0.5 * x + 0.5 * (x @ [0.299, 0.587, 0.114])[:, :, None]),
    ],
)
def test_each_colour_change_follows_its_formula(odd_files, name, expected):
    raw, photo = odd_files["png"]
    pipeline = T.Pipeline([T.DecodeImage(), T.ColorJitter(**{name: (0.5, 0.5)})])
    out, _ = prepare(pipeline, [raw], shape=photo.shape)
    assert np.abs(out[0] - expected(photo.astype(float))).max() < 0.6


def test_colour_changes_clip(odd_files):
    raw, photo = odd_files["png"]
    out, _ = prepare(T.Pipeline([T.DecodeImage(), T.ColorJitter((3, 3))]), [raw], shape=photo.shape)
    np.testing.assert_array_equal(out[0], np.minimum(photo.astype(int) * 3, 255))


def hued(encode, photo, *turns):
    """``photo`` with its hue turned by each of ``turns``."""
    jitters = [T.ColorJitter(hue=(turn, turn)) for turn in turns]
    out, _ = prepare(T.Pipeline([T.DecodeImage(), *jitters]), [encode(photo, "PNG")], shape=photo.shape)
    return out[0]


def pillow_hued(photo, turn):
    """torchvision's ``adjust_hue`` for a Pillow image."""
    hue, saturation, value = Image.fromarray(photo).convert("HSV").split()
    turned = np.array(hue) + np.array(int(turn * 255)).astype(np.uint8)
    return np.array(Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB"))


@pytest.mark.parametrize("turn", [0.02, 0.1, 0.25, 0.5, -0.1, -0.3, -0.5])
def test_hue_is_turned_as_torchvision_and_pillow_do(photos, encode, turn):
    """Measured: mean at most 1.45 levels, maximum 11. Pillow itself is 0.9-2.5 levels off after two turns of 0.5."""
    for photo in photos:
        error = np.abs(hued(encode, photo, turn).astype(int) - pillow_hued(photo, turn))
        assert error.mean() < 1.6
        assert error.max() <= 12


def test_half_a_turn_of_hue_twice_leaves_a_photograph_as_it_was(photos, encode):
    """Measured: mean at most 0.64 levels, maximum 8."""
    for photo in photos:
        assert np.abs(hued(encode, photo, 0.5).astype(int) - photo).mean() > 5
        error = np.abs(hued(encode, photo, 0.5, 0.5).astype(int) - photo)
        assert error.mean() < 0.8
        assert error.max() <= 9


@pytest.mark.parametrize("width", [1, 7, 64, 101])
def test_hue_leaves_grey_as_it_is_and_turns_red_to_cyan(encode, width):
    grey = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None], (256, width, 3))
    np.testing.assert_array_equal(hued(encode, grey.copy(), 0.3), grey)
    red = np.full((3, width, 3), (200, 0, 0), np.uint8)
    assert np.abs(hued(encode, red, 0.5).astype(int) - [0, 200, 200]).max() <= 2


def test_no_turn_of_hue_leaves_every_bit(photos, encode):
    """0.001 is less than half a step of 1/256, so even the round trip through HSV is skipped."""
    np.testing.assert_array_equal(hued(encode, photos[0], 0.0, 0.001, -0.001), photos[0])


@pytest.mark.parametrize("kind", ["png 1x1", "jpeg 1x1", "jpeg grey", "png 16 bit", "jpeg cmyk", "jpeg exif 6"])
@pytest.mark.parametrize("pipeline", [CROP, ALL], ids=["crop", "all"])
def test_odd_files_go_through_all_transforms(odd_files, kind, pipeline):
    _, bad = prepare(pipeline, [odd_files[kind][0]])
    assert bad == []


@pytest.mark.parametrize("pipeline", [CROP, ALL], ids=["crop", "all"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_sample_does_not_depend_on_its_minibatch_or_threads(jpegs, odd_files, pipeline, threads):
    raw = [*jpegs, *(raw for raw, _ in odd_files.values())]
    alone, _ = prepare(pipeline, raw, epoch=2, seed=9)
    order = np.random.default_rng(0).permutation(len(raw))
    mixed, _ = prepare(pipeline, [raw[k] for k in order], order, epoch=2, seed=9, threads=threads)
    np.testing.assert_array_equal(mixed, alone[order])


def test_epoch_seed_and_sample_change_the_result(jpegs):
    made = [prepare(ALL, jpegs[:1], [i], epoch=e, seed=s)[0].tobytes() for i, e, s in np.ndindex(2, 2, 2)]
    assert len(set(made)) == 8


def test_bad_rows_are_reported_zeroed_and_leave_the_others_alone(jpegs, bad_files):
    names = sorted(bad_files)
    raw = [item for name in names for item in (jpegs[0], bad_files[name][0])]
    for threads in (1, 2):
        out, bad = prepare(CROP, raw, threads=threads)
        assert [row.row for row in bad] == list(range(1, len(raw), 2))
        for row, name in zip(bad, names, strict=True):
            assert bad_files[name][1] in row.reason
        assert not out[1::2].any()
        good, _ = prepare(CROP, raw[::2], np.arange(0, len(raw), 2))
        np.testing.assert_array_equal(out[::2], good)


def test_a_block_of_bad_rows_only_and_an_empty_block(bad_files):
    assert prepare(CROP, [b""])[1] == [BadRow(0, "the file is empty (0 bytes)")]
    assert prepare(CROP, [])[1] == []


def test_read_only_input_of_every_kind_is_taken_and_kept(jpegs):
    arrays = np.frombuffer(jpegs[0], np.uint8)
    expected, _ = prepare(CROP, [jpegs[0]])
    for raw in (arrays, memoryview(jpegs[0]), np.frombuffer(b"xx" + jpegs[0], np.uint8)[2:]):
        np.testing.assert_array_equal(prepare(CROP, [raw])[0], expected)
    assert arrays.tobytes() == jpegs[0]


def test_what_is_made_is_learned_from_the_data_only_where_it_must_be(jpegs, bad_files):
    def spec(transforms, raw):
        return make_engine("cpu", T.Pipeline([T.DecodeImage(), *transforms]), seed=0).field(raw, "a/b.jpg", {})

    assert spec([T.Resize((8, 9))], b"") == Field("image", (8, 9, 3), "uint8")
    assert spec([], jpegs[0]) == Field("image", (400, 500, 3), "uint8")
    assert spec([T.Resize(80)], jpegs[0]) == Field("image", (80, 100, 3), "uint8")
    assert spec([T.Map(lambda x, _: x.mean(axis=2))], jpegs[0]) == Field("image", (400, 500), "float64")
    assert Field("image", (400, 500), "float64").nbytes == 1_600_000
    for name in ("half a jpeg", "half a jpeg with an end marker"):
        with pytest.raises(BadSampleError, match=r"cannot prepare a/b.jpg: (truncated|corrupt) JPEG"):
            spec([], bad_files[name][0])
    with pytest.raises(ConfigError, match=r"Normalize needs uint8 .* samples are float64 \[400, 500\]"):
        spec([T.Map(lambda x, _: x.mean(axis=2)), T.Normalize((0, 0, 0), (1, 1, 1))], jpegs[0])


def test_samples_of_another_size_than_the_feeds_are_bad_rows(jpegs, odd_files):
    out, bad = prepare(T.Pipeline([T.DecodeImage()]), [jpegs[0], odd_files["png"][0]], shape=(400, 500, 3))
    reason = (
        "it is prepared to uint8 [120, 90, 3], but the samples of this feed are uint8 [400, 500, 3]; a Resize, a "
        "CenterCrop, a RandomCrop or a RandomResizedCrop in the pipeline gives all the same size, and DecodeImage's "
        "max_pixels lets them differ"
    )
    assert bad == [BadRow(1, reason)]
    np.testing.assert_array_equal(out[0], pillow(jpegs[0]))


def test_map_gets_the_image_and_a_generator_of_its_own(jpegs):
    def measure(image, rng):
        total = image.sum(dtype=np.float64)
        image[:] = 0
        return np.array([total, rng.random()])

    pipeline = T.Pipeline([T.DecodeImage(), T.Resize(50), T.Map(measure)])
    ids = [4, 3, 2, 1, 0]
    out, bad = prepare(pipeline, jpegs, ids, epoch=6, seed=8, shape=(2,), dtype=np.float64)
    assert bad == []
    assert out[:, 1].tolist() == [generator(8, 6, sample_id, substream=2).random() for sample_id in ids]
    assert out[:, 0].tolist() == [antialiased(pillow(raw), (50, 62)).sum() for raw in jpegs]


def test_transforms_after_a_map_see_its_result_and_its_size(jpegs):
    def shrink(image, rng):
        return image[: 60 + 0 * rng.integers(2), :40]

    pipeline = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip(1.0), T.Map(shrink), T.CenterCrop((70, 40))])
    out, bad = prepare(pipeline, jpegs[:2])
    assert bad == []
    for row in range(2):
        expected = np.pad(pillow(jpegs[row])[:60, ::-1][:, :40], ((5, 5), (0, 0), (0, 0)))
        np.testing.assert_array_equal(out[row], expected)


KEPT: list[np.ndarray] = []


def keep(image, rng):
    KEPT.append(image)
    return image


def test_the_image_that_a_map_gets_is_its_own(jpegs):
    KEPT.clear()
    out, _ = prepare(T.Pipeline([T.DecodeImage(), T.Map(keep)]), jpegs, shape=(400, 500, 3))
    for row, image in enumerate(KEPT):
        np.testing.assert_array_equal(image, out[row])


CACHED = np.arange(30 * 20 * 3).astype(np.uint8).reshape(30, 20, 3)


def test_what_a_map_returns_stays_its_own(jpegs):
    def cached(image, rng):
        return CACHED

    before = CACHED.copy()
    prepare(
        T.Pipeline([T.DecodeImage(), T.Map(cached), T.RandomHorizontalFlip(1.0)]),
        jpegs[:1],
        shape=(30, 20, 3),
    )
    np.testing.assert_array_equal(CACHED, before)


def test_a_map_that_fails_or_returns_nonsense_is_a_bad_row(jpegs):
    def some(image, rng):
        kind = int(image[0, 0, 0]) % 3
        if kind == 0:
            raise KeyError("no label")
        return "text" if kind == 1 else image[:, :, 0]

    def constant(value):
        return T.Map(lambda image, rng: image * 0 + np.uint8(value))

    for value, reason in [
        (0, r"some raised KeyError: 'no label'"),
        (1, r"must return a NumPy array, got str"),
        (2, r"made uint8 [400, 500], but RandomHorizontalFlip needs uint8 [height, width, 3]"),
    ]:
        pipeline = T.Pipeline([T.DecodeImage(), constant(value), T.Map(some), T.RandomHorizontalFlip()])
        _, (bad,) = prepare(pipeline, jpegs[:1], shape=(400, 500, 3))
        assert reason in bad.reason


def test_a_sliver_whose_result_would_be_huge_is_a_bad_row(encode):
    """1x9000 pixels with the shorter side resized to 400: 400x3,600,000 pixels, 4.3 GB."""
    sliver = encode(np.zeros((1, 9000, 3), np.uint8), "PNG")
    pipeline = T.Pipeline([T.DecodeImage(), T.Resize(400), T.CenterCrop(300)])
    _, bad = prepare(pipeline, [sliver])
    reason = "it would be resized to 3600000x400, over the limit of 100,000,000 pixels (max_pixels)"
    assert bad == [BadRow(0, reason)]


def test_pixels_do_not_depend_on_the_number_of_threads(jpegs):
    made = []
    for threads in (1, 3, 2):
        engine = make_engine("cpu", CROP, seed=1, threads=threads)
        out = np.zeros((len(jpegs), 224, 224, 3), np.uint8)
        assert engine.prepare(Batch(jpegs, np.arange(len(jpegs)), 0, {}), out).bad == []
        made.append(out)
        engine.close()
    assert all((out == made[0]).all() for out in made[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("transform", "loaded"), [("RandomResizedCrop(8)", True), ("CenterCrop(8)", False)])
def test_an_engine_is_made_with_the_libraries_that_its_blocks_need(transform: str, loaded: bool) -> None:
    """On a busy machine, importing torch took longer than the time limit of a block.

    Each new worker was then given up as stuck.
    """
    run = (
        "import sys; from mbaas import transforms as T; from mbaas.prep.engines.cpu import CpuEngine;"
        f"CpuEngine(T.Pipeline([T.DecodeImage(), T.{transform}]), seed=0); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, check=True, text=True)
    assert done.stdout == f"{loaded}\n"
