"""Spectrograms match other libraries, and masks match torchaudio's algorithm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mbaas import transforms as T
from mbaas.transforms.arrays import Form, UnfitError

RATE = 16_000
SOUND = Form("sound", rate=RATE)
SPECTROGRAM = Form("spectrogram", rate=RATE)
NO_CHANCE = np.empty(0)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32) * 0.1


@pytest.mark.parametrize(
    ("transform", "scale", "norm"),
    [
        (T.MelSpectrogram(n_fft=512, hop_length=160, n_mels=40), "htk", None),
        (T.MelSpectrogram(512, 400, 160, n_mels=64, norm="slaney", mel_scale="slaney"), "slaney", "slaney"),
        (T.MelSpectrogram(400, f_min=60.0, f_max=7600.0, n_mels=40, power=1.0), "htk", None),
        (T.MelSpectrogram(400, 333, 77, n_mels=23, power=3.0), "htk", None),
    ],
)
def test_a_mel_spectrogram_is_that_of_torch_and_of_transformers_filters(
    transform: T.MelSpectrogram, scale: str, norm: str | None
) -> None:
    """Transform from torch, filters from `transformers.audio_utils`, which follows librosa."""
    from transformers.audio_utils import mel_filter_bank

    sound, n_fft = noise(7321), transform.n_fft
    window = transform.win_length or n_fft
    hop = transform.hop_length or window // 2
    spectrum = torch.stft(
        torch.from_numpy(sound), n_fft, hop, window, torch.hann_window(window), center=True, return_complex=True
    )
    power = spectrum.abs().numpy() ** transform.power  # [frequencies, frames]
    f_max = transform.f_max or RATE / 2
    filters = mel_filter_bank(
        n_fft // 2 + 1, transform.n_mels, transform.f_min, f_max, RATE, norm=norm, mel_scale=scale
    )
    made = transform.apply(sound, NO_CHANCE, SOUND)
    assert made.dtype == np.float32
    assert made.shape == (1 + 7321 // hop, transform.n_mels)
    np.testing.assert_allclose(made, power.T @ filters, rtol=2e-5, atol=1e-6 * power.max())


def test_a_long_recording_is_transformed_in_pieces() -> None:
    """Compares the 2,251 frames with shorter pieces of the same sound, except at their ends."""
    mels, sound = T.MelSpectrogram(n_fft=64, hop_length=16, n_mels=5, power=1.5), noise(36_000)
    whole = mels.apply(sound, NO_CHANCE, SOUND)
    assert whole.shape == (2251, 5)
    for first in (900, 1740):
        part = mels.apply(sound[16 * first : 16 * first + 8000], NO_CHANCE, SOUND)
        np.testing.assert_array_equal(part[2:-3], whole[first + 2 : first + 498])


def test_channels_are_transformed_apart_and_keep_their_axis() -> None:
    mels, sound = T.MelSpectrogram(n_mels=20), noise(3000, 2)
    made = mels.apply(sound, NO_CHANCE, Form("sound", rate=RATE, channels=2))
    assert made.shape == (16, 2, 20)
    for channel in range(2):
        alone = mels.apply(np.ascontiguousarray(sound[:, channel]), NO_CHANCE, SOUND)
        np.testing.assert_array_equal(made[:, channel], alone)


def test_a_tone_is_where_its_frequency_is() -> None:
    """1 kHz is 1000 mel on the HTK scale: number 27 of 79 filters from 0 to 2840 mel, at intervals of 35.5."""
    tone = np.sin(2 * np.pi * 1000 * np.arange(RATE) / RATE).astype(np.float32)
    made = T.MelSpectrogram(n_fft=2048, n_mels=79).apply(tone, NO_CHANCE, SOUND)
    assert set(made[2:-2].argmax(axis=1).tolist()) == {27}


@pytest.mark.parametrize(
    ("array", "form", "says"),
    [
        (noise(200), SOUND, r"sound has 200 samples, but MelSpectrogram with n_fft=400 needs more than 200"),
        (
            noise(900).astype(np.float64),
            SOUND,
            r"it is float64 \[900\] before MelSpectrogram, which needs float32 \[time",
        ),
        (noise(900, 2), SOUND, r"it is float32 \[900, 2\] before MelSpectrogram, which needs float32 \[time\]"),
        (noise(900), Form("sound", rate=RATE, channels=2), r"which needs float32 \[time, channels\]"),
    ],
)
def test_what_is_no_such_sound_does_not_fit(array: np.ndarray, form: Form, says: str) -> None:
    with pytest.raises(UnfitError, match=says):
        T.MelSpectrogram().apply(array, NO_CHANCE, form)


def test_decibels_are_those_of_torchaudio() -> None:
    """10 * log10(x) for powers, 20 for magnitudes; silence is -100 and -200; top_db counts from the loudest value."""
    power = np.array([[1.0, 100.0], [1e-3, 0.0]], np.float32)
    np.testing.assert_allclose(
        T.AmplitudeToDB().apply(power, NO_CHANCE, SPECTROGRAM), [[0, 20], [-30, -100]], atol=1e-5
    )
    magnitude = T.AmplitudeToDB("magnitude").apply(power, NO_CHANCE, SPECTROGRAM)
    np.testing.assert_allclose(magnitude, [[0, 40], [-60, -200]], atol=1e-5)
    bounded = T.AmplitudeToDB(top_db=30).apply(power, NO_CHANCE, SPECTROGRAM)
    np.testing.assert_allclose(bounded, [[0, 20], [-10, -10]], atol=1e-5)
    assert bounded.dtype == np.float32


def torchaudio_masks(array: np.ndarray, u: np.ndarray, spec: T.SpecAugment) -> np.ndarray:
    """`torchaudio.functional.mask_along_axis`, mask by mask, with the given random numbers."""
    masked, value = torch.from_numpy(array.copy()), 0.0 if spec.zero_masking else float(array.mean())
    axes = [0] * spec.n_time_masks + [array.ndim - 1] * spec.n_freq_masks
    for axis, (wide, place) in zip(axes, u.reshape(-1, 2).tolist(), strict=True):
        param = spec.time_mask_param if axis == 0 else spec.freq_mask_param
        if spec.p != 1.0:
            param = min(param, int(array.shape[axis] * spec.p))
        width = torch.tensor(wide * param, dtype=torch.float64)
        start = (place * (array.shape[axis] - width)).long()
        index = torch.arange(array.shape[axis])
        mask = (index >= start) & (index < start + width.long())
        masked = masked.transpose(axis, -1).masked_fill(mask, value).transpose(axis, -1)
    return masked.numpy()


@pytest.mark.parametrize("shape", [(50, 20), (50, 2, 20)])
@pytest.mark.parametrize(
    "spec",
    [T.SpecAugment(2, 15, 2, 6), T.SpecAugment(1, 40, 0, 0, zero_masking=True), T.SpecAugment(2, 40, 1, 9, p=0.2)],
)
def test_masks_are_those_of_torchaudio(spec: T.SpecAugment, shape: tuple[int, ...]) -> None:
    array, chance = noise(*shape), np.random.default_rng(5)
    changed = 0
    for _ in range(50):
        u = chance.random(spec.draws)
        before = array.copy()
        made = spec.apply(array, u, SPECTROGRAM)
        np.testing.assert_allclose(made, torchaudio_masks(array, u, spec), rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(array, before)
        changed += bool((made != array).any())
    assert changed > 40


def test_numbers_of_a_file_may_be_a_spectrogram_and_others_do_not_fit() -> None:
    with pytest.raises(
        UnfitError, match=r"it is int16 \[4, 4\] before SpecAugment, which needs floats \[time, ..., freq"
    ):
        T.SpecAugment(1, 2, 1, 2).apply(np.zeros((4, 4), np.int16), np.zeros(4), Form("array"))
    with pytest.raises(UnfitError, match=r"it is float32 \[4\] before AmplitudeToDB"):
        T.AmplitudeToDB().apply(np.zeros(4, np.float32), NO_CHANCE, Form("array"))
