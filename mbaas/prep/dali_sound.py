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

from mbaas.fields import Arrays, Field, Packed
from mbaas.messages import EngineName
from mbaas.prep import dali_sound_graph
from mbaas.prep.array_engine import ArrayEngine
from mbaas.prep.array_results import Array, ArrayResults
from mbaas.prep.array_steps import ArrayPart, ArraySteps
from mbaas.prep.dali_runs import GraphRuns
from mbaas.prep.decoded import KeptRows
from mbaas.prep.engine import DEFAULT_MAX_BYTES, BadRow, Encoded, Prepared
from mbaas.prep.threads import SampleThreads
from mbaas.transforms import MelSpectrogram, Pipeline

BATCH_VALUES = 64_000_000
"""Maximum spectrum values of a batch, before mel filters: 256 MB. One second at 16 kHz has 26,000 values with
MelSpectrogram(n_fft=512, hop_length=160).
"""


class DaliSoundEngine:
    """An engine that makes spectrograms of audio with DALI. See ``prep.engine.Engine``."""

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
        """Build no graph yet: its batch size depends on the first block.

        Args:
            batch_values: maximum spectrum values of a batch, unless a single sample has more.
            pipeline, seed, threads, device_id, max_bytes: see `mbaas.prep.engines.make_engine`.

        Raises:
            ConfigError: a package for decoding audio is missing.
        """
        stages = list(enumerate(pipeline.transforms))
        first, mels = next((index, each) for index, each in stages if isinstance(each, MelSpectrogram))
        self._pipeline, self._stages = pipeline, stages[first:]
        self._mels, self._form = mels, pipeline.forms[first - 1]
        self._steps = ArraySteps(pipeline, seed=seed, max_bytes=max_bytes, count=first)
        self._threads = SampleThreads(threads)
        self._cpu = ArrayEngine(pipeline, seed=seed, threads=threads, max_bytes=max_bytes)
        self._runs = GraphRuns(
            lambda: dali_sound_graph.spectrograms(self._stages, self._form, gpu=device_id is not None),
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
        keep: KeptRows | None = None,
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
        self, part: ArrayPart, results: ArrayResults, keep: KeptRows | None
    ) -> tuple[list[dict[str, NDArray[Any]]], NDArray[np.int64]]:
        """Decode audio; return the graph's inputs and number of spectrum values per sample, none for bad samples."""
        inputs: list[dict[str, NDArray[Any]]] = [{} for _ in part.encoded]
        values = np.zeros(len(inputs), np.int64)

        def work(row: int) -> None:
            with results.judged(row, keep):
                sound = self._steps.sample(part, row, keep)
                self._mels.check(sound, self._form)
                chance = [numbers[row] for numbers in part.chance]
                inputs[row] = dali_sound_graph.feeds(self._stages, np.ascontiguousarray(sound), chance)
                channels = sound.size // len(sound)
                values[row] = self._mels.frames(len(sound)) * channels * (self._mels.n_fft // 2 + 1)

        self._threads.run(work, len(inputs))
        return inputs, values


_NOTHING = np.zeros(0, np.float32)
"""Placeholder for the inputs of a bad sample; no run uses it."""
