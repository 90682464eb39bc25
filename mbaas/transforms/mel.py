"""Windows and filters of mel spectrograms."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

MelScale: TypeAlias = Literal["htk", "slaney"]
"""The formula of HTK, torchaudio's default, or of Slaney's Auditory Toolbox, librosa's default."""


@lru_cache(maxsize=16)
def hann(length: int, n_fft: int) -> NDArray[np.float32]:
    """Return a periodic Hann window, float32 [n_fft], padded with zeros on both sides if shorter."""
    window = np.zeros(n_fft, np.float32)
    first = (n_fft - length) // 2
    window[first : first + length] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
    return window


@lru_cache(maxsize=16)
def mel_filters(
    rate: int, n_fft: int, f_min: float, f_max: float, n_mels: int, norm: str | None, scale: MelScale
) -> tuple[tuple[int, NDArray[np.float32]], ...]:
    """Return triangular filters: the index of the first frequency of each, and its weights from that index."""
    frequencies = np.fft.rfftfreq(n_fft, 1 / rate)
    lowest, highest = _mel(np.array([f_min, f_max]), scale).tolist()
    corners = _hertz(np.linspace(lowest, highest, n_mels + 2), scale)
    found = []
    for low, centre, high in zip(corners, corners[1:], corners[2:], strict=False):
        rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
        weights = np.maximum(0.0, np.minimum(rising, falling))
        if norm == "slaney":
            weights *= 2.0 / (high - low)
        (spanned,) = np.nonzero(weights)
        first, end = (int(spanned[0]), int(spanned[-1]) + 1) if len(spanned) else (0, 0)
        found.append((first, weights[first:end].astype(np.float32)))
    return tuple(found)


# The Slaney scale is linear up to 1 kHz and logarithmic above.
_LINEAR_HZ, _BREAK_HZ, _LOG_STEP = 200.0 / 3, 1000.0, np.log(6.4) / 27


def _mel(hertz: NDArray[np.float64], scale: MelScale) -> NDArray[np.float64]:
    if scale == "htk":
        return np.asarray(2595.0 * np.log10(1.0 + hertz / 700.0))
    above = np.log(np.maximum(hertz, _BREAK_HZ) / _BREAK_HZ) / _LOG_STEP
    return np.where(hertz < _BREAK_HZ, hertz / _LINEAR_HZ, _BREAK_HZ / _LINEAR_HZ + above)


def _hertz(mel: NDArray[np.float64], scale: MelScale) -> NDArray[np.float64]:
    if scale == "htk":
        return np.asarray(700.0 * (10.0 ** (mel / 2595.0) - 1.0))
    above = _BREAK_HZ * np.exp(_LOG_STEP * (mel - _BREAK_HZ / _LINEAR_HZ))
    return np.where(mel < _BREAK_HZ / _LINEAR_HZ, mel * _LINEAR_HZ, above)
