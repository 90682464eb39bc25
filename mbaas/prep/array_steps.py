"""What is done to a sample that is no image, on the CPU: its decoder, then transforms of arrays and Maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.fields import Arrays, Column, Packed
from mbaas.order import generator, uniforms
from mbaas.prep.array_files import ArrayReader
from mbaas.prep.engine import BadRow, Encoded, Prepared
from mbaas.prep.header import UndecodableError
from mbaas.prep.sound import SoundDecoder
from mbaas.prep.user_code import SampleFields, call_map
from mbaas.transforms import DecodeAudio, Map, Pipeline
from mbaas.transforms.arrays import ArrayTransform, ArrayWindow, UnfitError
from mbaas.transforms.decoders import DecodeArray

Array = NDArray[Any]
_Decode = Callable[[memoryview, NDArray[np.float64]], Array]


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

    def chance(self, sample_ids: NDArray[np.int64], epoch: int) -> list[NDArray[np.float64]]:
        """Draw the uniform numbers of each transform, for all samples of a block at once: float64[n, draws]."""
        return [
            uniforms(self._seed, epoch, sample_ids, substream=index, draws=transform.draws)
            for index, transform in enumerate(self._pipeline.transforms)
        ]

    def sample(
        self,
        encoded: Encoded,
        sample_id: int,
        epoch: int,
        chance: Sequence[NDArray[np.float64]],
        row: int,
        fields: SampleFields,
    ) -> Array:
        """Prepare one sample, whose numbers and fields are in this row of ``chance`` and ``fields``.

        Raises:
            UndecodableError: it cannot be decoded, or does not fit a transform.
        """
        array = self._decode(memoryview(cast("Any", encoded)), chance[self._chance_of_decoding][row])
        for index, transform in self._later:
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


def _decoder_of(pipeline: Pipeline, max_bytes: int, window: ArrayWindow | None) -> _Decode:
    decoder = pipeline.decoder
    if isinstance(decoder, DecodeAudio):
        return SoundDecoder(decoder, max_bytes, window)
    assert isinstance(decoder, DecodeArray), decoder
    read = ArrayReader(decoder, max_bytes)
    return lambda encoded, _: read(encoded)


def deliver(sample: Array, row: Array, *, differs: bool) -> int:
    """Copy a sample to its row of a block, and return its first length; 0 where samples do not differ in it.

    Raises:
        UndecodableError: it does not fit.
    """
    into = _room_for(sample, row) if differs else row
    if (sample.shape, sample.dtype) != (into.shape, into.dtype):
        got, wanted = (f"{each.dtype.name} {list(each.shape)}" for each in (sample, into))
        raise UndecodableError(
            f"it is prepared to {got}, but the samples of this feed are {wanted}; a RandomCrop or a CropOrPad in the "
            "pipeline gives all the same lengths"
        )
    np.copyto(into, sample)
    return len(into) if differs else 0


def _room_for(sample: Array, row: Array) -> Array:
    """Return the first places of a row, as many as a sample has."""
    if not sample.ndim or len(sample) > len(row):
        got = f"{sample.dtype.name} {list(sample.shape)}"
        raise UndecodableError(f"it is prepared to {got}, and its first length must be at most {len(row):,}")
    return row[: len(sample)]


def finish(bad: Sequence[BadRow], known: Arrays, lengths: NDArray[np.int64] | None, out: Array) -> Prepared:
    """Zero the bad rows of ``out``, and return them in order, with the fields of the good ones.

    Args:
        bad: those that could not be prepared, in any order.
        known: the fields of all samples.
        lengths: of all samples, 0 of bad ones; None where all have one shape.
        out: what was made of the block.
    """
    if not bad:
        return Prepared([], known, _together(out, lengths))
    ordered = sorted(bad, key=lambda each: each.row)
    rows = [each.row for each in ordered]
    out[rows] = 0
    good = np.setdiff1d(np.arange(len(out)), rows)
    return Prepared(ordered, {name: column[good] for name, column in known.items()}, _together(out, lengths))


def _together(out: Array, lengths: NDArray[np.int64] | None) -> Column:
    return out if lengths is None else Packed.closed_up(out, lengths)
