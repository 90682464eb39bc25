"""Transforms of arrays that are no images, and what is known of such an array before any is seen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.transforms import checks
from mbaas.transforms.base import Transform

Array: TypeAlias = NDArray[Any]

Kind: TypeAlias = Literal["image", "sound", "spectrogram", "array"]


@dataclass(frozen=True)
class Form:
    """What is known of each sample between two transforms of a pipeline, before any sample is seen.

    Attributes:
        kind: "image": uint8 [height, width, 3]. "sound": float32 [time], or [time, channels]. "spectrogram": float32
            [time, frequency], or [time, channels, frequency]. "array": any other, whose axes mean what they mean.
        differing: in how many of their first lengths samples differ; 0 if all have one shape.
        longest: the greatest first length, if they differ in it, or the greatest product of those in which they differ;
            None if nothing bounds it.
        rate: of sound, samples a second.
        channels: of sound; one has no axis of its own.
    """

    kind: Kind
    differing: int = 0
    longest: int | None = None
    rate: int = 0
    channels: int = 1

    @property
    def differs(self) -> bool:
        """Whether samples differ in their first length, or in several."""
        return self.differing > 0


class UnfitError(Exception):
    """A sample cannot be transformed. The message is one clause, which goes into a `BadSampleError`."""


class ArrayTransform(Transform, ABC):
    """A transform of sound, spectrograms and other arrays: a pure function of the array and of random numbers."""

    @abstractmethod
    def result(self, form: Form) -> Form:
        """Return what is known of the result.

        Raises:
            ConfigError: the transform is none for such samples.
        """

    @abstractmethod
    def apply(self, array: Array, u: NDArray[np.float64], form: Form) -> Array:
        """Return the result for one sample, which may be a view of ``array``; that stays as it is.

        Args:
            array: the sample.
            u: float64[draws], uniform in [0, 1).
            form: what the pipeline knows of ``array``.

        Raises:
            UnfitError: ``array`` has another shape or dtype than the transform can take.
        """


@dataclass(frozen=True)
class ArrayWindow(ArrayTransform, ABC):
    """A window of fixed size, along the first axes; where it reaches beyond the array are zeros.

    Attributes:
        size: lengths along the first axes; an integer is that along the first.
    """

    size: int | tuple[int, ...]

    def __post_init__(self) -> None:
        where = f"{type(self).__name__}'s size"
        given = self.size if isinstance(self.size, (list, tuple)) else (self.size,)
        if not given:
            raise checks.refused(where, "must have a length for at least one axis", self.size)
        sizes = tuple(checks.whole(where, length, least=1, most=2**40) for length in given)
        self._set("size", sizes if isinstance(self.size, (list, tuple)) else sizes[0])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its lengths along the first axes."""
        return self.size if isinstance(self.size, tuple) else (self.size,)

    def result(self, form: Form) -> Form:
        if form.differing > len(self.sizes):
            raise ConfigError(
                f"{self!r} gives one length to {len(self.sizes)} of the axes, but samples differ in {form.differing}: "
                "its size must have as many lengths"
            )
        return replace(form, differing=0, longest=None)

    def starts(self, shape: Sequence[int], u: NDArray[np.float64]) -> list[int]:
        """Return where the window begins along each of its axes: below 0 where an array of this shape is shorter.

        Raises:
            UnfitError: the array has fewer axes than the window.
        """
        axes = len(self.sizes)
        if len(shape) < axes:
            raise UnfitError(f"it has the shape {list(shape)}, but {self!r} needs at least {axes} axes")
        found: list[int] = self._starts(np.array(shape[:axes]) - np.array(self.sizes), u).tolist()
        return found

    @abstractmethod
    def _starts(self, room: NDArray[np.int64], u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Choose where it begins: int64[axes], of an array that is longer by ``room``, which is below 0 if shorter."""

    def apply(self, array: Array, u: NDArray[np.float64], form: Form) -> Array:  # noqa: ARG002 (of all forms alike)
        begins = self.starts(array.shape, u)
        spans = list(zip(begins, self.sizes, array.shape, strict=False))
        inside = tuple(slice(max(start, 0), min(start + size, length)) for start, size, length in spans)
        if all(at.stop - at.start == size for at, size in zip(inside, self.sizes, strict=True)):
            return array[inside]
        whole = np.zeros((*self.sizes, *array.shape[len(begins) :]), array.dtype)
        place = tuple(slice(at.start - start, at.stop - start) for at, start in zip(inside, begins, strict=True))
        whole[place] = array[inside]
        return whole


@dataclass(frozen=True)
class RandomCrop(ArrayWindow):
    """Cut out a window of ``size`` at a random place; an array that is shorter is put at a random place among zeros.

    As torchvision's RandomCrop of images with ``pad_if_needed``: all places are equally likely.

    Args:
        size: lengths along the first axes; one integer is that along the first, such as 16000 for a second of sound of
            that rate. Further axes, such as channels, stay whole.
    """

    @property
    def draws(self) -> int:
        return len(self.sizes)

    def _starts(self, room: NDArray[np.int64], u: NDArray[np.float64]) -> NDArray[np.int64]:
        # One more than the difference: an array as long as the window has one place, not none.
        places = np.floor(u * (np.abs(room) + 1)).astype(np.int64)
        return np.where(room < 0, -places, places)


@dataclass(frozen=True)
class CropOrPad(ArrayWindow):
    """Cut ``size`` out of the middle; an array that is shorter is put into the middle of zeros.

    As TorchIO's transform of this name. Where half of the difference is no whole number, the lesser half is in front.

    Args:
        size: lengths along the first axes; one integer is that along the first. Further axes stay whole.
    """

    def _starts(self, room: NDArray[np.int64], u: NDArray[np.float64]) -> NDArray[np.int64]:  # noqa: ARG002 (no chance)
        return np.asarray(np.sign(room) * (np.abs(room) // 2))
