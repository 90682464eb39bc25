"""Builds a DALI graph that makes a pipeline's spectrograms, and the data that is fed to it.

The graph is static. Random parameters are inputs, from the same random numbers that the cpu engine draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, math

from mbaas.prep.dali_runs import types
from mbaas.prep.plan import Stage
from mbaas.transforms import AmplitudeToDB, MelSpectrogram, SpecAugment
from mbaas.transforms.arrays import ArrayWindow, Form

SOUND = "sound"


def feeds(
    stages: Sequence[Stage], sound: NDArray[np.float32], chance: Sequence[NDArray[np.float64]]
) -> dict[str, NDArray[Any]]:
    """Return the inputs of the graph for one sample.

    Args:
        stages: a MelSpectrogram, and the transforms after it.
        sound: float32 [time] or [time, channels].
        chance: random numbers of each transform of the pipeline, float64[draws].
    """
    inputs: dict[str, NDArray[Any]] = {SOUND: sound}
    shape: tuple[int, ...] = sound.shape
    for index, transform in stages:
        if isinstance(transform, MelSpectrogram):
            shape = (transform.frames(len(sound)), *shape[1:], transform.n_mels)
        elif isinstance(transform, SpecAugment):
            of_time, of_frequency = transform.stretches(shape, chance[index])
            inputs[f"time {index}"] = _kept(shape, 0, of_time)
            inputs[f"frequency {index}"] = _kept(shape, len(shape) - 1, of_frequency)
        elif isinstance(transform, ArrayWindow):
            inputs[f"start {index}"] = np.array(transform.starts(shape, chance[index]), np.int32)
            shape = (*transform.sizes, *shape[len(transform.sizes) :])
    return inputs


def _kept(shape: Sequence[int], axis: int, masked: Sequence[slice]) -> NDArray[np.float32]:
    """Return a mask along an axis: 1 where values are kept, 0 where they are masked; all other axes have length 1."""
    kept = np.ones(shape[axis], np.float32)
    for stretch in masked:
        kept[stretch] = 0
    return kept.reshape([-1 if each == axis else 1 for each in range(len(shape))])


def spectrograms(stages: Sequence[Stage], form: Form, *, gpu: bool) -> Any:
    """Build the nodes of a graph whose output is float32 [frames, n_mels] or [frames, channels, n_mels].

    ``stages`` are a MelSpectrogram and the transforms after it; ``form`` is the form of the audio.
    """
    axes = 1 if form.channels == 1 else 2
    made = _input(SOUND, axes, gpu)
    for index, transform in stages:
        if isinstance(transform, MelSpectrogram):
            made, axes = _mels(made, transform, form), axes + 1
        elif isinstance(transform, AmplitudeToDB):
            made = _decibels(made, transform)
        elif isinstance(transform, SpecAugment):
            kept = _input(f"time {index}", axes, gpu) * _input(f"frequency {index}", axes, gpu)
            masked = made * kept
            made = masked if transform.zero_masking else masked + (1.0 - kept) * fn.reductions.mean(made)
        elif isinstance(transform, ArrayWindow):
            start = fn.external_source(name=f"start {index}", dtype=types.INT32, ndim=1)
            along = list(range(len(transform.sizes)))
            made = fn.slice(
                made, start=start, shape=list(transform.sizes), axes=along, out_of_bounds_policy="pad", fill_values=0
            )
    return made


def _mels(sound: Any, transform: MelSpectrogram, form: Form) -> Any:
    if form.channels > 1:
        alone = Form("sound", rate=form.rate)
        channels = [_mels(sound[:, channel], transform, alone) for channel in range(form.channels)]
        return fn.stack(*channels, axis=1)
    spectrum = fn.spectrogram(
        sound,
        nfft=transform.n_fft,
        # Full-length window from our transform: DALI's is not periodic, and a shorter one is aligned differently.
        window_length=transform.n_fft,
        window_fn=transform.window.tolist(),
        window_step=transform.hop,
        power=int(transform.power),
        layout="tf",
    )
    return fn.mel_filter_bank(
        spectrum,
        nfilter=transform.n_mels,
        sample_rate=form.rate,
        freq_low=transform.f_min,
        freq_high=form.rate / 2 if transform.f_max is None else transform.f_max,
        mel_formula=transform.mel_scale,
        normalize=transform.norm == "slaney",
    )


def _decibels(spectrogram: Any, transform: AmplitudeToDB) -> Any:
    factor = 10.0 if transform.stype == "power" else 20.0
    # Same cut-off as in AmplitudeToDB: factor * log10(1e-10).
    decibels = fn.to_decibels(spectrogram, multiplier=factor, reference=1.0, cutoff_db=-10 * factor)
    if transform.top_db is None:
        return decibels
    return math.max(decibels, fn.reductions.max(decibels) - transform.top_db)


def _input(name: str, axes: int, gpu: bool) -> Any:
    given = fn.external_source(name=name, dtype=types.FLOAT, ndim=axes, no_copy=True)
    return given.gpu() if gpu else given
