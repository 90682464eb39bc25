"""Collates fields whose values differ in length: as a list, padded, or packed.

In each case the values pass through the converter as plain arrays, to NumPy, torch or a device. Images of different
sizes differ in their first two lengths, their masks in three. They pass through the converter as one run of pixels, so
that no padding is copied or normalized, and are cut or padded afterwards.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import Struct

from mbaas.client.batches import read_only
from mbaas.client.convert import Converter, Minibatch
from mbaas.errors import ConfigError
from mbaas.samples.fields import IMAGE, Arrays, Packed
from mbaas.wire.samples import SampleSpec

Collate: TypeAlias = Literal["list", "pad", "packed"]
"""Forms of a field whose values differ in length.

"list": one array per sample. "pad": one zero-padded array and ``NAME_length``. "packed": all values end to end and
``NAME_bounds``. A field that differs in several lengths gets ``NAME_size``, instead of its length or in addition to its
bounds.
"""

_BESIDE: dict[str, tuple[str, ...]] = {"pad": ("length",), "packed": ("bounds",)}
"""Suffixes of the keys added for a field that differs in its first length."""

_BESIDE_SIZED: dict[str, tuple[str, ...]] = {"pad": ("size",), "packed": ("bounds", "size")}
"""Suffixes of the keys added for a field that differs in several lengths."""


def check_names(spec: SampleSpec, how: Collate) -> None:
    """Raise ConfigError if a key added for a field is the name of another field."""
    names = {field.name for field in spec.fields}
    for field in spec.fields:
        beside = (_BESIDE_SIZED if field.differing > 1 else _BESIDE).get(how, ()) if field.is_packed else ()
        for name in names.intersection(f"{field.name}_{each}" for each in beside):
            raise ConfigError(f"collate={how!r} adds {name!r} to a minibatch, which is a field of this feed already")


def collating(converter: Converter, spec: SampleSpec, how: Collate, *, has_images: bool = True) -> Converter:
    """Return a converter that also accepts `Packed` values, if samples have any."""
    if not any(field.is_packed for field in spec.fields):
        return converter
    return _Collating(converter, how, IMAGE if has_images else None)


class _Sized(Struct, frozen=True):
    """Pending steps for a field that differs in several lengths, to be done after its conversion."""

    shapes: list[list[int]]  # the first lengths of each sample
    tail: tuple[int, ...]  # the lengths shared by all samples
    is_image: bool  # converted as an image one pixel wide, so that it is normalized

    @classmethod
    def of(cls, column: Packed, *, may_be_image: bool) -> _Sized:
        assert column.shapes is not None
        tail = column.values.shape[1:]
        is_image = (column.dtype.name, column.shapes.shape[1], tail) == ("uint8", 2, (3,))
        return cls(column.shapes.tolist(), tail, is_image and may_be_image)

    def finish(self, values: Any, how: Collate) -> Any:
        """Return the collated field. In torch, lists and padded arrays of images are channels-first."""
        as_torch = self.is_image and not isinstance(values, np.ndarray)
        if self.is_image:  # [1, 3, total, 1] in torch, [1, total, 1, 3] in NumPy: the same memory
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
        # NumPy arrays are read-only even if a minibatch does not share them.
        return read_only(out) if isinstance(out, np.ndarray) else out


class _Started(Struct, frozen=True):
    inner: Any
    lengths: dict[str, list[int]]
    sized: dict[str, _Sized]


class _Collating:
    def __init__(self, converter: Converter, how: Collate, image: str | None) -> None:
        self._converter, self._how, self._image = converter, how, image
        self.ahead = converter.ahead

    def start(self, arrays: Arrays) -> _Started:
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
        batch = self._converter.finish(started.inner)
        for name, own in started.lengths.items():
            batch[name] = _cut(batch[name], own)
        for name, sized in started.sized.items():
            batch[name] = sized.finish(batch[name], self._how)
        return batch


def _cut(values: Any, lengths: list[int]) -> list[Any]:
    pieces, start = [], 0
    for length in lengths:
        pieces.append(values[start : start + length])
        start += length
    return pieces
