"""Decoders, the first transforms of pipelines: they convert a sample's bytes to an array and name it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np

from mbaas.samples.fields import IMAGE, RESERVED
from mbaas.transforms import checks
from mbaas.transforms.arrays import Form
from mbaas.transforms.base import Transform

ArrayFormat: TypeAlias = Literal["npy", "npz", "raw"]

MOST_PIXELS = 100_000_000
"""Pixels of the largest image that is decoded: 300 MB. A larger size means a damaged header or an attack."""


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of this dtype can be delivered: bool, integer, float and complex types that torch has."""
    return dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


class Decoder(Transform, ABC):
    """The first transform of a pipeline; ``field`` is the name of the decoded value in minibatches."""

    field: str

    @property
    def dali_limit(self) -> str:
        return "prepares images, and sound that becomes a MelSpectrogram"

    @property
    @abstractmethod
    def form(self) -> Form:
        """Form of every decoded sample."""


@dataclass(frozen=True)
class DecodeImage(Decoder):
    """Decode JPEG, PNG, WebP or BMP bytes to RGB, uint8 [height, width, 3]; minibatches have them as ``image``.

    Grey images get three equal channels, CMYK and YCCK become RGB, and alpha is dropped. 16 bits per channel become the
    upper 8. The EXIF orientation is applied. The engines agree to within a few grey levels.

    Args:
        max_pixels: allows images of different sizes, up to this number of pixels (height times width) after all
            transforms. A larger one is a bad sample. ``collate`` of `mbaas.join` controls how such images are batched.
            Ignored if a transform makes all images equally large. By default all images must end up as large as the
            first.
    """

    max_pixels: Annotated[int | None, partial(checks.whole, most=MOST_PIXELS)] = None
    field = IMAGE  # not a parameter
    dali_limit = ""

    def __repr__(self) -> str:
        # Unchanged without max_pixels, because saved states contain fingerprints of pipelines.
        return "DecodeImage()" if self.max_pixels is None else f"DecodeImage(max_pixels={self.max_pixels})"

    @property
    def form(self) -> Form:
        return Form("image")


@dataclass(frozen=True)
class DecodeAudio(Decoder):
    """Decode WAV, FLAC, Ogg, MP3 and other libsndfile formats to sound of one rate: float32, full scale is [-1, 1].

    The shape is [time] for one channel and [time, channels] for several. Time is the first axis, because its length
    differs between samples. soundfile decodes, soxr resamples (quality "HQ"); mbaas's extra "audio"
    installs both.

    Args:
        rate: sample rate in Hz; audio of other rates is resampled.
        channels: 1 averages all channels. With more, a file must have the same number of channels, or one, which is
            repeated.
        max_s: maximum duration in seconds; longer audio is a bad sample. Not needed if a crop makes all samples equally
            long.
        field: name of the sound in minibatches.
    """

    rate: Annotated[int, partial(checks.whole, most=10_000_000)] = 16_000
    channels: Annotated[int, partial(checks.whole, most=1024)] = 1
    max_s: Annotated[float | None, checks.number] = None
    field: Annotated[str, _new_name] = "audio"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_s is not None and self.max_s <= 0:
            raise self._refused("max_s", "must be above 0 seconds")

    @property
    def form(self) -> Form:
        longest = None if self.max_s is None else math.ceil(self.max_s * self.rate)
        return Form("sound", differing=1, longest=longest, rate=self.rate, channels=self.channels)


@dataclass(frozen=True)
class DecodeArray(Decoder):
    """Read numeric arrays of any shape: volumes, spectrograms, time series, tokens. The order of axes is kept.

    Args:
        format: "npy", the first array of the file, as in `numpy.load`; "npz", a zip file of arrays; or "raw", only the
            numbers, in C order.
        key: name of the array in an npz file; not needed if the file has only one.
        dtype: dtype of the file, such as "int16" or ">f4". Required for raw files; other files must match it if given.
            Arrays are delivered in the machine's byte order.
        shape: shape of each array. Required for raw files; other files must match it if given. By default all arrays
            must have the shape of the first one, unless a crop makes them equal. Leading lengths that differ between
            arrays are None; raw files can have one None.
        longest: greatest first length if it is None, or greatest product of all lengths that are None, such as the
            voxels of a volume. A larger array is a bad sample.
        field: name of the array in minibatches.
    """

    format: Annotated[ArrayFormat, partial(checks.one_of, names=get_args(ArrayFormat))] = "npy"
    key: str | None = None
    dtype: Annotated[str | None, _dtype] = None
    shape: Annotated[tuple[int | None, ...] | None, _shape] = None
    longest: Annotated[int | None, checks.whole] = None
    field: Annotated[str, _new_name] = "array"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key is not None and (self.format != "npz" or not isinstance(self.key, str)):
            raise self._refused("key", "must be the name of an array in an npz file")
        if self.longest is not None and not self._differing:
            raise self._refused("longest", "must be left out, unless shape begins with None")
        if self.format == "raw":
            for name in ("dtype", "shape"):
                if getattr(self, name) is None:
                    raise self._refused(name, "must be given for raw files")
            if self._differing > 1:
                raise self._refused("shape", "may have one None for raw files")

    @property
    def _differing(self) -> int:
        return 0 if self.shape is None else self.shape.count(None)

    @property
    def form(self) -> Form:
        return Form("array", differing=self._differing, longest=self.longest)


def _dtype(where: str, value: object) -> str:
    try:
        found = np.dtype(value)  # type: ignore[call-overload]  # of anything, or an error
    except (TypeError, ValueError):
        found = None
    if found is None or not is_numeric(found):
        raise checks.refused(where, 'must be the name of a type of numbers, such as "float32"', value)
    return str(found.str)


def _shape(where: str, value: object) -> tuple[int | None, ...]:
    if not isinstance(value, (list, tuple)):
        raise checks.refused(where, "must be a list of lengths", value)
    if None in value[value.count(None) :]:
        raise checks.refused(where, "must be whole numbers, of which only the first ones may be None", value)
    return tuple(None if length is None else checks.whole(where, length) for length in value)


def _new_name(where: str, name: object) -> str:
    if not isinstance(name, str) or not name or name in RESERVED:
        raise checks.refused(where, "must be a name that minibatches do not have already", name)
    return name
