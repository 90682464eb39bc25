"""The cpu engine for samples other than images: audio, spectrograms, volumes and other arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import BadSampleError, ConfigError
from mbaas.fields import Arrays, Field
from mbaas.messages import EngineName
from mbaas.prep.array_results import Array, ArrayResults
from mbaas.prep.array_steps import ArraySteps
from mbaas.prep.decoded import KeptRows
from mbaas.prep.engine import DEFAULT_MAX_BYTES, Encoded, Prepared
from mbaas.prep.header import UndecodableError
from mbaas.prep.threads import SampleThreads
from mbaas.transforms import Pipeline
from mbaas.transforms.arrays import UnfitError
from mbaas.transforms.decoders import is_numeric


class ArrayEngine:
    """An engine that prepares audio and other arrays, ``threads`` samples at a time. See ``prep.engine.Engine``.

    Args:
        pipeline: begins with DecodeAudio or DecodeArray.
        seed, threads, max_bytes: see `mbaas.prep.engines.make_engine`.

    Raises:
        ConfigError: a package needed by the decoder is missing.
    """

    name: EngineName = "cpu"

    def __init__(self, pipeline: Pipeline, *, seed: int, threads: int = 1, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._pipeline = pipeline
        self._steps = ArraySteps(pipeline, seed=seed, max_bytes=max_bytes)
        self._threads = SampleThreads(threads)

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        try:
            sample = self._steps.sample(self._steps.part([encoded], np.zeros(1, np.int64), 0, known), 0)
        except (UndecodableError, UnfitError) as error:
            raise BadSampleError(uri, str(error)) from error
        last, name = self._pipeline.forms[-1], self._pipeline.decoder.made
        if not is_numeric(sample.dtype):
            raise ConfigError(f"samples are arrays of {sample.dtype.name}, and must be numbers that torch has")
        if not last.differs:
            return Field(name, sample.shape, sample.dtype.name)
        if sample.ndim < last.differing:
            first = "length" if last.differing == 1 else f"{last.differing} lengths"
            has = "a number without any" if not sample.ndim else f"{sample.dtype.name} {list(sample.shape)}"
            raise ConfigError(f"samples may differ in their first {first}, but the first one is {has}")
        assert last.longest is not None  # checked by the pipeline
        shape = (*(None,) * last.differing, *sample.shape[last.differing :])
        return Field(name, shape, sample.dtype.name, last.longest)

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

        def work(row: int) -> None:
            with results.judged(row, keep):
                results.put(row, self._steps.sample(part, row, keep))

        self._threads.run(work, len(encoded))
        return results.finish(part.fields.columns())

    def set_threads(self, threads: int) -> None:
        self.close()
        self._threads = SampleThreads(threads)

    def close(self) -> None:
        self._threads.close()
