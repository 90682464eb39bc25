"""The dali engine for audio: DALI makes the spectrograms, on a GPU or the CPU.

All steps before MelSpectrogram run as in the cpu engine, so audio has the same values, and samples are bad for the same
reasons. DALI's own decoder does not support MP3, and rejects a whole batch for one damaged file. DALI's resampler does
not filter before it reduces the rate, so it causes aliasing. The decoded form of a sample is its audio before
MelSpectrogram, the same for both engines.

Results that are not finite are prepared again by the cpu engine: DALI's masks turn infinity into NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, math

from mbaas.prep.decoded import DecodedRows
from mbaas.prep.engines import DEFAULT_MAX_BYTES, Batch, Prepared
from mbaas.prep.engines.arrays import Array, ArrayEngine
from mbaas.prep.engines.dali_runs import GraphRuns, types
from mbaas.prep.geometry import Stage
from mbaas.prep.part import SampleFields
from mbaas.transforms import AmplitudeToDB, MelSpectrogram, Pipeline, SpecAugment
from mbaas.transforms.arrays import ArrayWindow, Form
from mbaas.wire.samples import EngineName

BATCH_VALUES = 64_000_000
"""Maximum spectrum values of a batch, before mel filters: 256 MB. One second at 16 kHz has 26,000 values with
MelSpectrogram(n_fft=512, hop_length=160).
"""


SOUND = "sound"


class DaliSoundEngine(ArrayEngine):
    """An engine that makes spectrograms of audio with DALI. See `mbaas.prep.engines.Engine`."""

    name: EngineName = "dali"

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        seed: int,
        threads: int = 1,
        device_id: int | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        batch_values: int = BATCH_VALUES,
    ) -> None:
        super().__init__(pipeline, seed=seed, threads=threads, max_bytes=max_bytes)
        stages = list(enumerate(pipeline.transforms))
        self._first, self._mels = next((index, each) for index, each in stages if isinstance(each, MelSpectrogram))
        self._stages, self._form = stages[self._first :], pipeline.forms[self._first - 1]
        self._kept_after = self._kept_after[: self._first]
        self._runs = GraphRuns(
            lambda: spectrogram_graph(self._stages, self._form, gpu=device_id is not None),
            threads=threads,
            device_id=device_id,
            limit=batch_values,
            unit="values",
        )
        self._graphs = (self._runs,)

    def prepare(self, batch: Batch, out: Array, keep: DecodedRows | None = None) -> Prepared:
        part, again = self._part(batch, out, keep), list[int]()
        inputs: dict[int, dict[str, Array]] = {}
        values = np.zeros(len(batch), np.int64)  # of the spectrum

        def decode(row: int) -> None:
            sound = self._sample(part, row, self._first)
            self._mels.check(sound, self._form)
            chance = [numbers[row] for numbers in part.chance]
            inputs[row] = graph_inputs(self._stages, np.ascontiguousarray(sound), chance)
            channels = sound.size // len(sound)
            values[row] = self._mels.frames(len(sound)) * channels * (self._mels.n_fft // 2 + 1)

        def take(spectrograms: Mapping[int, Array]) -> None:
            for row, made in spectrograms.items():
                if np.isfinite(made).all():
                    part.results.attempt(row, part.results.put, row, made)
                else:
                    again.append(row)

        self._threads.run(lambda row: part.results.attempt(row, decode, row), len(batch))
        taken = np.flatnonzero(values)
        names = inputs[taken[0]] if len(taken) else ()
        feeds = {name: {row: each[name] for row, each in inputs.items()} for name in names}
        again += self._runs.run(taken, values, feeds, take)
        # From the original fields, because a Map has changed those of the part.
        self._make(replace(part, fields=SampleFields(batch.known, self._pipeline)), sorted(again))
        return part.results.finish(part.fields.columns())


def graph_inputs(
    stages: Sequence[Stage], sound: NDArray[np.float32], chance: Sequence[NDArray[np.float64]]
) -> dict[str, NDArray[Any]]:
    """Return the inputs of the graph for one sample.

    Args:
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


def spectrogram_graph(stages: Sequence[Stage], form: Form, *, gpu: bool) -> Any:
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
