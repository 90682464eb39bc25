"""Transforms of sound and spectrograms, like those in torchaudio, except that time is the first axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.transforms import checks
from mbaas.transforms.arrays import Array, ArrayTransform, Form, UnfitError

MelScale: TypeAlias = Literal["htk", "slaney"]
"""The formula of HTK, torchaudio's default, or of Slaney's Auditory Toolbox, librosa's default."""

_MOST = 2**20
_MaskParameter: TypeAlias = Annotated[int, partial(checks.whole, least=0, most=_MOST)]

_FRAMES = 1024
"""Frames transformed at once, to bound memory for long sounds."""

_LEAST_POWER = 1e-10
"""The floor of AmplitudeToDB, as in torchaudio and librosa."""


@dataclass(frozen=True)
class MelSpectrogram(ArrayTransform):
    """Compute a mel spectrogram: float32 [frames, n_mels], or [frames, channels, n_mels] for several channels.

    This matches torchaudio: a short-time Fourier transform with a periodic Hann window centred on every
    ``hop_length``-th sample, with the sound mirrored at its ends. Then the magnitude to the ``power``, and triangular
    filters on the mel scale. Sound of n samples has 1 + n // hop_length frames. With ``mel_scale="slaney",
    norm="slaney"`` it matches librosa. Add `AmplitudeToDB` for a logarithmic scale.

    Args:
        n_fft: length of the Fourier transform in samples.
        win_length: length of the window in samples, at most ``n_fft``; default: ``n_fft``.
        hop_length: samples from one frame to the next; default: half of ``win_length``.
        f_min: lower end of the filters, in Hz.
        f_max: upper end of the filters, in Hz; default: half of the sample rate.
        n_mels: number of filters. A filter narrower than the distance of two frequencies may be zero everywhere.
        power: 2 for power, 1 for magnitude.
        norm: "slaney" divides each filter by its width; None does not.
        mel_scale: "htk" or "slaney".
    """

    n_fft: Annotated[int, partial(checks.whole, least=2, most=_MOST)] = 400
    win_length: Annotated[int | None, partial(checks.whole, most=_MOST)] = None
    hop_length: Annotated[int | None, partial(checks.whole, most=_MOST)] = None
    f_min: Annotated[float, checks.number] = 0.0
    f_max: Annotated[float | None, checks.number] = None
    n_mels: Annotated[int, partial(checks.whole, most=_MOST)] = 128
    power: Annotated[float, checks.number] = 2.0
    norm: Literal["slaney"] | None = None
    mel_scale: Annotated[MelScale, partial(checks.one_of, names=get_args(MelScale))] = "htk"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.win_length is not None and self.win_length > self.n_fft:
            raise self._refused("win_length", f"must be at most n_fft, {self.n_fft}")
        if self.f_min < 0 or (self.f_max is not None and self.f_max <= self.f_min):
            raise self._refused("f_min", "must be at least 0, and below f_max")
        if self.power <= 0:
            raise self._refused("power", "must be above 0")
        if self.norm not in (None, "slaney"):
            raise self._refused("norm", 'must be "slaney" or left out')

    @property
    def dali_limit(self) -> str:
        is_supported = self.n_fft % 2 == 0 and self.n_fft >= 4 and self.power in (1.0, 2.0)
        return "" if is_supported else "makes spectrograms of an even n_fft from 4 on, and of power 1 or 2"

    @property
    def hop(self) -> int:
        """Samples from one frame to the next."""
        return max(1, self._length // 2) if self.hop_length is None else self.hop_length

    @property
    def window(self) -> NDArray[np.float32]:
        """The window, float32 [n_fft], padded with zeros on both sides if shorter."""
        return _hann(self._length, self.n_fft)

    @property
    def _length(self) -> int:
        return self.n_fft if self.win_length is None else self.win_length

    def frames(self, samples: int) -> int:
        """Return the number of frames for a number of audio samples."""
        return 1 + samples // self.hop

    def result(self, form: Form) -> Form:
        if form.kind != "sound":
            raise ConfigError(f"{self!r} needs sound, as DecodeAudio makes it, got {form.kind}s")
        top = form.rate / 2
        if self.f_min >= top or (self.f_max is not None and self.f_max > top):
            limits = f"f_min={self.f_min}, f_max={self.f_max}"
            raise ConfigError(f"{self!r} needs frequencies up to half of the rate, {top} Hz, got {limits}")
        longest = None if form.longest is None else self.frames(form.longest)
        return replace(form, kind="spectrogram", longest=longest)

    def check(self, array: Array, form: Form) -> None:
        """Validate the input.

        Raises:
            UnfitError: the array does not have the dtype and axes of ``form``, or is too short.
        """
        if array.dtype != np.float32 or array.ndim != (1 if form.channels == 1 else 2):
            wanted = "[time]" if form.channels == 1 else "[time, channels]"
            got = f"{array.dtype.name} {list(array.shape)}"
            raise UnfitError(f"it is {got} before MelSpectrogram, which needs float32 {wanted}")
        if len(array) <= self.n_fft // 2:
            raise UnfitError(
                f"its sound has {len(array)} samples, but MelSpectrogram with n_fft={self.n_fft} needs more than "
                f"{self.n_fft // 2}"
            )

    def apply(self, array: Array, u: NDArray[np.float64], form: Form) -> Array:  # noqa: ARG002 (deterministic)
        self.check(array, form)
        if array.ndim == 1:
            return self._mels(array, form.rate)
        return np.stack([self._mels(channel, form.rate) for channel in array.T], axis=1)

    def _mels(self, sound: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
        padded = np.pad(sound, self.n_fft // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop]
        window = self.window
        top = rate / 2 if self.f_max is None else self.f_max
        filters = _mel_filters(rate, self.n_fft, self.f_min, top, self.n_mels, self.norm, self.mel_scale)
        mels = np.empty((self.n_mels, len(frames)), np.float32)
        for start in range(0, len(frames), _FRAMES):
            some = slice(start, start + _FRAMES)
            by_frequency = np.ascontiguousarray(self._magnitudes(frames[some] * window).T)
            # Not a matrix product: each filter spans few frequencies, and the summation order of BLAS depends on the
            # processor.
            for row, (first, weights) in enumerate(filters):
                spanned = by_frequency[first : first + len(weights)] * weights[:, None]
                np.add.reduce(spanned, axis=0, out=mels[row, some])
        return np.ascontiguousarray(mels.T)

    def _magnitudes(self, frames: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return magnitudes to the ``power``, float32 [frames, frequencies]."""
        spectrum = np.fft.rfft(frames, axis=1).astype(np.complex64, copy=False)
        power = spectrum.real**2 + spectrum.imag**2
        if self.power == 2.0:
            return power
        if self.power == 1.0:
            return np.sqrt(power)
        # In float64: differences between processors are below the rounding to float32.
        return np.asarray(power.astype(np.float64) ** (self.power / 2), np.float32)


class SpectrogramTransform(ArrayTransform):
    """A transform of spectrograms, which arrays from files may be, too."""

    def result(self, form: Form) -> Form:
        if form.kind not in ("spectrogram", "array"):
            raise ConfigError(f"{self!r} needs spectrograms: put MelSpectrogram before it")
        return form

    def check(self, array: Array) -> None:
        if array.ndim < 2 or array.dtype.kind != "f":
            got = f"{array.dtype.name} {list(array.shape)}"
            raise UnfitError(f"it is {got} before {type(self).__name__}, which needs floats [time, ..., frequency]")


@dataclass(frozen=True)
class AmplitudeToDB(SpectrogramTransform):
    """Convert a spectrogram to decibels, like torchaudio: ``10 * log10(max(x, 1e-10))``, or 20 times for magnitudes.

    Args:
        stype: "power", or "magnitude" for a spectrogram with ``power=1``.
        top_db: values are clipped to at most this many decibels below the sample's maximum; None: no clipping.
    """

    stype: Annotated[Literal["power", "magnitude"], partial(checks.one_of, names=("power", "magnitude"))] = "power"
    top_db: Annotated[float | None, partial(checks.number, least=0.0)] = None

    def apply(self, array: Array, u: NDArray[np.float64], form: Form) -> Array:  # noqa: ARG002 (deterministic)
        self.check(array)
        # In float64: the float32 logarithm of NumPy rounds differently on different processors.
        decibels = np.log10(np.maximum(array, _LEAST_POWER, dtype=np.float64))
        decibels *= 10.0 if self.stype == "power" else 20.0
        if self.top_db is not None and decibels.size:
            np.maximum(decibels, decibels.max() - self.top_db, out=decibels)
        return decibels.astype(np.float32)


@dataclass(frozen=True)
class SpecAugment(SpectrogramTransform):
    """Mask random ranges of time and frequency in a spectrogram (Park et al., 2019), like torchaudio.

    The width of a mask is uniform in [0, maximum), and its position is uniform. Time masks are along the first axis,
    frequency masks along the last; all channels have the same masks.

    Args:
        n_time_masks: number of time masks.
        time_mask_param: maximum width of a time mask, in frames.
        n_freq_masks: number of frequency masks.
        freq_mask_param: maximum width of a frequency mask, in filters.
        p: maximum fraction of an axis covered by one mask, in [0, 1].
        zero_masking: whether masked values become 0; otherwise the mean of the sample's spectrogram.
    """

    n_time_masks: _MaskParameter
    time_mask_param: _MaskParameter
    n_freq_masks: _MaskParameter
    freq_mask_param: _MaskParameter
    p: Annotated[float, checks.fraction] = 1.0
    zero_masking: Annotated[bool, checks.flag] = False

    @property
    def draws(self) -> int:
        return 2 * (self.n_time_masks + self.n_freq_masks)

    def apply(self, array: Array, u: NDArray[np.float64], form: Form) -> Array:  # noqa: ARG002 (same for all forms)
        self.check(array)
        masked = array.copy()
        # Use the copy, which is in C order: another memory order would sum, and round, in another order.
        value = 0.0 if self.zero_masking or not array.size else masked.mean(dtype=np.float64)
        of_time, of_frequency = self.stretches(array.shape, u)
        for stretch in of_time:
            masked[stretch] = value
        for stretch in of_frequency:
            masked[..., stretch] = value
        return masked

    def stretches(self, shape: Sequence[int], u: NDArray[np.float64]) -> tuple[list[slice], list[slice]]:
        """Return the masked ranges of time and of frequency for a spectrogram of this shape."""
        found: tuple[list[slice], list[slice]] = ([], [])
        widths, places = u.reshape(-1, 2).T
        for number, (wide, place) in enumerate(zip(widths.tolist(), places.tolist(), strict=True)):
            is_time = number < self.n_time_masks
            length = shape[0 if is_time else -1]
            greatest = self.time_mask_param if is_time else self.freq_mask_param
            width = wide * (greatest if self.p == 1.0 else min(greatest, int(length * self.p)))
            start = int(place * max(0.0, length - width))
            found[0 if is_time else 1].append(slice(start, start + int(width)))
        return found


@lru_cache(maxsize=16)
def _hann(length: int, n_fft: int) -> NDArray[np.float32]:
    """Return a periodic Hann window, float32 [n_fft], padded with zeros on both sides if shorter."""
    window = np.zeros(n_fft, np.float32)
    first = (n_fft - length) // 2
    window[first : first + length] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
    return window


@lru_cache(maxsize=16)
def _mel_filters(
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
