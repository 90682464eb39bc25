"""How a minibatch has a field whose values differ in length: as a list, padded, or packed.

Whatever the way, the values travel as plain arrays through the converter to NumPy, torch or a device.

Images of any size differ in their first two lengths, their masks in three. They go through the converter as one run of
pixels, so that no zeros are copied or normalized, and are cut or padded where they arrive.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import Struct

from mbaas.client.batches import read_only
from mbaas.client.convert import Converter, Minibatch
from mbaas.errors import ConfigError
from mbaas.fields import IMAGE, Arrays, Packed
from mbaas.messages import SampleSpec

Collate: TypeAlias = Literal["list", "pad", "packed"]
"""A list of arrays, one for each sample; one array with zeros behind what is shorter, and ``NAME_length``; all values
end to end, and ``NAME_bounds``. A field that differs in several lengths has ``NAME_size`` instead of its length, and
beside its bounds.
"""

_BESIDE: dict[str, tuple[str, ...]] = {"pad": ("length",), "packed": ("bounds",)}
"""What a minibatch has beside a field that differs in its first length, after its name and an underscore."""

_BESIDE_SIZED: dict[str, tuple[str, ...]] = {"pad": ("size",), "packed": ("bounds", "size")}
"""The same for one that differs in several."""


def check_names(spec: SampleSpec, how: Collate) -> None:
    """Check that nothing that a minibatch has beside a field is called as another one.

    Raises:
        ConfigError: it is.
    """
    names = {field.name for field in spec.fields}
    for field in spec.fields:
        beside = (_BESIDE_SIZED if field.differing > 1 else _BESIDE).get(how, ()) if field.is_packed else ()
        for name in names.intersection(f"{field.name}_{each}" for each in beside):
            raise ConfigError(f"collate={how!r} adds {name!r} to a minibatch, which is a field of this feed already")


def collating(converter: Converter, spec: SampleSpec, how: Collate, *, has_images: bool = True) -> Converter:
    """Return a converter that also takes `Packed` values, if samples have any.

    Args:
        converter: makes what a trial gets of plain arrays.
        spec: what samples have.
        how: a minibatch has such values.
        has_images: as `make_converter` has it.
    """
    if not any(field.is_packed for field in spec.fields):
        return converter
    return _Collating(converter, how, IMAGE if has_images else None)


class _Sized(Struct, frozen=True):
    """What is left to be done to a field that differs in several lengths, once its values are where they shall be.

    Attributes:
        shapes: the first lengths of each sample.
        tail: the lengths that are the same for all.
        is_image: whether its values went as an image one pixel wide, so that they are normalized.
    """

    shapes: list[list[int]]
    tail: tuple[int, ...]
    is_image: bool

    @classmethod
    def of(cls, column: Packed, *, may_be_image: bool) -> _Sized:
        assert column.shapes is not None
        tail = column.values.shape[1:]
        is_image = (column.dtype.name, column.shapes.shape[1], tail) == ("uint8", 2, (3,))
        return cls(column.shapes.tolist(), tail, is_image and may_be_image)

    def finish(self, values: Any, how: Collate) -> Any:
        """Return the field as the minibatch has it: an image as torch is channels-first, in a list and padded."""
        as_torch = self.is_image and not isinstance(values, np.ndarray)
        if self.is_image:  # [1, 3, total, 1] as torch, [1, total, 1, 3] as NumPy: the same memory
            values = (values.permute(0, 2, 3, 1) if as_torch else values).reshape(-1, 3)
        if how == "packed":
            return values
        lengths = [prod(shape) for shape in self.shapes]
        pieces = zip(_cut(values, lengths), self.shapes, strict=True)
        cut = [piece.reshape(*shape, *self.tail) for piece, shape in pieces]
        if how == "list":
            return [each.permute(2, 0, 1) for each in cut] if as_torch else cut
        padded = self._padded(values, cut)
        return padded.permute(0, 3, 1, 2) if as_torch else padded

    def _padded(self, values: Any, cut: list[Any]) -> Any:
        most = [max(lengths) for lengths in zip(*self.shapes, strict=True)]
        shape = (len(cut), *most, *self.tail)
        out = np.zeros(shape, values.dtype) if isinstance(values, np.ndarray) else values.new_zeros(shape)
        for row, (each, lengths) in enumerate(zip(cut, self.shapes, strict=True)):
            corner: tuple[int | slice, ...] = (row, *(slice(length) for length in lengths))
            out[corner] = each
        # Arrays of NumPy are read-only, whether or not a minibatch shares them.
        return read_only(out) if isinstance(out, np.ndarray) else out


class _Started(Struct, frozen=True):
    """A minibatch that is being converted.

    Attributes:
        inner: what the converter around which this is one began.
        lengths: name -> the lengths in which values are cut for a list.
        sized: name -> what is left to be done to a field that differs in several lengths.
    """

    inner: Any
    lengths: dict[str, list[int]]
    sized: dict[str, _Sized]


class _Collating:
    """A converter around another one, which never sees `Packed` values."""

    def __init__(self, converter: Converter, how: Collate, image: str | None) -> None:
        self._converter, self._how, self._image = converter, how, image
        self.ahead = converter.ahead

    def start(self, arrays: Arrays) -> _Started:
        """Begin to convert."""
        plain: Arrays = {}
        lengths: dict[str, list[int]] = {}
        sized: dict[str, _Sized] = {}
        for name, column in arrays.items():
            if not isinstance(column, Packed):
                plain[name] = column
            elif column.shapes is None and self._how == "pad":
                plain |= {name: column.padded(), f"{name}_length": column.lengths}
            else:
                plain[name], bounds = column.own()
                if self._how == "packed":
                    plain[f"{name}_bounds"] = bounds
                if column.shapes is None:
                    lengths |= {name: column.lengths.tolist()} if self._how == "list" else {}
                    continue
                sized[name] = _Sized.of(column, may_be_image=name == self._image)
                if sized[name].is_image:
                    plain[name] = plain[name][None, :, None]
                if self._how != "list":
                    plain[f"{name}_size"] = column.shapes
        return _Started(self._converter.start(plain), lengths, sized)

    def finish(self, started: _Started) -> Minibatch:
        """Return the minibatch."""
        batch = self._converter.finish(started.inner)
        for name, own in started.lengths.items():
            batch[name] = _cut(batch[name], own)
        for name, sized in started.sized.items():
            batch[name] = sized.finish(batch[name], self._how)
        return batch


def _cut(values: Any, lengths: list[int]) -> list[Any]:
    """Cut an array or a tensor in pieces of these lengths, which are views."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(values[start : start + length])
        start += length
    return pieces
