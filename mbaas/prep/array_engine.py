"""The engine for all that is no image: sound, spectrograms, volumes and other arrays, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import BadSampleError, ConfigError
from mbaas.fields import Arrays, Field
from mbaas.messages import EngineName
from mbaas.prep.array_steps import Array, ArraySteps, deliver, finish
from mbaas.prep.engine import DEFAULT_MAX_BYTES, BadRow, Encoded, Prepared
from mbaas.prep.header import UndecodableError
from mbaas.prep.threads import SampleThreads
from mbaas.prep.user_code import SampleFields
from mbaas.transforms import Pipeline
from mbaas.transforms.decoders import is_numeric


class ArrayEngine:
    """An engine that prepares arrays that are no images, ``threads`` samples at a time. See ``prep.engine.Engine``.

    Args:
        pipeline: begins with DecodeAudio or DecodeArray.
        seed: of the feed.
        threads: that work on one block.
        max_bytes: of one decoded sample; one that claims more is refused before memory is taken for it.

    Raises:
        ConfigError: a package is not installed that the decoder needs.
    """

    name: EngineName = "cpu"

    def __init__(self, pipeline: Pipeline, *, seed: int, threads: int = 1, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._pipeline = pipeline
        self._steps = ArraySteps(pipeline, seed=seed, max_bytes=max_bytes)
        self._threads = SampleThreads(threads)

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        try:
            fields = SampleFields(known, self._pipeline)
            chance = self._steps.chance(np.zeros(1, np.int64), 0)
            sample = self._steps.sample(encoded, 0, 0, chance, 0, fields)
        except UndecodableError as error:
            raise BadSampleError(uri, str(error)) from error
        last, name = self._pipeline.forms[-1], self._pipeline.decoder.made
        if not is_numeric(sample.dtype):
            raise ConfigError(f"samples are arrays of {sample.dtype.name}, and must be numbers that torch has")
        if not last.differs:
            return Field(name, sample.shape, sample.dtype.name)
        if not sample.ndim:
            raise ConfigError("samples may differ in their first length, but the first one is a number without any")
        assert last.longest is not None  # the pipeline has checked it
        return Field(name, (None, *sample.shape[1:]), sample.dtype.name, last.longest)

    def prepare(
        self, encoded: Sequence[Encoded], sample_ids: NDArray[np.int64], epoch: int, known: Arrays, out: Array
    ) -> Prepared:
        chance = self._steps.chance(sample_ids, epoch)
        differs = self._pipeline.forms[-1].differs
        fields = SampleFields(known, self._pipeline)
        lengths = np.zeros(len(encoded), np.int64)
        bad: list[BadRow] = []

        def work(row: int) -> None:
            try:
                sample = self._steps.sample(encoded[row], int(sample_ids[row]), epoch, chance, row, fields)
                lengths[row] = deliver(sample, out[row, ...], differs=differs)  # an array, also of one number
            except UndecodableError as error:
                bad.append(BadRow(row, str(error)))

        self._threads.run(work, len(encoded))
        return finish(bad, fields.columns(), lengths if differs else None, out)

    def set_threads(self, threads: int) -> None:
        self.close()
        self._threads = SampleThreads(threads)

    def close(self) -> None:
        self._threads.close()
