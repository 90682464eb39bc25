"""The dali engine for audio: DALI makes the spectrograms, on a GPU or the CPU.

All steps before MelSpectrogram run as in the cpu engine, so audio has the same values, and samples are bad for the same
reasons. DALI's own decoder does not support MP3, and rejects a whole batch for one damaged file. DALI's resampler does
not filter before it reduces the rate, so it causes aliasing. The decoded form of a sample is its audio before
MelSpectrogram, the same for both engines.

Results that are not finite are prepared again by the cpu engine: DALI's masks turn infinity into NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, math

from mbaas.prep.decoded import DecodedRows
from mbaas.prep.engines import DEFAULT_MAX_BYTES, BadRow, Encoded, Prepared
from mbaas.prep.engines.arrays import Array, ArrayEngine, ArrayPart, ArrayResults, ArraySteps
from mbaas.prep.engines.dali_runs import GraphRuns, types
from mbaas.prep.geometry import Stage
from mbaas.prep.process import SampleThreads
from mbaas.samples.fields import Arrays, Field, Packed
from mbaas.transforms import AmplitudeToDB, MelSpectrogram, Pipeline, SpecAugment
from mbaas.transforms.arrays import ArrayWindow, Form
from mbaas.wire.samples import EngineName

BATCH_VALUES = 64_000_000
"""Maximum spectrum values of a batch, before mel filters: 256 MB. One second at 16 kHz has 26,000 values with
MelSpectrogram(n_fft=512, hop_length=160).
"""


SOUND = "sound"


class DaliSoundEngine:
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
        # No graph is built yet: its batch size depends on the first block. A single sample may have more values.
        stages = list(enumerate(pipeline.transforms))
        first, mels = next((index, each) for index, each in stages if isinstance(each, MelSpectrogram))
        self._pipeline, self._stages = pipeline, stages[first:]
        self._mels, self._form = mels, pipeline.forms[first - 1]
        self._steps = ArraySteps(pipeline, seed=seed, max_bytes=max_bytes, count=first)
        self._threads = SampleThreads(threads)
        self._cpu = ArrayEngine(pipeline, seed=seed, threads=threads, max_bytes=max_bytes)
        self._runs = GraphRuns(
            lambda: spectrogram_graph(self._stages, self._form, gpu=device_id is not None),
            threads=threads,
            device_id=device_id,
            limit=batch_values,
            unit="values",
        )

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        return self._cpu.field(encoded, uri, known)

    def prepare(
        self,
        encoded: Sequence[Encoded],
        sample_ids: NDArray[np.int64],
        epoch: int,
        known: Arrays,
        out: Array,
        keep: DecodedRows | None = None,
    ) -> Prepared:
        part = self._steps.part(encoded, sample_ids, epoch, known)
        results = ArrayResults(out, self._pipeline.forms[-1].differing)
        inputs, values = self._decoded(part, results, keep)
        again: list[int] = []

        def take(row: int, made: Array) -> None:
            if not np.isfinite(made).all():
                again.append(row)
                return
            with results.judged(row, keep):
                results.put(row, made)

        taken = np.flatnonzero(values)
        names = inputs[taken[0]] if len(taken) else {}
        feeds = {name: [each.get(name, _NOTHING) for each in inputs] for name in names}
        again += self._runs.run(taken, values, feeds, take)
        if again:
            rows = sorted(again)
            some = {name: column[np.array(rows)] for name, column in known.items()}
            # A separate array: indexing `out` with rows would make a copy.
            apart = np.empty((len(rows), *out.shape[1:]), out.dtype)
            left = self._cpu.prepare([encoded[row] for row in rows], sample_ids[rows], epoch, some, apart)
            lost = {rows[each.row]: each.reason for each in left.bad}
            for number, row in enumerate(rows):
                if row not in lost:
                    results.put(row, left.made.value(number) if isinstance(left.made, Packed) else left.made[number])
                elif keep is not None:
                    keep.drop(row)
            results.bad += [BadRow(row, reason) for row, reason in lost.items()]
        return results.finish(part.fields.columns())

    def set_threads(self, threads: int) -> None:
        self._threads.close()
        self._threads = SampleThreads(threads)
        self._cpu.set_threads(threads)
        self._runs.set_threads(threads)

    def close(self) -> None:
        self._threads.close()
        self._runs.close()
        self._cpu.close()

    def _decoded(
        self, part: ArrayPart, results: ArrayResults, keep: DecodedRows | None
    ) -> tuple[list[dict[str, NDArray[Any]]], NDArray[np.int64]]:
        """Decode audio; return the graph's inputs and number of spectrum values per sample, none for bad samples."""
        inputs: list[dict[str, NDArray[Any]]] = [{} for _ in part.encoded]
        values = np.zeros(len(inputs), np.int64)

        def work(row: int) -> None:
            with results.judged(row, keep):
                sound = self._steps.sample(part, row, keep)
                self._mels.check(sound, self._form)
                chance = [numbers[row] for numbers in part.chance]
                inputs[row] = graph_inputs(self._stages, np.ascontiguousarray(sound), chance)
                channels = sound.size // len(sound)
                values[row] = self._mels.frames(len(sound)) * channels * (self._mels.n_fft // 2 + 1)

        self._threads.run(work, len(inputs))
        return inputs, values


_NOTHING = np.zeros(0, np.float32)
"""Placeholder for the inputs of a bad sample; no run uses it."""


def graph_inputs(
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
