"""Engines give the same result for encoded and decoded samples, whichever samples they cache."""

from __future__ import annotations

import io
import json

import cv2
import numpy as np
import pytest
import simplejpeg
import soundfile

from mbaas import transforms as T
from mbaas.prep import pixels
from mbaas.prep.decoded import DecodedRows, read_decoded
from mbaas.prep.engines import Batch, make_engine
from mbaas.samples.fields import Packed
from support.decoded import check_any_mix, containers


def brighter(image):
    image += np.uint8(9)  # in place: the function owns the image
    return image


def as_floats(image):
    return np.asfortranarray(image[:, :, :2].astype(np.float32) / 255)


def smaller(image):
    return image[::2, ::-2]


def noisy(image, rng):
    return image + rng.integers(5, size=image.shape, dtype=np.uint8)


def only_small(image):
    if image.shape[0] > 110:
        raise ValueError("too high")
    return image


def sometimes_bad(image, rng):
    if rng.random() < 0.3:
        raise ValueError("by chance")
    return image


def always(fn):
    return T.Map(fn, deterministic=True)


CROP, FLIP, JITTER = T.RandomResizedCrop((48, 40)), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.1)
ANY = T.DecodeImage(max_pixels=50_000)
IMAGES = {
    "crop, flip, jitter": (1, [T.DecodeImage(), CROP, FLIP, JITTER]),
    "resize first": (2, [T.DecodeImage(), T.Resize(66), CROP, FLIP]),
    "flip first": (1, [T.DecodeImage(), FLIP, CROP, FLIP]),
    "jitter first": (1, [T.DecodeImage(), JITTER, FLIP, T.CenterCrop(50)]),
    "all of it": (3, [T.DecodeImage(), T.Resize((56, 72)), T.CenterCrop(50)]),
    "normalized": (3, [T.DecodeImage(), T.Resize(56), T.CenterCrop(50), T.Normalize((0, 0, 0), (1, 1, 1))]),
    "padded": (2, [T.DecodeImage(), T.CenterCrop((130, 60)), FLIP]),
    "padded, augmented": (
        3,
        [T.DecodeImage(), T.Resize(50), T.Pad(3, 9), T.RandomCrop(48), T.RandAugment(3), T.AugMix()],
    ),
    "mirrored": (2, [T.DecodeImage(), T.Pad(7, padding_mode="reflect"), T.RandomCrop(60), T.RandomPerspective()]),
    "warped": (1, [ANY, T.RandomRotation(40, "bilinear", expand=True), T.GaussianBlur(5), T.RandomErasing(0.9)]),
    "function": (3, [T.DecodeImage(), T.Resize((56, 72)), always(brighter), CROP, JITTER]),
    "two functions": (
        5,
        [T.DecodeImage(), T.Resize(66), always(smaller), T.CenterCrop(40), always(brighter), FLIP],
    ),
    "chance after a function": (2, [T.DecodeImage(), always(smaller), T.Map(noisy), CROP, always(brighter), FLIP]),
    "no image": (3, [T.DecodeImage(), T.CenterCrop(20), always(as_floats)]),
    "bad for its size": (2, [T.DecodeImage(), always(only_small), CROP]),
    "bad by chance": (1, [T.DecodeImage(), T.Map(sometimes_bad), CROP]),
    "any size": (1, [ANY]),
    "any size, flipped": (1, [ANY, FLIP]),
    "any size, jitter": (1, [ANY, JITTER, FLIP]),
    "any size, resized": (2, [ANY, T.Resize(66), FLIP, JITTER]),
    "any size, function": (2, [ANY, always(smaller), FLIP]),
    "too large": (2, [T.DecodeImage(max_pixels=66 * 80), T.Resize(66), FLIP]),
}


@pytest.fixture(scope="module")
def files(photos, odd_files, bad_files):
    """Good and bad files, and JPEGs that are damaged or unusual in their lower part, so that upper crops are good."""
    small = [np.ascontiguousarray(photo[::3, ::3]) for photo in photos]
    jpegs = [simplejpeg.encode_jpeg(photo, quality=80, colorsubsampling="420") for photo in small]
    whole = simplejpeg.encode_jpeg(photos[0], quality=80, colorsubsampling="420")
    half = len(whole) // 2
    below = [whole[: -len(whole) // 4] + b"\xff\xd9", whole[:half] + bytes(200) + whole[half + 200 :]]
    odd = [raw for raw, _ in odd_files.values()]
    return [*jpegs, *below, whole[:-2] + b"abc\xff\xd9", *odd, *(raw for raw, _ in bad_files.values())]


@pytest.mark.parametrize("name", IMAGES)
def test_images(files, name):
    prefix, steps = IMAGES[name]
    pipeline = T.Pipeline(steps)
    assert pipeline.prefix == prefix
    kept = check_any_mix(lambda threads: make_engine("cpu", pipeline, seed=4, threads=threads), files)
    assert len(kept) == KEPT.get(name, 51)
    for container in kept.values():
        assert read_decoded(memoryview(container)).applied == prefix


KEPT = {
    **dict.fromkeys(("padded", "no image"), 53),  # the rows of two that are damaged below are never read
    **dict.fromkeys(("any size", "any size, flipped", "any size, jitter", "warped"), 50),  # one is too large
    "bad for its size": 4,
    "bad by chance": 35,
    "too large": 4,
}
"""Number of cached samples, if not 51."""


def test_a_file_that_is_damaged_below_the_crop_is_good_in_some_epochs_and_never_kept(files, jpegs):
    """It is bad whenever a crop reaches the damage. check_any_mix above compares this with caching on and off."""
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(40)])
    engine, damaged = make_engine("cpu", pipeline, seed=4), files[5]
    seen = []
    for epoch in range(20):
        keep = DecodedRows([0, 1], 1 << 22)
        out = np.empty((2, 40, 40, 3), np.uint8)
        bad = engine.prepare(Batch([damaged, jpegs[0]], np.array([3, 4]), epoch, {}), out, keep).bad
        seen.append([each.row for each in bad])
        assert list(containers(keep)) == [1]
    assert 0 < seen.count([0]) < 20
    assert seen.count([]) + seen.count([0]) == 20


def test_a_file_in_which_only_another_decoder_finds_its_way_is_not_kept(jpegs):
    """The other decoder gives the same pixels here, but decoding only the upper rows may not always match it."""
    tables = jpegs[0].index(b"\xff\xdb")
    odd, keep = jpegs[0][:tables] + bytes(2) + jpegs[0][tables:], DecodedRows([0, 1], 1 << 22)
    engine, out = make_engine("cpu", T.Pipeline([T.DecodeImage(), CROP]), seed=4), np.empty((2, 48, 40, 3), np.uint8)
    assert engine.prepare(Batch([jpegs[0], odd], np.array([8, 8]), 0, {}), out, keep).bad == []
    assert out[0].tobytes() == out[1].tobytes()
    assert list(containers(keep)) == [0]


def test_only_the_upper_rows_are_decoded_of_what_is_not_kept(jpegs, monkeypatch):
    """Decoding a whole image costs more than its crop, so only samples pay for it that are to be cached and fit."""
    from mbaas.prep import decode

    heights, into = [], decode.simplejpeg.decode_jpeg

    def watched(data, **options):
        heights.append(options["buffer"].shape[0])
        return into(data, **options)

    monkeypatch.setattr(decode.simplejpeg, "decode_jpeg", watched)
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(40, scale=(0.05, 0.05))])
    engine, out = make_engine("cpu", pipeline, seed=4), np.empty((5, 40, 40, 3), np.uint8)
    engine.prepare(Batch(jpegs, np.arange(5), 0, {}), out)
    alone = heights.copy()
    assert max(alone) < 400
    heights.clear()
    keep = DecodedRows([1, 3, 4], 2 * 601_000)
    engine.prepare(Batch(jpegs, np.arange(5), 0, {}), out, keep)
    assert heights == [alone[0], 400, alone[2], 400, alone[4]], "a third one does not fit"
    assert list(containers(keep)) == [1, 3]


def test_an_image_that_is_read_only_is_resampled_where_it_lies():
    """torch warns once per process about read-only arrays unless the warning is off; warnings are errors here."""
    image = np.arange(90 * 50 * 3, dtype=np.uint8).reshape(90, 50, 3)
    wanted, found = (np.empty((20, 30, 3), np.uint8) for _ in range(2))
    pixels.cut(image, (10, 0, 70, 50), wanted, pixels.Scratch())
    image.flags.writeable = False
    pixels.cut(image, (10, 0, 70, 50), found, pixels.Scratch())
    assert wanted.any()
    assert found.tobytes() == wanted.tobytes()
    assert not image.flags.writeable


# ---- annotations of images ----


def segmentation(box):
    left, top, width, height = box
    return [[left, top, left + width, top, left + width, top + height, left, top + height]]


@pytest.fixture(scope="module")
def scenes():
    """PNGs of different sizes with two boxes each, and their classes, keypoints and segmentations."""
    chance, encoded, boxes, texts = np.random.default_rng(2), [], [], []
    for _ in range(16):
        height, width = chance.integers(60, 110, 2).tolist()
        encoded.append(cv2.imencode(".png", chance.integers(256, size=(height, width, 3), dtype=np.uint8))[1].tobytes())
        two = [[int(chance.integers(30)), int(chance.integers(30)), 12 + n, 20] for n in range(2)]
        boxes += two
        texts.append(json.dumps([segmentation(box) for box in two]).encode())
    bounds = np.arange(0, 33, 2)
    points = np.array([[[x, y, 2], [x + 9, y + 9, 1]] for x, y, _, _ in boxes], np.float32)
    known = {
        "boxes": Packed(np.array(boxes, np.float32), bounds),
        "kinds": Packed(np.arange(32), bounds),
        "keypoints": Packed(points, bounds),
        "segmentation": Packed(np.frombuffer(b"".join(texts), np.uint8), np.cumsum([0, *map(len, texts)])),
        "age": np.arange(16),
    }
    return encoded, known


BOXES = T.Boxes(format="xywh", beside=("kinds", "keypoints"), min_size=3.0)
POINTS = {"keypoints": T.Keypoints(swaps=((0, 1),))}
TWICE = T.Map(lambda image, rng: np.ascontiguousarray(np.repeat(image, 2, axis=0)))


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
@pytest.mark.parametrize(
    ("prefix", "steps", "lying"),
    [
        (1, [T.DecodeImage(), T.RandomIoUCrop(), T.Resize((40, 40)), FLIP], {**POINTS, "masks": T.Masks()}),
        (
            2,
            [T.DecodeImage(), T.Resize(50), T.RandomIoUCrop(), T.Resize((40, 40)), FLIP],
            {**POINTS, "masks": T.Masks()},
        ),
        (3, [ANY, T.Resize(50), T.CenterCrop(44), FLIP], {**POINTS, "masks": T.Masks()}),
        (2, [ANY, T.Resize(50), T.RandomZoomOut(), FLIP], {"masks": T.Masks()}),
        (1, [ANY, T.Map(noisy), T.RandomHorizontalFlip(), TWICE, T.Resize((40, 60))], POINTS),
        (2, [ANY, T.Resize(50), always(smaller), T.Resize((40, 60)), FLIP], POINTS),
    ],
    ids=str,
)
def test_fields_move_as_those_of_the_file_do(scenes, prefix, steps, lying):
    encoded, known = scenes
    pipeline = T.Pipeline(steps, boxes=BOXES, **lying)
    assert pipeline.prefix == prefix
    files = [encoded[0], b"no image", *encoded[2:]]
    kept = check_any_mix(lambda threads: make_engine("cpu", pipeline, seed=4, threads=threads), files, known)
    assert len(kept) == (14 if T.RandomZoomOut() in steps else 15), "one becomes too large"


# ---- limits and foreign containers ----


def decoded(pipeline, files, **options):
    """Decode the valid ``files`` into containers."""
    engine = make_engine("cpu", pipeline, seed=0, **options)
    keep, field = DecodedRows(range(len(files)), 1 << 24), engine.field(files[0], "x", {})
    assert engine.prepare(Batch(files, np.arange(len(files)), 0, {}), field.empty(len(files)), keep).bad == []
    engine.close()
    return [*containers(keep).values()]


def refusal(pipeline, container, **options):
    engine = make_engine("cpu", pipeline, seed=0, **options)
    shape = pipeline.output_shape or (9,)
    (bad,) = engine.prepare(Batch([container], np.arange(1), 0, {}), np.empty((1, *shape), np.uint8)).bad
    assert bad.row == 0
    return bad.reason


def test_a_decoded_image_is_refused_for_the_same_number_of_pixels(jpegs):
    pipeline = T.Pipeline([T.DecodeImage(), T.Resize((20, 30)), FLIP])
    (container,) = decoded(pipeline, jpegs[:1], max_pixels=400 * 500)
    says = "500x400 is 200,000 pixels, over the limit of 199,999 (max_pixels)"
    assert refusal(pipeline, jpegs[0], max_pixels=400 * 500 - 1) == says
    assert refusal(pipeline, container, max_pixels=400 * 500 - 1) == says


SOUND = T.Pipeline([T.DecodeAudio(), T.CropOrPad(9)])
RESIZED = T.Pipeline([T.DecodeImage(), T.Resize((20, 30)), FLIP])
TURNED = T.Pipeline([T.DecodeImage(), always(as_floats)])


def test_a_container_of_another_pipeline_is_refused(jpegs):
    engine = make_engine("cpu", SOUND, seed=0)
    keep = DecodedRows([0], 1 << 20)
    engine.prepare(Batch([wav(np.zeros(20))], np.arange(1), 0, {}), np.empty((1, 9), np.float32), keep)
    (sound,) = containers(keep).values()
    (resized,), (plain,) = decoded(RESIZED, jpegs[:1]), decoded(T.Pipeline([T.DecodeImage()]), jpegs[:1])
    crop = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(40)])
    assert refusal(crop, sound) == "it is a decoded sample, but not of an image"
    assert refusal(crop, resized).startswith("it is a decoded sample after 2 transforms, of which this pipeline begins")
    other = T.Pipeline([T.DecodeImage(), T.Resize((40, 40)), FLIP])
    assert refusal(other, resized) == (
        "it is a decoded sample, uint8 [20, 30, 3], but must be uint8 [40, 40, 3] after 2 transforms"
    )
    (floats,) = decoded(TURNED, jpegs[:1])
    after = T.Pipeline([T.DecodeImage(), always(smaller), T.Resize((40, 40)), FLIP])
    assert refusal(after, floats).endswith("made float32 [400, 500, 2], but Resize needs uint8 [height, width, 3]")
    assert refusal(SOUND, plain) == "it is a decoded image, and this pipeline makes none"
    assert refusal(T.Pipeline([T.DecodeAudio(), T.RandomCrop(9)]), sound).startswith("it is a decoded sample after 2")
    damaged = sound.copy()
    damaged[20] ^= 1
    for pipeline in (crop, SOUND):
        assert refusal(pipeline, damaged) == "damaged decoded sample: its header has the wrong checksum"


def test_fewer_transforms_than_the_prefix_may_be_done(jpegs):
    """A container with only decoding applied is valid for any image pipeline, like its file."""
    pipeline = T.Pipeline([T.DecodeImage(), T.Resize((40, 50)), always(smaller), FLIP])
    engine, plain = make_engine("cpu", pipeline, seed=0), decoded(T.Pipeline([T.DecodeImage()]), jpegs)
    out = [np.empty((5, 20, 25, 3), np.uint8) for _ in range(3)]
    middle = decoded(T.Pipeline([T.DecodeImage(), T.Resize((40, 50)), FLIP]), jpegs)
    for samples, made in zip((jpegs, plain, middle), out, strict=True):
        assert engine.prepare(Batch(samples, np.arange(5), 1, {}), made).bad == []
    assert out[0].tobytes() == out[1].tobytes() == out[2].tobytes()


# ---- sound and arrays ----


def wav(sound, rate=16_000, subtype="PCM_16", kind="WAV"):
    stream = io.BytesIO()
    soundfile.write(stream, sound, rate, format=kind, subtype=subtype)
    return stream.getvalue()


def npy(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def recordings(rate=16_000):
    """Audio files: 0-21 good, of several formats; 22-24 damaged or not finite after their middle; 25-26 not sound."""
    chance = np.random.default_rng(0)
    sounds = [chance.uniform(-1, 1, (3000 + 700 * n, 1 + n % 2)) for n in range(6)]
    good = [wav(each, rate, subtype) for each in sounds for subtype in ("PCM_16", "FLOAT")]
    flac = [wav(each, rate, kind="FLAC") for each in sounds]
    ogg = [wav(each, rate, "VORBIS", "OGG") for each in sounds[:2]]
    mp3 = [wav(each, rate, "MPEG_LAYER_III", "MP3") for each in sounds[:2]]
    broken = [flac[5][:-3000], flac[5][: len(flac[5]) // 2] + bytes(99) + flac[5][len(flac[5]) // 2 + 99 :]]
    infinite = sounds[5].copy()
    infinite[5500] = np.inf
    return [*good, *flac, *ogg, *mp3, *broken, wav(infinite, rate, "FLOAT"), b"no sound", b""]


ONE, MELS, DECIBELS = T.DecodeAudio(), T.MelSpectrogram(n_fft=128, n_mels=20), T.AmplitudeToDB(top_db=60)
MASKS = T.SpecAugment(1, 9, 1, 5)


def louder(sound):
    return np.repeat(sound, 2)[::-1]


@pytest.mark.parametrize(
    ("prefix", "steps", "rate"),
    [
        (1, [ONE, T.RandomCrop(2000)], 16_000),
        (1, [ONE, T.RandomCrop(2000), MELS, DECIBELS, MASKS], 16_000),
        (1, [ONE, T.RandomCrop(4000)], 22_050),
        (1, [T.DecodeAudio(8000), T.RandomCrop(4000)], 44_100),
        (1, [T.DecodeAudio(channels=2), T.RandomCrop(4000)], 16_000),
        (2, [ONE, T.CropOrPad(4000), T.RandomCrop(900)], 16_000),
        (4, [T.DecodeAudio(max_s=0.35), MELS, DECIBELS, T.CropOrPad(30), MASKS], 16_000),
        (3, [T.DecodeAudio(max_s=1, channels=2), MELS, DECIBELS, MASKS], 16_000),
        (2, [T.DecodeAudio(max_s=1), always(louder), T.RandomCrop(900)], 16_000),
        (2, [T.DecodeAudio(max_s=1), always(louder)], 16_000),
    ],
    ids=str,
)
def test_sound(prefix, steps, rate):
    pipeline = T.Pipeline(steps)
    assert pipeline.prefix == prefix
    files = recordings(rate)
    kept = check_any_mix(lambda threads: make_engine("cpu", pipeline, seed=4, threads=threads), files)
    assert {0, 11, 12, 18, 20}.issubset(kept) or steps[0].max_s == 0.35
    # Damaged, not finite or not sound; the middle of number 24 is good.
    assert {22, 23, 24, 25, 26}.intersection(kept) == ({24} if T.CropOrPad(4000) in steps else set())
    assert len(kept) > 8


ARRAYS = [
    npy((np.asfortranarray if n % 2 else np.asarray)(np.random.default_rng(n).normal(size=(30 + n, 20, 3))))
    for n in range(12)
]
"""Float64, because its sums depend on the order of addition."""


@pytest.mark.parametrize(
    ("prefix", "steps"),
    [
        (1, [T.DecodeArray(shape=(None, 20, 3), longest=99)]),
        (2, [T.DecodeArray(), T.CropOrPad((24, 16)), MASKS]),
        (1, [T.DecodeArray(), T.RandomCrop((24, 16)), MASKS]),
        (1, [T.DecodeArray(shape=(None, 20, 3), longest=99), MASKS]),
        (1, [T.DecodeArray(), T.Map(sometimes_bad), T.RandomCrop(24)]),
        (2, [T.DecodeArray(shape=(None, 20, 3), longest=99), DECIBELS, MASKS]),
        (2, [T.DecodeArray(), always(lambda array: array[:20].T), T.RandomCrop(2)]),
        (1, [T.DecodeArray(shape=(None, None, 3), longest=9999), T.Map(lambda array, rng: array * rng.random())]),
    ],
    ids=str,
)
def test_arrays(prefix, steps):
    pipeline = T.Pipeline(steps)
    assert pipeline.prefix == prefix
    files = [*ARRAYS, b"no array", ARRAYS[0][:-4]]
    kept = check_any_mix(lambda threads: make_engine("cpu", pipeline, seed=4, threads=threads), files)
    assert len(kept) == (6 if T.Map(sometimes_bad) in steps else 12)


def test_a_masked_array_is_not_kept_for_it_is_another_thing_than_its_numbers():
    masked = always(lambda array: np.ma.masked_less(array, 0.0))
    pipeline = T.Pipeline([T.DecodeArray(), T.CropOrPad(30), masked, T.Map(lambda array, rng: array.filled(7.0))])
    kept = check_any_mix(lambda threads: make_engine("cpu", pipeline, seed=4, threads=threads), ARRAYS)
    assert not kept


def test_a_recording_is_not_kept_whose_window_is_another_one_when_it_is_read_alone(monkeypatch):
    """In a damaged file, a decoder may seek to a wrong offset."""
    from mbaas.prep.sound import SoundDecoder

    decode = SoundDecoder.__call__

    def misled(self, encoded, u):
        sound, is_window = decode(self, encoded, u)
        return sound + np.float32(self._window is None), is_window

    monkeypatch.setattr(SoundDecoder, "__call__", misled)
    pipeline, keep = T.Pipeline([ONE, T.RandomCrop(2000)]), DecodedRows([0], 1 << 20)
    engine = make_engine("cpu", pipeline, seed=4)
    assert (
        engine.prepare(Batch([recordings()[0]], np.arange(1), 0, {}), np.empty((1, 2000), np.float32), keep).bad == []
    )
    assert not containers(keep)


def test_a_window_of_a_kept_recording_is_a_slice_of_it(monkeypatch):
    """soundfile is removed, so decoding the file again would fail."""
    pipeline = T.Pipeline([ONE, T.RandomCrop(2000)])
    engine, keep, out = make_engine("cpu", pipeline, seed=4), DecodedRows([0], 1 << 20), np.empty((1, 2000), np.float32)
    file = recordings()[0]
    engine.prepare(Batch([file], np.arange(1), 0, {}), out, keep)
    (container,) = containers(keep).values()
    wanted = out.copy()
    monkeypatch.setattr(soundfile, "SoundFile", None)
    assert engine.prepare(Batch([container], np.arange(1), 0, {}), out).bad == []
    assert out.tobytes() == wanted.tobytes()
