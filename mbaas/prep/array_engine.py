"""The engine for all that is no image: sound, spectrograms, volumes and other arrays, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import BadSampleError, ConfigError
from mbaas.fields import Arrays, Field, Packed
from mbaas.messages import EngineName
from mbaas.order import generator, uniforms
from mbaas.prep.array_files import ArrayReader
from mbaas.prep.engine import DEFAULT_MAX_BYTES, BadRow, Encoded, Prepared
from mbaas.prep.header import UndecodableError
from mbaas.prep.sound import SoundDecoder
from mbaas.prep.threads import SampleThreads
from mbaas.prep.user_code import SampleFields, call_map
from mbaas.transforms import DecodeArray, DecodeAudio, Map, Pipeline
from mbaas.transforms.arrays import ArrayTransform, UnfitError
from mbaas.transforms.decoders import is_numeric

Array = NDArray[Any]


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
        self._pipeline, self._seed = pipeline, seed
        self._decode = _decoder_of(pipeline, max_bytes)
        self._threads = SampleThreads(threads)

    def field(self, encoded: Encoded, uri: str, known: Arrays) -> Field:
        try:
            fields = SampleFields(known, self._pipeline)
            sample = self._sample(encoded, 0, 0, self._chance(np.zeros(1, np.int64), 0), 0, fields)
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
        chance = self._chance(sample_ids, epoch)
        differs = self._pipeline.forms[-1].differs
        fields = SampleFields(known, self._pipeline)
        lengths = np.zeros(len(encoded), np.int64)
        bad: list[BadRow] = []

        def work(row: int) -> None:
            try:
                sample = self._sample(encoded[row], int(sample_ids[row]), epoch, chance, row, fields)
                into = _room_for(sample, out[row]) if differs else out[row, ...]  # an array, also of one number
                _deliver(sample, into)
            except UndecodableError as error:
                bad.append(BadRow(row, str(error)))
            else:
                lengths[row] = len(into) if differs else 0

        self._threads.run(work, len(encoded))
        known = fields.columns()
        if bad:
            bad.sort(key=lambda each: each.row)
            rows = [each.row for each in bad]
            out[rows] = 0
            good = np.setdiff1d(np.arange(len(encoded)), rows)
            known = {name: column[good] for name, column in known.items()}
        return Prepared(bad, known, Packed.closed_up(out, lengths) if differs else out)

    def set_threads(self, threads: int) -> None:
        self.close()
        self._threads = SampleThreads(threads)

    def close(self) -> None:
        self._threads.close()

    def _chance(self, sample_ids: NDArray[np.int64], epoch: int) -> list[NDArray[np.float64]]:
        """Draw the uniform numbers of each transform, for all samples of a block at once: float64[n, draws]."""
        return [
            uniforms(self._seed, epoch, sample_ids, substream=index, draws=transform.draws)
            for index, transform in enumerate(self._pipeline.transforms)
        ]

    def _sample(
        self,
        encoded: Encoded,
        sample_id: int,
        epoch: int,
        chance: Sequence[NDArray[np.float64]],
        row: int,
        fields: SampleFields,
    ) -> Array:
        """Prepare one sample, whose numbers and fields are in this row of ``chance`` and ``fields``."""
        array = self._decode(memoryview(encoded))  # type: ignore[arg-type]  # arrays are buffers, too
        _, *transforms = self._pipeline.transforms
        for index, transform in enumerate(transforms, start=1):
            if isinstance(transform, Map):
                # A copy, because the function may change what it gets, and this may be a view of the sample's bytes.
                rng = generator(self._seed, epoch, sample_id, substream=index)
                array = call_map(transform, self._pipeline.decoder.made, array.copy(), fields, row, rng)
            elif isinstance(transform, ArrayTransform):
                try:
                    # A sample's numbers may be so large that their squares are none; a warning would not say whose.
                    with np.errstate(over="ignore", invalid="ignore"):
                        array = transform.apply(array, chance[index][row], self._pipeline.forms[index - 1])
                except UnfitError as error:
                    raise UndecodableError(str(error)) from error
        return array


def _decoder_of(pipeline: Pipeline, max_bytes: int) -> Callable[[memoryview], Array]:
    decoder = pipeline.decoder
    if isinstance(decoder, DecodeAudio):
        return SoundDecoder(decoder, max_bytes)
    assert isinstance(decoder, DecodeArray), decoder
    return ArrayReader(decoder, max_bytes)


def _room_for(sample: Array, row: Array) -> Array:
    """Return the first places of a row, as many as a sample has."""
    if not sample.ndim or len(sample) > len(row):
        got = f"{sample.dtype.name} {list(sample.shape)}"
        raise UndecodableError(f"it is prepared to {got}, and its first length must be at most {len(row):,}")
    return row[: len(sample)]


def _deliver(sample: Array, into: Array) -> None:
    if (sample.shape, sample.dtype) != (into.shape, into.dtype):
        got, wanted = (f"{each.dtype.name} {list(each.shape)}" for each in (sample, into))
        raise UndecodableError(
            f"it is prepared to {got}, but the samples of this feed are {wanted}; a RandomCrop or a CropOrPad in the "
            "pipeline gives all the same lengths"
        )
    np.copyto(into, sample)
