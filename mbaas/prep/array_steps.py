"""What is done to a sample that is no image, on the CPU: its decoder, then transforms of arrays and Maps."""

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
from mbaas.prep.engine import Encoded
from mbaas.prep.sound import SoundDecoder
from mbaas.prep.user_code import SampleFields, call_map
from mbaas.transforms import DecodeAudio, Map, Pipeline
from mbaas.transforms.arrays import ArrayTransform, ArrayWindow
from mbaas.transforms.decoders import DecodeArray

Array = NDArray[Any]
_Decode = Callable[[memoryview, NDArray[np.float64]], Array]


@dataclass(frozen=True)
class ArrayPart:
    """The samples of a block, before they are prepared.

    Attributes:
        encoded: the bytes of the n samples.
        sample_ids: int64[n], their ids.
        epoch: of the block; what is random depends on it.
        chance: the uniform numbers of each transform of the pipeline, float64[n, draws].
        fields: of the samples, in which Maps change values.
    """

    encoded: Sequence[Encoded]
    sample_ids: NDArray[np.int64]
    epoch: int
    chance: list[NDArray[np.float64]]
    fields: SampleFields


class ArraySteps:
    """The first transforms of a pipeline, or all of them, for one sample at a time. Threads may share it.

    Args:
        pipeline: begins with DecodeAudio or DecodeArray.
        seed: of the feed.
        max_bytes: of one decoded sample; one that claims more is refused before memory is taken for it.
        count: how many of its transforms are done, at least the decoder; None: all.

    Raises:
        ConfigError: a package is not installed that the decoder needs.
    """

    def __init__(self, pipeline: Pipeline, *, seed: int, max_bytes: int, count: int | None = None) -> None:
        self._pipeline, self._seed = pipeline, seed
        first, *later = list(enumerate(pipeline.transforms))[:count]
        window = later[0][1] if later else None
        if isinstance(pipeline.decoder, DecodeAudio) and isinstance(window, ArrayWindow) and len(window.sizes) == 1:
            first, *later = later
        else:
            window = None
        self._decode, self._chance_of_decoding = _decoder_of(pipeline, max_bytes, window), first[0]
        self._later = later

    def part(self, encoded: Sequence[Encoded], sample_ids: NDArray[np.int64], epoch: int, known: Arrays) -> ArrayPart:
        """Draw the random numbers of samples, all at once: drawing for each alone would cost more than a transform.

        See `Engine.prepare` for the arguments.
        """
        chance = [
            uniforms(self._seed, epoch, sample_ids, substream=index, draws=transform.draws)
            for index, transform in enumerate(self._pipeline.transforms)
        ]
        return ArrayPart(encoded, sample_ids, epoch, chance, SampleFields(known, self._pipeline))

    def sample(self, part: ArrayPart, row: int) -> Array:
        """Prepare one sample.

        Raises:
            UndecodableError: it cannot be decoded, or a Map's function fails.
            UnfitError: it is none for a transform.
        """
        encoded = memoryview(cast("Any", part.encoded[row]))
        array = self._decode(encoded, part.chance[self._chance_of_decoding][row])
        for index, transform in self._later:
            if isinstance(transform, Map):
                # A copy, because the function may change what it gets, and this may be a view of the sample's bytes.
                rng = partial(generator, self._seed, part.epoch, int(part.sample_ids[row]), substream=index)
                array = call_map(transform, self._pipeline.decoder.made, array.copy(), part.fields, row, rng)
            elif isinstance(transform, ArrayTransform):
                # A sample's numbers may be so large that their squares are none; a warning would not say whose.
                with np.errstate(over="ignore", invalid="ignore"):
                    array = transform.apply(array, part.chance[index][row], self._pipeline.forms[index - 1])
        return array


def _decoder_of(pipeline: Pipeline, max_bytes: int, window: ArrayWindow | None) -> _Decode:
    decoder = pipeline.decoder
    if isinstance(decoder, DecodeAudio):
        return SoundDecoder(decoder, max_bytes, window)
    assert isinstance(decoder, DecodeArray), decoder
    read = ArrayReader(decoder, max_bytes)
    return lambda encoded, _: read(encoded)
