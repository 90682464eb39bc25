"""Pipelines of sound and arrays refuse invalid transforms, know shapes before the first sample, and crop evenly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mbaas import transforms as T
from mbaas.errors import ConfigError
from mbaas.samples.fields import LABEL, Field
from mbaas.transforms.arrays import Form, UnfitError

AUDIO = T.DecodeAudio(rate=8000, max_s=2)
MELS = T.MelSpectrogram(n_fft=256, n_mels=32)
NORMALIZE = T.Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))


def halved(array: Any, rng: np.random.Generator) -> Any:
    return array / 2


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: T.Pipeline([MELS, AUDIO]),
            r"first transform must be DecodeImage, DecodeAudio or DecodeArray, got Mel",
        ),
        (lambda: T.Pipeline([AUDIO, T.DecodeImage()]), "needs one decoder, got 2: DecodeAudio, DecodeImage"),
        (lambda: T.Pipeline([AUDIO, T.CenterCrop(8)]), r"CenterCrop.* is a transform of images, but .* makes sounds"),
        (lambda: T.Pipeline([AUDIO, NORMALIZE]), r"Normalize.* is a transform of images, but DecodeAudio"),
        (lambda: T.Pipeline([T.DecodeImage(), T.CropOrPad(8)]), r"CropOrPad.* of arrays and sound, but DecodeImage"),
        (
            lambda: T.Pipeline([T.DecodeImage(), T.RandomCrop((8, 8, 3))]),
            r"RandomCrop's size.* must hold 2 values, got",
        ),
        (lambda: T.Pipeline([T.DecodeAudio(), T.RandomCrop(8, padding=1)]), r"RandomCrop's padding is for images, and"),
        (lambda: T.Pipeline([T.DecodeAudio(), T.RandomRotation(9)]), r"RandomRotation.* of images, but DecodeAudio"),
        (lambda: T.Pipeline([T.DecodeArray(), MELS]), r"needs sound, as DecodeAudio makes it, got arrays"),
        (lambda: T.Pipeline([AUDIO, MELS, MELS]), r"needs sound, as DecodeAudio makes it, got spectrograms"),
        (lambda: T.Pipeline([AUDIO, T.AmplitudeToDB()]), r"needs spectrograms: put MelSpectrogram before it"),
        (lambda: T.Pipeline([AUDIO, T.SpecAugment(1, 5, 1, 5)]), r"needs spectrograms: put MelSpectrogram before it"),
        (
            lambda: T.Pipeline([T.DecodeAudio()]),
            r"may have any length: give DecodeAudio\(.*\) max_s, the greatest one, or",
        ),
        (
            lambda: T.Pipeline([T.DecodeArray(shape=(None, 2))]),
            r"any length: give DecodeArray\(.*\) longest, the greatest",
        ),
        (
            lambda: T.Pipeline([AUDIO, T.MelSpectrogram(f_max=4001)]),
            r"up to half of the rate, 4000.0 Hz, got f_min=0.0, f",
        ),
        (lambda: T.Pipeline([AUDIO, T.MelSpectrogram(f_min=4000)]), r"half of the rate, 4000.0 Hz, got f_min=4000.0"),
        (lambda: T.Pipeline([AUDIO], boxes=T.Boxes()), r"boxes lie on images, but DecodeAudio\(.*\) makes none"),
        (lambda: T.DecodeAudio(rate=0), r"rate must be a whole number in \[1, 10,000,000\], got 0"),
        (lambda: T.DecodeAudio(channels=1.5), r"channels must be a whole number in \[1, 1,024\], got 1.5"),
        (lambda: T.DecodeAudio(max_s=0), r"max_s must be above 0 seconds, got 0.0"),
        (
            lambda: T.DecodeAudio(field="sample_id"),
            r"field must be a name that minibatches do not have already, got 'sam",
        ),
        (lambda: T.DecodeArray("hdf5"), r'format must be "npy", "npz" or "raw", got \'hdf5\''),
        (lambda: T.DecodeArray(key="a"), r"key must be the name of an array in an npz file, got 'a'"),
        (lambda: T.DecodeArray("raw", shape=(3,)), r"dtype must be given for raw files, got None"),
        (lambda: T.DecodeArray("raw", dtype="int16"), r"shape must be given for raw files, got None"),
        (lambda: T.DecodeArray(dtype="text"), r"dtype must be the name of a type of numbers, such as .*, got 'text'"),
        (lambda: T.DecodeArray(dtype="O"), r"dtype must be the name of a type of numbers, such as .*, got 'O'"),
        (
            lambda: T.DecodeArray(dtype="longdouble"),
            r"dtype must be the name of a type of numbers, such as .*, got 'lon",
        ),
        (lambda: T.DecodeArray(shape=(3, None)), r"of which only the first ones may be None, got \(3, None\)"),
        (lambda: T.DecodeArray(shape=(None, 3, None)), r"of which only the first ones may be None, got \(None, 3, N"),
        (
            lambda: T.DecodeArray("raw", dtype="int8", shape=(None, None)),
            r"shape may have one None for raw files, got \(None, None\)",
        ),
        (
            lambda: T.Pipeline([T.DecodeArray(shape=(None, None)), T.CropOrPad(3)]),
            r"^CropOrPad\(size=3\) gives one length to 1 of the axes, but samples differ in 2: its size must have ",
        ),
        (lambda: T.DecodeArray(shape=(0,)), r"shape must be a whole number in \[1, .*, got 0"),
        (lambda: T.DecodeArray(shape=3), r"shape must be a list of lengths, got 3"),
        (lambda: T.DecodeArray(longest=3), r"longest must be left out, unless shape begins with None, got 3"),
        (lambda: T.RandomCrop(0), r"RandomCrop's size must be a whole number in \[1, .*, got 0"),
        (lambda: T.CropOrPad((3, 1.5)), r"CropOrPad's size must be a whole number in \[1, .*, got 1.5"),
        (lambda: T.CropOrPad(()), r"must have a length for at least one axis, got \(\)"),
        (lambda: T.MelSpectrogram(n_fft=100, win_length=101), r"win_length must be at most n_fft, 100, got 101"),
        (lambda: T.MelSpectrogram(f_min=50, f_max=50), r"f_min must be at least 0, and below f_max, got 50.0"),
        (lambda: T.MelSpectrogram(power=0), r"power must be above 0, got 0.0"),
        (lambda: T.MelSpectrogram(norm="area"), r"norm must be \"slaney\" or left out, got 'area'"),
        (lambda: T.MelSpectrogram(mel_scale="bark"), r'mel_scale must be "htk" or "slaney", got \'bark\''),
        (lambda: T.AmplitudeToDB("energy"), r'stype must be "power" or "magnitude", got \'energy\''),
        (lambda: T.AmplitudeToDB(top_db=-1), r"top_db must be at least 0, got -1"),
        (lambda: T.SpecAugment(-1, 5, 1, 5), r"n_time_masks must be a whole number in \[0, .*, got -1"),
        (lambda: T.SpecAugment(1, 5, 1, 5, p=2), r"p must be in \[0, 1\], got 2"),
        (lambda: T.SpecAugment(1, 5, 1, 5, zero_masking=1), r"zero_masking must be true or false, got 1"),
    ],
)
def test_what_does_not_fit_is_refused_at_construction(build: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build()


@pytest.mark.parametrize(
    ("steps", "kind", "differs", "longest"),
    [
        ([AUDIO], "sound", True, 16000),
        ([T.DecodeAudio(rate=3, max_s=1.1)], "sound", True, 4),
        ([AUDIO, T.Map(halved)], "sound", True, 16000),
        ([AUDIO, MELS, T.AmplitudeToDB(), T.SpecAugment(1, 5, 1, 5)], "spectrogram", True, 126),
        ([AUDIO, T.RandomCrop(8000), MELS], "spectrogram", False, None),
        ([T.DecodeAudio(), MELS, T.CropOrPad(100)], "spectrogram", False, None),
        ([T.DecodeArray()], "array", False, None),
        ([T.DecodeArray(shape=(None, 4), longest=9), T.SpecAugment(1, 5, 1, 5)], "array", True, 9),
        ([T.DecodeArray(shape=(None, 4)), T.CropOrPad((3, 3))], "array", False, None),
        ([T.DecodeArray(shape=(None, None, 4), longest=99)], "array", True, 99),
        ([T.DecodeArray(shape=(None, None, 4)), T.RandomCrop((3, 3))], "array", False, None),
    ],
)
def test_what_is_known_of_samples_before_any_is_seen(steps: Any, kind: str, differs: bool, longest: int | None) -> None:
    last = T.Pipeline(steps).forms[-1]
    assert (last.kind, bool(last.differing), last.longest) == (kind, differs, longest)


def test_pipelines_without_images_say_so() -> None:
    pipeline = T.Pipeline([AUDIO, T.RandomCrop(8000), MELS, T.AmplitudeToDB()])
    assert not pipeline.has_images
    assert pipeline.is_random
    assert not T.Pipeline([AUDIO, T.CropOrPad(8000), MELS]).is_random
    assert T.Pipeline([AUDIO, MELS, T.SpecAugment(1, 5, 0, 0)]).is_random
    assert pipeline.decoder.field == "audio"
    assert pipeline.normalize is None
    assert pipeline.fingerprint != T.Pipeline([AUDIO, T.RandomCrop(8001), MELS, T.AmplitudeToDB()]).fingerprint


def test_a_repr_evaluates_back_to_an_equal_pipeline() -> None:
    steps = [T.DecodeArray("raw", None, "float32", [None, 3], 7, "points"), T.RandomCrop([2, 3]), T.Map(halved)]
    pipeline = T.Pipeline([*steps[:2], T.CropOrPad(2), T.SpecAugment(1, 2, 3, 4, 0.5, True)])
    assert eval(repr(pipeline), dict(vars(T))) == pipeline
    sound = T.Pipeline([T.DecodeAudio(8000, 2, 1.5, "clip"), MELS, T.AmplitudeToDB(top_db=80)])
    assert eval(repr(sound), dict(vars(T))) == sound


def test_what_is_made_has_no_name_that_the_dataset_has_taken() -> None:
    fields = (LABEL, Field("audio", (3,), "int64"))
    with pytest.raises(
        ConfigError, match=r"has a field 'audio' already, so DecodeAudio\(.*\) must make one of another"
    ):
        T.Pipeline([AUDIO]).known(fields)
    assert T.Pipeline([T.DecodeAudio(max_s=1, field="clip")]).known(fields) == fields
    with pytest.raises(ConfigError, match=r"has a field 'label' already"):
        T.Pipeline([T.DecodeArray(field="label")]).known(fields)


# ---- crops ----

PLAIN = Form("array")


@pytest.mark.parametrize("length", [5, 8])
def test_a_random_crop_is_at_every_place_equally_often(length: int) -> None:
    """1,000 evenly spaced numbers in [0, 1): each of the four offsets of a window gets 250."""
    array = np.arange(1, length + 1)
    size = {5: 8, 8: 5}[length]
    crops = [tuple(T.RandomCrop(size).apply(array, np.array([u / 1000]), PLAIN).tolist()) for u in range(1000)]
    if length > size:
        places = [tuple(range(start, start + size)) for start in range(1, 5)]
    else:
        places = [(0,) * before + tuple(range(1, 6)) + (0,) * (3 - before) for before in range(4)]
    assert {place: crops.count(place) for place in places} == dict.fromkeys(places, 250)


@pytest.mark.parametrize(("length", "wanted"), [(5, [2, 3]), (4, [2, 3]), (2, [1, 2]), (1, [1, 0]), (0, [0, 0])])
def test_a_crop_without_chance_is_in_the_middle(length: int, wanted: list[int]) -> None:
    assert T.CropOrPad(2).apply(np.arange(1, length + 1), np.empty(0), PLAIN).tolist() == wanted


def test_a_crop_pads_one_axis_and_cuts_another() -> None:
    """[2, 4, 3] -> [3, 2, 3]: half of 1 is 0 rows in front, half of 2 is 1 column; channels stay."""
    array = np.arange(24, dtype=np.int16).reshape(2, 4, 3)
    made = T.CropOrPad((3, 2)).apply(array, np.empty(0), PLAIN)
    np.testing.assert_array_equal(made, np.concatenate([array[:, 1:3], np.zeros((1, 2, 3))]))
    assert made.dtype == np.int16
    assert T.RandomCrop((3, 2)).draws == 2
    drawn = T.RandomCrop((3, 2)).apply(array, np.array([0.6, 0.999]), PLAIN)
    np.testing.assert_array_equal(drawn, np.concatenate([np.zeros((1, 2, 3)), array[:, 2:4]]))


def test_an_array_of_too_few_axes_does_not_fit() -> None:
    with pytest.raises(UnfitError, match=r"has the shape \[5\], but CropOrPad\(size=\(2, 2\)\) needs at least 2 axes"):
        T.CropOrPad((2, 2)).apply(np.zeros(5), np.empty(0), PLAIN)
