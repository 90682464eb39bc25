"""Locates TFRecord records and the features of the `tf.train.Example` in each.

Framing, from TensorFlow's `record_writer.h`: a length, its checksum, the contents, their checksum. An Example is a
protocol buffer (`tensorflow/core/example/example.proto`, `feature.proto`). Only requested features are parsed. The
bytes of an image are skipped, and read later.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np

from mbaas.errors import DatasetError

_HEADER, _FOOTER = struct.Struct("<QI"), 4
_WINDOW = 4096
"""Bytes read together: usually a whole Example except its image."""

_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""

_FEATURES, _FEATURE, _KEY, _VALUE = 1, 1, 1, 2
_BYTES, _FLOATS, _INTS, _LIST = 1, 2, 3, 1
"""Field numbers in Example, Features, an entry of its map, Feature, and the lists."""

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x78\x01": "zlib", b"\x78\x9c": "zlib", b"\x78\xda": "zlib"}
"""First bytes of a compressed file -> format."""


class Span(NamedTuple):
    """A range of bytes in a file."""

    offset: int
    length: int


Values: TypeAlias = list[bytes] | list[float] | list[int]
"""Contents of a feature: strings or bytes, floats, or integers."""


class Feature(NamedTuple):
    """A feature of an Example: positions of its strings or bytes in the file, and its values, None if not requested."""

    spans: list[Span]
    values: Values | None


def records(file: BinaryIO, nbytes: int, shard: str) -> Iterator[Span]:
    """Yield the position of each record's contents in a TFRecord file; ``shard`` is its name in messages.

    Raises:
        DatasetError: not a TFRecord file, or a compressed, truncated or damaged one.
    """
    at = 0
    while at < nbytes:
        file.seek(at)
        header = file.read(_HEADER.size)
        length, told = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, -1)
        if told != _checksum(header[:8]):
            raise DatasetError(f"{shard} {_what_it_is(header, at)}")
        content = Span(at + _HEADER.size, length)
        at += _HEADER.size + length + _FOOTER
        if at > nbytes:
            raise DatasetError(
                f"{shard} is cut off: its record at byte {content.offset:,} would end at byte {at:,}, and the file has "
                f"{nbytes:,} bytes"
            )
        yield content


def _what_it_is(header: bytes, at: int) -> str:
    if at:
        return f"is cut off or damaged: at byte {at:,}, where a record must begin, is none"
    if (how := _COMPRESSED.get(header[:2])) is not None:
        return f"is compressed by {how}, but must be plain, so that single records can be read: decompress it"
    return "is no file of TensorFlow's records"


def features_of(
    file: BinaryIO, record: Span, shard: str, *, spans: Collection[str], values: Collection[str]
) -> tuple[dict[str, Feature], list[str]]:
    """Return the requested features of a record's Example, if they exist, and the names of all its features.

    The positions of features ``spans`` are located, and features ``values`` are read.

    Raises:
        DatasetError: the record is not an Example.
    """
    source = _Source(file, record)
    found: dict[str, Feature] = {}
    names: list[str] = []
    try:
        for features in source.messages(record, _FEATURES):
            for entry in source.messages(features, _FEATURE):
                name = b"".join(source.read(key) for key in source.messages(entry, _KEY)).decode()
                names.append(name)
                if name in spans or name in values:
                    found[name] = _feature(source, entry, to_read=name in values)
    except (ValueError, struct.error) as error:
        raise DatasetError(f"{shard}: the record at byte {record.offset:,} is no Example: {error}") from None
    return found, names


def _feature(source: _Source, entry: Span, *, to_read: bool) -> Feature:
    spans: list[Span] = []
    values: Values = []
    for feature in source.messages(entry, _VALUE):
        for kind, way, at in source.fields(feature):
            if way != _LENGTH or kind not in (_BYTES, _FLOATS, _INTS):
                continue
            if kind == _BYTES:
                spans = [*source.messages(at, _LIST)]
                values = [source.read(span) for span in spans] if to_read else []
            elif to_read:
                values = _floats(source, at) if kind == _FLOATS else _ints(source, at)
    return Feature(spans, values if to_read else None)


def _floats(source: _Source, of: Span) -> list[float]:
    # Packed, as TensorFlow writes them, or single values.
    parts = [
        source.read(at) for number, way, at in source.fields(of) if number == _LIST and way in (_LENGTH, _FIXED_32)
    ]
    return [*np.frombuffer(b"".join(parts), "<f4")]


def _ints(source: _Source, of: Span) -> list[int]:
    found: list[int] = []
    for number, way, at in source.fields(of):
        end = at.offset + at.length
        while number == _LIST and way in (_LENGTH, _VARINT) and at.offset < end:
            value, after = source.varint(at.offset, end)
            found.append(value - (1 << 64) if value >> 63 else value)
            at = Span(after, end - after)
    return found


class _Source:
    # A window of the record is in memory. Positions refer to the file.

    def __init__(self, file: BinaryIO, record: Span) -> None:
        self._file, self._end = file, record.offset + record.length
        self._start, self._window = record.offset, b""

    def read(self, span: Span) -> bytes:
        first = span.offset - self._start
        if first < 0 or first + span.length > len(self._window):
            self._file.seek(span.offset)
            self._start, first = span.offset, 0
            self._window = self._file.read(min(max(span.length, _WINDOW), self._end - span.offset))
        return self._window[first : first + span.length]

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Return the value and the position after it."""
        value = 0
        for position, byte in enumerate(self.read(Span(at, min(10, end - at)))):
            value |= (byte & 0x7F) << 7 * position
            if not byte & 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, at + position + 1
        raise ValueError(f"at byte {at:,} a number does not end")

    def fields(self, message: Span) -> Iterator[tuple[int, int, Span]]:
        """Yield field number, wire type and position of each value."""
        at, end = message.offset, message.offset + message.length
        while at < end:
            tag, start = self.varint(at, end)
            way = tag & 7
            if way == _LENGTH:
                length, start = self.varint(start, end)
            elif way == _VARINT:
                length = self.varint(start, end)[1] - start
            elif way in (_FIXED_32, _FIXED_64):
                length = 4 if way == _FIXED_32 else 8
            else:
                raise ValueError(f"at byte {at:,} a field is written in a way that there is not, {way}")
            if start + length > end:
                raise ValueError(f"at byte {at:,} a field would end at byte {start + length:,}, after its message")
            yield tag >> 3, way, Span(start, length)
            at = start + length

    def messages(self, within: Span, number: int) -> Iterator[Span]:
        """Yield the positions of a field's values with a length: messages, strings or bytes."""
        return (at for found, way, at in self.fields(within) if found == number and way == _LENGTH)


def _checksum(content: bytes) -> int:
    """Return the masked CRC-32C (Castagnoli) that TensorFlow uses."""
    crc = 0xFFFF_FFFF
    for byte in content:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFF_FFFF
    return ((crc >> 15 | crc << 17) + 0xA282_EAD8) & 0xFFFF_FFFF


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F6_3B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = [_crc_of_byte(byte) for byte in range(256)]
