"""Transforms of arrays other than images, and `Form`, the description of samples between two transforms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.transforms import checks
from mbaas.transforms.base import Colour, DrawInputs, PaddingMode, Size, Transform, Windows
from mbaas.transforms.geometry import PaddingTransform

Array: TypeAlias = NDArray[Any]

Kind: TypeAlias = Literal["image", "sound", "spectrogram", "array"]


@dataclass(frozen=True)
class Form:
    """Properties of samples between two transforms of a pipeline, known without looking at a sample.

    Attributes:
        kind: "image": uint8 [height, width, 3]. "sound": float32 [time], or [time, channels]. "spectrogram": float32
            [time, frequency], or [time, channels, frequency]. "array": any other, with axes of any meaning.
        differing: number of leading axes whose lengths differ between samples; 0 if all samples have one shape.
        longest: greatest length of the first axis if only it differs, or greatest product of the differing lengths;
            None if unbounded.
        rate: sample rate of sound, in Hz.
        channels: channels of sound; a single channel has no axis.
    """

    kind: Kind
    differing: int = 0
    longest: int | None = None
    rate: int = 0
    channels: int = 1


class UnfitError(Exception):
    """A sample cannot be transformed. The message is one clause, which becomes part of a `BadSampleError`."""


class ArrayTransform(Transform, ABC):
    """A transform of sound, spectrograms or other arrays: a pure function of the array and of random numbers."""

    @abstractmethod
    def result(self, form: Form) -> Form:
        """Return the form of the result; raise ConfigError if the transform does not accept such samples."""

    @abstractmethod
    def apply(self, array: Array, u: NDArray[np.float64], form: Form) -> Array:
        """Return the result for one sample. It may be a view of ``array``, which is not modified.

        Args:
            array: the sample.
            u: float64[draws], uniform in [0, 1).
            form: the form of ``array``.

        Raises:
            UnfitError: the transform does not accept the shape or dtype of ``array``.
        """


@dataclass(frozen=True)
class ArrayWindow(ArrayTransform, ABC):
    """A window of fixed size along the leading axes, filled with zeros outside the array.

    Attributes:
        size: lengths along the leading axes; an integer is the length along the first.
    """

    size: Annotated[int | tuple[int, ...], checks.lengths]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.size if isinstance(self.size, tuple) else (self.size,)

    def result(self, form: Form) -> Form:
        if form.differing > len(self.sizes):
            raise ConfigError(
                f"{self!r} gives one length to {len(self.sizes)} of the axes, but samples differ in {form.differing}: "
                "its size must have as many lengths"
            )
        return replace(form, differing=0, longest=None)

    def starts(self, shape: Sequence[int], u: NDArray[np.float64]) -> list[int]:
        """Return the window's start along each axis, negative if the array is shorter; UnfitError if it lacks axes."""
        axes = len(self.sizes)
        if len(shape) < axes:
            raise UnfitError(f"it has the shape {list(shape)}, but {self!r} needs at least {axes} axes")
        found: list[int] = self._starts(np.array(shape[:axes]) - np.array(self.sizes), u).tolist()
        return found

    @abstractmethod
    def _starts(self, room: NDArray[np.int64], u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return window starts, int64[axes]. ``room`` is the array's length minus the window's."""

    def apply(self, array: Array, u: NDArray[np.float64], form: Form) -> Array:  # noqa: ARG002 (same for all forms)
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
class RandomCrop(ArrayWindow, PaddingTransform):
    """Crop a window of ``size`` at a random position of an image, a sound or an array.

    A smaller sample is placed at a random position among zeros, as by torchvision's RandomCrop with ``pad_if_needed``.

    Args:
        size: of images: (height, width) in pixels; an integer means a square. Of others: lengths along the leading
            axes; an integer is the length along the first, such as 16000 for one second of sound at that rate. Further
            axes, such as channels, are not cropped.
        padding: pixels that are first added to an image, as in `Pad`; 4 is usual for CIFAR.
        fill: level of added pixels, 0 to 255, one or (red, green, blue).
        padding_mode: as in `Pad`.
    """

    padding: Annotated[int | tuple[int, ...] | None, checks.paddings] = None
    fill: Annotated[float | Colour, checks.colour] = 0
    padding_mode: Annotated[PaddingMode, checks.padding_mode] = "constant"

    @property
    def draws(self) -> int:
        return max(2, len(self.sizes))

    @property
    def fixed_size(self) -> Size | None:
        return checks.height_width("RandomCrop's size", self.size)

    def result(self, form: Form) -> Form:
        if self.padding is not None:
            raise self._refused("padding", "is for images, and must be left out for arrays and sound")
        return super().result(form)

    def step(self, drawn: DrawInputs) -> Windows:
        left, top, right, bottom = self.padding or (0, 0, 0, 0)  # type: ignore[misc]  # canonical since the check
        results = np.tile(np.array(self.fixed_size), (len(drawn.u), 1))
        padded = drawn.sizes + np.array([top + bottom, left + right])
        corners = self._starts(padded - results, drawn.u) - np.array([top, left])
        return Windows(np.column_stack([corners, results]), results, padding=self.padding_of)

    def _starts(self, room: NDArray[np.int64], u: NDArray[np.float64]) -> NDArray[np.int64]:
        # The difference plus one: an array as long as the window has one position.
        places = np.floor(u[..., : room.shape[-1]] * (np.abs(room) + 1)).astype(np.int64)
        return np.where(room < 0, -places, places)


@dataclass(frozen=True)
class CropOrPad(ArrayWindow):
    """Crop the central ``size``; a shorter array is centred among zeros.

    Like TorchIO's transform of this name. If the difference is odd, the smaller half is in front.

    Args:
        size: lengths along the leading axes. An integer is the length along the first. Further axes are not cropped.
    """

    def _starts(self, room: NDArray[np.int64], u: NDArray[np.float64]) -> NDArray[np.int64]:  # noqa: ARG002 (deterministic)
        return np.asarray(np.sign(room) * (np.abs(room) // 2))
