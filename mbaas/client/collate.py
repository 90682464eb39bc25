"""How a minibatch has a field whose values differ in length: as a list, padded, or packed.

Whatever the way, the values travel as plain arrays through the converter to NumPy, torch or a device.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from mbaas.client.convert import Converter, Minibatch
from mbaas.errors import ConfigError
from mbaas.fields import Arrays, Packed
from mbaas.messages import SampleSpec

Collate: TypeAlias = Literal["list", "pad", "packed"]
"""A list of arrays, one for each sample; one array with zeros behind what is shorter, and ``NAME_length``; all values
end to end, and ``NAME_bounds``.
"""

_BESIDE: dict[str, str] = {"pad": "length", "packed": "bounds"}
"""What a minibatch has beside such a field, after its name and an underscore."""


def check_names(spec: SampleSpec, how: Collate) -> None:
    """Check that nothing that a minibatch has beside a field is called as another one.

    Raises:
        ConfigError: it is.
    """
    names = {field.name for field in spec.fields}
    for name in [f"{field.name}_{_BESIDE.get(how)}" for field in spec.fields if field.is_packed]:
        if name in names:
            raise ConfigError(f"collate={how!r} adds {name!r} to a minibatch, which is a field of this feed already")


def collating(converter: Converter, spec: SampleSpec, how: Collate) -> Converter:
    """Return a converter that also takes `Packed` values, if samples have any."""
    return _Collating(converter, how) if any(field.is_packed for field in spec.fields) else converter


class _Collating:
    """A converter around another one, which never sees `Packed` values."""

    def __init__(self, converter: Converter, how: Collate) -> None:
        self._converter, self._how = converter, how
        self.ahead = converter.ahead

    def start(self, arrays: Arrays) -> tuple[Any, dict[str, list[int]]]:
        """Begin to convert; what comes back also holds the lengths of what is to become a list."""
        plain: Arrays = {}
        lengths: dict[str, list[int]] = {}
        for name, column in arrays.items():
            if not isinstance(column, Packed):
                plain[name] = column
            elif self._how == "pad":
                plain |= {name: column.padded(), f"{name}_length": column.lengths}
            else:
                plain[name], bounds = column.own()
                if self._how == "packed":
                    plain[f"{name}_bounds"] = bounds
                else:
                    lengths[name] = column.lengths.tolist()
        return self._converter.start(plain), lengths

    def finish(self, started: tuple[Any, dict[str, list[int]]]) -> Minibatch:
        """Return the minibatch."""
        inner, lengths = started
        batch = self._converter.finish(inner)
        for name, own in lengths.items():
            batch[name] = _cut(batch[name], own)
        return batch


def _cut(values: Any, lengths: list[int]) -> list[Any]:
    """Cut an array or a tensor in pieces of these lengths, which are views."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(values[start : start + length])
        start += length
    return pieces
