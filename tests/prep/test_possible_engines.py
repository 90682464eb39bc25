"""The possible engines follow from the pipeline, the requested engine and the GPUs."""

from __future__ import annotations

import pytest

from mbaas import transforms as T
from mbaas.errors import ConfigError
from mbaas.prep.engines import check_share, make_engine, possible_engines


def same(image, rng):
    return image


PLAIN = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(8)])
MAPPED = T.Pipeline([T.DecodeImage(), T.Map(same)])
JITTERED = T.Pipeline([T.DecodeImage(), T.ColorJitter(0.4, 0.4, 0.4)])
HUED = T.Pipeline([T.DecodeImage(), T.ColorJitter(hue=(0.0, 0.1))])
MIRRORED = T.Pipeline([T.DecodeImage(), T.Pad(2, padding_mode="reflect")])

DECODE, MELS = T.DecodeAudio(max_s=1), T.MelSpectrogram()
SPECTROGRAMS = T.Pipeline([DECODE, T.Map(same), T.RandomCrop(900), MELS, T.AmplitudeToDB(), T.SpecAugment(1, 2, 1, 2)])
MAPPED_SPECTROGRAMS = T.Pipeline([DECODE, MELS, T.Map(same)])


@pytest.mark.parametrize(
    ("kind", "pipeline", "gpus", "possible"),
    [
        ("auto", PLAIN, 0, "cpu"),
        ("auto", PLAIN, 1, "cpu dali"),
        ("auto", MAPPED, 1, "cpu"),
        ("auto", JITTERED, 1, "cpu dali"),
        ("auto", HUED, 1, "cpu dali"),
        ("cpu", PLAIN, 1, "cpu"),
        ("cpu", MAPPED, 0, "cpu"),
        ("cpu", HUED, 1, "cpu"),
        ("dali", PLAIN, 0, "dali"),
        ("dali", PLAIN, 2, "dali"),
        ("dali", HUED, 0, "dali"),
        ("auto", SPECTROGRAMS, 0, "cpu"),
        ("auto", SPECTROGRAMS, 1, "cpu dali"),
        ("cpu", SPECTROGRAMS, 1, "cpu"),
        ("dali", SPECTROGRAMS, 0, "dali"),
        ("auto", MAPPED_SPECTROGRAMS, 1, "cpu"),
        ("auto", T.Pipeline([DECODE, T.RandomCrop(9)]), 1, "cpu"),
        ("auto", T.Pipeline([DECODE, T.MelSpectrogram(401)]), 1, "cpu"),
        ("auto", T.Pipeline([T.DecodeArray()]), 1, "cpu"),
    ],
)
def test_auto_may_be_dali_only_with_a_gpu_and_a_pipeline_that_it_can_run(kind, pipeline, gpus, possible):
    assert possible_engines(kind, pipeline, gpus=gpus) == tuple(possible.split())


def test_what_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="engine must be 'auto', 'cpu' or 'dali', got 'gpu'"):
        possible_engines("gpu", PLAIN, gpus=1)
    for gpus in (0, 1):
        for pipeline, limit, name in (
            (MAPPED, "runs no Map of images or spectrograms", "Map"),
            (MIRRORED, "pads with a colour only", "Pad"),
        ):
            says = rf"'dali' {limit}; use 'cpu' or 'auto' for a pipeline with {name}\("
            with pytest.raises(ConfigError, match=says):
                possible_engines("dali", pipeline, gpus=gpus)
    with pytest.raises(ConfigError, match="'dali' runs no Map"):
        make_engine("dali", MAPPED, seed=0)


def test_only_the_images_of_an_engine_that_has_dali_are_shared_out():
    for engine in ("auto", "dali"):
        check_share(0.5, engine, PLAIN)
    check_share(1.0, "cpu", PLAIN)
    check_share(1.0, "dali", SPECTROGRAMS)
    with pytest.raises(ConfigError, match=r"dali_share must be 1 with engine='cpu', which leaves .*, got 0.5"):
        check_share(0.5, "cpu", PLAIN)
    with pytest.raises(
        ConfigError, match=r"dali_share must be 1 for a pipeline that begins with DecodeAudio.* got 0.5"
    ):
        check_share(0.5, "auto", SPECTROGRAMS)


@pytest.mark.parametrize(
    ("transforms", "reason", "named"),
    [
        ([DECODE, MELS, T.Map(same)], "runs no Map of images or spectrograms", repr(T.Map(same))),
        ([DECODE], "prepares images, and sound that becomes a MelSpectrogram", repr(DECODE)),
        ([DECODE, T.Map(same)], "prepares images, and sound that becomes a MelSpectrogram", repr(DECODE)),
        ([T.DecodeArray()], "prepares images, and sound that becomes a MelSpectrogram", repr(T.DecodeArray())),
        *(
            (
                [DECODE, T.Map(same), T.MelSpectrogram(**odd), T.Map(same)],
                "makes spectrograms of an even n_fft from 4 on, and of power 1 or 2",
                repr(T.MelSpectrogram(**odd)),
            )
            for odd in ({"n_fft": 401}, {"n_fft": 2}, {"power": 1.5})
        ),
    ],
)
def test_of_sound_dali_says_which_transform_it_does_not_run(transforms, reason, named):
    pipeline = T.Pipeline(transforms)
    with pytest.raises(ConfigError) as caught:
        possible_engines("dali", pipeline, gpus=1)
    assert str(caught.value) == f"engine 'dali' {reason}; use 'cpu' or 'auto' for a pipeline with {named}"
    with pytest.raises(ConfigError, match=f"engine 'dali' {reason}"):
        make_engine("dali", pipeline, seed=0)
