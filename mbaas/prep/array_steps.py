"""Steps of the cpu engine for audio and other arrays: the decoder, array transforms and Maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.fields import Arrays
from mbaas.order import generator, uniforms
from mbaas.prep.array_files import ArrayReader
from mbaas.prep.decoded import KeptRows, KeptSample, is_decoded, read_decoded
from mbaas.prep.engine import Encoded
from mbaas.prep.header import UndecodableError
from mbaas.prep.sound import SoundDecoder
from mbaas.prep.user_code import SampleFields, call_map
from mbaas.transforms import DecodeAudio, Map, Pipeline
from mbaas.transforms.arrays import ArrayTransform, ArrayWindow, UnfitError
from mbaas.transforms.decoders import DecodeArray

Array = NDArray[Any]
_Decode = Callable[[memoryview, NDArray[np.float64]], tuple[Array, bool]]
"""(bytes, random numbers of the second transform) -> (decoded sample, True if the second transform is included)."""


@dataclass(frozen=True)
class ArrayPart:
    """The samples of a block, before they are prepared.

    Attributes:
        encoded: bytes of the n samples.
        sample_ids: int64[n], their ids.
        epoch: seeds the random transforms.
        chance: uniform random numbers of each transform of the pipeline, float64[n, draws].
        fields: the samples' fields, which Maps may change.
    """

    encoded: Sequence[Encoded]
    sample_ids: NDArray[np.int64]
    epoch: int
    chance: list[NDArray[np.float64]]
    fields: SampleFields


class ArraySteps:
    """Applies the first transforms of a pipeline, or all, to one sample at a time. Thread-safe.

    Args:
        pipeline: begins with DecodeAudio or DecodeArray.
        seed, max_bytes: see `mbaas.prep.engines.make_engine`.
        count: number of transforms to apply, at least the decoder; None: all.

    Raises:
        ConfigError: a package needed by the decoder is missing.
    """

    def __init__(self, pipeline: Pipeline, *, seed: int, max_bytes: int, count: int | None = None) -> None:
        self._pipeline, self._seed = pipeline, seed
        self._stages = list(enumerate(pipeline.transforms))[:count]
        window = self._stages[1][1] if len(self._stages) > 1 else None
        of_sound = isinstance(pipeline.decoder, DecodeAudio)
        if not (of_sound and isinstance(window, ArrayWindow) and len(window.sizes) == 1):
            window = None
        self._decode, self._decode_whole = (_decoder_of(pipeline, max_bytes, each) for each in (window, None))
        # These steps may end before the pipeline's prefix does.
        self._kept = min(pipeline.prefix, len(self._stages))

    def part(self, encoded: Sequence[Encoded], sample_ids: NDArray[np.int64], epoch: int, known: Arrays) -> ArrayPart:
        """Draw the random numbers of all samples at once; one by one would cost more than a transform."""
        chance = [
            uniforms(self._seed, epoch, sample_ids, substream=index, draws=transform.draws)
            for index, transform in enumerate(self._pipeline.transforms)
        ]
        return ArrayPart(encoded, sample_ids, epoch, chance, SampleFields(known, self._pipeline))

    def sample(self, part: ArrayPart, row: int, keep: KeptRows | None = None) -> Array:
        """Prepare one sample, and keep its decoded form if ``keep`` wants it.

        Raises:
            UndecodableError: it cannot be decoded, or a Map's function fails.
            UnfitError: a transform does not accept it.
        """
        encoded = memoryview(cast("Any", part.encoded[row]))
        if is_decoded(encoded):
            return self._rest(part, row, *self._opened(encoded), None)
        kept = KeptSample(keep, row, self._kept) if keep is not None and keep.wants(row) else None
        u = part.chance[1 if len(part.chance) > 1 else 0][row]
        array, is_window = self._decode(encoded, u)
        done = 2 if is_window else 1
        if kept is not None and self._kept == done:
            kept.put(array)
        elif kept is not None and self._kept < done:
            self._keep_whole(encoded, array, u, kept)
        return self._rest(part, row, array, done, kept)

    def _opened(self, container: memoryview) -> tuple[Array, int]:
        decoded = read_decoded(container)
        if decoded.original is not None:
            raise UndecodableError("it is a decoded image, and this pipeline makes none")
        decoded.check_applied(self._kept)
        return decoded.values, decoded.applied

    def _keep_whole(self, encoded: memoryview, window: Array, u: NDArray[np.float64], kept: KeptSample) -> None:
        # Not kept if damaged elsewhere: the sample is good while windows do not reach the damage. Nor if its window
        # differs from the one read alone, as in files where the decoder cannot seek exactly.
        transform = self._pipeline.transforms[1]
        assert isinstance(transform, ArrayWindow)
        try:
            whole, _ = self._decode_whole(encoded, u)
            same = np.array_equal(transform.apply(whole, u, self._pipeline.forms[0]), window)
        except (UndecodableError, UnfitError):
            same = False
        if same:
            kept.put(whole)
        else:
            kept.drop()

    def _rest(self, part: ArrayPart, row: int, array: Array, done: int, kept: KeptSample | None) -> Array:
        for index, transform in self._stages[done:]:
            if isinstance(transform, Map):
                # Copy, because the function may change its input, which may be a view of the sample's bytes.
                rng = partial(generator, self._seed, part.epoch, int(part.sample_ids[row]), substream=index)
                array = call_map(transform, self._pipeline.decoder.made, array.copy(), part.fields, row, rng)
            elif isinstance(transform, ArrayTransform):
                # Large values may overflow when squared; a warning would not name the sample.
                with np.errstate(over="ignore", invalid="ignore"):
                    array = transform.apply(array, part.chance[index][row], self._pipeline.forms[index - 1])
            if kept is not None and self._kept == index + 1:
                kept.put(array)
        return array


def _decoder_of(pipeline: Pipeline, max_bytes: int, window: ArrayWindow | None) -> _Decode:
    decoder = pipeline.decoder
    if isinstance(decoder, DecodeAudio):
        return SoundDecoder(decoder, max_bytes, window)
    assert isinstance(decoder, DecodeArray), decoder
    read = ArrayReader(decoder, max_bytes)
    return lambda encoded, _: (read(encoded), False)
